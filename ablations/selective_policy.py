"""What selective checkpointing keeps, asked operator by operator, and counted. `checkpointing.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ATTENTION, MM = "attention", "GEMM"
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}  # → which argument is the left factor


class Policy:
    """Keeps what fused attention returns, or what products over more than `rank` elements return, or both.

    `kept`: operators whose result was kept, by name, of all layers since the model was built; `again`: how many
    operators of those layers backward runs again.
    """

    def __init__(self, *, attention: bool, mm: bool, rank: int) -> None:
        self.wanted = {name for name, on in ((ATTENTION, attention), (MM, mm)) if on}
        self.rank = rank
        self.kept: Counter[str] = Counter()
        self.again = 0
        self._found: set[str] = set()
        self._kinds: dict[Any, str] = {}  # of an operator: looked up once, for this is asked at every call

    def contexts(self) -> partial[Any]:
        """What torch's `checkpoint` takes as `context_fn`. A partial, or torch.compile does not know it."""
        return partial(create_selective_checkpoint_contexts, self.decide)

    def decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in self._kinds:
            self._kinds[op] = _kind(op.name())
        kind = self._kinds[op]
        keep = kind in self.wanted and (kind != MM or self._is_wide(op, args))
        if not context.is_recompute:  # before torch 2.13 it is asked in the second run, too
            self._count(op, kind, keep)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def _is_wide(self, op: Any, args: tuple[Any, ...]) -> bool:
        return args[PRODUCTS[_plain(op.name())]].shape[-1] > self.rank

    def _count(self, op: Any, kind: str, keep: bool) -> None:
        if keep:
            self.kept[_plain(op.name())] += 1
            self._found.add(kind)
        else:
            self.again += 1

    def missing(self) -> str:
        """What it was to keep and never saw, in words; '' for nothing."""
        return " and no ".join(sorted(self.wanted - self._found))


def _plain(name: str) -> str:
    """Without the overload: a default one has none in its name, `aten::mm.out` has."""
    return name.partition(".")[0]


def _kind(name: str) -> str:
    if name in PRODUCTS:
        return MM
    return ATTENTION if ("attention" in name or "attn" in name) and "backward" not in name else ""
