"""An arm's toggles, asked hook by hook, and which of them changed anything at all.

A toggle says by its `audit` how many sites it is at work in. That something was touched is seen from here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lorabench.contract.ablation import Ablation
from lorabench.contract.hooks import Hook, asked
from lorabench.measure.fairness import Same, attributes, state_of


class Hooks:
    """The toggles, in the order in which they are asked, whatever the order of the list. `touched`: the names of those
    that changed something."""

    def __init__(self, ablations: Iterable[Ablation]) -> None:
        self.ordered = sorted(ablations, key=lambda a: (a.rank, a.name))
        self.touched: set[str] = set()

    def first(self, hook: Hook, *args: Any, among: Iterable[Ablation] | None = None) -> Any:
        """The answer of the first toggle that does not leave it to another one; None where all do."""
        for ablation in self.ordered if among is None else among:
            answer = asked(ablation, hook, *args)
            if answer is not None:
                self.touched.add(ablation.name)
                return answer
        return None

    def each(self, hook: Hook, changed: Any, **kwargs: Any) -> dict[str, Any]:
        """What every toggle answers that is given `changed`, a dictionary or a module, to change it in place."""
        state: Callable[[Any], Any] = state_of if isinstance(changed, nn.Module) else copy.deepcopy
        answers, before = {}, None
        for ablation in self.ordered:
            if _leaves(ablation, hook):
                answers[ablation.name] = asked(ablation, hook, changed, **kwargs)
                continue
            before = state(changed) if before is None else before
            answers[ablation.name] = asked(ablation, hook, changed, **kwargs)
            after = state(changed)
            if after != before:
                self.touched.add(ablation.name)
            before = after
        return answers

    def through(self, hook: Hook, value: Any) -> Any:
        """`value` as it is when every toggle has handed it on."""
        for ablation in self.ordered:
            handed = asked(ablation, hook, value)
            if handed is not value:
                self.touched.add(ablation.name)
            value = handed
        return value

    def wrapped(self, hook: Hook, inner: Any) -> Any:
        """`inner` with what every toggle puts around it."""
        for ablation in self.ordered:
            before = _attributes(inner)
            outer = asked(ablation, hook, inner)
            if outer is not inner or _attributes(inner) != before:
                self.touched.add(ablation.name)
            inner = outer
        return inner


def _leaves(ablation: Ablation, hook: Hook) -> bool:
    """Whether a toggle's hook is the contract's own, which changes nothing: nobody need look at a large model then."""
    name = hook.__name__
    return getattr(type(ablation), name) is hook and name not in vars(ablation)


def _attributes(step: Any) -> dict[tuple[int, str], Same]:
    """What a toggle can have put into a step that it gives back as it is; torch.compile is put into its model."""
    return attributes(step, step.innermost, step.model)
