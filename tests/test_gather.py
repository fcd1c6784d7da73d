"""Several folders' records into one: nothing lost, nothing twice, another session of a cell beside the first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from record.arms import Simulated, written

from lorabench import compare, gather
from lorabench import sweep as sweeps
from lorabench.record.schema import Record
from lorabench.record.store import Store, read_arms, read_records, read_sessions
from lorabench.report import __main__ as report


def folder(path, session, *keys, replicates=(0,)):
    """A results folder with a record of each key in each session of a run."""
    names = {f"{session}{replicate or ''}": replicate for replicate in replicates}
    written(path, [
        Record(
            family=key, kind="train", key=key, session=name, replicate=replicate, model="m", workload="w",
            design="solo", against=[], candidate=[], ablations=[], status="unsupported", reason="why",
        )
        for name, replicate in names.items() for key in keys
    ])  # fmt: skip
    with Store(path) as store:
        for name in names:
            store.add_session({"id": name, "commit": "c"})
    return path


def contents(path):
    return [(r.key, r.session, r.replicate) for r in read_records(path)]


def test_parts_of_a_sweep_and_sessions_of_a_cell(tmp_path, capsys):
    first = folder(tmp_path / "gpu0", "a", "one", "two")
    other = folder(tmp_path / "gpu1", "b", "three", "two")
    into = tmp_path / "all"
    assert gather.main([str(into), str(first), str(other)]) == 0
    assert "gpu1: 2 of 2 records are new" in capsys.readouterr().out
    assert contents(into) == [("one", "a", 0), ("two", "a", 0), ("three", "b", 0), ("two", "b", 1)]
    assert [s["id"] for s in read_sessions(into)] == ["a", "b"]
    assert gather.main([str(into), str(other), str(first)]) == 0
    assert "0 of 2 records are new" in capsys.readouterr().out
    assert len(contents(into)) == 4, "the same once more changes nothing"


def test_runs_of_several_sessions_each_keep_their_order(tmp_path):
    into = folder(tmp_path / "one", "a", "cell", replicates=(0, 1))
    assert gather.main([str(into), str(folder(tmp_path / "two", "b", "cell", replicates=(0, 1)))]) == 0
    assert contents(into) == [("cell", "a", 0), ("cell", "a1", 1), ("cell", "b", 2), ("cell", "b1", 3)]


def of_arms(path, session, *own, replicates=(0,)):
    """A results folder with a family of these arms in each session of a run."""
    made = [Simulated(session=f"{session}{n or ''}", replicate=n, seed=n) for n in replicates]
    arms = [arm for one in made for arm in (one.arm(), *(one.arm([name], 1.5) for name in own))]
    return written(path, arms, {"id": session, "commit": "c"})


def test_arms_of_one_session_of_a_family_stay_together(tmp_path):
    first, second = of_arms(tmp_path / "one", "a", "x", "y"), of_arms(tmp_path / "two", "b", "x", replicates=(0, 1))
    into = tmp_path / "all"
    assert gather.main([str(into), str(first), str(second)]) == 0
    found = [(arm.arm, arm.session, arm.replicate) for arm in read_arms(into)]
    assert found == [("reference", "a", 0), ("x", "a", 0), ("y", "a", 0), ("reference", "b", 1), ("x", "b", 1),
                     ("reference", "b1", 2), ("x", "b1", 2)]  # fmt: skip
    assert [r.status for r in read_records(into)] == ["ok"] * 4


def test_what_a_session_measured_later_joins_the_arms_that_it_was_measured_with(tmp_path):
    of_arms(tmp_path / "other", "a", "x")
    early, late = of_arms(tmp_path / "early", "b", "x"), of_arms(tmp_path / "late", "b", "x", "y")
    into = tmp_path / "all"
    assert gather.main([str(into), *map(str, (tmp_path / "other", early))]) == 0
    assert gather.main([str(into), str(late)]) == 0
    assert [(arm.arm, arm.replicate) for arm in read_arms(into) if arm.session == "b"] == [
        ("reference", 1), ("x", 1), ("y", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["gather", "compare", "report"])
def test_a_half_written_last_line_is_told_whoever_reads_it(tmp_path, warned, command):
    source, into = folder(tmp_path / "one", "a", "one"), folder(tmp_path / "all", "b", "one")
    with open(source / "records.jsonl", "ab") as file:
        file.write(b'{"schema"')
    mains = {
        "gather": lambda: gather.main([str(into), str(source)]),
        "compare": lambda: compare.main([str(source), str(source)]),
        "report": lambda: report.main([str(source)]),
    }
    assert mains[command]() == 0
    told = f"lorabench: the last line of {source / 'records.jsonl'} was half written (9 bytes, {{}}); "
    told += "the same sweep measures again what it was of"
    assert warned == [told.format("left out")]
    assert gather.main([str(source), str(into)]) == 0
    assert warned[1:] == [told.format("kept in records.jsonl.fragment")]


@pytest.mark.parametrize("name", ["records.jsonl", "environment.json"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, capsys, monkeypatch):
    source, read = folder(tmp_path / "one", "a", "one"), Path.read_bytes

    def refused(path):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    sweep = ["models=[tiny-llama]", "workload=1x8", "ablations=[]", "dry_run=true", f"output={tmp_path / 'out'}"]
    for command in (
        lambda: gather.main([str(tmp_path / "all"), str(source)]),
        lambda: sweeps.main([*sweep, f"estimate_from=[{source}]"]),
    ):
        assert command() == 2
        assert capsys.readouterr().err == f"lorabench: {source / name} cannot be read: Permission denied\n"
    assert not (tmp_path / "all").exists()


def test_folders_without_a_record_are_refused_and_one_beside_others_is_told(tmp_path, capsys):
    good, bare, other = folder(tmp_path / "good", "a", "one"), folder(tmp_path / "bare", "b"), tmp_path / "other"
    shutil.copytree(bare, other)
    into = tmp_path / "all"
    for sources, said in (
        ([bare], f"{bare}/records.jsonl has no record"),
        ([bare, other], f"{bare}/records.jsonl and {other}/records.jsonl have no record"),
    ):
        assert gather.main([str(into), *map(str, sources)]) == 2
        told = capsys.readouterr()
        assert told.err == f"lorabench: {said}; expected one at least (nothing was written)\n" and not told.out
        assert not into.exists()
    assert gather.main([str(into), str(good), str(bare)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{bare}: it has no record"
    assert contents(into) == [("one", "a", 0)]


@pytest.mark.parametrize("wrong", ["missing", "corrupt"])
def test_nothing_is_written_unless_every_folder_can_be_read(tmp_path, wrong, capsys):
    good, bad = folder(tmp_path / "good", "a", "one"), tmp_path / "bad"
    if wrong == "corrupt":
        bad.mkdir()
        (bad / "records.jsonl").write_text("no record\n")
    assert gather.main([str(tmp_path / "all"), str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lorabench: ") and str(bad) in said and said.count("\n") == 1
    assert not (tmp_path / "all").exists()
