"""The ladder as it is shown: a table with what each step is worth elsewhere, a waterfall that adds up, an epoch."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import benchmark
from record.arms import slower

from lorabench.report.analysis import Analysis
from lorabench.report.attribution import ladder, leave_one_out
from lorabench.report.attribution_tables import attribution_tables, increment
from lorabench.report.claims import load_claims
from lorabench.report.epoch import data_sets, epochs
from lorabench.report.ladder_summary import conclusions, start_to_end, steps_table
from lorabench.report.plots import figures
from lorabench.report.shown import show
from lorabench.report.standings import beside

ROOT = Path(__file__).resolve().parents[2]
START = ("nf4_base", "sdpa", "padding", "gradient_checkpointing", "paged_adamw_32bit")
STEPS = {"adamw": 1.1, "adamw_fused": 1.39, "flash_attention_2": None, "auto_batch_size": 2.1, "packing": 4.2}


def predibase(record, workload="one_by_one_gsm8k"):
    """A ladder over Predibase's start with a rung that cannot be had, and one toggle alone and away from the end."""
    common = {"reference": START, "workload": workload, "sd": 0.004}
    standing = []
    for number, (name, speed) in enumerate(STEPS.items(), start=1):
        own = [name] if name == "adamw_fused" else [*standing, name]
        kwargs = {"speedup": speed} if speed else {"status": "unsupported"}
        candidate = [t for t in START if t not in ("paged_adamw_32bit", "padding" if "packing" in own else "")] + own
        yield record(own, design="ladder", rung=number, candidate=candidate, **kwargs, **common)
        standing = own if speed else standing
    yield record(["packing"], speedup=3.0, **common)
    others = [t for t in START if t != "paged_adamw_32bit"] + ["adamw_fused", "auto_batch_size"]
    yield record(["packing"], design="leave_one_out", speedup=1.9, **common | {"reference": others})


def tables(record, **kwargs):
    made = Analysis(list(predibase(record, **kwargs)))
    (group,) = made.groups
    return {caption: (headings, rows) for caption, headings, rows in attribution_tables(group.records, made)}


def test_one_table_has_every_way_of_crediting_a_step(record):
    found = tables(record)
    headings, rows = next(table for caption, table in found.items() if caption.startswith("Ladder"))
    by = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert list(by) == list(STEPS)
    packing = by["packing"]
    values = [float(packing[f"{name} × [95 %]"].split()[0]) for name in ("increment", "cumulative", "alone", "last")]
    assert values == pytest.approx([2.0, 4.2, 3.0, 1.9], rel=0.03)
    before, after = map(float, packing["ms, before → after"].split(" → "))
    assert before / after == pytest.approx(2.0, rel=0.02)
    assert by["flash_attention_2"]["status"] == "unsupported" and not by["flash_attention_2"]["cumulative × [95 %]"]
    assert packing["peak GiB"] == "6.00"


def test_each_step_has_its_claim_beside_it_with_the_baseline_that_it_was_made_over(record):
    headings, rows = next(table for caption, table in tables(record).items() if caption.startswith("Ladder"))
    claims = {row[0]: row[headings.index("published for this step")] for row in rows}
    assert claims["adamw"] == "Predibase 1.10 (ours within)"
    assert claims["adamw_fused"] == "Predibase 1.39 (ours within)"  # over the start, not over adamw
    assert claims["auto_batch_size"] == "Predibase 1.43–1.67 (ours within)"
    assert claims["packing"].startswith("Predibase 2.00–5.00 (over another baseline)")


def in_steps(record, end=5.0):
    """The same start in steps: each over the one below it and over the start, one that cannot be had."""
    common = {"workload": "one_by_one_gsm8k", "sd": 0.004}
    stack, speeds = list(START), {"auto_batch_size": (2.0, 2.0), "xformers": (None, None), "packing": (1.5, end)}
    for number, (name, (step, whole)) in enumerate(speeds.items(), start=1):
        of = lambda speed: {"speedup": speed} if speed else {"status": "unsupported"}  # noqa: E731
        own = [*stack, name]
        added = [t for t in own if t not in START]
        yield record(added, rung=number, design="ladder", reference=START, candidate=own, **of(whole), **common)
        if number > 1:
            yield record([name], rung=number, design="steps", reference=stack, candidate=own, **of(step), **common)
        stack = own if step else stack


def test_steps_show_what_each_was_measured_to_add_and_the_end_as_it_was_measured(record):
    own = ladder(list(in_steps(record)), Analysis([]).contrasts)
    first, absent, last = own
    assert [rung.added for rung in own] == ["auto_batch_size", "xformers", "packing"]
    assert [rung.increment and round(rung.increment.centre, 1) for rung in own] == [2.0, None, 1.5]
    assert absent.cumulative is None and last.below is first.record
    assert last.cumulative.centre == pytest.approx(5.0, rel=0.02), "not the product of the steps"
    assert last.after == pytest.approx(first.start / last.cumulative.centre)
    assert last.increment.high - last.increment.low < 0.05, "the noise of the start is not in it"


