"""More than 64 columns of S: several adapters of one batch side by side, or one wide adapter.

On an H200 eight adapters of rank 16 had wrong gradients of o's B while kernels took up to 128 columns. It was S's
kernel where it copies x, too: tensor cores read a buffer that later rows were already copied into (compile_kernels.py
looks for such buffers in every kernel). Sizes here are those of that model.
"""

from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import assert_close, poisoned
from lorakernels import runtime, tune
from lorakernels.nodes import adapter_grad
from lorakernels.ops import multi_product
from lorakernels.ops.concat_operand import LoraColumns, ScaledS, concat_operand_into, concat_operand_reference, s_into
from lorakernels.ops.linear_cross_entropy import mm_in
from lorakernels.ops.lora_grad import A_TILES, a_gradient, a_gradient_reference
from lorakernels.tuning import worth_trying
from test_multi import alone, gradients, loss_of, model
from tiny_models import batch

ROWS, COLUMNS, RANK = 4096, 576, 128


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(runtime, "MAX_FUSED_RANK", RANK)
    torch.manual_seed(1)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True], ids=["of rows", "of columns"])  # A, and sB in the backward
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("tile", ["fused", "fused_wide", "fused_small"])
@pytest.mark.parametrize("rank", [16, 64, RANK])
def test_s_of_many_columns(rank, tile, copied, turned, wide):
    x, a = on_gpu(ROWS, COLUMNS), on_gpu(rank, COLUMNS + rank)[:, :COLUMNS]
    a = a.t().contiguous().t() if turned else a
    wanted = concat_operand_reference(x, a)
    for _ in range(10):  # a race need not show at once
        out = poisoned(ROWS, COLUMNS + rank, dtype=x.dtype, device="cuda")
        scaled = ScaledS(poisoned(ROWS, rank, dtype=x.dtype, device="cuda"), torch.full((rank,), 2.0, device="cuda"))
        columns = LoraColumns(a, rank, scaled)
        if copied:
            concat_operand_into(x, columns, out, tile)
        else:
            s_into(x, columns, out[:, COLUMNS:], tile)
        assert_close(out[:, COLUMNS:], wanted[:, COLUMNS:], x.dtype, 2)
        assert_close(scaled.out, 2 * wanted[:, COLUMNS:], x.dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*A_TILES])
def test_da_of_128_columns(tile, wide):
    ds, x = on_gpu(ROWS, COLUMNS + RANK)[:, COLUMNS:], on_gpu(ROWS, COLUMNS)
    wanted = a_gradient_reference(ds, x)
    for _ in range(10):
        assert_close(a_gradient(ds, x, None, tile), wanted, torch.float32, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_db_by_the_library_of_a_dy_with_spare_columns(columns):
    dy, s = on_gpu(ROWS, COLUMNS + columns)[:, :COLUMNS], on_gpu(ROWS, columns)
    s[ROWS // 8 :, : columns // 8] = 0  # a job has an eighth of the rows
    assert_close(mm_in(dy.t(), s, s.dtype), dy.float().t() @ s.float(), s.dtype, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "form"),
    # SwiGLU of 128 columns in fused's tiles takes 237,568 bytes of shared memory; an H200 has 232,448.
    [(RANK, "fused_small"), (RANK, "plain"), (64, "fused"), (64, "fused_small"), (64, "plain")],
)
def test_eight_adapters_at_the_size_that_was_wrong(columns, form, monkeypatch):
    """SmolLM2-135M's layers in bfloat16, beside plain PEFT in float32. columns: up to how many our kernels take."""
    for module in (runtime, adapter_grad):
        monkeypatch.setattr(module, "MAX_FUSED_RANK", columns)
    sizes = {"hidden_size": COLUMNS, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"head_dim": 64, "max_position_embeddings": 512}
    ours, ids = model(ranks={f"job{i}": 16 for i in range(8)}, sizes=sizes), batch(8, 512)["input_ids"].cuda()
    with torch.no_grad():
        for n, parameter in ours.named_parameters():
            if "lora" not in n and ("proj" in n or "lm_head" in n):
                parameter.div_(8)  # which tiny models of narrow layers need
    ours = ours.to("cuda", torch.bfloat16)
    plain = deepcopy(ours).float()
    lorakernels.apply_multi(ours, fused=True).set(list(range(8)))
    with tune.forced(form):
        loss_of(ours, ids).sum().backward()
    found, off = gradients(ours), {}
    for i in range(8):
        for n, gradient in alone(plain, ids, [i], f"job{i}")[1].items():
            off[n] = ((found[n].float() - gradient).norm() / gradient.norm()).item()
    worst = sorted(off, key=lambda n: -off[n])[:8]
    assert off[worst[0]] < 0.05, [(n, round(off[n], 3)) for n in worst]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("adapters", [8, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_many_adapters_of_rank_16(adapters, device):
    """Each job's loss and gradients are those that it has alone, in one batch with the others."""
    plain, ids = model(ranks={f"job{i}": 16 for i in range(adapters)}).to(device), batch(adapters, 12)["input_ids"]
    ours, ids = deepcopy(plain), ids.to(device)
    lorakernels.apply_multi(ours, fused=True).set(list(range(adapters)))
    losses = loss_of(ours, ids)
    losses.sum().backward()
    found = gradients(ours)
    for i in range(adapters):
        wanted, theirs = alone(plain, ids, [i], f"job{i}")
        torch.testing.assert_close(losses[[i]], wanted, rtol=1e-4, atol=1e-4)
        assert theirs
        for n, gradient in theirs.items():
            assert (found[n] - gradient).norm() < 0.01 * gradient.norm(), n


def test_a_choice_is_always_among_the_same_forms(monkeypatch):
    """A GPU remembers a choice by its key: a form that one call has and another has not would be looked for in vain.
    Sixteen adapters have the form that looks them up, and dY comes with room for dS or without."""
    ours, ids, forms_of, pick = model(ranks={f"job{i}": 4 for i in range(16)}), batch(16, 5)["input_ids"], {}, tune.pick

    def checked(name, key, forms, *more):
        assert forms_of.setdefault((name, key), {*forms}) == {*forms} or len(forms) == 1, (name, key)
        return pick(name, key, forms, *more)

    monkeypatch.setattr(multi_product, "TILES", {"tail": (32, 32, 32, 4, 1)})
    monkeypatch.setattr(worth_trying, "takes", lambda *_: True)
    monkeypatch.setattr(tune, "pick", checked)
    lorakernels.apply_multi(ours, fused=True).set(list(range(16)))
    for form in ("packed", "apart"):
        with tune.forced(form):
            loss_of(ours, ids).sum().backward()
    assert any("tail" in forms and "one" in forms for forms in forms_of.values())
