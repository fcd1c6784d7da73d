"""python -m lorabench.log_command: any command's output beside the environment it ran in."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from lorabench import log_command


def sessions(folder):
    return json.loads((folder / "environment.json").read_text())["sessions"]


def command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_keeps_output_and_environment(tmp_path, capsys):
    file = tmp_path / "new" / "check.log"
    wanted = "import sys; print('hello', flush=True); sys.stderr.write('and an error\\n'); sys.exit(3)"
    assert log_command.main([str(file), *command(wanted)]) == 3
    assert file.read_text() == "hello\nand an error\n"
    assert capsys.readouterr().out == "hello\nand an error\n"
    (session,) = sessions(file.parent)
    assert session["command"] == command(wanted) and session["exit_code"] == 3 and session["id"] == "check.log"
    assert session["machine"]["packages"]["torch"] and session["commit"]
    assert sorted(p.name for p in file.parent.iterdir()) == ["check.log", "environment.json"]


@contextlib.contextmanager
def endless(file):
    """A command that does not end, once it has printed a line; its processes."""
    text = command("import time; print('one'); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-m", "lorabench.log_command", str(file), *text]) as process:
        until = time.monotonic() + 30
        while time.monotonic() < until and not (file.exists() and file.read_text()):
            time.sleep(0.05)
        yield psutil.Process(process.pid)
    assert file.read_text() == "one\n"


def test_the_log_says_how_far_a_command_came_that_does_not_end(tmp_path):
    with endless(tmp_path / "check.log") as process:
        for each in (process, *process.children(recursive=True)):
            each.kill()


def test_a_command_whose_time_is_up_has_a_session(tmp_path):
    with endless(tmp_path / "check.log") as process:
        process.terminate()
    (session,) = sessions(tmp_path)
    assert session["exit_code"] == -signal.SIGTERM and session["machine"]["packages"]["torch"]


def test_a_second_run_replaces_the_first_and_leaves_others(tmp_path):
    for name, text in (("a.log", "print(1)"), ("b.log", "print(2)"), ("a.log", "print(3)")):
        assert log_command.main([str(tmp_path / name), *command(text)]) == 0
    assert (tmp_path / "a.log").read_text() == "3\n"
    assert {s["id"]: s["command"][-1] for s in sessions(tmp_path)} == {"a.log": "print(3)", "b.log": "print(2)"}


def test_the_code_is_looked_at_before_and_the_machine_after(tmp_path, monkeypatch):
    file, seen = tmp_path / "a.log", {}
    new_session, describe = log_command.new_session, log_command.describe
    monkeypatch.setattr(log_command, "new_session", lambda c: seen.update(code=file.exists()) or new_session(c))
    monkeypatch.setattr(log_command, "describe", lambda: seen.update(machine=file.read_text()) or describe())
    assert log_command.main([str(file), *command("print(1)")]) == 0
    assert seen == {"code": False, "machine": "1\n"}


def test_bad_input_is_one_line_and_loses_nothing(tmp_path, capsys):
    file = tmp_path / "a.log"
    file.write_text("the last run's")
    assert log_command.main([str(file), "/no/such/command"]) == 2
    assert file.read_text() == "the last run's"
    error = capsys.readouterr().err
    assert "/no/such/command" in error and "expected" in error and error.count("\n") == 1
    (tmp_path / "environment.json").write_text("no JSON")
    assert log_command.main([str(file), *command("print(1)")]) == 2
    assert file.read_text() == "the last run's" and "environment file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, code", [([], 2), (["only.log"], 2), (["--help"], 0)])
def test_usage(arguments, code, capsys):
    assert log_command.main(arguments) == code
    assert "python -m lorabench.log_command FILE COMMAND" in capsys.readouterr().out
