"""benchmarks/gpu_session.sh and its lists of jobs: what they ask for can be asked for, in the time that they have."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lorabench.plan.compose import load_config, plan

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LINES = [
    line for file in sorted((BENCHMARKS / "gpu_jobs").glob("*.txt")) for line in file.read_text().splitlines()
    if line and not line.startswith("#")
]  # fmt: skip
SWEEPS = [line for line in LINES if "lorabench.sweep" in line]
MACHINE = {"python3": "exit 0", "nvidia-smi": "echo 'GPU 0'"}  # of one GPU, on which nothing is installed


def stubbed(folder, **says):
    """The environment in which these commands are scripts in this folder."""
    for name, text in says.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "AT": str(folder / "at"), "PATH": f"{folder}:{os.environ['PATH']}"}


def call(folder, env, seconds):
    """The script, in folder/here."""
    command = ["bash", str(BENCHMARKS / "gpu_session.sh"), str(seconds), str(folder / "out.tgz")]
    return subprocess.run(command, cwd=folder / "here", env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid")
def test_a_fresh_machine_goes_on_where_a_lost_one_was(tmp_path):
    here, at, lost = tmp_path / "here", tmp_path / "at", tmp_path / "lost/out/3_one_gpu"
    for folder in (
        here / ".whl",
        here / ".pack",
        here / ".real",
        here / "benchmarks",
        at,
        lost / "log",
        lost / "taken/first",
    ):
        folder.mkdir(parents=True)
    (lost / "log/worker0.txt").write_text("12:00:00 worker 0: first\n12:00:01 worker 0: first ended with 0\n")
    (lost / "taken/second").mkdir()
    (lost / "second/went_on").mkdir(parents=True)
    (lost / "second/rounds.jsonl").write_text("kept")
    subprocess.run(["tar", "czf", here / ".pack/r.tgz", "-C", tmp_path / "lost", "out"], check=True)
    (tmp_path / "text.jsonl").write_text("{}")
    subprocess.run(["tar", "czf", here / ".real/text.tgz", "-C", tmp_path, "text.jsonl"], check=True)
    shutil.copytree(BENCHMARKS, tmp_path / "source/benchmarks", ignore=shutil.ignore_patterns("*.txt", "__pycache__"))
    (here / "benchmarks/gpu_jobs").mkdir()
    jobs = "first 9 touch {out}.again\nsecond 9 cp {out}/rounds.jsonl $REAL/text.jsonl {out}/went_on\n"
    (here / "benchmarks/gpu_jobs/3_one_gpu.txt").write_text(jobs)
    env = stubbed(tmp_path, **MACHINE, git=f"cp -r {tmp_path}/source $4")
    done = call(tmp_path, env, 30)
    found = at / "out/3_one_gpu"
    assert len(list((found / "second/went_on").iterdir())) == 2 and not (found / "first.again").exists(), (
        done.stdout + done.stderr
    )
    assert (found / "ended").read_text() == "first\n"
    with (here / "benchmarks/gpu_jobs/3_one_gpu.txt").open("a") as more:
        more.write("third 9 touch {out}\n")
    again = call(tmp_path, env, 30)
    assert "third 9" in (at / "3_one_gpu.txt").read_text() and "first ended with 0" not in again.stdout, (
        "it goes on here"
    )


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid")
def test_a_call_brings_packages_that_are_too_large_for_the_first_one(tmp_path):
    here, site = tmp_path / "here", tmp_path / "at/site"
    for folder in (
        here / ".whl",
        here / ".more",
        here / "benchmarks/gpu_jobs",
        site / "both",
        tmp_path / "source",
        tmp_path / "a/both",
    ):
        folder.mkdir(parents=True)
    (site / "both/own.py").write_text("")
    (tmp_path / "a/both/more.py").write_text("")
    python = f'[ "$1" != -c ] || exec {sys.executable} "$@"; exit 0'
    env = stubbed(tmp_path, **MACHINE | {"python3": python}, git=f"cp -r {tmp_path}/source $4")
    (here / ".more/libraries.tar.xz").write_bytes(b"half of it")  # is tried again below
    for form, name in (("zip", "both-1.whl"), ("xztar", "libraries.tar.xz")):
        made = shutil.make_archive(str(tmp_path / form), form, tmp_path / "a")
        shutil.move(made, here / ".more" / name)
        call(tmp_path, env, 5)
        assert {path.name for path in (site / "both").iterdir()} == {"own.py", "more.py"}
        (site / "both/more.py").unlink()
    call(tmp_path, env, 5)
    assert not (site / "both/more.py").exists(), "each is unpacked once"


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid")
def test_a_later_call_brings_its_commit_and_takes_back_what_has_not_begun(tmp_path):
    here, at = tmp_path / "here", tmp_path / "at"
    for folder in (here / ".whl", here / "benchmarks/gpu_jobs", tmp_path / "source"):
        folder.mkdir(parents=True)
    shutil.copytree(BENCHMARKS, tmp_path / "source/benchmarks", ignore=shutil.ignore_patterns("*.txt", "__pycache__"))
    source, jobs = tmp_path / "source", here / "benchmarks/gpu_jobs/3_one_gpu.txt"

    def commit(text):
        (source / "what").write_text(text)
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*named, "commit", "-qm", text]):
            subprocess.run(["git", *words], cwd=source, check=True)
        shutil.rmtree(here / ".clone", ignore_errors=True)
        subprocess.run(["git", "clone", "-q", "--no-checkout", f"file://{source}", here / ".clone"], check=True)

    env = stubbed(tmp_path, **MACHINE)
    commit("old")
    waits = f"until grep -q ^mended {at}/3_one_gpu.txt; do sleep 0.1; done"
    jobs.write_text(f"first 20 cp what {{out}}; {waits}\ngone 9 touch {{out}}\n")
    call(tmp_path, env, 2)
    commit("new")
    jobs.write_text("# another list\nfirst 20 anything else\nmended 9 cp what {out}; echo $PYTHONPATH > {out}.path\n")
    done = call(tmp_path, env, 20)
    found = at / "out/3_one_gpu"
    assert (found / "first").read_text() == "old", done.stdout + done.stderr
    assert (found / "mended").read_text() == "new" and not (found / "gone").exists()
    (src,) = at.glob("src-*[0-9a-f]")
    paths = (found / "mended.path").read_text().split(":")
    assert paths[:3] == [f"{src}", f"{src}/kernels", f"{src}-names"]


def test_each_job_has_a_name_of_its_own():
    names = [line.split()[0] for line in LINES]
    assert len(names) == len(set(names)) > 5


@pytest.mark.parametrize("line", SWEEPS, ids=lambda line: line.split()[0])
def test_a_sweep_of_the_lists_can_be_planned_and_ends_before_its_limit(line):
    _, limit, *command = shlex.split(line)
    arguments = command[command.index("lorabench.sweep") + 1 :]
    assert "output={out}" in arguments
    (minutes,) = (float(found[1]) for a in arguments if (found := re.fullmatch(r"budget_minutes=(.+)", a)))
    assert int(limit) >= 60 * minutes + 60
    found = plan(load_config([*arguments[: arguments.index("output={out}")], "output=somewhere"]), "cpu")
    assert found.cells
    # A pipeline refuses a sample that is longer than its rows, which four GPUs have found out twice.
    rows = [
        (cell.workload, own)
        for cell in found.cells
        for own in (*cell.reference, *cell.candidate)
        if getattr(own, "tokens", None)
    ]
    assert all(workload.seq_len <= own.tokens for workload, own in rows if own.slot == "parallel")
