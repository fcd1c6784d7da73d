"""The simulator: its table beside LoRAFusion's, its files, and what it says to wrong input."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lorabench import cli, simulate
from lorabench.plan import bubbles
from lorabench.plan.bubbles import EMPTIED, FEEDS, FLUSHED, MLORA, PUBLISHED, Setting, drawn, rows

TIMES = simulate.profiled("llama-3.1-70b", 4)
SMALL = Setting(TIMES, steps=6, seeds=2, time_limit_s=0.0)


def said(capsys, *arguments):
    code = cli.main(["simulate", *arguments])
    got = capsys.readouterr()
    return code, got.out, got.err


@pytest.fixture(scope="module")
def table():
    """The mixed workload, as LoRAFusion's table has it: {(method, adapters): row}."""
    made = rows(Setting(TIMES, steps=20, seeds=2, time_limit_s=0.0), ["mixed"])
    return {(row.method, row.adapters): row for row in made}


def test_the_shape_of_lorafusions_table_comes_out(table):
    """Their figures are measured with lengths that nobody published; ours are within some points, in their order."""
    ratios = [table["lorafusion", n].bubble_pct for n in (1, 2, 3, 4)]
    assert ratios == sorted(ratios, reverse=True)
    assert table[FLUSHED, 1].bubble_pct > table[MLORA, 4].bubble_pct > table["lorafusion", 2].bubble_pct
    assert set(table) > {(method, 1) for method in EMPTIED}
    assert table["interleaved with flush", 1].bubble_pct < 0.8 * table[FLUSHED, 1].bubble_pct
    for (method, adapters), published in PUBLISHED.items():
        assert table[method, adapters].bubble_pct == pytest.approx(published, abs=10)
    assert table["lorafusion", 4].bubble_pct == pytest.approx(11.09, abs=3)


def test_ours_waits_less_and_computes_fewer_micro_batches(table):
    theirs, own = (table[name, 4] for name in ("lorafusion", "staggered"))
    assert own.bubble_pct < theirs.bubble_pct and own.micro_batches < theirs.micro_batches
    assert own.tokens_s > theirs.tokens_s


def test_a_row_says_what_it_rests_on(table):
    assert {row.lengths for row in table.values()} == {"approximate"}
    row = table["lorafusion", 4]
    assert (row.published_pct, row.measured_pct) == (11.09, None)
    assert table[MLORA, 4].published_pct is None
    assert row.lowest_pct <= row.bubble_pct <= row.highest_pct and row.without_ramp_pct < row.bubble_pct
    last = [float(x) for x in row.by_stage_pct.split()]
    assert len(last) == 4 and last[3] < min(last[:3])  # the head is on the last stage: it waits least


def test_emptied_pipelines_of_equal_micro_batches_wait_as_their_formulas_say(monkeypatch):
    """Two stages, eight equal micro-batches a step: GPipe and 1F1B 1 of 9, each rank's stages cut in two 0.5 of 8.5."""
    monkeypatch.setitem(bubbles.FEEDS, "equal", bubbles.Feed(("xsum",) * 4, 4096, 2, 2))
    monkeypatch.setattr(bubbles, "drawn", lambda name, steps, rng: [[100] * 16] * steps)
    times = simulate.StageTimes([100, 200], [[1.0, 2.0]] * 2, [[2.0, 4.0]] * 2)
    found = {row.method: row.bubble_pct for row in rows(Setting(times), ["equal"], list(EMPTIED))}
    assert found == pytest.approx(dict(zip(EMPTIED, (100 / 9, 100 / 9, 50 / 8.5), strict=True)))


def test_measured_stands_beside_simulated():
    (row,) = rows(SMALL, ["xsum"], ["staggered"], [2], {("xsum", "staggered", 2): 12.5})
    assert row.measured_pct == 12.5
    assert "| 12.5 % |" in simulate.markdown([row])


