"""What every kernel shares: Triton when it can run, dtypes and layouts, and checks that say what was wrong.

Triton is imported only where a kernel could run: on a CUDA build of torch, or under the interpreter
(TRITON_INTERPRET=1). Elsewhere `jit` leaves the function as it is and nothing ever launches it. What is launched is a
`kernel`; what kernels call is `jit`.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from . import compile_ahead

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
NO_DEVICE = -1  # the number that torch gives a CPU

jit: Any
if TYPE_CHECKING or torch.version.cuda is not None or INTERPRET:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
else:
    # torch.version, not torch.cuda.is_available(): asking for devices would touch the driver in a fork server.
    triton = TensorDescriptor = None
    tl = SimpleNamespace(constexpr=lambda value: value)

    def jit(function: Any) -> Any:
        """The function as it is: nothing ever launches it here."""
        return function


class _Kinds(dict[int, int]):
    """By integer, what Triton tells it from others by: whether it is 1, a multiple of 16, and of 32 bits."""

    def __missing__(self, value: int) -> int:
        self[value] = kind = (value == 1) + 2 * (value % 16 == 0) + 4 * (value >> 31 in (0, -1))
        return kind


_kinds = _Kinds()


class Kernel:
    """A Triton function, launched as `f[grid](*arguments, CONSTANT=…, num_warps=…)`.

    Triton binds and specializes the arguments anew at each launch, and small models wait for the host. Here a launch
    with dtypes, alignments, constants and kinds of integers as one before goes straight to what was compiled for that
    one, at half the cost (docs/lab-notes.md), also where a row is as long as none before it. The first argument is a
    tensor; a launch is on its device, and on the stream that is the current one there.
    """

    def __init__(self, function: Any):
        self.function = triton.jit(function)
        names = function.__annotations__
        self.constants = [name for name in names if "constexpr" in str(names[name])]
        self._compiled: dict[tuple, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        driver: Any = triton.runtime.driver.active  # the class annotated there lacks what every driver has
        device, own = driver.get_current_device(), arguments[0].get_device()
        if own not in (device, NO_DEVICE):  # Triton launches on the current device, torch where the tensors are
            with torch.cuda.device(own):
                return self._launch(grid, *arguments, **options)
        # Triton tells pointers apart by a multiple of 16 bytes, and other numbers by their types alone.
        alike = [
            _kinds[x] if x.__class__ is int
            else (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor)
            else (x.base.dtype, *x.block_shape) if x.__class__ is TensorDescriptor
            else x.__class__
            for x in arguments
        ]  # fmt: skip
        key = (device, *alike, *options.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            if compile_ahead.collecting():
                self.function.run(*arguments, grid=grid, warmup=True, **options)
                return
            self._compiled[key] = self.function[grid](*arguments, **options)
            return
        constants = [options[name] for name in self.constants]
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants, stream=driver.get_current_stream(device))


def kernel(function: Any) -> Any:
    """Decorator of a function that is launched; its constants are the last of its parameters."""
    return function if triton is None else triton.jit(function) if INTERPRET else Kernel(function)


TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# Tiles (rows, columns, warps, stages) of kernels that walk a block of rows with S = X · Aᵀ in registers. Which is best
# depends on the number of rows: few large blocks leave multiprocessors idle, many small ones read A more often.
TILES = {"fused": (64, 128, 4, 4), "fused_wide": (32, 128, 8, 3), "fused_small": (16, 128, 4, 4)}
# Above this many columns of S a library GEMM takes over. With 128, forms of SwiGLU need more shared memory than there
# is, and nobody has timed what is left.
MAX_FUSED_RANK = 64


def tile_of(name: str, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages) of a key of TILES, for an output of this tensor's dtype (any shape)."""
    bm, bn, warps, stages = TILES[name]
    return bm, bn, warps, stages_of(tensor, stages)


def stages_of(tensor: torch.Tensor, wanted: int) -> int:
    """The stages of a pipeline over tiles of this dtype (any shape): those of float32 are too large for several."""
    return wanted if tensor.element_size() < 4 else 1


def rank_tile(rank: int) -> int:
    """The columns of a tile that holds rank of them: a power of two, and what tl.dot takes at the least."""
    return max(16, next_power_of_2(rank))


