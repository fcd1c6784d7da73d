"""`time(function)` of a kernel, waiting for the GPU where there is one. Run: python -m pytest benchmarks/micro

Shapes are Llama-3.1-8B's at 8192 tokens on CUDA (bf16) and small ones on a CPU (float32): there it is about running.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOKENS, HIDDEN, WIDE, VOCABULARY = (8192, 4096, 14336, 128256) if CUDA else (64, 64, 160, 500)


def pytest_collect_file(file_path, parent):
    """bench_*.py are tests here, whatever python_files says elsewhere; a file that is named is pytest's already."""
    listed = any(file_path.match(pattern) for pattern in parent.config.getini("python_files"))
    if file_path.match("bench_*.py") and not listed and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)


@pytest.fixture
def shapes():
    return {"tokens": TOKENS, "hidden": HIDDEN, "wide": WIDE, "vocabulary": VOCABULARY, "rank": 16}


@pytest.fixture
def tensor():
    torch.manual_seed(0)

    def make(*shape, grad=False):
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE).mul_(0.1).requires_grad_(grad)

    return make


@pytest.fixture
def time(benchmark):
    """Times a call; on CUDA a round is one call and a synchronization, so a round holds the launch too."""

    def run(function, bytes_moved: int | None = None):
        def call():
            function()
            if CUDA:
                torch.cuda.synchronize()

        call()
        call()
        benchmark.extra_info.update(device=DEVICE, dtype=str(DTYPE), least_bytes=bytes_moved)
        benchmark.pedantic(call, rounds=30 if CUDA else 5, iterations=1)

    return run


@pytest.fixture(params=["forward", "forward+backward"])
def phase(request):
    """Wraps a function of tensors into the phase: a fresh forward each time, never a retained graph."""

    def wrap(function, inputs):
        def forward():
            with torch.no_grad():
                function()

        def both():
            out = function()
            outs = out if isinstance(out, tuple) else (out,)
            torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs])

        return forward if request.param == "forward" else both

    return wrap
