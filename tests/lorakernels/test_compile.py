"""Every kernel compiles for a Hopper GPU, here, without one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("which", ["once", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_every_kernel_compiles(which):
    command = [sys.executable, "-W", "ignore", str(HERE / "compile_kernels.py"), "90", "bfloat16", which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "compiled" in done.stdout
