"""What really ran: how many forwards of a changed model went through our kernels, and how many were left to the model's
own, and why. The first forward that is left for a reason warns, once for each reason.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Forwards:
    """fused: forwards by part ("layer", "mlp", "linear_cross_entropy" …); left: forwards by (part, reason); warned: the
    warnings that were given. A layer that gradient checkpointing runs again counts again."""

    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    warned: set[str] = field(default_factory=set)

    def leave(self, part: str, reason: str, expected: bool = False) -> None:
        """Counts a forward that the model's own code runs. expected: nobody would think that it could be ours, so
        there is no warning."""
        self.left[part, reason] += 1
        if not expected:
            self.warn(f"leaves forwards to the model's own code: {reason} (lorakernels.status counts them)")

    def warn(self, message: str) -> None:
        """Warns of this once."""
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(f"lorakernels {message}", UserWarning, stacklevel=3)

    def __str__(self) -> str:
        fused = ", ".join(f"{part} {n}" for part, n in sorted(self.fused.items())) or "none"
        left = [f"left: {part} x {n}: {reason}" for (part, reason), n in sorted(self.left.items())]
        return "\n".join([f"fused forwards: {fused}", *left])
