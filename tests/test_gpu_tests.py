"""benchmarks/gpu_tests.sh runs every test that needs a GPU, each in one of its parts."""

import re
import subprocess
import sys
from pathlib import Path

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
    named += [path for part in parts for path in re.findall(r"tests/\S+", part)]
    assert len(wanted) > 20 and len(set(named)) == len(named)
    assert not {file for file in wanted if not any(file == n or file.startswith(f"{n}/") for n in named)}
    assert all((ROOT / name).exists() for name in named)
