"""Reports of arms that were measured together: every ratio is over the rounds that the two shared."""

from __future__ import annotations

import math

import pytest
from helpers import benchmark
from record.arms import BASE, Simulated, ladder, shown, written

from lorabench import compare
from lorabench.contract.kind import kind
from lorabench.record.contrast import contrast
from lorabench.record.pairs import pairs
from lorabench.record.store import read_arms
from lorabench.report import __main__ as report
from lorabench.report import attribution, tables
from lorabench.report.analysis import Analysis
from lorabench.report.page import page
from lorabench.report.rerun import rerun
from lorabench.report.shares import ShareOf, Shares
from lorabench.report.shown import show

WAITS = {"forward": {"label": "host-bound", "device_busy_ms": 5.0}, "backward": {"label": "host-bound"}}


def analysed(arms, against=None):
    return Analysis(pairs(arms, against), arms=arms, against=against)


def totals(arm, phases=("forward", "backward", "step")):
    return [sum(turn) for turn in zip(*(arm.phases[p] for p in phases), strict=True)]


def named(analysis, *own):
    return next(r for r in analysis.records if r.ablations == list(own))


# -- ladders, shares, any two of a family ----------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [True, False], ids=["in the design", "not in the design"])
def test_an_increment_is_measured_over_the_rounds_of_both_rungs(listed):
    arms = ladder(Simulated(sd=0.02), {"a": 1.2, "b": 1.5})
    arms[0].roofline = arms[3].roofline = WAITS  # which would leave records of schema 2 no pairing
    if not listed:
        arms[3].shown = arms[3].shown[:1]
    analysis = analysed(arms)
    first, second = attribution.ladder(analysis.groups[0].records, analysis.contrasts)
    wanted = contrast(totals(arms[2]), totals(arms[3]), paired=True).speedup
    assert second.increment == pytest.approx(wanted) and not second.unpaired
    assert first.increment.centre == pytest.approx(1.2, rel=0.03)
    by_way_of_the_start = analysis.contrasts.of(second.record).difference(analysis.contrasts.of(first.record)).speedup
    assert second.increment.high / second.increment.low < by_way_of_the_start.high / by_way_of_the_start.low


def test_a_failed_rung_has_no_increment_and_the_next_one_stands_on_the_rung_below_it():
    made = Simulated()
    arms = ladder(made, {"a": 1.2, "b": 1.5, "c": 1.8})
    arms[3] = made.arm(["a", "b"], status="crash", shown=arms[3].shown)
    analysis = analysed(arms)
    rungs = attribution.ladder(analysis.groups[0].records, analysis.contrasts)
    assert [r.increment is None for r in rungs] == [False, True, True]
    assert rungs[2].cumulative.centre == pytest.approx(1.8, rel=0.02)


def test_the_share_of_the_limit_is_over_the_rounds_that_both_had():
    made = Simulated(sd=0.02)
    arms = [made.arm(), made.twin(), made.arm(["a"], 1.5, roofline=WAITS), made.limit(2.0)]
    arms[0].roofline = WAITS
    analysis = analysed(arms)
    both, forward = ("forward", "backward"), ("forward",)
    shares = Shares(analysis.records, analysis.devices, analysis.contrasts)
    for phases in (both, forward):
        found = shares.of(named(analysis, "a"), ShareOf(kind("limit"), phases))
        wanted = contrast(totals(arms[3], phases), totals(arms[2], phases), paired=True).speedup
        assert found.contrast.speedup == pytest.approx(wanted)
        assert found.paired and found.how == "within"
    assert "unpaired" not in tables.markdown(show(analysis))


def test_two_stacks_of_a_family_meet_within_a_process_or_between_processes():
    made = Simulated(process=0.03)
    arms = [made.arm(), made.twin(alone=True), made.arm(["a"], 1.5), made.arm(["b"], 1.2)]
    arms += [made.arm(["c"], 1.3, alone=True)]
    analysis = analysed(arms)
    found = {
        pair: analysis.contrasts.beside(*(named(analysis, name) for name in pair))
        for pair in (("a", "b"), ("a", "c"), ("b", "c"))
    }
    assert {"".join(pair): d.how for pair, d in found.items()} == {"ab": "within", "ac": "between", "bc": "between"}
    wanted = contrast(totals(arms[3]), totals(arms[2]), paired=True).speedup
    assert found["a", "b"].contrast.speedup == pytest.approx(wanted)
    assert found["a", "c"].contrast.low < 1.5 / 1.3 < found["a", "c"].contrast.high


