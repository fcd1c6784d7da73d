"""The whole report: from records to files, with whatever records there are."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from lorabench.record.store import Store, read_arms
from lorabench.report import load_results, panels, plots, write_report
from lorabench.report.__main__ import main
from lorabench.report.analysis import Analysis
from lorabench.report.figure import short
from lorabench.report.race import bars
from lorabench.run.journal import JOURNAL, Journal, Turn

TEXTS = {"summary.csv", "summary.md", "summary.tex", "report.html"}
# No claim or layout is of what a simulated sweep measures, and it has no jobs.
DRAWN = set(plots.NAMES) - {"published", "packing", "jobs"}
PNG = b"\x89PNG"


def test_full_sweep_writes_every_file_and_nothing_else(tmp_path, sweep, record, session, folder, tags):
    ladder = [record(["a", "b"][: n + 1], speedup=1.2 + n / 5, design="ladder", model="m2") for n in range(2)]
    run = folder(tmp_path / "run", [*sweep(), *ladder], [session(), session("s2", device="cpu")])
    before = (run / "records.jsonl").read_bytes()
    written = write_report(str(run))
    images = {run / "plots" / f"{name}{suffix}" for name in DRAWN for suffix in plots.SUFFIXES}
    expected = {run / name for name in TEXTS} | images
    assert set(written) == expected
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == expected | {
        run / "records.jsonl",
        run / "environment.json",
    }
    assert all(image.read_bytes().startswith(PNG if image.suffix == ".png" else b"<?xml") for image in images)
    assert (run / "records.jsonl").read_bytes() == before
    assert plt.get_fignums() == []  # pyplot never heard of our figures
    html = (run / "report.html").read_text()
    assert "#where" in tags(html).links and all(link.startswith("#") for link in tags(html).links)
    text = " ".join(tags(html).text.split())
    for said in (
        "python -m lorabench.sweep",
        "0123abcd with uncommitted changes",
        "680 TFLOP/s",
        "Trials were 26.7 % of",
        "layers.0.q_proj.lora_A.weight",
        "Traceback: the last line",
    ):
        assert said in text
    assert len(load_results(run)) == len(sweep()) + 2


def test_rounds_of_a_sweep_that_was_ended_become_records_unless_it_still_runs(tmp_path, record, folder):
    arms = read_arms(folder(tmp_path / "whole", [record(["a"], speedup=2.0)]))
    run, phases = folder(tmp_path / "run", []), ("forward", "backward", "step")
    journal = Journal(run)
    journal.begin([arm.model_copy(update={"rounds": [], "seats": [], "phases": {}}) for arm in arms], 12)
    for n in range(9):
        ms = {arm.arm: (1 + (arm.role == "reference")) * (20.0 + n) for arm in arms}
        journal.round(n, {name: [Turn(n, 0, dict.fromkeys(phases, each))] for name, each in ms.items()})
    with Store(run):
        assert main([str(run)]) == 2
        assert (run / JOURNAL).exists() and not read_arms(run)
    assert main([str(run)]) == 0
    assert not (run / JOURNAL).exists() and [len(arm.rounds) for arm in read_arms(run)] == [9, 9]
    said = (run / "summary.md").read_text()
    assert "2.00" in said and "after 9 rounds" in said


@pytest.mark.parametrize("case", ["nothing", "only failures", "one ok on a CPU", "no environment"])
def test_any_records_will_do(case, tmp_path, record, folder, tags):
    records = {
        "nothing": [],
        "only failures": [record(["a"], status="crash"), record([], status="timeout")],
        "one ok on a CPU": [record(["a"], gpu=False, trials=2)],
        "no environment": [record(["a"], status="unsupported")],
    }[case]
    run = folder(tmp_path, records, [])
    if case == "no environment":
        (run / "environment.json").unlink()
    write_report(run)
    assert {p.name for p in run.iterdir()} >= TEXTS
    html = (run / "report.html").read_text()
    assert ("No records yet." in html) == (not records)
    assert all(r.reason in html for r in records if r.reason)
    assert "None" not in tags(html).text and "nan" not in tags(html).text.split()
    assert (run / "plots" / "race.png").exists() == (case == "one ok on a CPU")
    assert not (run / "plots" / "memory.png").exists()


def test_stale_plots_are_removed_and_a_second_run_gives_the_same_bytes(tmp_path, record, folder):
    run = folder(tmp_path, [record(["a"], status="crash")])
    (run / "plots").mkdir()
    (run / "plots" / "ladder.png").write_bytes(b"old")
    (run / "plots" / "mine.png").write_bytes(b"the user's own")
    first = {p: p.read_bytes() for p in write_report(run)}
    assert {p.name for p in (run / "plots").iterdir()} == {"speedup.png", "speedup.svg", "mine.png"}
    assert {p: p.read_bytes() for p in write_report(run)} == first


def test_command_line(tmp_path, record, folder, capsys):
    run = folder(tmp_path / "run", [record(["lora_kernels"], status="crash")])
    assert main([str(run)]) == 0
    assert "lora_kernels" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    (run / "records.jsonl").write_text('{"schema": 1}\n')
    assert main([str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "nowhere" in errors[0] and "line 1" in errors[1]


@pytest.mark.parametrize("content", [b"", b'{"schema": 3, "fam'])
def test_records_without_a_whole_line_leave_the_report_as_it_is(content, tmp_path, record, folder, capsys, warned):
    run = folder(tmp_path, [record(["a"], status="crash")])
    assert main([str(run)]) == 0
    before = {name: (run / name).read_bytes() for name in TEXTS}
    (run / "records.jsonl").write_bytes(content)
    capsys.readouterr()
    assert main([str(run)]) == 2
    said = f"lorabench: {run / 'records.jsonl'} has no record; expected one at least (no report was written)\n"
    assert capsys.readouterr().err == said
    assert ["was half written" in line for line in warned] == [True] * bool(content)
    assert {name: (run / name).read_bytes() for name in TEXTS} == before


@pytest.mark.parametrize("wrong", ["nowhere", "records.jsonl"])
def test_what_is_no_sweep_s_folder_is_told_before_it_is_read(wrong, tmp_path, record, folder, capsys):
    path = folder(tmp_path, [record(["a"], status="crash")]) / wrong
    assert main([str(path)]) == 2
    wanted = "has no records.jsonl; expected the folder that a sweep had as output="
    assert capsys.readouterr().err == f"lorabench: {path} {wanted}\n"


def test_a_broken_environment_is_one_clear_error(tmp_path, record, folder, capsys):
    run = folder(tmp_path, [record(["a"], status="crash")])
    for content in ("{", '{"sessions": 3}', '{"sessions": [{"no": "id"}]}', "[]"):
        (run / "environment.json").write_text(content)
        assert main([str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all("environment.json is not an environment file" in e for e in errors)


def test_a_plots_label_names_what_tells_rows_apart():
    low = "adapters_in_compute_dtype"
    assert short(low) == low
    assert short(f"lora_kernels + {low} + cuda_graph") == f"lora_kernels +\n{low} + cuda_graph"
    assert short(f"liger + {low}") == f"liger + {low}"
    rungs = [f"rung_number_{i}" for i in range(9)]
    assert short(" + ".join(rungs)) == "8 more + rung_number_8"
    assert len(short("x" * 60)) == 40


def test_a_figure_of_many_groups_says_what_it_leaves_out(tmp_path, record, folder, monkeypatch):
    monkeypatch.setattr(panels, "MAX_PANELS", 2)
    cells = [record(["a"], speedup=1.3, model=f"m{i:03}", trials=6) for i in range(5)]
    run = folder(tmp_path, cells)
    write_report(run)
    left_out = "2 of 5 rows, 2 of 5 groups"
    drawn = [path.read_text() for path in sorted((run / "plots").glob("*.svg"))]
    assert len(drawn) == 4 and all(left_out in svg for svg in drawn)
    assert len(load_results(run)) == len(cells)
    html = (run / "report.html").read_text()
    assert all(c.model in html for c in cells)


def test_a_bar_of_phases_is_as_long_as_its_total_says(record):
    """The medians of phases that are slow in different trials do not add up to the median of the trials' sums."""
    slow = [10.0] * 12 + [40.0] * 18
    times = {"forward": slow, "backward": slow[::-1], "step": [1.0] * 30}
    times["total"] = [sum(trial) for trial in zip(*times.values(), strict=True)]
    phases = {name: {"reference": ms, "candidate": ms} for name, ms in times.items()}
    made = Analysis([record(["a"], phases=phases)])
    (panel,) = panels.panels_of(made)
    bar = next(bar for bar in bars(panel) if bar.label == "a")
    widths = np.array(bar.phases)
    assert made.row(made.records[0])["total_candidate_ms"] == np.median(times["total"]) == 51
    assert widths.sum() == pytest.approx(51)
    assert widths[0] == widths[1] == pytest.approx(40 * 51 / 81)
