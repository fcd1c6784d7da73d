"""Published numbers: they load, say what the sources say, stand beside the right records, in the right direction.

Every source quotes a text, and keeps a hash of the quotes as they were when all of them were last found in it. Whoever
has the texts can look again: LORABENCH_TEXTS=FOLDER python -m pytest tests/report/test_claims.py
"""

import math
import os
import re
import statistics
from pathlib import Path

import pytest
from pydantic import ValidationError
from record.arms import tokens

from lorabench.report import claims
from lorabench.report.analysis import Analysis
from lorabench.report.claim_tables import claim_rows, claim_tables, claims_frame, judged
from lorabench.report.contrasts import Contrasts
from lorabench.report.published import published

QUOTED = [s for s in claims.load_claims() if s.text_sha256]
WORDS = {"twice": 2.0}


def found(records, source=None):
    return [m for m in claims.match(records) if source in (None, m.source.id)]


def a_claim(**changes):
    """Fields of a claim: `x` added to `base`."""
    fields = {"id": "c", "wording": "1x", "printed": [1], "unit": "x", "quantity": "total_speedup", "baseline": "b"}
    return fields | {"statistic": "single run", "reference": ["base"], "candidate": ["base", "x"]} | changes


def measured(record, quantity, phase=None):
    unit = "x" if quantity.endswith("speedup") else "%"
    claim = claims.Claim.model_validate(a_claim(quantity=quantity, phase=phase, unit=unit))
    return claims.measured(record, claim, Contrasts())[0]


def outcome(match):
    return claims.against(match, *claims.measured(match.record, match.claim, Contrasts()))


def claim_of(source, name):
    return next(c for s in claims.load_claims() if s.id == source for c in s.claims if c.id == name)


# -- what the sources say ---------------------------------------------------------------------------------------------


def test_all_numbers_of_the_five_texts_are_there():
    counted = {s.id: sum(len(c.printed) for c in s.claims) for s in QUOTED}
    assert counted == {"axolotl_blog": 18, "axolotl_guide": 0, "lorafusion": 10, "mlora": 26, "predibase_ladder": 26}
    assert sum(counted.values()) == 80


def test_every_number_stands_in_its_quote():
    for source in QUOTED:
        for claim in source.claims:
            said = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", claim.wording)]
            said += [n for word, n in WORDS.items() if word in claim.wording]
            assert set(claim.printed) <= set(said), f"{source.id}/{claim.id}"


@pytest.mark.parametrize("source", QUOTED, ids=lambda s: s.id)
def test_the_quotes_are_those_that_were_found_in_the_text(source):
    assert source.wordings_sha256 == source.quotes_sha256(), "a quote was changed: look it up (see this file's head)"


@pytest.mark.parametrize("source", QUOTED, ids=lambda s: s.id)
def test_every_quote_stands_in_the_text_and_no_number_of_it_is_left_out(source):
    folder = os.environ.get("LORABENCH_TEXTS")
    if not folder:
        pytest.skip("LORABENCH_TEXTS names no folder with the texts")
    texts = [claims.in_one_line(f.read_text()) for f in sorted(Path(folder).iterdir()) if f.is_file()]
    (text,) = [t for t in texts if claims.sha256(t) == source.text_sha256]
    assert not [quote for quote in source.quotes if quote not in text]
    for quote in sorted(source.quotes, key=len, reverse=True):
        text = text.replace(quote, " … ")
    assert not re.findall(r".{0,40}\d.{0,40}", text)


def test_a_number_that_says_the_same_again_says_the_same():
    again = [(s, c) for s in QUOTED for c in s.claims if c.same_as]
    assert len(again) == 6
    for source, claim in again:
        assert claim.low == pytest.approx(
            claim_of(source.id, claim.same_as).low, abs=0.005 + 0.0005
        )  # half a last digit each


