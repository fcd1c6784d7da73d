"""The console script: it only finds the subcommand's module, quickly, and says so where there is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from lorabench import cli

HEAVY = ("torch", "transformers", "pandas", "pydantic", "scipy", "rich")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_names_every_subcommand(arguments, capsys):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for name in ("sweep", "recommend", "list", "report", "compare", "gather", "simulate", "doctor", "log"):
        assert f"\n  {name} " in text


def test_nothing_asked_for_is_help_and_a_failure(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and "usage: lorabench SUBCOMMAND" in said.err


def test_help_imports_nothing_heavy():
    code = "import sys; from lorabench import cli; cli.main(['--help']); "
    assert python(f"{code} print([m for m in {HEAVY} if m in sys.modules])").endswith("[]\n")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lorabench {version('lorabench')}\n"


@pytest.mark.parametrize("wrong, right", [("swep", "sweep"), ("docter", "doctor"), ("logged", "log")])
def test_a_wrong_subcommand_is_one_line_with_the_nearest(wrong, right, capsys):
    assert cli.main([wrong, "--help"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err == f"lorabench: no subcommand named {wrong!r}; did you mean {right}?\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_subcommand_has_help(name, capsys):
    try:
        code = cli.main([name, "--help"])
    except SystemExit as stopped:  # argparse's way
        code = stopped.code
    assert code == 0
    assert "python -m lorabench." in capsys.readouterr().out


def test_arguments_and_exit_code_are_the_subcommands(monkeypatch, capsys):
    given = []
    monkeypatch.setattr("lorabench.sweep.main", lambda arguments: given.append(arguments) or 130)
    assert cli.main(["sweep", "trials=3", "seed=1"]) == 130
    assert cli.main(["list", "dtype=float32"]) == 130
    assert given == [["trials=3", "seed=1"], ["list=true", "dtype=float32"]]


def test_a_subcommands_own_complaint(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_report_of_a_folder_without_records_names_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "."]) == 2
    wanted = "expected the folder that a sweep had as output="
    assert capsys.readouterr().err == f"lorabench: {tmp_path} has no records.jsonl; {wanted}\n"


def test_python_m_lorabench_is_the_same(capsys):
    cli.main(["--help"])
    done = subprocess.run([sys.executable, "-m", "lorabench", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == capsys.readouterr().out


def test_bitsandbytes_does_not_report_a_kernel_that_is_not_installed():
    """Its import, by peft's, logs a warning on a CPU with AVX-512 and bfloat16."""
    warns = "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load')"
    for command, said in (("", "Failed to load\n"), ("cli.main(['list', '--help'])", "")):
        code = f"import logging; from lorabench import cli; {command or 'pass'}; {warns}"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == said


def test_the_console_script_is_installed():
    (point,) = entry_points(group="console_scripts", name="lorabench")
    assert point.load() is cli.main
