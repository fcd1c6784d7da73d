"""Devices and tolerances for the kernels' tests.

Each numeric test takes `device` and `dtype`. On a CPU it runs the torch path; `test_interpreter.py` runs the same files
again under TRITON_INTERPRET=1, where the Triton kernels themselves run; and `-m gpu` runs them on the GPU.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch.set_num_threads(1)
os.environ["LORAKERNELS_CACHE"] = "0"  # what a test measures is neither read nor left behind

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRET:
    from quick_interpreter import patch_once_a_launch, remember_answers, remember_types

    remember_types()
    remember_answers()
    patch_once_a_launch()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    if INTERPRET and request.param == "bfloat16":
        pytest.skip("the interpreter has no bfloat16")
    return getattr(torch, request.param)