def test_steps_stand_in_a_part_of_their_own_in_their_order(record):
    first, *others = in_steps(record)
    itself = record([], design="steps", reference=START, workload=first.workload)
    (whole, own) = show(Analysis([itself, *reversed(others), first])).groups
    assert [row["toggle"] for row in own.rows] == ["xformers", "packing"]
    assert own.title == f"{whole.title}, each over what stands below it"
    assert [row["toggle"] for row in whole.rows[1:]] == [
        "auto_batch_size + packing", "auto_batch_size", "auto_batch_size + xformers",
    ]  # fmt: skip


def test_the_last_step_is_also_what_its_toggle_adds_when_all_others_are_on(record):
    made = list(in_steps(record))
    all_on = made[-1].candidate
    left = record(["auto_batch_size"], design="leave_one_out", candidate=all_on, speedup=1.2, workload=made[0].workload)
    found = leave_one_out([*made, left], Analysis([]).contrasts)
    assert [x.toggle for x in found] == ["packing", "auto_batch_size"]


def test_a_direction_from_too_few_trials_has_no_figure_in_any_table_of_the_ladder(record):
    made = Analysis([record(["packing"], design="ladder", rung=1, speedup=9.0, trials=4, workload="one_by_one_gsm8k")])
    _, _, rows = start_to_end(made)
    assert rows[0][3].startswith("faster [")
    assert steps_table(made)[2][0][1].startswith("faster [")
    assert rows[0][3].endswith("], 4 trials") and steps_table(made)[2][0][1].endswith("], 4 trials")
    assert conclusions(made)[0].startswith("`packing` has too few trials on 1 of 1 workloads (faster [")


def test_over_a_start_that_waits_for_its_host_a_step_is_of_the_two_cells_own_times(record):
    """What the host did beside one rung and not beside the next is in no increment, and in no milliseconds."""
    idle = {"reference": {phase: {"label": "host-bound"} for phase in ("forward", "backward")}}
    common = {"design": "ladder", "workload": "one_by_one_gsm8k", "sd": 0.004, "roofline": idle}
    made = [slower(record(["packing"], rung=1, speedup=4.0, **common), 80)]  # 2000 ms
    made += [slower(record(["packing", "sdpa"], rung=2, speedup=4.8, **common), 120)]  # 2500 ms
    analysis = Analysis(made)
    first, second = ladder(made, analysis.contrasts)
    assert second.unpaired and not first.unpaired
    assert second.increment.centre == pytest.approx(0.8, rel=0.05), "and not 4.8 / 4"
    assert (second.start, second.before, second.after) == pytest.approx((12000, 2000, 2500), rel=0.05)
    assert (second.before, second.after) == tuple(np.median(r.ms("candidate")) for r in made)
    assert increment(second, analysis).endswith("], unpaired")
    assert start_to_end(analysis)[2][0][1] == f"{second.start:.0f} → {second.after:.0f}"
    (axis,) = [ax for ax in figures(analysis)["ladder"][0].axes if ax.patches]
    assert "medians of each rung's own cell" in axis.get_xlabel()


def test_an_epoch_is_extrapolated_where_the_lengths_have_a_training_set(record):
    rungs = ladder(list(predibase(record)), Analysis([]).contrasts)
    (own,) = epochs(rungs)
    assert (own.data.samples, own.data.measured) == (7473, True)
    assert own.end == pytest.approx(7473 * 159.63 / 4000 * rungs[-1].after / 60_000)
    assert rungs[-1].cumulative and own.start / own.end == pytest.approx(rungs[-1].cumulative.centre)
    assert epochs(ladder(list(predibase(record, workload="4x2048")), Analysis([]).contrasts)) == []
    assert epochs(ladder(list(predibase(record, workload="gone.jsonl")), Analysis([]).contrasts)) == []
    (caption,) = [c for c in tables(record) if "epoch" in c]
    assert "extrapolated" in caption


def test_every_training_set_has_lengths_and_a_source():
    assert {d.distribution for d in data_sets()} >= {"viggo", "glue", "drop", "magicoder", "gsm8k"}
    assert all(d.tokens > d.samples and d.source for d in data_sets())


