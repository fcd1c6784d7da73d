"""benchmarks/gpu_queue.sh: each job once, within its limit, whoever asks how often."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_queue.sh"
NEEDS = ("bash", "setsid", "taskset", "pgrep", "timeout")


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
@pytest.mark.parametrize("every", ["", "1"])
def test_each_job_runs_once_and_no_longer_than_its_limit(tmp_path, every):
    jobs, folder = tmp_path / "jobs.txt", tmp_path / "results"
    jobs.write_text(
        "# name, seconds, command\n\nfirst 20 echo {out}; date +%N >> {out}.ran\nslow 1 sleep 30\nlast 20 false\n"
    )
    for _ in range(2):
        command, env = ["bash", str(SCRIPT), str(jobs), str(folder)], {**os.environ, "ALL_GPUS": every}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said = {line.partition(": ")[2] for line in done.stdout.splitlines() if line[9:].startswith("worker ")}
        ended = {"first ended with 0", "slow ended with 124", "last ended with 1"}
        assert said == {"first", "slow", "last", "no job is left"} | ended
    assert (folder / "log/first.txt").read_text() == f"{folder}/first\n"
    assert len((folder / "first.ran").read_text().splitlines()) == 1
