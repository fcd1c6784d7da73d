"""A step as CUDA graphs: captured at its first forward, then replayed. `capture.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lorakernels.capturing.graph import CudaGraphs, NotCaptured, Recording
from lorakernels.capturing.state import Gradients
from torch import Tensor

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.step import Step, Wrapped

WARM_UP = 3  # eager steps on the side stream before the capture: lazy states, cuBLAS workspaces, autotuning
MOST_SHAPES = 24  # each has its launches, megabytes of a small model, and takes about as long as an eager step


class SameMasks:
    """Leaves out, in the captured forward, the attention masks that the uncaptured one went without.

    transformers makes no causal mask where SDPA can be told `is_causal`, and torch then picks a fused causal kernel.
    But it takes a capturing stream for tracing: it cannot look whether samples are packed or padded, for that would
    wait for the device, and makes the mask. SDPA with a mask is another, slower kernel: the 8B's captured step took
    0.93 x. A captured step has known micro-batches, and at each the last eager step of the warm-up has looked.
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


FED = ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k")  # the last three say where samples lie


class Layout:
    """Micro-batches of one shape: the tensors that their graphs read, and the forward and the backward as graphs.
    Inputs that get a gradient, as a single operation's, are read where they lie: there their owner writes the next."""

    def __init__(self, batch: Batch, masks: SameMasks) -> None:
        copied = lambda x: isinstance(x, Tensor) and not x.requires_grad  # noqa: E731
        self.inputs = {n: x.clone() if copied(x) else x for n, x in batch.inputs.items()}
        self.holds, self.masks = batch, masks
        self.loss: Tensor | None = None  # of the forward before its backward
        self.graphs: dict[str, Recording] = {}

    def takes(self, batch: Batch, masks: SameMasks) -> bool:
        """Whether a micro-batch can be put into these tensors, and its forward is made of the same operations."""
        return (
            self.masks.left_out == masks.left_out
            and self.inputs.keys() == batch.inputs.keys()
            and all(alike(x, batch.inputs[n]) for n, x in self.inputs.items())
        )

    def feed(self, captured: Batch, batch: Batch) -> None:
        """The next micro-batch into the tensors that the graphs read; part of every step, as in training.

        Its tokens and labels are new, and of a packed row where its samples lie. All else is of the micro-batch that
        was `captured` in its place: what is padded where decided which masks were captured. ValueError where that, or a
        shape, is another.
        """
        for name in captured.inputs.keys() | batch.inputs.keys():
            old, new = captured.inputs.get(name), batch.inputs.get(name)
            if name in FED and isinstance(new, Tensor) and alike(old, new):
                self.inputs[name].copy_(new)
            elif old is not new and not _equal(old, new):
                raise ValueError(f"cuda_graph captured another {name}: {_told(old)}, this batch has {_told(new)}")
            elif isinstance(old, Tensor) and self.holds is not captured:
                self.inputs[name].copy_(old)
        self.holds = captured