def test_where_a_source_disagrees_with_itself_the_claim_says_so():
    hours = {c.id: c.printed[0] for s in QUOTED for c in s.claims if c.unit == "h"}
    seq, parallel, ours = (hours[f"four-jobs-{i}-latency"] for i in ("seq", "parallel", "mlora"))
    assert 100 * (1 - ours / seq) == pytest.approx(
        claim_of("mlora", "faster-than-one-after-the-other").printed[0], abs=0.005
    )
    beside = claim_of("mlora", "faster-than-side-by-side")
    assert f"{100 * (1 - ours / parallel):.2f} %" in beside.caveat
    assert f"{beside.printed[0]}" == "3.92"

    steps = [
        claim_of("predibase_ladder", f"step-{n}")
        for n in ("1-hardware", "2-fused-adam", "3-batch-size", "5-checkpointing")
    ]
    low, high = (math.prod(getattr(step, end) for step in steps) for end in ("low", "high"))
    five = claim_of("predibase_ladder", "steps-1-to-5-average")
    assert f"{low:.2f} to {high:.2f}" in five.caveat
    assert five.high < low

    days, after = (claim_of("predibase_ladder", f"magicoder-{when}") for when in ("before", "after"))
    assert f"{24 * days.printed[0] / after.printed[0]:.0f}x" in after.caveat


def test_a_percentage_becomes_a_ratio_by_what_it_is_a_percentage_of():
    assert claim_of("predibase_ladder", "step-5-checkpointing").high == pytest.approx(1.35)
    batch = claim_of("predibase_ladder", "step-3-batch-size")
    assert (batch.low, batch.high) == (pytest.approx(1 / 0.7), pytest.approx(1 / 0.6))
    assert claim_of("predibase_ladder", "step-6-loading").high == math.inf
    assert claim_of("axolotl_blog", "smollm2-135m-forward-memory").low == 38.2


def test_every_claim_has_a_direction_and_is_open_or_has_both_arms():
    for source in claims.load_claims():
        for claim in source.claims:
            assert claim.better in ("more", "less")
            toggles = bool(claim.reference and claim.candidate)
            assert [bool(claim.open), bool(claim.counted), claim.is_one, toggles].count(True) == 1


def test_a_newer_source_stands_among_the_claims_and_is_none_of_the_five_texts():
    (source,) = [s for s in claims.load_claims() if s.id == "tlora"]
    assert source not in QUOTED and all(c.open for c in source.claims)
    for claim in source.claims:
        assert {f"{n:g}" for n in claim.printed} <= set(re.findall(r"\d+(?:\.\d+)?", claim.wording))


def test_what_is_simulated_is_of_rows_that_are_there(tmp_path):
    table = "cpu/bubbles/bubbles.csv"
    found = claims.Tabled(table=table, column="bubble_pct", where={"adapters": "4"}, how="so")
    (tmp_path / table).parent.mkdir(parents=True)
    (tmp_path / table).write_text("workload,adapters,bubble_pct\na,4,11.5\nb,4,9.25\na,1,50\n")
    assert claims.tabled(found, tmp_path) == [11.5, 9.25]
    with pytest.raises(ValueError, match="has no row"):
        claims.tabled(found.model_copy(update={"where": {"adapters": "9"}}), tmp_path)
    bubble = a_claim(quantity="pipeline_bubble_pct", unit="%", open="no suite", simulated=found)
    assert claims.Claim.model_validate(bubble).simulated == found
    with pytest.raises(ValidationError, match="for a claim that is open"):
        claims.Claim.model_validate(bubble | {"open": None, "counted": found, "reference": [], "candidate": []})
    assert claims.whether_measured(claims.Claim.model_validate(bubble), []) == "open: no suite"


def test_a_pipeline_s_bubbles_stand_beside_lorafusion_s_and_its_speed_beside_that_over_megatron(record):
    """The reference empties the pipeline behind each job; both arms are one toggle with other parameters."""
    notes = {"reference": {"pipeline": {"bubble_pct": 48.5}}, "candidate": {"pipeline": {"bubble_pct": 21.0}}}
    own = ["pipeline_multi_adapter(tokens=7168)"]
    base = ("padding", "pipeline_multi_adapter(tokens=7168, flush=True)")
    row = record(own, reference=base, speedup=1.5, sd=0.0, model="qwen2.5-32b", workload="lorafusion_xsum", notes=notes)
    found = {m.claim.id: m for m in claims.match([row]) if m.source.id == "lorafusion"}
    values = {name: claims.measured(row, m.claim, Contrasts())[0] for name, m in found.items()}
    assert values == {
        "bubble-one-adapter": 48.5, "bubble-four-adapters": 21.0,
        **dict.fromkeys(("over-megatron-most", "over-megatron-average"), pytest.approx(1.5)),
    }  # fmt: skip
    assert found["over-megatron-most"].differs == "without megatron_lm, with padding + pipeline_multi_adapter"
    full = record(own, reference=("padding", "pipeline_multi_adapter(tokens=4096)"), workload="lorafusion_xsum")
    assert not claims.match([full])  # nothing empties that one behind a job
    assert not any(m.inverted for m in found.values())
    plain = record(own, reference=("padding",), workload="lorafusion_xsum", notes=notes)
    assert "over-megatron-most" not in {m.claim.id for m in claims.match([plain])}


