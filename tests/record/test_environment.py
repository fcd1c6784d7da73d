"""environment.json: a field of another type is one line that names the file and the field."""

from __future__ import annotations

import json
import os

import pytest

from lorabench.record.store import RecordError, read_sessions
from lorabench.report.__main__ import main as report
from lorabench.sweep import main as sweep

GOOD = {
    "id": "s", "started": "2026-01-01", "command": ["python"], "commit": "abc", "dirty": False, "wall_s": 1.5,
    "machine": {"device": "cpu", "memory_bytes": 8, "gpu": None, "packages": {"torch": "2"}, "later": [1]},
    "ceilings": {"gemm_tflops": {"float32": 1}, "copy_gbs": 2.5}, "a later field": {"x": 1},
}  # fmt: skip
LINK = {"collective": "send", "ranks": 2, "bytes": 4096, "ms": 0.5, "gbs": 0.1}  # older sessions have none
WRONG = {
    "sessions.0.id": {"id": 5},
    "sessions.0.commit": {"commit": 7},
    "sessions.0.dirty": {"dirty": "no"},
    "sessions.0.command": {"command": "python"},
    "sessions.0.wall_s": {"wall_s": "long"},
    "sessions.0.machine": {"machine": "a GPU"},
    "sessions.0.machine.memory_bytes": {"machine": {"memory_bytes": "8 GiB"}},
    "sessions.0.machine.packages.torch": {"machine": {"packages": {"torch": 2.1}}},
    "sessions.0.ceilings.gemm_tflops.float32": {"ceilings": {"gemm_tflops": {"float32": "fast"}}},
    "sessions.0.ceilings.links.0.ms": {"ceilings": {"links": [LINK | {"ms": "1"}]}},
    "sessions.0.ceilings.copy_gbs": {"ceilings": {"copy_gbs": "1"}},
}


def write(folder, *sessions):
    (folder / "environment.json").write_text(json.dumps({"schema": 1, "sessions": list(sessions)}))


def test_what_sweeps_of_any_version_write_is_read_as_it_is(tmp_path):
    assert read_sessions(tmp_path) == []
    every = [GOOD, {"id": "bare"}, GOOD | {"id": "of ranks", "ceilings": {"links": [LINK]}}]
    write(tmp_path, *every)
    assert read_sessions(tmp_path) == every


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_another_type_is_named(tmp_path, field):
    write(tmp_path, GOOD | WRONG[field])
    with pytest.raises(RecordError, match=rf"environment.json is not an environment file: {field}: Input should be"):
        read_sessions(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"sessions": 3}', b"[" * 100_000])
def test_what_is_no_such_file_at_all(tmp_path, content):
    (tmp_path / "environment.json").write_bytes(content)
    with pytest.raises(RecordError, match="is not an environment file"):
        read_sessions(tmp_path)


@pytest.mark.exhaustive
def test_report_and_resume_end_in_one_line(tmp_path, capsys):
    write(tmp_path, GOOD | {"machine": {"memory_bytes": "8 GiB"}})
    (tmp_path / "records.jsonl").write_bytes(b"")
    assert report([str(tmp_path)]) == 2
    arguments = ["models=[tiny-llama]", "workload=2x16", "ablations=[]", f"output={tmp_path}"]
    assert sweep(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("sessions.0.machine.memory_bytes: Input should be" in line for line in lines)


def test_a_pipe_in_the_place_of_the_records_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "records.jsonl")
    assert report([str(tmp_path)]) == 2
    assert "records.jsonl: no regular file; expected" in capsys.readouterr().err
