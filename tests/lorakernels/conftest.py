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


# Without a GPU its cases are not made: fifteen hundred more lines would say what those of the tests marked `gpu` do.
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    if INTERPRET and request.param == "bfloat16":
        pytest.skip("the interpreter has no bfloat16")
    return getattr(torch, request.param)


@pytest.fixture
def fake(monkeypatch):
    """A recorder that keeps a CUDA graph's promises, in the place of CUDA graphs."""
    from fake_graphs import FakeGraphs

    made = FakeGraphs()
    monkeypatch.setattr("lorakernels.capturing.step.graphs_for", lambda device: made)
    return made


@pytest.fixture
def flash():
    """An attention of a flash attention's name, whose kernel is told where samples begin, or finds it out."""
    import transformers
    from attend import attend
    from transformers.masking_utils import flash_attention_mask

    told = []

    def attention(module, query, key, value, mask, *, scaling=None, position_ids=None, cu_seq_lens_q=None, **kwargs):
        told.append((None if cu_seq_lens_q is None else len(cu_seq_lens_q), kwargs.get("max_length_q")))
        begins = cu_seq_lens_q
        if begins is None:
            starts = (position_ids[0].diff() != 1).nonzero().flatten() + 1
            begins = torch.cat([starts.new_zeros(1), starts, starts.new_tensor([query.shape[2]])])
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend("flash_test", *rows, begins, scaling)[None], None

    transformers.AttentionInterface.register("flash_test", attention)
    transformers.AttentionMaskInterface.register("flash_test", flash_attention_mask)
    yield told
    del transformers.AttentionInterface._global_mapping["flash_test"]
    del transformers.AttentionMaskInterface._global_mapping["flash_test"]