def test_over_mlora_are_kernels_and_rows_of_tokens_against_padded_micro_batches(record):
    """Neither a pipeline that is emptied or that fills rows is mLoRA's, nor one without our kernels LoRAFusion's."""
    plain, full = "pipeline_multi_adapter", "pipeline_multi_adapter(tokens=7168, kernels=True)"

    def beside(own, base, workload="lorafusion_xsum"):
        row = record([own], reference=("padding", base), speedup=1.3, sd=0.0, workload=workload)
        return {m.claim.id: m for m in claims.match([row])}

    made = beside(full, plain)
    assert {"over-mlora-most", "over-mlora-average"} <= made.keys()
    assert made["over-mlora-most"].differs == "without gradient_checkpointing" and not made["over-mlora-most"].inverted
    assert made["over-mlora-most"].stands_for == "lorafusion"
    emptied = beside(full, "pipeline_multi_adapter(flush=True)")
    assert "over-megatron-most" in emptied and "over-mlora-most" not in emptied
    for own, base in (
        ("pipeline_multi_adapter(tokens=7168)", plain),
        ("pipeline_multi_adapter(kernels=True)", plain),
        (full, "pipeline_multi_adapter(tokens=7168)"),
    ):
        assert "over-mlora-most" not in beside(own, base)
    assert "over-mlora-most" not in beside(full, plain, workload="two_jobs")


def test_what_was_counted_beside_sweeps_is_measured():
    found = claims.Tabled(table="a.csv", column="saved_pct", where={"arm": "lora_kernels"}, how="by ncu")
    traffic = a_claim(quantity="memory_traffic_saved_pct", unit="%", kind="op", counted=found)
    traffic |= {"reference": [], "candidate": []}
    assert claims.whether_measured(claims.Claim.model_validate(traffic), []) == "measured"
    for more in ({"open": "no suite"}, {"reference": ["sdpa"], "candidate": ["eager"]}):
        with pytest.raises(ValidationError, match="neither open nor"):
            claims.Claim.model_validate(traffic | more)


# -- figures of another machine ---------------------------------------------------------------------------------------

SAME = ("padding", "gradient_checkpointing")
JOBS = {"model": "llama-3.1-8b", "workload": "alpaca_jobs_4", "reference": SAME}


def test_hours_and_tokens_of_another_machine_compare_as_the_ratio_to_their_baseline(record):
    one = record(["batched"], speedup=1.2, sd=0.0, tokens=tokens(1000, 900, 1000, 2000), peaks=(10.0, 15.0), **JOBS)
    hours, passed = (claim_of("mlora", f"four-jobs-mlora-{name}") for name in ("latency", "throughput"))
    assert (hours.low, passed.low) == (pytest.approx(10.51 / 9.46), pytest.approx(674.58 / 608.41))
    beside = [m.claim for m in found([one], "mlora")]
    assert hours in beside and passed in beside
    assert claims.measured(one, hours, Contrasts())[0] == pytest.approx(1.2, rel=1e-3)
    assert claims.measured(one, passed, Contrasts())[0] == pytest.approx(1.2 * 3000 / 2000, rel=1e-3)
    memory = claim_of("mlora", "strategies-m1-memory")
    assert memory.low == pytest.approx(23.82 / 10.68)
    assert claims.measured(one, memory, Contrasts())[0] == pytest.approx(1.5)


def test_a_baseline_s_own_figures_are_the_reference_s(record):
    one = record(["batched"], speedup=1.2, sd=0.0, tokens=tokens(1000, 900, 1000, 2000), peaks=(10.0, 15.0), **JOBS)
    passed, memory = (claim_of("mlora", f"strategies-seq-{name}") for name in ("throughput", "memory"))
    took = statistics.median(one.ms("reference"))
    assert claims.measured(one, passed, Contrasts())[0] == pytest.approx(1000 * 2000 / took)
    assert claims.measured(one, memory, Contrasts())[0] == pytest.approx(10 * 2**30 / 1e9)
    hours = claim_of("mlora", "strategies-seq-latency")
    assert claims.whether_measured(hours, []) == claims.BY_DEFINITION and hours not in [m.claim for m in found([one])]