def alike(old: Any, new: Any) -> bool:
    """Whether one is the other, or both are tensors of one form."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and old.dtype == new.dtype
    return not isinstance(old, Tensor) and not isinstance(new, Tensor) and (old is new or bool(old == new))


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return alike(old, new) and torch.equal(old, new)
    return alike(old, new)


def _told(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


class CapturedStep(Wrapped):
    """Forward and backward of each shape of micro-batch, and the update, each captured in a graph, in one memory pool.

    Graphs of their own, so that the phases can still be timed apart; nothing runs between them. Of one micro-batch a
    step the backward writes the gradients where the optimizer's graph reads them. Of several it adds them to buffers,
    in a few launches: the parameters' `.grad`, and zero where that was dropped, as at the start of a step.
    `AccumulateGrad` remembers the stream on which a parameter was first used, so every eager step must have run on the
    side stream too: the first `forward` of a micro-batch of the step warms up and captures before it replays.

    The optimizer stays the arm's own, made `capturable`: its step count is kept on the device, and AdamW's bias
    corrections are computed there too. For `adamw_foreach` these are kernels of their own (8B: 3.8 ms instead of 1.5,
    of an 890 ms step). That is what capturing this optimizer costs, so it stays in; `adamw_fused` has it in one kernel.
    """

    each_trains_all = True  # whether every micro-batch gives a gradient to all that gets one

    def __init__(self, inner: Step, recorder: CudaGraphs) -> None:
        super().__init__(inner)
        self.recorder = recorder
        self.layouts: list[Layout] = []
        self.captured: list[tuple[Batch, Layout]] = []  # by place in the step: the micro-batch that was captured
        self.gradients: Gradients | None = None  # None: of one micro-batch, the backward's own
        self.trained: list[torch.nn.Parameter] = []  # those that get gradients
        self.now: Layout | None = None  # of the micro-batch whose forward was the last; None: it ran uncaptured
        self.graph_of_update: Recording | None = None
        for group in self._groups():
            group["capturable"] = all(p.is_cuda for p in group["params"])  # keeps the step count on the device

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def micro_batches(self) -> Sequence[Batch]:
        """Those of a step, in order."""
        return self.batches

    def clear(self) -> None:
        """Nothing where a replayed backward writes the gradients and does not add to them."""
        if not self.keeps_gradients:
            self.inner.clear()

    def forward(self, batch: Batch) -> Tensor:
        """A micro-batch that is not the step's, before anything is captured, is another toggle's that looks for a size:
        it runs as it is."""
        place = next((i for i, own in enumerate(self.batches) if own is batch), None)
        if place is None and not self.captured:
            with self.recorder.aside():
                return self.inner.forward(batch)
        if not self.captured:
            self._capture()
        if place is None or place >= len(self.captured):
            raise ValueError(f"cuda_graph captured {len(self.captured)} micro-batches, and this is none of them")
        captured, self.now = self.captured[place]
        self.now.feed(captured, batch)
        loss = self.now.graphs["forward"].replay()["loss"]
        return loss.clone() if self.gradients else loss  # the next micro-batch of this shape overwrites it

    def backward(self, loss: Tensor) -> None:
        if self.now is None:
            with self.recorder.aside():
                self.inner.backward(loss)
            return
        if self.gradients:
            self.gradients.attach()
        self.now.graphs["backward"].replay()

    def update(self) -> None:
        if self.graph_of_update is None:
            with self.recorder.aside():
                self.inner.update()
        else:
            self.graph_of_update.replay()

    @property
    def graphs(self) -> list[str]:
        """The phase of each graph."""
        return [phase for layout in self.layouts for phase in layout.graphs] + ["step"] * bool(self.graph_of_update)

    def _capture(self) -> None:
        before, batches = self._snapshot(), self.micro_batches()
        masks: list[SameMasks] = []
        with self.recorder.aside():
            for _ in range(WARM_UP):
                self.inner.clear()
                masks = [self._uncaptured(batch) for batch in batches]
                self.inner.update()
            self.trained = [p for p in self._params() if p.grad is not None]
            self.inner.clear()
        for batch, own in zip(batches, masks, strict=True):
            layout = next((one for one in self.layouts if one.takes(batch, own)), None)
            if layout is None:
                self.layouts.append(layout := Layout(batch, own))
            self.captured.append((batch, layout))
        if len(self.layouts) > MOST_SHAPES:
            raise Unsupported(
                f"cuda_graph captures at most {MOST_SHAPES} shapes a step, and these micro-batches have "
                f"{len(self.layouts)}: give the workload another batch_size"
            )
        try:
            self._record()
        except NotCaptured as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise Unsupported(f"cuda_graph: the step cannot be captured: {error}") from error
        self._restore(before)

    def _uncaptured(self, batch: Batch) -> SameMasks:
        """Forward and backward as they are; which masks they went without."""
        masks = SameMasks()
        with masks.noted():
            loss = self.inner.forward(batch)
        self.inner.backward(loss)
        return masks

    @property
    def several(self) -> bool:
        """Whether gradients of several backwards are added up."""
        return len(self.batches) > 1

    def _record(self) -> None:
        self.gradients = Gradients(self.trained) if self.several else None
        for layout in self.layouts:
            layout.graphs["forward"] = self.recorder.record(partial(self._forward, layout))
            layout.graphs["backward"] = backward = self.recorder.record(partial(self._backward, layout))
            layout.loss = None  # what its forward saved goes back to the pool, for the next shape
            if self.gradients is None:
                for param, gradient in zip(self.trained, backward.outputs.values(), strict=True):
                    param.grad = gradient
        if self.gradients:
            self.inner.clear()
            self.gradients.attach()
        self.graph_of_update = self.recorder.record(self._update)
        self.keeps_gradients = not self.several  # a replayed backward writes into the buffers that it was captured with
        self.clear()

    def _forward(self, layout: Layout) -> dict[str, Tensor]:
        with layout.masks.repeated():
            layout.loss = self.inner.forward(replace(layout.holds, inputs=layout.inputs))
        return {"loss": layout.loss.detach()}

    def _backward(self, layout: Layout) -> dict[str, Tensor]:
        assert layout.loss is not None
        for param in self.trained:
            param.grad = None
        self.inner.backward(layout.loss)
        found = {str(i): param.grad for i, param in enumerate(self.trained) if param.grad is not None}
        if len(found) != len(self.trained) and (self.each_trains_all or not self.several):
            raise RuntimeError("micro-batches of different shapes give gradients to different parameters")
        if not self.several:
            return found
        assert self.gradients is not None
        self.gradients.collect(self.trained)
        return {}

    def _update(self) -> dict[str, Tensor]:
        self.inner.update()
        return {}

    def _snapshot(self) -> list[Tensor]:
        """The trained parameters, before the eager steps of the warm-up change them."""
        return [p.detach().clone() for p in self._params()]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _params(self) -> list[torch.nn.Parameter]:
        return [p for group in self._groups() for p in group["params"]]

    def _restore(self, before: list[Tensor]) -> None:
        """Undo the warm-up's updates in place: the first replay starts where the other arm's first step does."""
        with torch.no_grad():
            for param, value in zip(self._params(), before, strict=True):
                param.copy_(value)
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    for tensor in state.values():
                        if isinstance(tensor, Tensor):
                            tensor.zero_()
