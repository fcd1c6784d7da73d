"""What a stage of a pipeline needs for a micro-batch of so many tokens: from a table of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage (outer) at each number of `tokens` (inner, ascending), forward and backward. Between
    two measured points, and beyond the outermost, the time lies on the line through them; no tokens take none.

    Raises ValueError for tables that do not fit together."""

    tokens: Sequence[int]
    forward_ms: Sequence[Sequence[float]]
    backward_ms: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        rows = [*self.forward_ms, *self.backward_ms]
        if len(self.tokens) < 2 or list(self.tokens) != sorted(set(self.tokens)) or min(self.tokens) < 1:
            raise ValueError(f"tokens={list(self.tokens)}: expected two different numbers above 0 or more, ascending")
        if not rows or len(self.forward_ms) != len(self.backward_ms) or {len(r) for r in rows} != {len(self.tokens)}:
            raise ValueError("expected forward and backward milliseconds of every stage at every number of tokens")
        if any(ms <= 0 for row in rows for ms in row):
            raise ValueError("expected every measured time to be above 0 ms")

    @property
    def stages(self) -> int:
        return len(self.forward_ms)

    def of(self, tokens: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
        """(forward, backward) milliseconds, of each micro-batch of each stage."""
        found = {n: [[self._at(row, n) for row in table] for table in (self.forward_ms, self.backward_ms)]
                 for n in set(tokens)}  # fmt: skip
        return [found[n][0] for n in tokens], [found[n][1] for n in tokens]

    def _at(self, row: Sequence[float], tokens: int) -> float:
        if tokens < 1:
            return 0.0
        right = next((i for i, n in enumerate(self.tokens) if n >= tokens and i), len(self.tokens) - 1)
        (x0, x1), (y0, y1) = self.tokens[right - 1 : right + 1], row[right - 1 : right + 1]
        return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


def split(layers: Sequence[int], tokens: Sequence[int], layer_ms: Sequence[float], head_ms: Sequence[float],
          forward_share: float) -> StageTimes:  # fmt: skip
    """Stages of so many equal layers each, the last with the head (and what else stands outside of the layers) on top.
    layer_ms, head_ms: forward and backward together, at each number of tokens. forward_share: of it, the forward."""
    both = [
        [n * one + (head if stage == len(layers) - 1 else 0.0) for one, head in zip(layer_ms, head_ms, strict=True)]
        for stage, n in enumerate(layers)
    ]
    parts = ([[ms * share for ms in row] for row in both] for share in (forward_share, 1 - forward_share))
    return StageTimes(tokens, *parts)


def balanced(layers: int, stages: int, layer_ms: float, last_ms: float) -> list[int]:
    """How many of the equal layers each stage has, at least one, so that the slowest stage is as fast as can be.
    layer_ms: of one layer; last_ms: what the last stage has to do beside its layers (the head). Stages that come
    earlier take what is left over. Raises ValueError where there are fewer layers than stages."""
    if not 1 <= stages <= layers:
        raise ValueError(f"stages={stages}: expected 1 to {layers}, the layers of the model")
    if stages == 1:
        return [layers]

    def slowest(last: int) -> float:
        return max(-(-(layers - last) // (stages - 1)) * layer_ms, last * layer_ms + last_ms)

    last = min(range(1, layers - stages + 2), key=lambda n: (slowest(n), -n))
    each, more = divmod(layers - last, stages - 1)
    return [each + (n < more) for n in range(stages - 1)] + [last]


# Measured by LoRAFusion's authors on an H100, as shipped with their simulator: milliseconds of one decoder layer and of
# all that is outside of the layers, forward and backward together. The forward of a layer at 8192 tokens is 26.3 of
# 54.1 ms (70B) and 8.7 of 17.4 (8B).
PROFILED = (512, 1024, 2048, 4096, 8192)
PROFILES = {
    "llama-3.1-70b": (80, (3.83, 7.42, 14.0, 27.4, 54.1), (3.82, 7.55, 16.7, 33.4, 68.0), 26.3 / 54.1),
    "llama-3.1-8b": (32, (1.53, 2.52, 4.66, 9.08, 17.4), (2.99, 4.94, 9.89, 20.6, 41.1), 8.7 / 17.4),
}


def profiled(model: str, stages: int | Sequence[int]) -> StageTimes:
    """A model of PROFILES over so many stages, split as evenly as can be, the first taking what is left over; or over
    stages of so many layers each. Raises KeyError for another model, ValueError for a split that is none."""
    layers, layer_ms, head_ms, share = PROFILES[model]
    if isinstance(stages, int):
        if not 1 <= stages <= layers:
            raise ValueError(f"stages={stages}: expected 1 to {layers}, the layers of {model}")
        each, more = divmod(layers, stages)
        stages = [each + (n < more) for n in range(stages)]
    if sum(stages) != layers or min(stages) < 1:
        raise ValueError(f"stages={list(stages)}: expected {layers} layers together, those of {model}, and none empty")
    return split(stages, PROFILED, layer_ms, head_ms, share)
