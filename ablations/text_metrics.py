"""Slot `text_metrics`: what a checkpoint's evaluation computes beside the loss. A training loop comes with the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar, Literal, get_args

from pydantic import PositiveInt

from lorabench.contract import text_metrics
from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires

INSTALL = "pip install 'lorabench[text-metrics]'"
BLEU = "bleu"
Metric = Literal["bleu", "rouge1", "rouge2", "rougeL"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, kw_only=True)
class BleuAndRouge(text_metrics.TextMetrics):
    """0 to 100 each. BLEU is sacrebleu's, of the corpus; ROUGE-1, -2 and -L are the mean of rouge-score's F-measures
    over the answers, without stemming. ROUGE-L looks for the longest common subsequence: its time grows with the
    product of two texts' lengths, that of the others with their sum."""

    def compute(self, name: str, answers: Sequence[str], expected: Sequence[str]) -> float:
        if name == BLEU:
            from sacrebleu import corpus_bleu

            return corpus_bleu(list(answers), [list(expected)]).score
        scored = [_rouge(name).score(of, text)[name].fmeasure for text, of in zip(answers, expected, strict=True)]
        return 100 * sum(scored) / len(scored)


@cache
def _rouge(name: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([name])


@dataclass(frozen=True, kw_only=True)
class TextMetrics(Ablation):
    """BLEU and ROUGE of greedy answers to samples of the validation set and of the test set, `samples` of each."""

    name: ClassVar[str] = "text_metrics"
    slot: ClassVar[str] = "text_metrics"
    kinds: ClassVar[tuple[str, ...]] = ("evaluate",)
    summary: ClassVar[str] = "BLEU and ROUGE of generated answers at a checkpoint, beside the loss"
    requires: ClassVar[Requires] = Requires(packages={"sacrebleu": INSTALL, "rouge_score": INSTALL})

    metrics: tuple[Metric, ...] = METRICS
    max_new_tokens: PositiveInt = 32
    samples: PositiveInt = 4  # of each of the two sets
    batch_size: PositiveInt = 1

    def __post_init__(self) -> None:
        given = (self.metrics,) if isinstance(self.metrics, str) else tuple(self.metrics)
        object.__setattr__(self, "metrics", given)  # a list, where it comes from a command line
        super().__post_init__()

    def text_metrics(self) -> text_metrics.TextMetrics:
        return BleuAndRouge(
            names=self.metrics, samples=self.samples, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size
        )

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        if missing := [name for name in self.metrics if any(name not in of for of in arm.values.values())]:
            raise NotApplied(f"{missing[0]} was not computed")
        return len(arm.answers)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {package: version(package) for package in ("sacrebleu", "rouge-score")}}


@dataclass(frozen=True, kw_only=True)
class NoTextMetrics(Ablation):
    """The loss alone, where the reference also generates text and scores it."""

    name: ClassVar[str] = "no_text_metrics"
    slot: ClassVar[str] = "text_metrics"
    kinds: ClassVar[tuple[str, ...]] = ("evaluate",)
    summary: ClassVar[str] = "the loss alone at a checkpoint: no text is generated"

    def text_metrics(self) -> text_metrics.TextMetrics:
        return text_metrics.LOSS_ONLY

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        if any(toggle.slot == self.slot for toggle in reference):
            return None
        return "the reference computes no text metrics either: add text_metrics to reference="

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        if arm.answers:
            raise NotApplied(f"{len(arm.answers)} answers were generated all the same")
        return len(arm.step.batches)