def test_a_balanced_split_waits_less_and_optimizer_steps_are_work():
    even, balanced = (Setting(simulate.profiled("llama-3.1-70b", s), steps=8) for s in (4, [21, 20, 20, 19]))
    stepping = Setting(even.times, steps=8, update_ms=500.0)
    found = [next(rows(s, ["mixed"], ["staggered"], [4])) for s in (even, balanced, stepping)]
    assert found[1].bubble_pct < found[0].bubble_pct and found[1].tokens_s > found[0].tokens_s
    assert found[2].tokens_s < found[0].tokens_s


def test_several_data_sets_are_every_group_of_jobs_of_that_many():
    (one,) = rows(SMALL, ["heterogeneous"], ["fast_fit"], [1])
    alone = [next(rows(SMALL, [name], ["fast_fit"], [1])) for name in ("xsum", "wikisum")]
    assert min(row.bubble_pct for row in alone) < one.bubble_pct < max(row.bubble_pct for row in alone) + 5


def test_a_capacity_is_held_against_the_jobs_that_train():
    """Of one job alone the others' longer samples say nothing."""
    longest = [
        max(max(batch) for batch in drawn("xsum", 6, np.random.default_rng([0, job])))
        for job in range(bubbles.ADAPTERS)
    ]  # fmt: skip
    assert max(longest) > longest[0]
    own = Setting(TIMES, steps=6, capacity=longest[0], multiple=1, time_limit_s=0.0)
    assert next(rows(own, ["xsum"], ["fifo"], [1])).capacity == longest[0]
    with pytest.raises(ValueError, match="a micro-batch holds at most"):
        next(rows(own, ["xsum"], ["fifo"], [4]))


def test_draws_are_the_same_for_the_same_seed_and_have_the_sets_means():
    first, again = (drawn("mixed", 50, np.random.default_rng(7)) for _ in range(2))
    assert first == again and len(first) == 50 and {len(batch) for batch in first} == {16}
    assert np.mean(first) == pytest.approx((560 + 950 + 1700) / 3, rel=0.1)


