"""One reference in several sessions: each median, and how far they are apart."""

import math

import pytest
from record.arms import slower

from lorabench.report.analysis import Analysis
from lorabench.report.drift import moved, references

SESSIONS = [{"id": "s1", "started": "2026-01-01T00:00:00"}, {"id": "s2"}]


def test_a_row_a_record_with_its_session_and_the_median_of_its_reference(record):
    analysis = Analysis([record(), record(["a"], session="s2"), record(["b"], status="crash")], SESSIONS)
    found = references(analysis)
    assert found["session"].tolist() == ["s1", "s2"] and found["started"].tolist() == ["2026-01-01T00:00:00", ""]
    assert found["toggles"].tolist() == [analysis.table["toggles"][0], "a"]
    assert found["ms"].tolist() == analysis.table["total_reference_ms"][:2].tolist()
    assert (found["ms_low"] < found["ms"]).all() and (found["ms"] < found["ms_high"]).all()


def test_all_sessions_of_one_row_are_there(record):
    analysis = Analysis([record(["a"]), record(["a"], session="s2")], SESSIONS)
    assert references(analysis)["session"].tolist() == ["s1", "s2"]


def test_moved_is_the_slowest_session_over_the_fastest(record):
    records = [record(), record(["a"]), slower(record(["b"], session="s2"), 1.5)]
    (row,) = moved(references(Analysis(records, SESSIONS))).to_dict("records")
    assert row["sessions"] == 2 and row["reference"] == "sdpa + adamw_fused"
    assert row["moved"] == pytest.approx(0.5, rel=0.2)
    assert row["moved"] == pytest.approx(row["slowest_ms"] / row["fastest_ms"] - 1)


def test_one_session_has_not_moved_that_anybody_knows_of(record):
    (row,) = moved(references(Analysis([record(), record(["a"])], SESSIONS))).to_dict("records")
    assert row["sessions"] == 1 and math.isnan(row["moved"])


def test_without_records_both_are_empty():
    assert references(Analysis([])).empty and moved(references(Analysis([]))).empty
