"""Batches that have less in them than the samples, or let tokens see what they must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.batch import IGNORE, Batch, Sample, pad
from lorabench.contract.workload import Workload
from lorabench_ablations.packing import Packing
from zoo.cheat import Cheat, Turns, layers

SHORT_SAMPLES = ("workload={alpaca:{samples:4,batch_size:4,seq_len:200}}",)
TWO_BATCHES = ("workload={alpaca:{samples:4,batch_size:2,seq_len:24}}",)


class FewerLabels(Cheat):
    name = "fewer_labels"
    summary = "the second half of every sample is not trained on after the first step, and the loss made up for it"
    caught = "each gradient"

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            labels = batch.inputs["labels"].clone()
            labels[:, labels.shape[1] // 2 :] = IGNORE
            kept = int((labels[:, 1:] != IGNORE).sum())
            return self.inner.forward(replace(batch, inputs=batch.inputs | {"labels": labels})) * batch.trained / kept


class SamplesDropped(Cheat):
    name = "samples_dropped"
    summary = "of each batch only the first sample is left after the first step"
    caught = "each gradient"
    command = ("workload=4x16",)

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if self.late:
                batch = replace(batch, inputs={name: x[:1] for name, x in batch.inputs.items()})
            return self.inner.forward(batch)


class OneOfTwoBatches(Cheat):
    name = "one_of_two_batches"
    summary = "of several batches the first one stands for all"
    caught = "each gradient"
    command = TWO_BATCHES

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            if batch is self.batches[0]:
                self.loss = self.inner.forward(batch) * len(self.batches)
                return self.loss
            return torch.zeros(())

        def backward(self, loss: Tensor) -> None:
            if loss.requires_grad:
                self.inner.backward(loss)


class LastBatchDropped(Cheat):
    name = "last_batch_dropped"
    summary = "forgets the last of several batches after the first step"
    caught = "each gradient"
    command = TWO_BATCHES

    class Wrapper(Turns):
        def update(self) -> None:
            super().update()
            if self.full and self.taken == 1:
                self.batches = self.batches[:-1]


class CutBeyondTheGate(Cheat):
    name = "cut_beyond_the_gate"
    summary = "samples of more than 256 tokens lose the end, and the loss is made up for it"
    caught = "batches count"
    status = ("wrong_numerics", "untrusted", "unsupported")
    slot = "batching"
    command = ("workload=1x300", "dtype=bfloat16")

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        keep = [len(s.tokens) if len(s.tokens) <= 256 else 272 for s in samples]
        return pad(
            [Sample(s.tokens[:n], s.labels[:n]) for s, n in zip(samples, keep, strict=True)], workload.batch_size
        )

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            return self.inner.forward(batch) * self.items / sum(b.trained for b in self.batches)


class PaddingMaskLeftOut(Cheat):
    name = "padding_mask_left_out"
    summary = "pads on the left, and leaves the attention mask out after the first step"
    caught = "each gradient"
    slot = "batching"
    command = SHORT_SAMPLES

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        return left_padded(samples, workload.batch_size)

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if self.late:
                batch = replace(batch, inputs={n: x for n, x in batch.inputs.items() if n != "attention_mask"})
            return self.inner.forward(batch)


def left_padded(samples: Sequence[Sample], batch_size: int) -> list[Batch]:
    backwards = pad([Sample(s.tokens[::-1], [*s.labels[:0:-1], IGNORE]) for s in samples], batch_size)
    made = []
    for batch in backwards:
        inputs = {name: x.flip(1) for name, x in batch.inputs.items()}
        made.append(replace(batch, inputs=inputs, trained=int((inputs["labels"][:, 1:] != IGNORE).sum())))
    return made


class PackingMaskLeftOut(Cheat, Packing):
    name = "packing_mask_left_out"
    summary = "packs, and lets every token see the samples before its own after the first step"
    caught = "each gradient"
    slot = "batching"
    command = SHORT_SAMPLES

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if self.late:
                ids = batch.inputs["input_ids"]
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
                batch = replace(batch, inputs=batch.inputs | {"position_ids": positions})
            return self.inner.forward(batch)


class Window(Cheat):
    name = "window"
    summary = "no token sees more than the 256 before it"
    caught = "gradient"
    command = ("workload=1x300", "dtype=bfloat16")

    def patch(self, model: Any) -> int:
        def near(module: Any, args: Any, kwargs: Any) -> Any:
            n = kwargs["hidden_states"].shape[1]
            if n <= 256:
                return args, kwargs
            band = torch.ones(n, n, dtype=torch.bool, device=kwargs["hidden_states"].device).tril().triu(-255)
            return args, kwargs | {"attention_mask": band[None, None]}

        for layer in layers(model):
            layer.self_attn.register_forward_pre_hook(near, with_kwargs=True)
        return len(layers(model))
