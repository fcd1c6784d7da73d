"""The gate's gold and plain outcomes are computed once, and what comes out of the file is what was put in."""

from pathlib import Path

import pytest
import torch
from helpers import arm, cells, seat_of, shared_step

from lorabench.measure.gradient_kind import GradientKind
from lorabench.measure.judging import gold_cache, numerics

DEVICE = torch.device("cpu")


def computed(dtype):
    gold = shared_step(dtype=dtype, layers=2, upcast=True)
    return gold, gold if dtype == torch.float32 else numerics.plain_step(arm(dtype=dtype, layers=2), gold)


def same(one, two):
    gradients = set(one.gradients) == set(two.gradients) and all(
        torch.equal(g, two.gradients[n]) for n, g in one.gradients.items()
    )
    numbers = ((o.loss, o.update_error, o.scales) for o in (one, two))
    return gradients and next(numbers) == next(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_computed(dtype, tmp_path):
    file, calls = tmp_path / "gold.safetensors", []

    def compute():
        calls.append(1)
        return computed(dtype)

    first, second = (gold_cache.cached(file, DEVICE, compute) for _ in range(2))
    assert calls == [1]
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert (second[0] is second[1]) == (dtype == torch.float32)
    assert [f.name for f in tmp_path.iterdir()] == ["gold.safetensors"]


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    made = computed(torch.float32)
    gold, low = gold_cache.cached(tmp_path / "gone" / "gold.safetensors", DEVICE, lambda: made)
    assert gold is made[0] and low is made[1]


def test_one_file_for_all_that_differ_in_their_toggles_alone():
    def file(*overrides, seed=0, dtype=torch.float32):
        cell = cells(*overrides, "ablations=[eager]")[1]
        return gold_cache.path(Path("folder"), cell.model, cell.workload, seed, dtype)

    def over(base):
        cell = cells(f"reference=[sdpa,{base}]", "ablations=[eager]")[1]
        return gold_cache.path(Path("folder"), cell.model, cell.workload, 0, torch.float32, cell.held_weights)

    same = [file(), file("reference=peft_low"), file("trials=7"), over("padding")]
    other = [
        file(seed=1), file(dtype=torch.bfloat16), file("workload=2x17"), file("lora.r=4"), file("models=[tiny-gemma]"),
        over("nf4_base"), over("{nf4_base:{bnb_4bit_use_double_quant:false}}"),
    ]  # fmt: skip
    assert len(set(same)) == 1
    assert len({same[0], *other}) == 1 + len(other)


def gated(cell, folder, monkeypatch):
    """(models built, the candidate's verdict) of the gate of one cell."""
    built, plain = [], GradientKind._outcomes
    with monkeypatch.context() as patch:
        noted = lambda self, request: built.append(request.name) or plain(self, request)  # noqa: E731
        patch.setattr(GradientKind, "_outcomes", noted)
        seat, stack = seat_of(cell, folder)
        ready = seat.call("prepare", stack.name, stack)
    return built, ready.numerics[""]


def test_the_next_cell_s_gate_computes_its_arms_alone(tmp_path, monkeypatch):
    shared, fresh = tmp_path / "shared", tmp_path / "fresh"
    shared.mkdir(), fresh.mkdir()
    first, second = (c for c in cells("ablations=[eager,sdpa_math]") if c.toggles)
    assert gated(first, shared, monkeypatch)[0] == ["gold", "candidate"]
    built, verdict = gated(second, shared, monkeypatch)
    assert built == ["candidate"]
    assert (["gold", *built], verdict) == gated(second, fresh, monkeypatch)


def test_a_cell_gated_without_dropout_has_a_gold_of_its_own(tmp_path, monkeypatch):
    dropping = cells("ablations=[eager,lora_kernels]", "lora.lora_dropout=0.3")
    first, second = (c for c in dropping if c.toggles)
    gated(first, tmp_path, monkeypatch)
    built, verdict = gated(second, tmp_path, monkeypatch)
    assert built[0] == "gold" and verdict.passed
