"""Labels: rows of one table are told apart, and nothing is added where they are."""

from lorabench.record.schema import ARMS
from lorabench.report.analysis import Analysis
from lorabench.report.answers import fastest
from lorabench.report.labels import labels
from lorabench.report.shown import show


def sessions(session):
    return [session("s0"), session("s1") | {"command": ["python", "-m", "lorabench.sweep", "seed=3", "seed=7"]}]


def test_rows_of_two_seeds_are_told_apart_in_every_table(record, session):
    made = [
        record(names, key=f"{names}{n}", session=f"s{n}", speedup=1 + 0.3 * len(names) * (n + 1))
        for names in ([], ["a"])
        for n in (0, 1)
    ]
    analysis = Analysis([*made, record(["b"], session="s1")], sessions(session))
    (group,) = show(analysis).groups
    floors = {row["toggle"] for row in group.rows[:2]}
    assert floors == {"reference again (A/A), seed 0", "reference again (A/A), seed 7"}
    assert {row["toggle"] for row in group.rows[2:]} == {"a, seed 0", "a, seed 7", "b"}
    assert analysis.row(fastest(analysis.records, analysis)[0])["toggles"] == "a, seed 7"


def test_one_name_in_two_tables_is_no_clash(record):
    made = [record(["a"]), record(["a"], model="other"), record(["a"], reference=("eager",)), record(["a"], kind="op")]
    assert labels(made, []) == ["a"] * 4


def test_what_differs_is_said_by_the_first_word_that_tells_it(record):
    apart = {"pairing": "abba", "processes": {arm: [8, 8, 7, 7] for arm in ARMS}, "key": "other"}
    assert labels([record(["a"]), record(["a"], **apart)], []) == ["a", "a, separate processes"]
    assert labels([record(["a"]), record(["a"], design="ladder")], []) == ["a, solo", "a, ladder"]
    failed = [record([], status="crash", key=key) for key in ("abcdefghi", "123456789")]
    assert labels(failed, []) == [f"reference again (A/A), cell {key}" for key in ("abcdef", "123456")]
