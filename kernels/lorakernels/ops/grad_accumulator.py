"""The float32 accumulators of one backward node: dS, dB and dA of its projections, which kernels fill by atomic adds.

They lie in one buffer, so that one launch zeroes them all and one casts the gradients to the adapters' dtype; at small
batches a layer's step is as many launches as it is bytes. dS is not handed on and lies at the end, so that a gradient
never keeps it alive. Run: python -m pytest tests/lorakernels/test_grad_accumulator.py
"""

from __future__ import annotations

import torch


class GradAccumulator:
    """Room for `gradients` elements that are handed on and `scratch` elements that are not. Nothing is allocated before
    the first of them is asked for; who asks for more than there is (a trial does) gets a tensor of its own."""

    def __init__(self, device: torch.device, gradients: int, scratch: int):
        self.device, self.free = device, [gradients, scratch]
        self._begin = [0, gradients]
        self._all: torch.Tensor | None = None
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def _take(self, which: int, rows: int, columns: int) -> torch.Tensor:
        size = rows * columns
        if size > self.free[which]:
            return torch.zeros(rows, columns, dtype=torch.float32, device=self.device)
        everything = self._all
        if everything is None:
            everything = self._all = torch.zeros(sum(self.free), dtype=torch.float32, device=self.device)
        at = self._begin[which]
        self.free[which] -= size
        self._begin[which] += size
        return everything[at : at + size].view(rows, columns)

    def gradient(self, rows: int, columns: int) -> torch.Tensor:
        """Zeros (rows, columns) in float32 of a gradient that `cast` will be given."""
        return self._take(0, rows, columns)

    def scratch(self, rows: int, columns: int) -> torch.Tensor:
        """Zeros (rows, columns) in float32 that nobody needs after this node."""
        return self._take(1, rows, columns)

    def cast(self, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """A gradient of any shape, or rows of one, in dtype and outside the scratch. The first call of a dtype casts
        all there are: ask when they are complete. None stays None."""
        if gradient is None or self._all is None or not self._holds(gradient):
            return gradient if gradient is None else gradient.to(dtype)
        if dtype not in self._cast:
            self._cast[dtype] = self._all[: self._begin[0]].to(dtype, copy=True)
        return self._cast[dtype].as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())

    def _holds(self, gradient: torch.Tensor) -> bool:
        assert self._all is not None
        start = self._all.data_ptr()
        return start <= gradient.data_ptr() < start + self._all.nbytes


def gradient_zeros(accumulator: GradAccumulator | None, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Zeros (rows, columns) in float32, from the accumulator where there is one."""
    if accumulator is None:
        return torch.zeros(rows, columns, dtype=torch.float32, device=device)
    return accumulator.gradient(rows, columns)
