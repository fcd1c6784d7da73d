"""One LoRA linear of PEFT on our kernels, whatever module it stands in: the plan, and the forward that is bound to it.

Run: python -m pytest tests/lorakernels/test_linear.py tests/lorakernels/test_families.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..nodes.projection_node import project
from ..runtime import compute_dtype
from .forwards import unless
from .module_checks import GLOBAL_HOOKS, hooked_globally
from .plans import Linears

ARGUMENTS = "a linear was called with more than its input (adapter_names)"
EMPTY = "a linear was called with no rows"


@dataclass
class LinearPlan:
    """linears: the one linear that the forward is bound to."""

    linears: Linears

    def __post_init__(self) -> None:
        (self.linear,) = self.linears.modules
        self.linear.called = True

    def what_changed(self) -> str | None:
        """The reason, in words, if PEFT must run this forward."""
        return self.linear.what_changed()

    def output_dtype(self, x: torch.Tensor) -> torch.dtype:
        """What PEFT gives for x (…, K): bitsandbytes gives the input's dtype back, torch's Linear what it computes
        in."""
        return (
            x.dtype if self.linear.member.quantized is not None else compute_dtype(x, self.linear.member.weight.dtype)
        )


def _why_left(linear: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    if x.numel() == 0:
        return EMPTY
    return ARGUMENTS if args or kwargs else GLOBAL_HOOKS if hooked_globally() else linear._lorakernels.what_changed()


@unless(_why_left, "linear", expected=EMPTY)
def linear_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Bound to an instance of PEFT's LoRA linear: (…, N) of x (…, K)."""
    plan: LinearPlan = self._lorakernels
    return project(x, plan.linears.groups).to(plan.output_dtype(x))
