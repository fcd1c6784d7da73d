"""What a person sees in the first seconds: help and the list without anything heavy, and a word before what is slow."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import psutil
import pytest
from helpers import module

HEAVY = ("torch", "peft", "transformers", "lorakernels", "triton", "pandas", "scipy", "matplotlib")
RUN = """
import contextlib, io, json, runpy, sys, time
for command in sys.argv[1:]:
    module, *sys.argv[1:] = command.split()
    said, began = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            code = stop.code
    cpu_s = time.process_time() - began
    print(json.dumps({"code": code, "said": said.getvalue(), "modules": list(sys.modules), "cpu_s": cpu_s}))
"""


def test_the_tests_server_of_sweeps_is_nobody_s_child(tmp_path):
    """All workers of a run share it: what it computes for another one would be work beside the arms of this one."""
    assert module("lorabench.simulate", "--help", cwd=tmp_path).returncode == 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert "sweep_server.py" not in " ".join(child.cmdline())


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "commands",
    [
        ("lorabench --help", "lorabench.sweep list=true", "lorabench list -h",
         "lorabench recommend -h", "lorabench doctor -h", "lorabench compare -h", "lorabench report -h",
         "lorabench log -h", "lorabench simulate -h", "lorabench jobs -h"),
        pytest.param(("lorabench list",), marks=pytest.mark.exhaustive),
        pytest.param(  # the same modules by their own names
            [f"lorabench.{name} --help" for name in ("sweep", "recommend", "doctor", "simulate")],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["fast", "list", "by their names"],
)  # fmt: skip
def test_help_and_the_list_import_nothing_heavy(commands):
    """A file of ours that holds a toggle imports torch inside its hooks: who sees this fail has put it at the top. One
    process for all of them: a module that the first one imports is there for the last one."""
    done = run(RUN, *commands)
    lines = done.stdout.splitlines()
    for command, line in zip(commands, lines, strict=True):
        found = json.loads(line)
        assert found["code"] == 0 and not done.stderr
        assert "lorabench" in found["said"] or "ablations on" in found["said"]
        assert not [name for name in HEAVY if name in found["modules"]], command
        assert found["cpu_s"] < 2.0


def test_the_list_has_every_toggle_and_breaks_no_word_where_there_is_little_room(capsys, monkeypatch):
    from lorabench import cli
    from lorabench.plan.registry import registered

    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.partition(" ")[0]: line for line in lines[1:] if not line.startswith(" ")}
    assert found.keys() >= registered().keys()
    assert found["packing"].endswith(" available") and found["eager"] == "eager (attention) available"
    at = lines.index(found["activation_offloading"])
    assert lines[at].startswith("activation_offloading (checkpointing) needs a CUDA device; this machine measures on")
    assert lines[at + 1] == "    TRL's OffloadActivations: activations to host memory, on"


@pytest.mark.parametrize("command", ["sweep", "recommend"])
def test_it_says_what_it_does_before_it_imports_what_is_slow(command):
    code = f"""
from lorabench import sweep, {command} as command
import sys

def say_and_stop(console, doing, say=sweep.say):
    say(console, doing)
    print([name for name in {HEAVY} if name in sys.modules])
    raise sweep.ConfigError("stopped")

sweep.say = say_and_stop
raise SystemExit(command.main(["output=/nowhere"]))
"""
    done = run(code)
    first, second = done.stdout.splitlines()
    assert first.startswith("lorabench ") and first.endswith(": planning …")
    assert second == "[]" and done.returncode == 2 and done.stderr == "lorabench: stopped\n"


def test_compare_refuses_a_folder_before_it_imports_what_is_slow(tmp_path):
    code = f"""
import sys
from lorabench import compare

print(compare.main([{str(tmp_path)!r}, "/nowhere"]), [name for name in {HEAVY} if name in sys.modules])
"""
    done = run(code)
    assert done.stdout == "2 []\n" and done.stderr.startswith(f"lorabench: {tmp_path} has no records.jsonl")


@pytest.mark.parametrize("command", ["sweep", "recommend"])
def test_a_wrong_name_or_file_is_said_before_anything_slow_is_imported(command, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "usr", "content": "hello"}]}\n')
    wrong = {
        "models=[nope]": "no model named", "models=[./nowhere]": "no such folder", "models=[a.yaml]": "no such file",
        f"models=[{tmp_path}]": "no config.json", "workload=a.jsonl": "no such file", f"workload={rows}": "line 1",
        "workload=nope": "no workload named", "models=[tiny-llama@nope]": "no workload named",
        "ablations=[nope]": "no ablation named", "ablations=[{eager:{x:1}}]": "eager", "reference=nope": "no baseline",
    }  # fmt: skip
    code = f"""
import sys
from lorabench import {command} as command

for override in {list(wrong)}:
    assert command.main([override, {f"output={tmp_path / 'new'}"!r}]) == 2
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = run(code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    for line, (override, words) in zip(done.stderr.splitlines(), wrong.items(), strict=True):
        assert line.startswith("lorabench: ") and words in line, override


@pytest.mark.parametrize("wrong", ["budgt_minutes=3", "design=solo"])
def test_recommend_refuses_a_key_before_it_imports_what_is_slow(wrong):
    code = f"""
import sys
from lorabench import recommend

print(recommend.main([{wrong!r}]), [name for name in {HEAVY} if name in sys.modules])
"""
    done = run(code)
    assert done.stdout == "2 []\n" and wrong.partition("=")[0] in done.stderr