def test_utilization_is_the_share_of_a_step_in_which_the_gpu_was_busy(record):
    one = record(["batched"], sd=0.0, **JOBS)
    half = {
        p: {"device_busy_ms": statistics.median(one.ms("candidate", (p,))) / 2} for p in ("forward", "backward", "step")
    }
    done = record(["batched"], sd=0.0, **JOBS, roofline={"reference": {}, "candidate": half})
    ours, theirs = (claim_of("mlora", f"strategies-{arm}-utilization") for arm in ("m1", "seq"))
    assert claims.measured(done, ours, Contrasts())[0] == pytest.approx(50.0)
    assert math.isnan(claims.measured(done, theirs, Contrasts())[0])  # nobody profiled the reference


MORE_JOBS = "alpaca_many_8(jobs=[{'name': 'job', 'copies': 20}])"


def test_how_many_jobs_fit_is_said_by_an_arm_that_ran_out_of_memory(record):
    edge = {"of": "jobs", "asked": 16, "fits": 9, "too_many": 10, "room_gib": 130.0, "processes": 4}
    many = JOBS | {"workload": "alpaca_many_8"}
    full = record(["batched"], status="oom", arm="candidate", notes={"candidate": {"edge": edge}}, **many)
    ratio, beside = claim_of("mlora", "jobs-that-fit"), claim_of("mlora", "parallel-jobs-that-fit")
    assert claims.measured(full, ratio, Contrasts())[0] == pytest.approx(9 / 4)
    assert claims.measured(full, beside, Contrasts())[0] == 4
    assert {m.claim.id for m in found([full], "mlora") if claims.answers(m)} == {ratio.id, beside.id}
    assert claims.whether_measured(ratio, found([full])) == "measured"
    more = record(["batched"], status="oom", arm="candidate", notes=full.notes, **many | {"workload": MORE_JOBS})
    # Twenty were asked in place of sixteen: the edge counts.
    assert claims.whether_measured(ratio, found([more])) == "measured"
    cut = {"candidate": {"edge": edge | {"fits": 4, "too_many": 16}}}  # the time was up before five were tried
    early = found([record(["batched"], status="oom", arm="candidate", notes=cut, **many)])
    assert claims.whether_measured(ratio, early) != "measured"
    assert claims.whether_measured(beside, early) == "measured"
    room = record(["batched"], **many)  # all of its jobs fit: how many more would is not known
    assert math.isnan(claims.measured(room, ratio, Contrasts())[0])


def test_a_ratio_is_to_a_claim_of_the_same_quantity():
    both = [a_claim(id="base", unit="h", quantity="latency_h", is_one=True), a_claim(ratio_to="base")]
    source = {"id": "s", "name": "s", "title": "s", "publisher": "p", "hardware": "h", "protocol": "p", "kind": "train"}
    with pytest.raises(ValidationError, match="total_speedup is no ratio to latency_h"):
        claims.Source.model_validate(source | {"claims": both})


# -- beside records ---------------------------------------------------------------------------------------------------


def test_a_claim_for_a_model_matches_only_that_model(record):
    ours = found([record(["lora_kernels"], model="smollm2-1.7b")], "axolotl_blog")
    assert {m.claim.quantity: m.low for m in ours}["backward_speedup"] == 1.25
    assert len(ours) == 4
    assert not found([record(["lora_kernels"], model="qwen3-8b")], "axolotl_blog")


def test_three_kernels_together_match_but_one_alone_does_not(record):
    three = ["lora_o_kernel", "lora_mlp_kernel", "lora_qkv_kernel"]
    assert len(found([record(three)], "axolotl_blog")) == 4
    assert not found([record(three[:1])])


QLORA = ("nf4_base", "sdpa", "padding", "adamw_fused", "auto_batch_size")


def test_checkpointing_on_is_the_inverse_of_the_claim_for_off(record):
    (on,) = found([record(["gradient_checkpointing"], speedup=0.76, reference=QLORA)])
    assert (on.inverted, on.low, on.high) == (True, pytest.approx(1 / 1.35), pytest.approx(1 / 1.25))
    assert outcome(on) == "within"


