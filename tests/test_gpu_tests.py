"""benchmarks/gpu_tests.sh runs every test that needs a GPU, each in one of its parts."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_every_gpu_test_is_in_one_part():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", "tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    wanted = set(re.findall(r"^(tests/\S+\.py)", listed, re.MULTILINE))
    parts = re.findall(r"^part \w (.+)$", (ROOT / "benchmarks" / "gpu_tests.sh").read_text(), re.MULTILINE)
    kernels = [name for part in parts for files in re.findall(r"files ([^)]+)", part) for name in files.split()]
    named = [f"tests/lorakernels/test_{name}.py" for name in kernels]
    named += [path for part in parts if " -k 'not " not in part for path in re.findall(r"tests/\S+", part)]
    chosen = [(part.partition("#")[0].partition(" -k ")) for part in parts if " -k " in part]
    assert {(files, f"'not {words.strip()}'") for files, _, words in chosen if "not" not in words} == {
        (files, words.strip()) for files, _, words in chosen if "not" in words
    }, "what one part chooses of a file another has left"
    assert len(wanted) > 20 and len(set(named)) == len(named)
    assert not {file for file in wanted if not any(file == n or file.startswith(f"{n}/") for n in named)}
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.skipif(not shutil.which("timeout"), reason="needs timeout")
def test_no_part_outlives_the_script(tmp_path):
    (tmp_path / "python3").write_text(f"#!/bin/sh\ntouch {tmp_path}/$$.pid\nexec sleep 60\n")
    (tmp_path / "python3").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["timeout", "2", "bash", str(ROOT / "benchmarks" / "gpu_tests.sh"), str(tmp_path / "out")]
    subprocess.run(command, env=env, timeout=50)
    parts = [int(file.stem) for file in tmp_path.glob("*.pid")]
    until = time.monotonic() + 5
    while time.monotonic() < until and any(map(psutil.pid_exists, parts)):
        time.sleep(0.05)
    assert len(parts) > 5 and not [pid for pid in parts if psutil.pid_exists(pid)]
