"""What is tried or laid out before a step: hooks `size` and `collate`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lorabench.contract.batch import IGNORE, Batch, Sample, pad
from lorabench.contract.rehearsal import Rehearsal, Sizing
from lorabench.contract.workload import Workload
from zoo.cheat import Cheat, Turns, is_full

SEVERAL = ("workload={alpaca:{samples:4,batch_size:2,seq_len:24}}",)


class Sizes(Cheat):
    slot = "batch_size"
    command = SEVERAL
    caught = "gradient"

    def size(self, rehearsal: Rehearsal) -> Sizing:
        return Sizing(4)


class SizeDropsSamples(Sizes):
    name = "size_drops_samples"
    slot = "batching"
    caught = "gradient"
    summary = "lays out half of the samples once its size is twice as large, which no shallow model's is"

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        batches = pad(samples, workload.batch_size)
        return [replace(b, inputs={n: x[:2] for n, x in b.inputs.items()}) for b in batches]

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            there = sum(int((b.inputs["labels"][:, 1:] != IGNORE).sum()) for b in self.batches)
            return self.inner.forward(batch) * self.items / there


class SizePatches(Sizes):
    name = "size_patches"
    summary = "changes the full model when it is asked for a size, which no shallow model is"

    def size(self, rehearsal: Any) -> Sizing:
        model = rehearsal.step.model
        for p in [p for n, p in model.named_parameters() if "lora_A" in n][: len(list(model.parameters())) // 8]:
            p.register_hook(lambda grad: grad * 0)
        return Sizing(4)


class SizeTrains(Sizes):
    name = "size_trains"
    summary = "trains frozen weights too while it tries a size, which are not put back"
    caught = "gradient | weights that all arms share"

    def size(self, rehearsal: Any) -> Sizing:
        for name, p in rehearsal.step.model.named_parameters():
            if "q_proj.base_layer" in name:
                p.data.mul_(0.5)
        return Sizing(4)


class SizeGoesOn(Sizes):
    name = "size_goes_on"
    summary = "keeps the rehearsal, and trains on with it between the trials"
    caught = "changed the arm | update"

    def size(self, rehearsal: Rehearsal) -> Sizing:
        rehearsal.run(rehearsal.lay_out(rehearsal.samples, 1), rehearsal.room)
        vars(self)["kept"] = rehearsal
        return Sizing(4)

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            kept = vars(self.cheat).get("kept")
            if kept and self.late and self.taken % 2 and not vars(self.cheat).get("busy"):
                vars(self.cheat)["busy"] = True
                kept.run(kept.lay_out(kept.samples, 4), kept.room)
                vars(self.cheat)["busy"] = False
            return self.inner.forward(batch)


class Collates(Cheat):
    slot = "collation"
    command = SEVERAL
    caught = "gradient | loss"


class CollateDropsLabels(Collates):
    name = "collate_drops_labels"
    summary = "leaves out the last labels of each batch that is long, and makes up for it"
    command = ("workload={alpaca:{samples:4,batch_size:2,seq_len:300}}",)

    def collate(self, batch: Batch) -> Batch:
        labels = batch.inputs["labels"].clone()
        labels[:, labels.shape[1] // 2 :] = IGNORE
        return replace(batch, inputs=batch.inputs | {"labels": labels}, trained=int((labels[:, 1:] != IGNORE).sum()))

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            return self.inner.forward(batch) * self.items / max(1, sum(b.trained for b in self.batches))


class CollateTruncates(Collates):
    name = "collate_truncates"
    summary = "cuts each batch to its first half, and says that it was whole"

    def collate(self, batch: Batch) -> Batch:
        half = batch.inputs["input_ids"].shape[1] // 2
        return replace(batch, inputs={name: x[:, :half] for name, x in batch.inputs.items()})


class CollateHidesTokens(Collates):
    name = "collate_hides_tokens"
    summary = "replaces the mask by one in which the second half of each sample is padding"

    def collate(self, batch: Batch) -> Batch:
        mask = (batch.inputs["input_ids"] >= 0).long()
        mask[:, mask.shape[1] // 2 :] = 0
        return replace(batch, inputs=batch.inputs | {"attention_mask": mask})


class CollateCountsMore(Collates):
    name = "collate_counts_more"
    summary = "says that its batches have ten times the tokens that they have"
    caught = "real tokens"

    def collate(self, batch: Batch) -> Batch:
        return replace(batch, real=10 * batch.real)


class CollateAnswersOnce(Collates):
    name = "collate_answers_once"
    summary = "gives each batch embeddings that it has looked up before the clock runs"

    def collate(self, batch: Batch) -> Batch:
        number = next(vars(self).setdefault("numbers", itertools.count()))
        return replace(batch, inputs=batch.inputs | {"number": number})

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            inputs = {name: x for name, x in batch.inputs.items() if name != "number"}
            if not is_full(self.model):
                return self.inner.forward(replace(batch, inputs=inputs))
            kept = vars(self).setdefault("kept", {})
            ids = inputs.pop("input_ids")
            if batch.inputs["number"] not in kept:
                kept[batch.inputs["number"]] = self.model.get_input_embeddings()(ids).detach()
            inputs["inputs_embeds"] = kept[batch.inputs["number"]]
            return self.inner.forward(replace(batch, inputs=inputs))
