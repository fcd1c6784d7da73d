"""The kernels' own tests once more in Triton's interpreter, in a process of its own because Triton reads the switch at
import. Float32 and float16: the interpreter has no bfloat16."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "fast_math",
    "swiglu",
    "geglu",
    "quantize_rows",
    "quantized_glu",
    "fp8",
    "rms_norm",
    "rope",
    "linear_cross_entropy",
    "linear_log_probs",
    "dropout",
    "concat_operand",
    "nf4",
    "adapter",
    "lora_grad",
    "projection",
    "projection_node",
    "mlp_node",
    "measuring",
    "deterministic",
    "linear",
    "side_stream",
    "multi_lora",
    "multi_product",
    "multi_linear",
    "job_columns",
    "own_columns",
]
FEW = ["swiglu", "rms_norm", "rope", "linear_cross_entropy", "dropout", "lora_grad", "multi_lora"]  # in make test

SWITCHED_ON = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton"),
    pytest.mark.skipif(SWITCHED_ON, reason="is the interpreter run already"),
]


def run(marks: str, *arguments: str) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", *arguments, "-x", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


FAST = "not gpu and not exhaustive"
LARGE = "float16 and (300 or 130 or 150)"  # the shapes of several blocks once more, which make test has in float32
DRAWN = "any_shape or any_runs or no_synchronization"  # drawn shapes, and what no kernel is needed for
WHOLE_LAYERS = "test_rope.py::test_same_as_transformers"  # whose imports take longer than any kernel


def whole_model(family: str) -> str:
    return f"test_apply.py::test_same_as_peft_in_float32[False-{family}]"


def test_triton_kernels_in_the_interpreter():
    """Files in one process: each would spend longer on its imports than on its tests."""
    run(
        FAST,
        *(f"test_{name}.py" for name in FEW),
        f"--deselect=tests/lorakernels/{WHOLE_LAYERS}",
        f"-k=not ({LARGE} or {DRAWN})",
    )


@pytest.mark.exhaustive
def test_the_rest_of_the_triton_kernels_in_the_interpreter():
    run("not gpu and exhaustive", *(f"test_{name}.py" for name in FEW))
    run(FAST, *(f"test_{name}.py" for name in FEW), f"-k={LARGE} or {DRAWN}")
    run("not gpu", *(f"test_{name}.py" for name in FILES if name not in FEW), WHOLE_LAYERS, whole_model("qwen3"))


@pytest.mark.exhaustive
def test_other_whole_models_in_the_interpreter():
    run(FAST, whole_model("llama"), whole_model("gemma2"))


@pytest.mark.exhaustive
def test_long_context_in_the_interpreter():
    """With the masks of the kernels, which have to be those of whole rows in every tile."""
    masks = "test_dropout_has_the_masks_of_the_form_without[0.0-llama-tiles]"
    run(FAST, "test_long_context.py::test_same_as_peft[tiles-llama]", f"test_long_context.py::{masks}")


@pytest.mark.exhaustive
def test_several_adapters_in_the_interpreter():
    tails = (f"test_multi.py::test_a_step_of_many_adapters_by_a_tail[{p}-fused]" for p in (0.0, 0.5))
    run(FAST, "test_multi.py::test_dropout_in_slots_is_that_of_linear_by_linear[[0, 1, 1, 2]-llama]", *tails)
    run(FAST, "test_own_rows.py")
