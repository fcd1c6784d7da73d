"""benchmarks/gpu_session.sh and its lists of jobs: what they ask for can be asked for, in the time that they have."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from lorabench.plan.compose import load_config, plan

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LINES = [
    line for file in sorted((BENCHMARKS / "gpu_jobs").glob("*.txt")) for line in file.read_text().splitlines()
    if line and not line.startswith("#")
]  # fmt: skip
SWEEPS = [line for line in LINES if "lorabench.sweep" in line]


def test_who_waits_on_a_fresh_machine_is_told_so(tmp_path):
    command = ["bash", str(BENCHMARKS / "gpu_session.sh"), "wait", "1", str(tmp_path / "out.tgz")]
    env = {**os.environ, "AT": str(tmp_path / "none")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (9, "no session was started here: a fresh machine\n")


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
