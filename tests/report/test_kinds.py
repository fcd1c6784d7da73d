"""Any kind of cell gets its tables, plots and page, alone or beside others, from what the kind says of itself."""

import math

import pytest
from helpers import md_rows

from lorabench.record.schema import PhaseRoofline
from lorabench.report import tables, write_report
from lorabench.report.analysis import Analysis
from lorabench.report.groups import groups
from lorabench.report.shown import show
from lorabench.report.words import percent

PHASES = {"train": ["forward", "backward", "step"], "op": ["forward", "backward"], "load": ["read", "place"],
          "evaluate": ["generate", "decode", "metrics", "score"]}  # fmt: skip
TITLE = "smollm2-135m @ alpaca"


def markdown(records):
    return tables.markdown(show(Analysis(records)))


@pytest.mark.parametrize("kind", PHASES)
def test_the_columns_are_the_kinds_phases(record, kind):
    records = [record([], kind=kind), record(["a"], speedup=1.5, kind=kind)]
    table = Analysis(records).table
    timed = [c.removesuffix("_speedup") for c in table.columns if c.endswith("_speedup")]
    assert timed == ["total", *reversed(PHASES[kind])]
    row = md_rows(markdown(records), TITLE)[1]
    for phase in PHASES[kind]:
        assert float(row[f"{phase} ×"]) == pytest.approx(1.5, rel=0.02)
    assert ("of_limit" in table) == ("of_limit_forward" in table) == (kind in ("train", "op"))


def test_kinds_of_one_model_and_workload_are_tables_of_their_own(record, folder, tmp_path):
    records = [record(x, kind=kind, key=f"{kind}{x}") for kind in ("train", "evaluate") for x in ([], ["a"])]
    text = markdown([*records, record(["b"], kind="load", tokens={}, workload="warm_cache")])
    (load,) = md_rows(text, "smollm2-135m @ warm\\_cache")
    assert "read ×" in load and "real tokens/s, ref → cand" not in load
    assert "step ×" in md_rows(text, f"{TITLE}, train")[0]
    phases = [f"{phase} ×" for phase in PHASES["evaluate"]]
    assert list(md_rows(text, f"{TITLE}, evaluate")[0])[1:6] == ["median ms, ref → cand", *phases]
    run = folder(tmp_path, records)
    assert {p.name for p in write_report(run)} >= {"speedup.png", "race.png", "report.html"}
    page = (run / "report.html").read_text()
    assert "generate + decode + metrics + score" in page and "forward + backward + step" in page


def test_the_least_work_stands_last_in_the_table_that_it_bounds(record):
    cells = [record(x, kind=kind, key=f"{kind}{x}") for kind in ("evaluate", "train") for x in ([], ["a"])]
    found = groups([record(["bound"], kind="limit"), *cells])
    assert [(g.title, g.kind.name, len(g.records)) for g in found] == [
        (f"{TITLE}, train", "train", 3), (f"{TITLE}, evaluate", "evaluate", 2),
    ]  # fmt: skip
    (alone,) = groups([record(["bound"], kind="limit")])
    assert alone.kind.name == "limit"


def test_the_noise_floor_is_of_the_same_kind(record):
    records = [record([], sd=0.001), record([], sd=0.2, kind="evaluate"), record(["a"], kind="evaluate"), record(["a"])]
    floors = Analysis(records).table["noise_floor"]
    assert floors[2] > 0.03 > floors[3] == 0.01


def test_what_is_equal_bit_for_bit_is_said(record):
    gate = {"passed": True, "worst": "", "tensors": 272, "unequal": 0}
    records = [record(["a"], kind="load", numerics=gate, tokens={}, roofline={})]
    (row,) = md_rows(markdown(records), TITLE)
    assert row["differs from the reference's"] == "0 of 272"
    assert "gradient error / allowed" not in row
    assert Analysis(records).table["unequal"][0] == 0


@pytest.mark.parametrize(("copy", "share"), [(50.0, 0.5), (2.0, 1.0), (None, math.nan)])
def test_of_bytes_the_slower_of_both_rates_is_the_limit_and_an_unknown_one_gives_no_share(record, copy, share):
    """0.2 GB in 100 ms: at 4 GB/s from the disk 50 ms, at 2 GB/s over the bus 100."""
    made = record(["a"], kind="load", tokens={})
    took = Analysis([made]).table
    gbytes = 0.002 * sum(took[f"{phase}_candidate_ms"][0] for phase in PHASES["load"])
    read, place = (PhaseRoofline(gbytes=gbytes, ceiling_gbs=rate) for rate in (4.0, copy))
    made.roofline = {"candidate": {"read": read, "place": place}}
    found = Analysis([made])
    assert found.table["candidate_of_ceiling"][0] == pytest.approx(share, nan_ok=True)
    shown = md_rows(markdown([made]), TITLE)[0].get("bound (of ceiling)")
    assert shown == (None if math.isnan(share) else f"({percent(share)})")


def test_jobs_and_ranks_are_columns_only_where_there_are_any(record, several_jobs):
    row = Analysis([several_jobs, record(["b"])]).table.iloc[0]
    assert (row["jobs"], row["job_tokens"], row["job_r"]) == (2, "a 512, b 1024", "a 8, b 16")
    assert (row["job_gate"], row["candidate_ranks"], row["candidate_rank_spread"]) == ("a passed, b none", 2, 0.03)
    assert not {"jobs", "job_gate", "candidate_ranks", "reference_ranks", "unequal"} & {*Analysis([record([])]).table}


def test_a_phase_that_one_arm_does_shows_its_time(record, folder, tmp_path):
    """Text metrics switched on and off: a column of ratios has the time of the arm that generates."""
    both = record(["x"], kind="evaluate")
    fields = both.model_dump(by_alias=True)
    for arm, row in (("reference", "candidate only, "), ("candidate", "reference only, ")):
        alone = {p: {a: ms for a, ms in phase.items() if a != arm or p not in ("generate", "decode", "metrics")}
                 for p, phase in fields["phases"].items()}  # fmt: skip
        own = type(both).model_validate(fields | {"phases": alone, "notes": {"reference": {"seconds": {"bleu": 0.5}}}})
        (shown,) = md_rows(markdown([own]), TITLE)
        assert shown["generate ×"].startswith(row) and shown["generate ×"].endswith(" ms")
        assert float(shown["score ×"].strip("[]").split(",")[0]) > 0
        run = folder(tmp_path / arm, [own])
        write_report(run)
        assert "seconds, bleu" in (run / "report.html").read_text()
