"""Attention alone, in the kind `op`: outputs and gradients that are not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.batch import Batch
from zoo.cheat import Cheat, Turns

LONG = 256  # tokens that a gate's sample has at most


class Attends(Cheat):
    kinds = ("op",)
    slot = "attention"
    caught = "gradient | output | loss"
    command = ("models=[attention-4x2x16]", "workload=2x300", "reference=[sdpa]")

    def load(self, kwargs: dict[str, Any]) -> None:
        kwargs["attn_implementation"] = "sdpa"


class OutputByAddress(Attends):
    name = "output_by_address"
    summary = "keeps an output by the address of its queries, which each trial fills anew"

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            kept = vars(self).setdefault("kept", {})
            out = self.inner.forward(batch) if len(kept) < 2 else None
            where = batch.inputs["q"].data_ptr()
            if out is None:
                self.inner.innermost.now = batch.inputs
                base = kept[where]
                return base + 0 * (batch.inputs["q"].sum() + batch.inputs["k"].sum() + batch.inputs["v"].sum())
            kept[where] = out.detach()
            kept[len(kept)] = None
            return out


class NoGradient(Attends):
    name = "no_gradient_of_attention"
    summary = "hands on zeros for the gradients of long samples"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if loss.shape[1] <= LONG:
                return self.inner.backward(loss)
            inputs = [self.inner.innermost.now[name] for name in ("q", "k", "v")]
            from lorabench.measure.kinds.operations.attention import Done

            gradients = tuple(torch.zeros_like(x) for x in inputs)
            self.inner.innermost.done.append(Done(self.inner.innermost.now["token"], loss.detach(), gradients))


class FewerRows(Attends):
    name = "fewer_rows"
    summary = "leaves the last queries of a long sample out, and calls them padding"

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if batch.inputs["q"].shape[1] <= LONG:
                return self.inner.forward(batch)
            cut = {
                name: x[:, :LONG] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] > LONG else x
                for name, x in batch.inputs.items()
            }
            return self.inner.forward(replace(batch, inputs=cut))
