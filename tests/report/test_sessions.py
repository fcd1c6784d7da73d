"""Rows of several sessions, of one, of a host that waits, of a dirty tree: what they say and what they leave out."""

import math

import pytest
from helpers import md_rows
from record.arms import slower

from lorabench.report import tables
from lorabench.report.analysis import Analysis
from lorabench.report.shown import show

TITLE = "smollm2-135m @ alpaca"


def analysed(records, sessions=()):
    analysis = Analysis(records, sessions)
    return analysis.table.iloc[0], md_rows(tables.markdown(show(analysis)), TITLE)[0]


def in_sessions(record, ratios, **changes):
    return [
        record(["a"], speedup=r, sd=0.002, seed=i, session=f"s{i}", replicate=i, **changes)
        for i, r in enumerate(ratios)
    ]


def test_the_interval_of_several_sessions_includes_the_spread_between_them(record):
    row, shown = analysed(in_sessions(record, (1.2, 1.3, 1.4)))
    assert row["total_speedup"] == pytest.approx((1.2 * 1.3 * 1.4) ** (1 / 3), rel=0.005)
    assert row["total_low"] < 1.2 and row["total_high"] > 1.4
    assert (row["sessions"], row["sessions_tried"]) == (3, 3)
    assert (row["session_low"], row["session_high"]) == pytest.approx((1.2, 1.4), rel=0.005)
    assert shown["interval is of"].startswith("3 sessions, 1.2")
    one, said = analysed(in_sessions(record, (1.2,)))
    assert one["total_high"] < 1.25 and said["interval is of"] == "one session"


def test_sessions_that_agree_are_no_narrower_than_the_rounds_allow(record):
    alike = in_sessions(record, (1.3, 1.3))
    same = [alike[0], alike[0].model_copy(update={"session": "s1", "replicate": 1})]
    row, _ = analysed(same)
    one, _ = analysed(alike[:1])
    width = lambda r: math.log(r["total_high"] / r["total_low"])  # noqa: E731
    assert width(row) == pytest.approx(width(one) / math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failed_session_hides_no_other_whichever_came_first(record, order):
    both = [record(["a"], speedup=1.3), record(["a"], status="crash", session="s2", replicate=1)]
    row, shown = analysed([both[i] for i in order])
    assert row["status"] == "ok" and (row["sessions"], row["sessions_tried"]) == (1, 2)
    assert "1 of 2 sessions ok" in shown["verdict"] and shown["verdict"].startswith("faster")


def test_sessions_of_other_code_are_not_combined_and_are_said(record, session):
    sessions = [session(f"s{i}") | {"commit": commit, "dirty": False} for i, commit in enumerate("aab")]
    records = in_sessions(record, (1.2, 1.2, 1.5))
    row, shown = analysed(records, sessions)
    assert row["total_speedup"] == pytest.approx(1.5, rel=0.005) and row["sessions"] == 1 and row["other_code"] == 2
    assert "2 of other code left out" in shown["verdict"]
    failed = [*records[:2], record(["a"], status="crash", session="s2", replicate=2)]
    row, _ = analysed(failed, sessions)
    assert row["status"] == "ok" and row["sessions"] == 2 and row["other_code"] == 1


def test_a_reference_that_moved_between_sessions_makes_a_range(record):
    records = in_sessions(record, (1.2, 1.3))
    records[1] = slower(records[1], 1.3)
    row, shown = analysed(records)
    assert row["reference_moved"] == pytest.approx(0.3, abs=0.06) and row["verdict"] == "unclear"
    assert shown["total × [95 %]"] == f"unclear, {row['session_low']:.2f}–{row['session_high']:.2f} (range)"
    assert "reference moved" in shown["verdict"]
    five = [slower(r, 1 + 0.05 * i) for i, r in enumerate(in_sessions(record, (1.5, 1.52, 1.54, 1.56, 1.58)))]
    row, shown = analysed(five)
    assert row["verdict"] == "faster"
    assert shown["total × [95 %]"] == f"{row['session_low']:.2f}–{row['session_high']:.2f} (range)"
    _, still = analysed(in_sessions(record, (1.2, 1.3)))
    assert "range" not in still["total × [95 %]"] and "moved" not in still["verdict"]


def test_an_unclear_row_shows_its_interval_and_no_ratio(record):
    row, shown = analysed([record(["a"], speedup=1.02, sd=0.2)])
    assert row["verdict"] == "unclear"
    assert shown["total × [95 %]"] == f"unclear [{row['total_low']:.2f}, {row['total_high']:.2f}]"
    assert shown["forward ×"].startswith("[")
    assert f"{row['total_speedup']:.2f} [" not in tables.latex(show(Analysis([record(["a"], speedup=1.02, sd=0.2)])))


def test_a_row_that_waits_for_its_host_has_milliseconds_and_the_host_s_share(record, tags):
    waits = {"forward": {"device_busy_ms": 6.0, "label": "host-bound"}}
    quick = {"forward": {"device_busy_ms": 20.0}}
    made = record(["a"], speedup=1.3, roofline={"reference": waits, "candidate": quick})
    row, shown = analysed([made])
    assert row["reference_host_share"] == pytest.approx(1 - 6 / row["forward_reference_ms"])
    took = [f"{row[f'total_{arm}_ms']:.{d}f}" for arm, d in (("reference", 0), ("candidate", 1))]
    shares = [f"({100 * row[f'{arm}_host_share']:.0f} %)" for arm in ("reference", "candidate")]
    assert shown["host-bound: ms (host's share), ref → cand"] == f"{took[0]} {shares[0]} → {took[1]} {shares[1]}"
    _, busy = analysed([record(["a"], speedup=1.3)])
    assert not any("host-bound" in column for column in busy)


def test_a_row_of_a_dirty_tree_is_marked(record, session):
    made = record(["a"], speedup=1.3)
    row, shown = analysed([made], [session() | {"dirty": True}])
    assert row["dirty"] and "uncommitted changes" in shown["verdict"]
    row, shown = analysed([made], [session() | {"dirty": False}])
    assert not row["dirty"] and "uncommitted" not in shown["verdict"]
