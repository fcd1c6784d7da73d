"""Every kernel beside what others do in its place, grouped by kernel and phase. docs/micro-benchmarks.md says how to
read and compare them. Run: python -m pytest benchmarks/micro

Shapes are Llama-3.1-8B's at 8192 tokens on CUDA (bf16) and small ones on a CPU (float32): there it is about running.
On CUDA a round is the device's time of one replay of a CUDA graph, with cold caches; on a CPU it is the wall clock's.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOKENS, HIDDEN, WIDE, VOCABULARY = (8192, 4096, 14336, 128256) if CUDA else (64, 64, 160, 500)
FORMS = ("form", "tile")  # parameters that tell the members of a group apart
CACHE = 200 << 20  # bytes that surely exceed the L2 cache
SPIN = 2_000_000  # cycles, a millisecond, in which the host launches what is timed


def pytest_addoption(parser):
    parser.addoption("--tokens", type=int, default=TOKENS, help=f"a multiple of 32, {TOKENS} unless given")


def pytest_collect_file(file_path, parent):
    """bench_*.py are tests here, whatever python_files says elsewhere; a file that is named is pytest's already."""
    listed = any(file_path.match(pattern) for pattern in parent.config.getini("python_files"))
    if file_path.match("bench_*.py") and not listed and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            options = {"timer": DEVICE_CLOCK} if CUDA else {}
            item.add_marker(pytest.mark.benchmark(group=group_of(item), **options))


def group_of(item):
    """The file's kernel, the test and its parameters but for the form: `rms_norm: rms_norm, forward`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    others = [v if k == "phase" else f"{k}={v}" for k, v in sorted(parameters.items()) if k not in FORMS]
    return ", ".join([f"{item.path.stem.removeprefix('bench_')}: {item.originalname.removeprefix('test_')}", *others])


class DeviceClock:
    """A clock in seconds that is read in pairs and goes only between them, by the device's events. The first of a pair
    empties the caches and keeps the device busy while the host launches."""

    def __init__(self):
        self.seconds, self.began, self.flush = 0.0, None, None

    def __call__(self):
        event = torch.cuda.Event(enable_timing=True)
        if self.began is None:
            if self.flush is None:
                self.flush = torch.empty(CACHE, dtype=torch.uint8, device=DEVICE)
            self.flush.zero_()
            torch.cuda._sleep(SPIN)
            event.record()
            self.began = event
            return self.seconds
        event.record()
        event.synchronize()
        self.seconds += self.began.elapsed_time(event) / 1e3
        self.began = None
        return self.seconds


DEVICE_CLOCK = DeviceClock()


@pytest.fixture(autouse=CUDA)
def memory_back():
    """What a graph had allocated is nobody else's before."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def shapes(request):
    return {
        "tokens": request.config.getoption("--tokens", TOKENS),
        "hidden": HIDDEN,
        "wide": WIDE,
        "vocabulary": VOCABULARY,
        "rank": 16,
    }


@pytest.fixture
def tensor():
    torch.manual_seed(0)

    def make(*shape, grad=False):
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE).mul_(0.1).requires_grad_(grad)

    return make


@pytest.fixture
def liger():
    """A function of liger_kernel.transformers.functional, by name; the test is skipped where it cannot run."""

    def named(name):
        if not CUDA or importlib.util.find_spec("liger_kernel") is None:
            pytest.skip("liger-kernel runs on CUDA, with pip install 'lorabench[gpu]'")
        return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)

    return named


def pytest_benchmark_update_json(config, output_json):
    """The machine, the tokens, and the limits of this run: benchmarks/kernel_table.py reads them."""
    from lorabench.measure.machine import describe

    copy_gbs, tflops = limits()
    output_json |= {
        "machine": describe().model_dump(mode="json"), "tokens": config.getoption("--tokens", TOKENS),
        "copy_gbs": copy_gbs, "tflops": tflops,
    }  # fmt: skip


@functools.cache
def limits():
    """(GB/s of a large copy, TFLOP/s of a large product), sustained, measured once; on a CPU nobody asks for them."""
    if not CUDA:
        return None, None
    from lorabench.measure.roofline import ceilings

    found = ceilings(torch.device(DEVICE), DTYPE)
    return found["copy_gbs"], next(iter(found["gemm_tflops"].values()))


@pytest.fixture
def time(benchmark, request):
    """Times a call. moved: the bytes it has to move at the least, or flops: the operations; what that makes a second,
    and on CUDA of the device's own limit, is in `extra_info`. graph: False where the call waits for the device."""

    def run(function, *, moved=None, flops=None, graph=True):
        for _ in range(2):
            function()
        call = graphed(function) if CUDA and graph and benchmark.enabled else function
        benchmark.pedantic(call, rounds=30 if CUDA else 5)
        about = getattr(request.node, "callspec", None)
        form = next((str(v) for k, v in about.params.items() if k in FORMS), None) if about else None
        benchmark.extra_info.update(form=form, device=DEVICE, dtype=str(DTYPE), least_bytes=moved, flops=flops)
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.median
            benchmark.extra_info.update(rates(seconds, moved, flops, *limits()))

    return run


def rates(seconds, moved, flops, copy_gbs, tflops):
    """What is moved and computed a second, and the share of the limits where those are known."""
    gbs = None if moved is None else moved / seconds / 1e9
    tflop = None if flops is None else flops / seconds / 1e12
    shares = [x / limit for x, limit in ((gbs, copy_gbs), (tflop, tflops)) if x is not None and limit is not None]
    return {"gb_per_s": gbs, "tflop_per_s": tflop, "share_of_ceiling": max(shares, default=None)}


def graphed(function):
    """The call as one replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with contextlib.ExitStack() as stack:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        stack.enter_context(torch.cuda.stream(stream))
        function()  # on the stream that captures: autograd remembers where a forward ran
        torch.cuda.synchronize()
        stack.enter_context(torch.cuda.graph(graph, stream=stream))
        function()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


class Phase(str):
    """`forward`, or `forward+backward`: wraps a function of tensors into one. It is a fresh forward each time, never a
    retained graph."""

    def __call__(self, function, inputs):
        gradients = []

        def forward():
            with torch.no_grad():
                function()

        def both():
            out = function()
            outs = out if isinstance(out, tuple) else (out,)
            if not gradients:
                gradients.extend(torch.ones_like(o) for o in outs)
            torch.autograd.grad(outs, inputs, gradients)

        return both if self.backward else forward

    @property
    def backward(self):
        return self == "forward+backward"

    def least(self, forward, backward):
        """What has to be moved or computed: `forward` alone, or with `backward`."""
        return forward + backward if self.backward else forward


@pytest.fixture(params=["forward", "forward+backward"])
def phase(request):
    return Phase(request.param)
