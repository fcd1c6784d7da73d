"""What really ran: how many forwards of a changed model went through our kernels, and how many were left to the model's
own, and why. The first forward that is left for a reason warns, once for each reason.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

NO_JOBS = "no rows' jobs are set, so PEFT computes with its active adapter"
EXPECTED = frozenset((NO_JOBS,))  # reasons that somebody has asked for: there is no warning


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
        if not expected and reason not in EXPECTED:
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


def unless(why: Callable[..., str | None], part: str, expected: str | None = None) -> Callable[..., Any]:
    """Decorator of a forward of ours that is bound to an instance: where `why`, called with the same arguments, gives a
    reason, the class's own forward runs in its place. Either is counted; expected: the reason that needs no warning."""

    def bound(ours: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ours)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if reason := why(self, *args, **kwargs):
                self._lorakernels_forwards.leave(part, reason, expected=reason is expected)
                return type(self).forward(self, *args, **kwargs)
            self._lorakernels_forwards.fused[part] += 1
            return ours(self, *args, **kwargs)

        return forward

    return bound
