"""benchmarks/gpu_queue.sh: each job once, within its limit, whoever asks how often."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_queue.sh"
NEEDS = ("bash", "setsid", "taskset", "pgrep", "timeout")


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
@pytest.mark.parametrize("each", ["1", "2"])
def test_each_job_runs_once_and_no_longer_than_its_limit(tmp_path, each):
    jobs, folder = tmp_path / "jobs.txt", tmp_path / "results"
    jobs.write_text(
        "# name, seconds, command\n\nfirst 20 echo {out}; date +%N >> {out}.ran\nslow 1 sleep 30\nlast 20 false\n"
    )
    for _ in range(2):
        command, env = ["bash", str(SCRIPT), str(jobs), str(folder)], {**os.environ, "GPUS_EACH": each}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said = {line.partition(": ")[2] for line in done.stdout.splitlines() if line[9:].startswith("worker ")}
        ended = {"first ended with 0", "slow ended with 124", "last ended with 1"}
        assert said == {"first", "slow", "last", "no job is left"} | ended
    assert (folder / "log/first.txt").read_text() == f"{folder}/first\n"
    assert len((folder / "first.ran").read_text().splitlines()) == 1


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
def test_four_gpus_are_two_workers_of_two_gpus_each(tmp_path):
    for name, says in {"nvidia-smi": "echo 'GPU 0\nGPU 1\nGPU 2\nGPU 3'", "nproc": "echo 2"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    jobs, folder = tmp_path / "jobs.txt", tmp_path / "results"
    line = "20 mkdir {out}; while [ ! -d %s/{other} ]; do sleep 0.1; done; echo $CUDA_VISIBLE_DEVICES"
    jobs.write_text("".join(f"{a} {line.replace('{other}', b) % folder}\n" for a, b in ("xy", "yx")))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUS_EACH": "2"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(jobs), str(folder)], env=env, capture_output=True, text=True, timeout=60
    )
    assert {"x ended with 0", "y ended with 0"} <= {line.partition(": ")[2] for line in done.stdout.splitlines()}
    assert {(folder / f"log/{name}.txt").read_text() for name in "xy"} == {"0,1\n", "2,3\n"}


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
@pytest.mark.parametrize(
    ("known", "cores"), [("0 4 1 5 2 6 3 7", {"0,4,1,5", "2,6,3,7"}), ("no such file", {"0,1,2,3", "4,5,6,7"})]
)
def test_no_two_workers_share_a_core(tmp_path, known, cores):
    """`known`: the threads of this process, those of one core beside each other."""
    stubs = {
        "nvidia-smi": "echo 'GPU 0\nGPU 1'", "nproc": "echo 8", "python3": f"echo {known}",
        "taskset": f'echo "$2" >> {tmp_path}/asked; shift 2; exec "$@"',
    }  # fmt: skip
    for name, says in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "jobs.txt").write_text("any 20 true\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), str(tmp_path / "jobs.txt"), str(tmp_path / "results")]
    subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert set((tmp_path / "asked").read_text().split()) == cores


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
@pytest.mark.parametrize(("mib", "ran"), [(143771, {"large_141gb", "any"}), (81559, {"small_80gb", "any"})])
def test_a_job_for_gpus_of_another_memory_is_passed_over(tmp_path, mib, ran):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $* in *memory*) echo {mib};; *) echo 'GPU 0';; esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    jobs, folder = tmp_path / "jobs.txt", tmp_path / "results"
    jobs.write_text("large_141gb 20 true\nsmall_80gb 20 true\nany 20 true\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), str(jobs), str(folder)]
    subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert {file.stem for file in (folder / "log").glob("*.txt")} - {"worker0"} == ran


@pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {', '.join(NEEDS)}")
def test_the_list_for_one_gpu_runs_beside_the_one_for_two_and_has_their_gpus_behind_it(tmp_path):
    at = tmp_path / "at"
    for name, says in {
        "nvidia-smi": "echo 'GPU 0\nGPU 1\nGPU 2\nGPU 3'",
        "nproc": "echo 4",
        "taskset": 'shift 2; exec "$@"',
        "python3": "exit 0",
        "git": f"mkdir -p $4; ln -s {SCRIPT.parent} $4/benchmarks",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    lists = tmp_path / "benchmarks/gpu_jobs"
    lists.mkdir(parents=True)

    def until(name):
        return f"while [ ! -e {at}/{name} ]; do sleep 0.1; done"

    (lists / "1_two_gpus.txt").write_text(f"both 20 {until('a_runs')}; {until('b_runs')}; echo $CUDA_VISIBLE_DEVICES\n")
    (lists / "2_one_gpu.txt").write_text(
        "".join(f"{a} 20 touch {at}/{a}_runs; {until('c_runs')}; echo $CUDA_VISIBLE_DEVICES\n" for a in "abc")
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "AT": str(at)}
    command = ["bash", str(SCRIPT.with_name("gpu_session.sh")), "40", str(tmp_path / "out.tgz")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    said = {file.stem: file.read_text() for file in at.glob("out/*/log/?*.txt") if "worker" not in file.stem}
    assert said["both"] == "2,3\n", done.stdout + done.stderr
    assert {said["a"], said["b"]} == {"0\n", "1\n"} and said["c"] in ("2\n", "3\n")