def test_sessions_of_a_family_are_combined_and_a_session_without_one_of_the_two_is_not():
    arms = [s.arm(own, x) for s in (Simulated(), Simulated(session="s2", replicate=1, seed=3))
            for own, x in (((), 1.0), (["a"], 1.2), (["b"], 1.5))]  # fmt: skip
    analysis = analysed(arms[:-1])
    direct = analysis.contrasts.beside(named(analysis, "b"), named(analysis, "a"))
    assert direct.contrast.estimate == contrast(totals(arms[1]), totals(arms[2]), paired=True).estimate
    both = analysed(arms)
    assert both.contrasts.beside(named(both, "b"), named(both, "a")).contrast.centre == pytest.approx(1.25, rel=0.01)
    assert both.contrasts.beside(named(both, "a"), named(both, "a")) is None


# -- the whole report -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A family with an arm that sits alone, one that failed, and a limit."""
    made = Simulated(process=0.004)
    arms = [made.arm(), made.twin(alone=True), made.arm(["a"], 1.5), made.arm(["b"], 1.2, alone=True)]
    arms += [made.arm(["c"], status="oom"), made.limit(3.0)]
    return written(tmp_path / "run", arms)


def test_a_family_makes_one_table_with_both_noise_floors(folder):
    analysis = Analysis.read(folder)
    (group,) = show(analysis).groups
    rows = {row["toggle"]: row for row in group.rows}
    assert {"reference again (A/A)", "reference again (A/A, separate processes)", "a", "b", "c"} <= rows.keys()
    b = analysis.row(named(analysis, "b"))
    assert (b["pairing"], b["noise_pairing"], b["processes"]) == ("turns", "turns", "4 and 4")
    assert analysis.row(named(analysis, "a"))["noise_pairing"] == "paired"
    assert analysis.row(named(analysis, "a"))["verdict"] == "faster"


def test_the_summary_says_what_share_of_the_wall_time_was_trials(folder, capsys):
    assert report.main([str(folder)]) == 0
    assert "Trials were 75.0 %" in capsys.readouterr().out
    assert (folder / "summary.md").read_text().endswith("\n\nTrials were 75.0 % of 24 s of wall time.\n")
    assert "Trials were 75.0 % of 24 s of wall time." in (folder / "report.html").read_text()


def test_where_the_rounds_seconds_are_not_known_no_share_is_said(folder):
    """As of a sweep that was ended from outside."""
    arms = [arm.model_copy(update={"cost": arm.cost and arm.cost.model_copy(update={"trials": 0.0})})
            for arm in read_arms(folder)]  # fmt: skip
    (folder / "records.jsonl").write_text("".join(arm.model_dump_json(by_alias=True) + "\n" for arm in arms))
    assert report.main([str(folder)]) == 0
    assert "Trials were" not in (folder / "summary.md").read_text()


