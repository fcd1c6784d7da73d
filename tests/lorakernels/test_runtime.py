"""Launching what was compiled for a launch alike, without asking Triton again."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lorakernels import runtime
from lorakernels.runtime import Kernel, kernel


class FakeTriton:
    """Records what goes through Triton's own launch, and what goes straight to a compiled kernel."""

    def __init__(self):
        self.device, self.bound, self.straight = 0, [], []
        driver = SimpleNamespace(get_current_device=lambda: self.device, get_current_stream=lambda device: 70 + device)
        self.runtime = SimpleNamespace(driver=SimpleNamespace(active=driver))

    def jit(self, function):
        triton = self

        class Compiled:
            def __getitem__(self, grid):
                return lambda *arguments, stream: triton.straight.append((grid, arguments, stream))

        class Function:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    triton.bound.append((grid, arguments, options))
                    return Compiled()

                return launch

        return Function()


def scale_kernel(x_ptr, n, factor, STEPS: "tl.constexpr", BLOCK: "tl.constexpr"):  # noqa: F821
    """Never run."""


@pytest.fixture
def triton(monkeypatch):
    fake = FakeTriton()
    monkeypatch.setattr(runtime, "triton", fake)
    return fake


def test_the_second_launch_alike_goes_straight_to_the_compiled_kernel(triton):
    launched, x = Kernel(scale_kernel), torch.zeros(64)
    for _ in range(3):
        launched[(4,)](x, 64, 0.5, BLOCK=16, STEPS=2, num_warps=4)
    assert len(triton.bound) == 1
    assert triton.bound[0][0] == (4,) and triton.bound[0][2] == {"BLOCK": 16, "STEPS": 2, "num_warps": 4}
    grid, arguments, stream = triton.straight[1]
    assert grid == (4, 1, 1) and stream == 70
    assert arguments[0] is x and arguments[1:] == (64, 0.5, 2, 16), "the constants in the order of the parameters"
    y = torch.ones(64)
    launched[(2, 3)](y, 64, 0.5, BLOCK=16, STEPS=2, num_warps=4)
    assert len(triton.bound) == 1 and triton.straight[-1][0] == (2, 3, 1) and triton.straight[-1][1][0] is y


def test_whatever_triton_could_tell_apart_is_bound_anew(triton):
    launched, x = Kernel(scale_kernel), torch.zeros(64)

    def launch(x=x, n=64, factor=0.5, block=16, warps=4):
        launched[(1,)](x, n, factor, STEPS=1, BLOCK=block, num_warps=warps)

    launch()
    other = torch.zeros(64)[1:]  # not on 16 bytes
    assert other.data_ptr() % 16
    variants = [
        {"n": 1},
        {"n": 65},
        {"n": 1 << 31},
        {"x": x.double()},
        {"x": other},
        {"block": 32},
        {"warps": 8},
        {"factor": 2},
    ]
    for i, variant in enumerate(variants):
        launch(**variant)
        assert len(triton.bound) == i + 2, variant
    triton.device = 1
    launch()
    assert len(triton.bound) == len(variants) + 2 and not triton.straight
    launch()
    assert triton.straight[-1][2] == 71


class OnSecondGpu(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    def get_device(self):
        return 1


def test_a_launch_is_on_the_device_of_its_tensors(triton, monkeypatch):
    """The current device is another one's: a model on the second GPU of a process that has not chosen it."""

    @contextmanager
    def device(number):
        before, triton.device = triton.device, number
        yield
        triton.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    launched, x = Kernel(scale_kernel), torch.zeros(64)
    there = x.as_subclass(OnSecondGpu)
    for _ in range(2):
        launched[(1,)](there, 64, 0.5, STEPS=1, BLOCK=16)
    assert len(triton.bound) == 1 and triton.straight[-1][2] == 71, "its stream"
    launched[(1,)](x, 64, 0.5, STEPS=1, BLOCK=16)
    assert len(triton.bound) == 2 and triton.device == 0, "compiled for each device, and the current one is as before"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu_while_the_first_is_current():
    from lorakernels.ops.rms_norm import rms_norm, rms_norm_reference

    x, w = torch.randn(9, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    for _ in range(2):
        with torch.cuda.device(0):
            y = rms_norm(x, w)
        torch.testing.assert_close(y, rms_norm_reference(x, w))
    assert y.device.index == 1


def test_rows_of_a_length_that_never_was_go_straight(triton):
    launched, x = Kernel(scale_kernel), torch.zeros(64)
    for n in (31, 48, *range(100, 200)):
        launched[(1,)](x, n, n / 7, STEPS=1, BLOCK=16)
    assert [arguments[1] for _, arguments, _ in triton.bound] == [31, 48] and len(triton.straight) == 100
    assert triton.straight[-1][1][1:3] == (199, 199 / 7)


def test_integers_are_told_apart_as_triton_tells_them_apart():
    compiler, library = (pytest.importorskip(name) for name in ("triton.backends.compiler", "triton._C.libtriton"))
    around = [n + d for n in (0, 16, 4096, 1 << 31, -(1 << 31), 1 << 40) for d in (-16, -1, 0, 1, 16)]
    theirs: dict[int, set] = {}
    for value in around:
        found = library.native_specialize_impl(compiler.BaseBackend, value, False, True, True)
        theirs.setdefault(runtime._kinds[value], set()).add(found)
    assert len(theirs) == 5 and all(len(kinds) == 1 for kinds in theirs.values())


def test_without_triton_a_kernel_is_the_function(monkeypatch):
    monkeypatch.setattr(runtime, "triton", None)
    assert kernel(scale_kernel) is scale_kernel


@pytest.mark.gpu
def test_both_ways_compute_the_same():
    from lorakernels.ops.rms_norm import rms_norm

    x, w = torch.randn(9, 64, device="cuda"), torch.randn(64, device="cuda")
    first, again = rms_norm(x, w), rms_norm(x, w)
    assert torch.equal(first, again)
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(9, 64)  # not on 16 bytes
    assert torch.equal(rms_norm(shifted, w), first)
