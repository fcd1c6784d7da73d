"""A step as CUDA graphs: captured at its first forward, then replayed. `capture.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.step import Step, Wrapped

WARM_UP = 3  # eager steps on the side stream before the capture: lazy states, cuBLAS workspaces, autotuning


class SameMasks:
    """Leaves out, in the captured forward, the attention masks that the uncaptured one went without.

    transformers makes no causal mask where SDPA can be told `is_causal`, and torch then picks a fused causal kernel.
    But it takes a capturing stream for tracing: it cannot look whether samples are packed or padded, for that would
    wait for the device, and makes the mask. SDPA with a mask is another, slower kernel: the 8B's captured step took
    0.93 x. A captured step has one batch, and for that batch the last eager step of the warm-up has looked.
    """

    def __init__(self) -> None:
        self.left_out: list[bool] = []  # of one forward, in the order in which the model asks for its masks

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around one uncaptured forward."""
        self.left_out.clear()

        def note(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
            mask = make(*args, **kwargs)
            self.left_out.append(mask is None)
            return mask

        with _sdpa_masks(note):
            yield

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around the captured forward."""
        left_out = iter(self.left_out)

        def repeat(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
            return None if next(left_out, False) else make(*args, **kwargs)

        with _sdpa_masks(repeat):
            yield


@contextmanager
def _sdpa_masks(through: Callable[..., Tensor | None]) -> Iterator[None]:
    """Send every request for an SDPA mask through `through(make, …)`, by transformers' own table of mask functions."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as table

    make = table["sdpa"]
    table["sdpa"] = lambda *args, **kwargs: through(make, *args, **kwargs)
    try:
        yield
    finally:
        table["sdpa"] = make


FED = ("input_ids", "labels")


def feed(into: Batch, batch: Batch) -> None:
    """The next batch into the tensors that a graph reads; part of every step, as in training.

    Only tokens and labels: what is padded or packed where decided which masks were captured. ValueError where that, or
    a shape, is not the captured batch's.
    """
    for name in into.inputs.keys() | batch.inputs.keys():
        old: Any = into.inputs.get(name)
        new: Any = batch.inputs.get(name)
        tensors = isinstance(old, Tensor) and isinstance(new, Tensor)
        if name in FED and tensors and old.shape == new.shape:
            old.copy_(new)
        elif old is not new and not (torch.equal(old, new) if tensors else old == new):
            raise ValueError(f"cuda_graph captured another {name}: {_told(old)}, this batch has {_told(new)}")


def _told(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


class CapturedStep(Wrapped):
    """Forward, backward and update each captured in a graph, in one memory pool, and replayed one after the other.

    Three graphs instead of one, so that the phases can still be timed apart; nothing runs between them.
    `AccumulateGrad` remembers the stream on which a parameter was first used, so every eager step must have run on the
    side stream too: the arm's very first `forward` warms up and captures before it replays.

    The optimizer stays the arm's own, made `capturable`: its step count is kept on the device, and AdamW's bias
    corrections are computed there too. For `adamw_foreach` these are kernels of their own (8B: 3.8 ms instead of 1.5,
    of an 890 ms step). That is what capturing this optimizer costs, so it stays in; `adamw_fused` has it in one kernel.
    """

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.loss: Tensor | None = None
        self.fed: Batch | None = None  # the tensors that the graphs read
        self.masks = SameMasks()
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # keeps the step count on the device

    def clear(self) -> None:
        """Nothing to clear: a replayed backward writes the gradients, it does not add to them."""
        if not self.graphs:
            self.inner.clear()

    def forward(self, batch: Batch) -> Tensor:
        if self.fed is None:
            self.fed = replace(
                batch, inputs=batch.inputs | {n: batch.inputs[n].clone() for n in FED if n in batch.inputs}
            )
            self._capture(self.fed)
        feed(self.fed, batch)
        self.graphs["forward"].replay()
        assert self.loss is not None
        return self.loss

    def backward(self, loss: Tensor) -> None:
        self.graphs["backward"].replay()

    def update(self) -> None:
        self.graphs["step"].replay()

    def _capture(self, batch: Batch) -> None:
        before = self._snapshot()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.inner.clear()
                with self.masks.noted():
                    loss = self.inner.forward(batch)
                self.inner.backward(loss)
                del loss
                self.inner.update()
            self.inner.clear()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        try:
            self._record(batch, side)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise Unsupported(f"cuda_graph: the step cannot be captured: {_first_line(error)}") from error
        self._restore(before)

    def _record(self, batch: Batch, side: torch.cuda.Stream) -> None:
        graphs = {phase: torch.cuda.CUDAGraph() for phase in ("forward", "backward", "step")}
        pool = torch.cuda.graph_pool_handle()
        with self.masks.repeated(), torch.cuda.graph(graphs["forward"], pool=pool, stream=side):
            loss = self.inner.forward(batch)
        with torch.cuda.graph(graphs["backward"], pool=pool, stream=side):
            self.inner.backward(loss)
        with torch.cuda.graph(graphs["step"], pool=pool, stream=side):
            self.inner.update()
        self.loss, self.graphs = loss.detach(), graphs
        self.keeps_gradients = True  # a replayed backward writes into the buffers that it was captured with

    def _snapshot(self) -> list[Tensor]:
        """The trained parameters, before the eager steps of the warm-up change them."""
        return [p.detach().clone() for p in self._params()]

    def _params(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _restore(self, before: list[Tensor]) -> None:
        """Undo the warm-up's updates in place: the first replay starts where the other arm's first step does."""
        with torch.no_grad():
            for param, value in zip(self._params(), before, strict=True):
                param.copy_(value)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        tensor.zero_()


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__context__ is not None:  # what stopped the capture; ending the broken capture raises once more
        cause = cause.__context__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