def test_the_report_against_another_arm(folder, capsys):
    assert report.main([str(folder), "against=a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("these show every arm over a; the same command without")
    text = (folder / "summary.md").read_text()
    assert "## smollm2-135m @ alpaca, against a\n" in text
    analysis = Analysis.read(folder, against="a")
    row = analysis.row(named(analysis, "reference"))
    assert row["total_speedup"] == pytest.approx(1 / 1.5, rel=0.02) and row["verdict"] == "slower"
    assert row["noise_pairing"] == "paired", "the floor is the family's own"
    first = show(analysis).groups[0]
    assert [row["toggle"] for row in first.rows] == ["b", "reference", "c", "frozen_limit"]


def test_a_page_has_every_ratio_of_a_family_for_whichever_arm_is_the_baseline(folder, cells_of):
    """As `against=` shows them, from the same rounds and with the same intervals."""
    analysis = Analysis.read(folder)
    (family,) = cells_of(page(analysis, show(analysis)))
    place = {arm["name"]: n for n, arm in enumerate(family["arms"])}
    i, j = sorted((place["a"], place["b"]))
    three, how = family["ratios"]["total"][i][j - i - 1], family["how"][i][j - i - 1]
    over = Analysis.read(folder, against="a")
    wanted = over.speedup(named(over, "b"))
    assert how == "between" and (three if i == place["a"] else [1 / three[n] for n in (0, 2, 1)]) == pytest.approx(
        list(wanted), rel=1e-3
    )
    failed = place["c"]
    assert all(row[failed - n - 1] is None for n, row in enumerate(family["ratios"]["total"][:failed]))


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_wrong_name_costs_one_line_with_the_nearest_and_exit_code_2(folder, command, capsys):
    written(folder.parent / "other", [])
    main, folders = {"report": (report.main, [folder]), "compare": (compare.main, [folder, folder])}[command]
    assert main([*map(str, folders), "against=refrence"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "no arm named 'refrence'; did you mean reference?" in said and str(folder) in said
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, folders), "versus=a"])
    assert stopped.value.code == 2 and "expected against=NAME" in capsys.readouterr().err


def test_the_command_that_measures_a_chosen_contrast_again_is_the_family_s(folder):
    command = ["python", "-m", "lorabench.sweep", "ablations=[a,b,c]", "output=x", "trials=30"]
    record = named(Analysis.read(folder, against="a"), "reference")
    assert rerun(record, command) == "python -m lorabench.sweep 'ablations=[a,b,c]' trials=30 output=output/rerun"


def test_rows_over_references_of_their_own_have_a_share_of_the_family_s_limit():
    made = Simulated()
    last = made.arm(["a", "b"], 1.8, shown=[shown(["b"], [*BASE, "a"], "leave_one_out")])
    analysis = analysed([made.arm(), made.arm(["a"], 1.5), last, made.limit(2.0)])
    row = analysis.row(named(analysis, "b"))
    assert row["of_limit"] == pytest.approx(1.8 / 2.0, rel=0.01) and row["family"] == "f"


def test_older_records_cannot_be_held_against_another_arm(tmp_path, capsys):
    made = Simulated()
    older = pairs([made.arm(numerics=None), made.arm(["a"])])
    assert report.main([str(written(tmp_path / "older", older)), "against=a"]) == 2
    assert "records of schemas 1 and 2 are pairs" in capsys.readouterr().err


def test_two_folders_are_compared_over_the_arm_that_is_named(folder, tmp_path, capsys):
    made = Simulated(seed=9)
    faster = [made.arm(), made.twin(), made.arm(["a"], 1.5), made.arm(["d"], 2.0)]
    other = written(tmp_path / "other", faster)
    runs = [Analysis.read(path, salt=path.name, against="a") for path in (folder, other)]
    outcomes = {"+".join((c.after or c.before).ablations): c for c in compare.compared(*runs)}
    assert outcomes["reference"].outcome == "same"
    assert float(outcomes["reference"].shown[0].split()[0]) == pytest.approx(1 / 1.5, rel=0.01)
    assert outcomes["d"].outcome == "appeared"
    assert compare.main([str(folder), str(other), "against=a"]) == 0
    assert "1 same" in capsys.readouterr().out
    assert compare.main([str(folder), str(other), "--fail-on-regression", "against=a"]) == 1
    assert f"{other} lacks" in capsys.readouterr().err


def test_where_the_wall_time_went(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with benchmark("family_cost") as script:
        assert script.main([str(folder)]) == 0
        said = capsys.readouterr().out
        (row,) = [line.split() for line in said.splitlines() if "reference again" in line]
        assert [x for x in row if x[0].isdigit()] == ["4.0", "0.5", "3.0", "75%"]
        (whole,) = [line.split() for line in said.splitlines() if line.strip("│ ").startswith("all ")]
        assert [x for x in whole if x[0].isdigit()] == ["24.0", "3.0", "18.0", "75%"]
        assert said.endswith("trials: 75% of 24.0 s\n")
        assert script.main([str(tmp_path / "nowhere")]) == 2
        assert script.main([str(written(tmp_path / "none", []))]) == 2
    assert math.isnan(script.trials_share([])[0])
