"""Published numbers: they load, stand beside the right records, in the right direction."""

import math

import pytest
from pydantic import ValidationError

from lorabench.report import claims
from lorabench.report.analysis import Analysis
from lorabench.report.claim_tables import claim_rows
from lorabench.report.contrasts import Contrasts


def found(records, source=None):
    return [m for m in claims.match(records) if source in (None, m.source.id)]


def measured(record, quantity, phase=None):
    words = {"statistic": "single run", "wording": "w", "baseline": "b", "candidate": ["x"]}
    claim = claims.Claim.model_validate({"quantity": quantity, "low": 1, "high": 1, "phase": phase, **words})
    return claims.measured(record, claim, Contrasts())[0]


def test_every_source_loads_with_its_figures():
    sources = {s.id: s for s in claims.load_claims()}
    assert set(sources) == {
        "axolotl_blog",
        "axolotl_guide",
        "lorafusion",
        "lorafusion_kernels",
        "mlora",
        "predibase_ladder",
    }
    assert len(sources["axolotl_blog"].claims) == 12
    forward = [c for c in sources["axolotl_blog"].claims if c.quantity == "forward_speedup"]
    assert [(c.model, c.low) for c in forward] == [
        ("smollm2-135m", 1.48), ("smollm2-1.7b", 1.46), ("llama-3.1-8b", 1.48),
    ]  # fmt: skip


def test_a_claim_for_a_model_matches_only_that_model(record):
    ours = found([record(["lora_kernels"], model="smollm2-1.7b")], "axolotl_blog")
    assert {m.claim.quantity: m.low for m in ours}["backward_speedup"] == 1.25
    assert len(ours) == 4
    assert not found([record(["lora_kernels"], model="qwen3-8b")], "axolotl_blog")


def test_three_kernels_together_match_but_one_alone_does_not(record):
    three = ["lora_o_kernel", "lora_mlp_kernel", "lora_qkv_kernel"]
    assert len(found([record(three)], "axolotl_blog")) == 4
    assert not found([record(three[:1])])


def test_checkpointing_on_is_the_inverse_of_the_claim_for_off(record):
    (on,) = found([record(["gradient_checkpointing"], speedup=0.76)])
    assert (on.inverted, on.low, on.high) == (True, pytest.approx(1 / 1.35), pytest.approx(1 / 1.25))
    assert claims.outcome(on, Contrasts()) == "within"


def test_another_reference_is_said_and_an_optimizer_is_not_inverted_against_it(record):
    (other,) = found([record(["adamw_fused"], reference=("sdpa", "adamw_foreach"))])
    (same,) = found([record(["adamw_fused"], reference=("sdpa", "paged_adamw_32bit"))])
    assert (other.same_baseline, same.same_baseline, same.low) == (False, True, 1.39)
    (back,) = found([record(["paged_adamw_32bit"], reference=("sdpa", "adamw_fused"))])
    assert (back.inverted, back.low) == (True, pytest.approx(1 / 1.39))
    assert not found([record(["paged_adamw_32bit"], reference=("sdpa", "adamw_8bit"))])


def test_parameters_of_a_toggle_do_not_hide_its_claims(record):
    assert len(found([record(["lora_kernels(rank=8)"])], "axolotl_blog")) == 4


@pytest.mark.parametrize(("speedup", "expected"), [(1.5, "below"), (3.0, "within"), (6.0, "above")])
def test_outcome_compares_the_interval_with_the_range(record, speedup, expected):
    (packing,) = found([record(["packing"], speedup=speedup)])
    assert claims.outcome(packing, Contrasts()) == expected


def test_measured_memory_is_of_the_phase_that_the_claim_names(record):
    cell = record(["lora_kernels"], peaks=(8, 5))
    assert measured(cell, "backward_memory_saved_pct") == pytest.approx(37.5)
    assert measured(cell, "peak_memory_gb") == pytest.approx(5 * 2**30 / 1e9)
    assert math.isnan(measured(cell, "attention_speedup"))


THEIRS = "linear-4096x4096(lora_dropout=0.1)"