def test_a_baseline_is_the_claims_own_or_the_difference_is_said(record):
    paged = ("nf4_base", "sdpa", "padding", "gradient_checkpointing", "paged_adamw_32bit")
    (same,) = found([record(["adamw_fused"], reference=paged)])
    assert (same.differs, same.low, same.inverted) == ("", 1.39, False)
    (other,) = found([record(["adamw_fused"], reference=("sdpa", "padding", "adamw_foreach"))])
    assert other.differs == "without nf4_base + gradient_checkpointing + paged_adamw_32bit, with adamw_foreach"
    fused = ("nf4_base", "sdpa", "padding", "gradient_checkpointing", "adamw_fused")
    (back,) = found([record(["paged_adamw_32bit"], reference=fused)])
    assert (back.inverted, back.low, back.differs) == (True, pytest.approx(1 / 1.39), "")
    assert not found([record(["paged_adamw_32bit"], reference=("sdpa", "adamw_8bit"))])


def test_a_claim_over_processes_is_not_about_jobs_one_after_the_other(record):
    plain = ("padding", "gradient_checkpointing")
    both = [record(["batched"], workload="alpaca_jobs_4", reference=base) for base in (plain, (*plain, "processes"))]
    after, beside = ({m.claim.id for m in found([one], "mlora") if not m.differs} for one in both)
    assert "faster-than-one-after-the-other" in after - beside
    assert beside == {"faster-than-side-by-side"}
    assert "faster-than-side-by-side" not in {m.claim.id for m in found([both[0]], "mlora")}


def test_against_another_baseline_nothing_is_said_to_be_within(record):
    same, other = (record(["packing"], speedup=3.0, reference=base) for base in (QLORA, ("sdpa", "padding", "adamw")))
    (first,), (second,) = found([same]), found([other])
    assert (outcome(first), outcome(second)) == ("within", "")
    rows = claim_rows(Analysis([same, other]))
    assert [r[4] for r in rows] == [
        "within",
        "against another baseline: without nf4_base + adamw_fused + auto_batch_size, with adamw",
    ]


def test_how_a_claim_stands(record):
    packing, cost = (claim_of("predibase_ladder", name) for name in ("step-7-packing", "cost"))
    gain = claim_of("axolotl_blog", "smollm2-135m-forward-gain")
    same, other = (record(["packing"], reference=base) for base in (QLORA, ("sdpa", "padding", "adamw")))
    failed = record(["packing"], reference=QLORA, status="crash")
    assert claims.whether_measured(packing, found([same, other])) == "measured"
    assert claims.whether_measured(packing, found([other])) == "measured against another baseline"
    assert claims.whether_measured(packing, found([failed])) == "open: not measured here"
    assert claims.whether_measured(cost, []).startswith("open: a price")
    assert claims.whether_measured(gain, []) == "the same as smollm2-135m-forward-speedup"


def test_an_optimizer_changes_nothing_about_a_claim_of_forward_and_backward(record):
    for optimizer, differs in (("no_optimizer", ""), ("adamw_foreach", ""), ("packing", "with packing")):
        cell = record(["axolotl"], reference=("sdpa", "padding", optimizer))
        assert {m.differs for m in found([cell], "axolotl_blog")} == {differs}


def test_other_toggles_in_place_of_the_sources_own_are_named(record):
    base = ("sdpa", "padding", "no_optimizer")
    own, ours = record(["axolotl"], reference=base), record(["lora_kernels"], reference=base)
    assert {m.stands_for for m in found([own], "axolotl_blog")} == {""}
    assert {m.stands_for for m in found([ours], "axolotl_blog")} == {"axolotl"}
    (row, *_) = claim_rows(Analysis([ours]))
    assert row[4].endswith("(in place of axolotl)")


def test_side_by_side_a_column_names_its_other_baseline(record):
    plain, low = ("sdpa", "padding", "no_optimizer"), ("sdpa", "padding", "no_optimizer", "adapters_in_compute_dtype")
    (table, *_) = claim_tables(Analysis([record(["axolotl"], reference=base, speedup=1.6) for base in (plain, low)]))
    _, headings, rows = table
    assert headings[3:] == ["axolotl", "axolotl, against another baseline: with adapters_in_compute_dtype"]
    assert rows[0][3].endswith("above")
    assert rows[0][4].endswith("]")


def test_parameters_of_a_toggle_do_not_hide_its_claims(record):
    assert len(found([record(["lora_kernels(rank=8)"])], "axolotl_blog")) == 4


