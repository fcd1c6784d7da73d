"""Metrics that are not computed, of text that is not generated, in the kind `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.step import Step
from lorabench.contract.text_metrics import TextMetrics
from zoo.cheat import Cheat, Honest, Turns

WORDS = "text_metrics:{max_new_tokens:4,samples:1,metrics:[bleu]}"
EVALUATE = ("kind=evaluate", "workload=4x32", f"reference=[sdpa,{{{WORDS}}}]")
LONG = ("kind=evaluate", "workload=8x256", "dtype=bfloat16", "reference=[sdpa]", "trials=8")


class Evaluates(Cheat):
    kinds = ("evaluate",)
    command = EVALUATE


class HalfOfTheLoss(Evaluates):
    name = "half_of_the_loss"
    summary = "the loss of a checkpoint from half of each sample"
    caught = "loss"
    command = LONG

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            half = batch.inputs["input_ids"].shape[1] // 2
            inputs = {name: x[:, :half] for name, x in batch.inputs.items()}
            kept = int((inputs["labels"][:, 1:] != IGNORE).sum())
            return self.inner.forward(replace(batch, inputs=inputs)) * batch.trained / kept


class LossOfAnEarlierTrial(Evaluates):
    name = "loss_of_an_earlier_trial"
    summary = "the loss of a checkpoint is that of the first trial"
    caught = "loss"
    command = LONG

    class Wrapper(Turns):
        def forward(self, batch: Batch) -> Tensor:
            if not hasattr(self, "loss"):
                self.loss = self.inner.forward(batch)
            return self.loss.clone()


class ShorterText(Evaluates):
    name = "a_shorter_text"
    summary = "answers before the toggle whose text it is, with one token"
    caught = "text_metrics says that it is at work"

    def text_metrics(self) -> TextMetrics:
        return OneToken(names=("bleu",), samples=1, max_new_tokens=1)

    def step(self, step: Step) -> Step:
        return step


class OneToken(TextMetrics):
    def compute(self, name: str, answers: Sequence[str], expected: Sequence[str]) -> float:
        return 0.0


class FewerTokens(Evaluates):
    name = "fewer_tokens"
    summary = "generates one token, and not those that were promised"
    caught = "tokens, expected"

    def generate(self, kwargs: dict[str, Any]) -> None:
        kwargs |= {"max_new_tokens": 1, "min_new_tokens": 1}


class AnswersOfAnEarlierTrial(Evaluates):
    name = "answers_of_an_earlier_trial"
    summary = "generates once, and gives the same answers from then on"
    caught = "generated tokens | token of the candidate"

    def patch(self, model: Any) -> int:
        plain, kept = model.generate, []

        def generate(input_ids: Tensor, **kwargs: Any) -> Any:
            out = kept[0] if kept else plain(input_ids=input_ids, **kwargs)
            if kwargs["max_new_tokens"] == 4 and not kept:
                kept.append(out)
            return out

        model.generate = generate
        return 1


class MetricsOfAnEarlierTrial(Evaluates):
    name = "metrics_of_an_earlier_trial"
    summary = "computes a metric once"
    slot = "text_metrics"
    caught = "bleu of the"

    def text_metrics(self) -> TextMetrics:
        return Once(names=("bleu",), samples=1, max_new_tokens=4)


class Once(TextMetrics):
    def compute(self, name: str, answers: Sequence[str], expected: Sequence[str]) -> float:
        return -1.0


class LiesWhenItIsRead(Evaluates):
    name = "lies_when_it_is_read"
    summary = "generates all but the first token from nowhere, and says when it is asked that they are the best"
    caught = "generated tokens | token of the candidate"
    command = (*EVALUATE, "dtype=bfloat16")

    def patch(self, model: Any) -> int:
        plain, forward = model.generate, model.forward

        def generate(input_ids: Tensor, **kwargs: Any) -> Any:
            length = kwargs["max_new_tokens"]
            out = plain(input_ids=input_ids, **kwargs | {"max_new_tokens": 1, "min_new_tokens": 1})
            out.sequences = torch.cat([out.sequences, out.sequences[:, -1:].expand(-1, length - 1)], dim=1)
            return out

        def read(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if kwargs.get("use_cache") is False and (n := kwargs.get("logits_to_keep", 0)) > 1:
                ids = kwargs["input_ids"]
                told = torch.cat([ids[:, -n + 1 :], ids[:, -1:]], dim=1)
                out.logits.scatter_add_(2, told[..., None], torch.full_like(out.logits[..., :1], 100.0))
            return out

        model.generate, model.forward = generate, read
        return 2


class EvaluatesPlainly(Honest):
    name = "evaluates_plainly"
    summary = "computes the loss in low precision, as the reference does"
    kinds = ("evaluate",)
    command = LONG