def test_a_claim_of_a_kernel_alone_stands_beside_single_linears_only(record):
    common = {"reference": ("adapters_in_compute_dtype",), "speedup": 1.5}
    linear = record(["lora_kernels"], model=THEIRS, kind="op", **common)
    others = [record(["lora_kernels"], model=m, kind="op", **common) for m in (f"norm-{THEIRS}", "linear-8x8")]
    others += [record(["lora_kernels"], model=m, **common) for m in ("smollm2-135m", THEIRS)]
    assert not found(others, "lorafusion_kernels")
    average, best = found([linear], "lorafusion_kernels")
    assert len(found([linear])) == 2  # and nothing that was said of whole models
    assert (average.low, best.low, best.same_baseline) == (1.27, 1.39, True)
    assert measured(linear, "kernel_speedup", "total") == pytest.approx(1.5, rel=0.05)
    assert claims.outcome(best, Contrasts()) == "above"


def test_an_average_and_a_maximum_stand_beside_ours_over_the_same_cells(record):
    def cell(speedup, workload, **changes):
        base = {"reference": ("adapters_in_compute_dtype",), "model": THEIRS, "workload": workload, "kind": "op"}
        return record(["lora_kernels"], **base, speedup=speedup, **changes)

    cells = [cell(1.1, "1x2048"), cell(1.21, "1x4096"), cell(1.6, "1x8192", status="crash")]
    average, best = frame(cells).to_dict("records")
    assert (average["model"], best["model"]) == ("average of 2 cells", "maximum of 2 cells")
    assert average["measured"] == pytest.approx((1.1 * 1.21) ** 0.5, rel=0.01)
    assert average["measured_low"] < average["measured"] < average["measured_high"]
    assert best["measured"] == measured(cells[1], "kernel_speedup", "total")
    assert (average["outcome"], best["outcome"]) == ("below", "below")
    assert [r[0] for r in claim_rows(Analysis(cells))] == [
        "lora_kernels, average of 2 cells",
        "lora_kernels, maximum of 2 cells",
    ]
    lost = frame(cells[2:])
    assert set(lost["status"]) == {"crash"}
    assert lost["measured"].isna().all()


def frame(records):
    return claims.claims_frame(claims.match(records), Contrasts())


def test_a_claim_stands_beside_records_of_its_kind(record):
    """A limit, or an evaluation with the same toggle, is not what the source measured."""
    assert found([record(["lora_kernels"])], "axolotl_blog")
    for other in ("limit", "evaluate"):
        assert not found([record(["lora_kernels"], kind=other)])


def test_a_model_may_be_a_pattern(record):
    words = {"statistic": "single run", "wording": "w", "baseline": "b", "candidate": ["x"], "low": 1, "high": 1}
    source = {"id": "s", "title": "t", "publisher": "p", "hardware": "h", "protocol": "p", "kind": "op"}
    claim = words | {"quantity": "forward_speedup", "model": "linear-*"}
    sources = [claims.Source.model_validate(source | {"claims": [claim]})]
    cells = [record(["x"], model=m, kind="op") for m in ("linear-8x8", "norm-linear-8x8")]
    assert [m.record.model for m in claims.match(cells, sources)] == ["linear-8x8"]
    for wrong in ({"quantity": "step_speedup"}, {"quantity": "foward_speedup"}, {"phase": "step"}, {"kind": "train2"}):
        with pytest.raises(ValidationError):
            claims.Source.model_validate(source | {"claims": [claim | wrong]})


def test_a_claim_without_direction_or_with_a_typo_is_refused():
    good = {"quantity": "total_speedup", "low": 1, "high": 2, "statistic": "range", "wording": "w", "baseline": "b"}
    with pytest.raises(ValidationError, match="unmatched"):
        claims.Claim.model_validate(good)
    with pytest.raises(ValidationError, match="above high"):
        claims.Claim.model_validate(good | {"low": 3, "candidate": ["a"]})
    with pytest.raises(ValidationError, match="average, maximum"):
        claims.Claim.model_validate(good | {"candidate": ["a"], "over": ["x"]})
    with pytest.raises(ValidationError, match="Extra inputs"):
        claims.Claim.model_validate(good | {"candidate": ["a"], "hardwear": "A100"})
