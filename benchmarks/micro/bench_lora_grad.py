"""dS with dB, dB alone, and dA, from one read of dY or X, against library products. Run: python -m pytest
benchmarks/micro/bench_lora_grad.py
"""

import pytest
import torch
from lorakernels.ops.lora_grad import (
    A_TILES,
    B_TILES,
    DS_DB_TILES,
    AdapterColumns,
    a_gradient,
    b_gradient,
    ds_and_db,
    fitting_tiles,
)
from lorakernels.ops.rms_norm import Norm, NormFactors
from lorakernels.runtime import use_triton


@pytest.mark.parametrize("form", [*DS_DB_TILES, "torch"])
@pytest.mark.parametrize("linear", ["o", "gate", "qkv", "gate_up"])
def test_ds_and_db(form, linear, time, tensor, shapes):
    h, wide = shapes["hidden"], shapes["wide"]
    widths = {"o": [h], "gate": [wide], "qkv": [h, h // 4, h // 4], "gate_up": [wide, wide]}[linear]
    m, n, r, p = shapes["tokens"], sum(widths), shapes["rank"], 64
    d, sb, s = tensor(m, n + p), tensor(n, p), tensor(m, p)
    if form != "torch" and form not in fitting_tiles(d, widths, [r] * len(widths)):
        pytest.skip("runs in Triton only")

    def library():
        torch.mm(d[:, :n], sb, out=d[:, n:])
        return d[:, :n].t() @ s

    time(
        library if form == "torch" else lambda: ds_and_db(d[:, :n], d[:, n:], AdapterColumns(sb, s, widths, r), form),
        moved=m * n * d.element_size(),
    )


@pytest.mark.parametrize("form", [*B_TILES, "torch"])
def test_b_gradient(form, time, tensor, shapes):
    m, n, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    dy, s = tensor(m, n), tensor(m, r)
    if form != "torch" and form not in fitting_tiles(dy, [n], [r], B_TILES):
        pytest.skip("runs in Triton only")
    time(lambda: dy.t() @ s if form == "torch" else b_gradient(dy, s, [n], r, form), moved=dy.nbytes)


@pytest.mark.parametrize("form", [*A_TILES, "torch"])
def test_a_gradient(form, time, tensor, shapes):
    m, k, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    ds, h, weight, rstd = tensor(m, r), tensor(m, k), tensor(k), tensor(m).float()
    if form != "torch" and not use_triton(h):
        pytest.skip("runs in Triton only")

    def library():
        return ((ds * rstd[:, None]).to(ds.dtype).t() @ h) * weight

    factors = NormFactors(rstd, weight, Norm(1e-6))
    time(library if form == "torch" else lambda: a_gradient(ds, h, factors, form), moved=h.nbytes)