def test_the_waterfall_says_milliseconds_that_add_up_and_what_has_none(record):
    figure, left_out = figures(Analysis(list(predibase(record))))["ladder"]
    said = [t.get_text() for t in figure.axes[0].texts]
    assert not left_out and "unsupported" in said and "flash_attention_2" in said and "+ packing" in said
    start = next(float(t.removesuffix(" ms")) for t in said if re.fullmatch(r"[\d.]+ ms", t))
    end = next(float(t.partition(" ms")[0]) for t in said if "in all" in t)
    changes = [float(m[1].replace("−", "-")) for t in said if (m := re.match(r"([−+][\d.]+) ms, ×", t))]
    assert len(changes) == 4 and start + sum(changes) == pytest.approx(end, abs=0.15)
    bars = figure.axes[0].patches
    assert len(bars) == 2 + 4  # start and end, and a bar a rung with a time


def test_several_ladders_together_and_what_they_say(record):
    made = Analysis([*predibase(record), *predibase(record, workload="one_by_one_glue")])
    _, headings, rows = steps_table(made)
    assert headings == ["rung", *(f"smollm2-135m @ one_by_one_{name}" for name in ("gsm8k", "glue")), "published"]
    by = {row[0]: row[1:] for row in rows}
    assert by["flash_attention_2"] == ["unsupported", "unsupported", ""]
    assert by["adamw"][2] == "Predibase 1.10"
    _, headings, rows = start_to_end(made)
    assert [row[0].rpartition("_")[2] for row in rows] == ["gsm8k", "glue", "glue"]  # two training sets of GLUE
    assert "extrapolated" in headings[-1] and float(rows[0][3].split()[0]) == pytest.approx(4.2, rel=0.02)
    said = dict(zip(STEPS, conclusions(made), strict=True))
    assert said["packing"].startswith("`packing` gains on 2 of 2 workloads (×")
    assert said["flash_attention_2"] == "`flash_attention_2` has no time here: unsupported."


def test_a_step_that_costs_or_changes_nothing_is_said_so(record):
    made = [record(["a"], speedup=1.0, sd=0.001, design="ladder", rung=1)]
    made += [record(["a", "b"], speedup=0.8, sd=0.001, design="ladder", rung=2)]
    nothing, costs = conclusions(Analysis(made))
    assert "shows no clear change on 1 of 1" in nothing and "costs on 1 of 1 workloads (×0.8" in costs
    assert conclusions(Analysis([record(["a"])])) == []


def test_the_page_is_filled_from_records_and_says_where_there_are_none(record, session, folder, tmp_path):
    page = (ROOT / "docs/predibase.md").read_text()
    with benchmark("readme_tables") as script:
        (tmp_path / "none").mkdir()
        nothing = script.filled(page, script.Results(tmp_path / "none"))
        assert nothing.count("*Not measured yet*") == 5
        factorial = [
            record(own, design="factorial", speedup=s, reference=START, workload="one_by_one_gsm8k")
            for own, s in ((["a"], 1.5), (["b"], 2.0), (["a", "b"], 3.0))
        ]
        made = tmp_path / "some"
        folder(made / "h200/predibase_ladder_gsm8k", list(predibase(record)), [session()])
        folder(made / "h200/predibase_ladder_viggo", list(predibase(record, "one_by_one_viggo")), [session()])
        folder(made / "h200/predibase_factorial", factorial, [session()])
        folder(made / "cpu/predibase_ladder_gsm8k", list(predibase(record)), [session(device="cpu", name="a CPU")])
        filled = script.filled(page, script.Results(made))
    assert "*Not measured yet*" not in filled
    assert "- `packing` gains on 2 of 2 workloads (×2" in filled
    assert "| GSM8K (7473 samples) |" in filled and "| packing | 2.0" in filled
    assert "peak GiB saved" in filled and "| NVIDIA H200, ms | CPU, ms |" in filled


def test_a_claim_of_a_step_stands_beside_the_rung_on_its_own_baseline(record, session, folder, tmp_path):
    """And not beside a cell over another baseline, nor beside a rung that stands on something else than was claimed."""
    claims = {c.id: c for s in load_claims() if s.id == "predibase_ladder" for c in s.claims}
    alone = record(["auto_batch_size"], speedup=1.7, reference=("sdpa", "padding"), workload="one_by_one_gsm8k")
    several = [*predibase(record), *predibase(record, "one_by_one_viggo"), alone]
    folder(tmp_path / "h200/predibase_ladder", several, [session()])
    with benchmark("readme_tables") as script:
        results = script.Results(tmp_path)
        found = beside(claims["step-3-batch-size"], results)
        assert found.baseline == "the same" and found.toggles == "`auto_batch_size`, as a step of the ladder"
        assert re.fullmatch(r"1\.5\d+ (to 1\.5\d+ )?× in 2 data sets", found.value), "2.1 over 1.39"
        assert beside(claims["step-8-attention"], results) is None, "it could not be had"
        assert "1.39" in beside(claims["step-2-fused-adam"], results).value