@pytest.mark.parametrize(("speedup", "expected"), [(1.5, "below"), (3.0, "within"), (6.0, "above")])
def test_outcome_compares_the_interval_with_the_range(record, speedup, expected):
    (packing,) = found([record(["packing"], speedup=speedup, reference=QLORA)])
    assert outcome(packing) == expected


def test_measured_memory_is_of_the_phase_that_the_claim_names(record):
    cell = record(["lora_kernels"], peaks=(8, 5))
    assert measured(cell, "backward_memory_saved_pct") == pytest.approx(37.5)
    assert measured(cell, "peak_memory_gb") == pytest.approx(5 * 2**30 / 1e9)
    assert math.isnan(measured(cell, "kernel_speedup"))


THEIRS = "linear-4096x4096(lora_dropout=0.1)"


def test_a_claim_of_a_kernel_alone_stands_beside_single_linears_only(record):
    common = {"reference": ("adapters_in_compute_dtype", "cuda_graph"), "speedup": 1.5}
    linear = record(["lora_kernels"], model=THEIRS, kind="op", **common)
    others = [record(["lora_kernels"], model=m, kind="op", **common) for m in (f"norm-{THEIRS}", "linear-8x8")]
    others += [record(["lora_kernels"], model=m, **common) for m in ("smollm2-135m", THEIRS)]
    assert not found(others, "lorafusion")
    best, average = found([linear], "lorafusion")
    assert len(found([linear])) == 2  # and nothing that was said of whole models
    assert (average.low, best.low, best.differs) == (1.27, 1.39, "")
    assert measured(linear, "kernel_speedup", "total") == pytest.approx(1.5, rel=0.05)
    assert outcome(best) == "above"


def test_the_claim_of_attention_stands_beside_attention_alone(record):
    common = {"model": "attention-32x8x128", "kind": "op", "speedup": 2.0}
    packed, padded = (record(["flash_attention_2"], reference=("sdpa", n), **common) for n in ("packing", "padding"))
    (own,), (other,) = found([packed]), found([padded])
    assert (own.claim.id, own.differs, other.differs) == ("step-8-attention", "", "without packing, with padding")
    assert outcome(own) == "below" and outcome(other) == ""
    assert not found([record(["flash_attention_2"], reference=("sdpa", "packing"), speedup=2.0)])


def test_an_average_and_a_maximum_stand_beside_ours_over_the_same_cells(record):
    def cell(speedup, workload, **changes):
        base = {
            "reference": ("adapters_in_compute_dtype", "cuda_graph"),
            "model": THEIRS,
            "workload": workload,
            "kind": "op",
        }
        return record(["lora_kernels"], **base, speedup=speedup, **changes)

    cells = [cell(1.1, "1x2048"), cell(1.21, "1x4096"), cell(1.6, "1x8192", status="crash")]
    best, average = frame(cells).to_dict("records")
    assert (average["model"], best["model"]) == ("average of 2 cells", "maximum of 2 cells")
    assert average["measured"] == pytest.approx((1.1 * 1.21) ** 0.5, rel=0.01)
    assert average["measured_low"] < average["measured"] < average["measured_high"]
    assert best["measured"] == measured(cells[1], "kernel_speedup", "total")
    assert (average["outcome"], best["outcome"]) == ("below", "below")
    assert [r[0] for r in claim_rows(Analysis(cells))] == [
        "lora_kernels, maximum of 2 cells",
        "lora_kernels, average of 2 cells",
    ]
    assert {r[4] for r in claim_rows(Analysis(cells))} == {"below (in place of lorafusion)"}
    lost = frame(cells[2:])
    assert set(lost["status"]) == {"crash"}
    assert lost["measured"].isna().all()


@pytest.mark.parametrize("workloads", [["1x2048"], ["1x2048", "1x4096"]])
def test_beside_a_published_number_an_unclear_row_has_its_interval_and_no_ratio(record, workloads):
    base = {"reference": ("adapters_in_compute_dtype", "cuda_graph"), "model": THEIRS, "kind": "op"}
    cells = [record(["lora_kernels"], **base, workload=w, speedup=1.02, sd=0.2, seed=1) for w in workloads]
    rows = claim_rows(Analysis(cells))
    assert {r[0] for r in rows} == {f"lora_kernels, {way} of {len(cells)} cells" for way in ("average", "maximum")}
    assert all(re.fullmatch(r"unclear \[[\d.]+, [\d.]+\]", r[3]) for r in rows), rows
    figure, _ = published(Analysis(cells))
    assert not [line for ax in figure.axes for line in ax.lines if line.get_marker() == "o"]
    assert all(
        "; ours unclear [" in text.get_text() for ax in figure.axes for text in ax.texts if ";" in text.get_text()
    )