@pytest.mark.parametrize("workload", FEEDS)
def test_the_command_prints_a_table_and_writes_it(workload, tmp_path, capsys):
    folder = tmp_path / "bubbles"
    code, out, err = said(
        capsys, f"workloads={workload}", "methods=[lorafusion,staggered]", "adapters=[1,4]", "steps=4",
        "time_limit_s=0.01", f"output={folder}",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("lorabench ") and "Simulated, not measured." in out
    with open(folder / "bubbles.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["workload"], r["method"], r["adapters"]) for r in found] == [
        (workload, method, n) for method in ("lorafusion", "staggered") for n in ("1", "4")
    ]
    assert {r["measured_pct"] for r in found} == {""}
    assert (folder / "bubbles.md").read_text() in out


def test_own_times_and_measured_bubbles(tmp_path, capsys):
    times, measured = tmp_path / "times.csv", tmp_path / "measured.csv"
    lines = [f"{stage},{n},{n / 100},{n / 50}" for stage in (0, 1) for n in (512, 4096)]
    times.write_text("\n".join(["stage,tokens,forward_ms,backward_ms", *lines]) + "\n")
    measured.write_text("workload,method,adapters,bubble_pct\nxsum,fifo,2,33.25\n")
    found = simulate.read_times(times)
    assert found.stages == 2 and found.of([2048]) == ([[20.48, 20.48]], [[40.96, 40.96]])
    code, out, _ = said(
        capsys, "workloads=xsum", "methods=fifo", "adapters=2", "steps=3", f"times={times}", f"measured={measured}"
    )
    assert code == 0 and "a pipeline of 2 stages" in out and "33.2 %" in out


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("workload=mixed", "no key named 'workload'; did you mean workloads?"),
        ("workloads=mixd", "did you mean mixed?"),
        ("methods=[lorafusoin]", "did you mean lorafusion?"),
        ("model=llama-3.1-71b", "did you mean llama-3.1-70b?"),
        ("adapters=5", "adapters=5: expected 1 to 4"),
        ("adapters=[0]", "expected a list of whole numbers above 0"),
        ("stages=0", "stages=0: expected a whole number above 0"),
        ("stages=81", "expected 1 to 80"),
        ("stages=[40,39]", "stages=[40, 39]: expected 80 layers together"),
        ("stages=[80,some]", "expected a list of whole numbers above 0"),
        ("steps=some", "steps='some': expected a whole number above 0"),
        ("multiple=true", "expected a whole number above 0"),
        ("transfer_ms=-1", "expected a number from 0"),
        ("capacity=100", "a micro-batch holds at most 100"),
        ("capacity=1024", "a micro-batch holds at most 1024"),
        ("workloads=[", "expected a list of names"),
        ("mixed", "'mixed': expected key=value"),
        ("times=/nowhere/times.csv", "/nowhere/times.csv: No such file or directory; expected a CSV file"),
        ("measured=/nowhere.csv", "expected a CSV file"),
        ("output=/proc/nowhere/x", "/proc/nowhere"),
        (f"output={__file__}", "cannot be written: Not a directory; name another folder"),
        ("output=", "expected a folder"),
        ('output=""', "output='': expected a folder"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(argument, wanted, capsys):
    code, out, err = said(capsys, argument)
    assert code == 2 and " %" not in out and wanted in err and err.startswith("lorabench: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "expected the columns stage, tokens, forward_ms, backward_ms"),
        ("stage,tokens,forward_ms,backward_ms\n0,512,x,1\n", "forward_ms='x'; expected a number"),
        ("stage,tokens,forward_ms,backward_ms\n1,512,1,1\n1,600,1,1\n", "expected the stages 0, 1"),
        ("stage,tokens,forward_ms,backward_ms\n0,512,1,1\n", "expected two different numbers"),
        ("stage,tokens,forward_ms,backward_ms\n0,512\n", "forward_ms=None; expected a number"),
    ],
)
def test_a_file_of_times_that_is_none(text, wanted, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(wanted)):
        simulate.read_times(path)


def test_the_first_line_comes_before_any_row(tmp_path):
    command = [sys.executable, "-m", "lorabench.simulate", "workloads=xsum", "methods=fifo", "adapters=1", "steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].endswith("simulating a pipeline of 4 stages …")


def test_the_example_in_its_help_runs(capsys):
    code = (simulate.__doc__ or "").split("numbers out:\n")[1].split("exit code")[0]
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), {})
    assert capsys.readouterr().out.startswith("0.")


# -- the published run ------------------------------------------------------------------------------------------------

PUBLISHED_RUN = Path(__file__).resolve().parents[1] / "results/cpu/bubbles"


@pytest.mark.parametrize("workload", ["xsum", "heterogeneous"])
def test_the_published_rows_come_out_again(workload):
    """But for the packings of the programme, whose time limit makes them the machine's; and the scheduling's time."""
    (session,) = json.loads((PUBLISHED_RUN / "environment.json").read_text())["sessions"]
    given = simulate.parsed(session["command"][3:])
    setting = Setting(TIMES, given["steps"], given["seeds"], multiple=given["multiple"])
    with open(PUBLISHED_RUN / "bubbles.csv", newline="") as file:
        held = {(r["workload"], r["method"], r["adapters"]): r for r in csv.DictReader(file)}
    assert len(held) == len(FEEDS) * (len(EMPTIED) + 1 + 4 * (len(simulate.SCHEDULERS) + 1))
    for row in rows(setting, [workload], [*EMPTIED, MLORA, "fifo", "staggered", "lorafusion, greedy"], [1, 4]):
        own = held[row.workload, row.method, str(row.adapters)]
        for column in ("bubble_pct", "without_ramp_pct", "micro_batches", "empty", "padding_pct", "tokens_s"):
            assert float(own[column]) == pytest.approx(getattr(row, column), rel=1e-4, abs=1e-4), (row, column)
