"""What a checkpoint's evaluation computes of generated text: the answer of a toggle's hook `text_metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TextMetrics:
    """Metrics of the greedy answers to samples of the validation set and of the test set. Subclass it for metrics."""

    names: tuple[str, ...] = ()  # of the metrics, in the order in which they are computed
    samples: int = 0  # how many of each set are answered; 0: no text is generated, and the loss is all there is
    max_new_tokens: int = 0  # of every answer
    batch_size: int = 1  # how many are answered at a time

    def compute(self, name: str, answers: Sequence[str], expected: Sequence[str]) -> float:
        """One metric over one set: of each answer and the text that was expected. A function of these texts alone."""
        raise NotImplementedError


LOSS_ONLY = TextMetrics()
