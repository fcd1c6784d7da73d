"""What a trial has to do, counted from shapes: the work that times are held against."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recomputed:
    """The shares, 0 to 1, of a decoder's layers that backward computes again: of their linears, of their attention."""

    linears: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class Work:
    """Useful work of one trial, by phase: 10¹² floating-point operations, 10⁹ bytes moved, and what is computed again
    (10¹² operations, counted apart). A phase that is left out has none that is known."""

    tflop: dict[str, float] = field(default_factory=dict)
    gbytes: dict[str, float] = field(default_factory=dict)
    recompute_tflop: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        pairs = (
            (self.tflop, other.tflop), (self.gbytes, other.gbytes), (self.recompute_tflop, other.recompute_tflop),
        )  # fmt: skip
        return Work(*({phase: a.get(phase, 0.0) + b.get(phase, 0.0) for phase in {**a, **b}} for a, b in pairs))