def test_a_phase_beyond_1_in_an_unclear_row_keeps_its_ratio(record):
    made = record(["lora_kernels"], reference=("adapters_in_compute_dtype",), sd=0.2, seed=1)
    (match,) = [m for m in claims.match([made]) if m.claim.quantity == "forward_speedup"][:1]
    analysis = Analysis([made])
    assert analysis.row(made)["verdict"] == "unclear"
    assert judged(match, (1.63, 1.62, 1.65), analysis) is None
    assert judged(match, (1.6, 0.8, 3.2), analysis) == "unclear"


def frame(records):
    analysis = Analysis(records)
    return claims_frame(analysis.matches, analysis)


def test_a_claim_stands_beside_records_of_its_kind(record):
    """A limit, or an evaluation with the same toggle, is not what the source measured."""
    assert found([record(["lora_kernels"])], "axolotl_blog")
    for other in ("limit", "evaluate"):
        assert not found([record(["lora_kernels"], kind=other)])


def test_a_model_may_be_a_pattern(record):
    source = {"id": "s", "name": "n", "title": "t", "publisher": "p", "hardware": "h", "protocol": "p", "kind": "op"}
    claim = a_claim(quantity="forward_speedup", model="linear-*")
    sources = [claims.Source.model_validate(source | {"claims": [claim]})]
    cells = [record(["x"], model=m, kind="op") for m in ("linear-8x8", "norm-linear-8x8")]
    assert [m.record.model for m in claims.match(cells, sources)] == ["linear-8x8"]
    for wrong in (
        {"quantity": "step_speedup"},
        {"quantity": "foward_speedup"},
        {"phase": "step"},
        {"kind": "train2"},
        {"same_as": "d"},
    ):
        with pytest.raises(ValidationError):
            claims.Source.model_validate(source | {"claims": [claim | wrong]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reference": []}, "write out"),
        ({"candidate": ["base"]}, "write out"),
        ({"printed": [3, 2]}, "above high"),
        ({"printed": []}, "at least 1"),
        ({"over": ["x"]}, "average, maximum"),
        ({"unit": "GB"}, "a ratio is printed in"),
        ({"hardwear": "A100"}, "Extra inputs"),
    ],
)
def test_a_claim_without_arms_or_with_a_typo_is_refused(changes, said):
    assert claims.Claim.model_validate(a_claim())
    with pytest.raises(ValidationError, match=said):
        claims.Claim.model_validate(a_claim(**changes))


@pytest.mark.parametrize(
    ("reference", "ablations", "arm"),
    [
        (["sdpa", "text_metrics(samples=8)"], ["no_text_metrics"], "reference"),
        (["sdpa", "no_text_metrics"], ["text_metrics(max_new_tokens=128)"], "candidate"),
    ],
)
def test_what_a_kind_says_of_an_arm_stands_beside_the_claim(record, reference, ablations, arm):
    """Minutes that one side spends are what the other one saves: the claim is read the same way from both."""
    note = {"value": 7.5, "how": "extrapolated from 8 answers to 2000, in proportion"}
    notes = {arm: {"answers": 8, "quantities": {"minutes_saved_per_checkpoint": note}}}
    own = record(ablations, kind="evaluate", reference=reference, notes=notes)
    (row,) = frame([own]).to_dict("records")
    assert (row["claim"], row["measured"], row["claimed_low"], row["claimed_high"]) == ("step-4-metrics", 7.5, 1, 17)
    assert (row["outcome"], row["baseline_differs"], row["inverted"], row["how"]) == ("within", "", False, note["how"])
    (said,) = claim_rows(Analysis([own]))
    assert said[3] == "7.500" and "extrapolated from 8 answers to 2000" in said[4]
    other = record([f"{ablations[0]}(x=1)"], kind="evaluate", reference=reference, notes=notes)
    ((_, _, [row_of_both]),) = claim_tables(Analysis([own, other]))
    assert [cell for cell in row_of_both if cell == f"7.500 within ({note['how']})"] == row_of_both[3:]
    (silent,) = frame([record(ablations, kind="evaluate", reference=reference)]).to_dict("records")
    assert math.isnan(silent["measured"]) and silent["outcome"] == ""