def use_triton(*tensors: torch.Tensor) -> bool:
    """True if the Triton kernel should run on these tensors, of any shapes; float64 always takes the torch path, for
    gradcheck."""
    first = tensors[0]
    if any(t.is_floating_point() and t.dtype not in TRITON_DTYPES for t in tensors) or first.numel() == 0:
        return False
    if INTERPRET:
        # The interpreter stores NaN for bfloat16 (numpy has no such type).
        return first.device.type == "cpu" and all(t.dtype != torch.bfloat16 for t in tensors)
    return first.is_cuda and triton is not None


def tensor_cores(*operands: torch.Tensor) -> bool:
    """True if a Triton kernel with a dot of these, of any shapes, is worth a trial: dots of float32 are kept exact, so
    they have no tensor cores, and Triton takes a quarter of a minute to compile one. The interpreter runs them all."""
    return use_triton(*operands) and (INTERPRET or all(t.element_size() < 4 for t in operands))


def tma_fits(wide: torch.Tensor) -> bool:
    """Whether `through_tma` takes wide (M, N): its rows lie in one piece each, and begin at multiples of 16 bytes."""
    return wide.stride(1) == 1 and wide.stride(0) * wide.element_size() % 16 == 0 and wide.data_ptr() % 16 == 0


def through_tma(wide: torch.Tensor, rows: int, columns: int) -> Any:
    """wide (M, N) for a kernel that loads and stores tiles of so many rows and columns by Hopper's copy engine: what of
    a tile lies outside is read as zero and not written. `tma_fits` says whether that can be."""
    return TensorDescriptor(wide, list(wide.shape), list(wide.stride()), [rows, columns])


def fuses(rank: int, sources: tuple[torch.Tensor, ...], operands: tuple[torch.Tensor, ...]) -> bool:
    """True if a kernel that reads `sources` can keep the product of `operands` over `rank` columns in registers. Of the
    tensors only dtypes and device count, and whether the first is empty."""
    return 0 < rank <= MAX_FUSED_RANK and use_triton(*sources) and tensor_cores(*operands)


def capturing(tensor: torch.Tensor) -> bool:
    """True if a CUDA graph is being captured, on the device of this tensor (of any shape)."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def table(values: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of these numbers (of any nesting) on the device, which the host does not wait for: the few KB of a table
    are out of its memory when the call returns."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def deterministic() -> bool:
    """True if torch is to compute the same bits each time (`torch.use_deterministic_algorithms`), so nothing may be
    added up atomically."""
    return torch.are_deterministic_algorithms_enabled()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 if n <= 1 else 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return cdiv(n, multiple) * multiple


def multiprocessors(tensor: torch.Tensor) -> int:
    """Of the GPU that this tensor (of any shape) is on; 2 stands for a CPU, in the interpreter."""
    return _multiprocessors(tensor.device) if tensor.is_cuda else 2


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows(x: torch.Tensor) -> torch.Tensor:
    """x (…, K) as (M, K), a view where the strides allow it, with K contiguous as the kernels need it."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() or x.shape[-1] else x.reshape(0, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def contiguous_on_cpu(x: torch.Tensor) -> torch.Tensor:
    """x (M, K), on a CPU copied where its rows lie apart: oneDNN's bfloat16 products for AMX read on behind a row's end
    and multiply what is there by zero, which a NaN survives. Needed where nothing has been written there yet."""
    return x if x.is_cuda else x.contiguous()


def compute_dtype(x: torch.Tensor, weight_dtype: torch.dtype) -> torch.dtype:
    """What a linear would compute in, given x (of any shape): autocast's dtype where it is on, else the frozen
    weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight_dtype


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """For autograd functions, which fix their dtypes themselves: autocast inside would cast the parameters'
    gradients."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def check(condition: bool, message: str, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError with the message and the tensors' shapes in it, unless the condition holds."""
    if condition:
        return
    shapes = ", ".join(f"{n}: {'None' if t is None else f'{tuple(t.shape)} {t.dtype}'}" for n, t in tensors.items())
    raise ValueError(f"{message} ({shapes})")


def working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a reference or torch path computes on this tensor (any shape): float32, or float64 when it was
    given that."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
