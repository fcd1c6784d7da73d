"""What was captured, what was replayed, and what ran as it is, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Graph:
    """One captured forward and backward: rows and length of its batches, how its masks are made, its replays, and
    whether it is still there."""

    rows: int
    length: int
    masks: str
    replays: int = 0
    live: bool = True


@dataclass
class Status:
    """graphs: captured so far; eager: batches that were not replayed, by reason; updates: clipping and optimizer steps,
    by how they ran; dropped: how often all graphs were thrown away, by what had changed."""

    graphs: list[Graph] = field(default_factory=list)
    eager: Counter[str] = field(default_factory=Counter)
    updates: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def replays(self) -> int:
        """Batches whose forward and backward were replayed."""
        return sum(graph.replays for graph in self.graphs)

    def __str__(self) -> str:
        lines = [f"replayed {self.replays} batches, eager {self.eager.total()}"]
        for g in self.graphs:
            gone = "" if g.live else " (gone)"
            lines.append(f"  graph {g.rows} x {g.length}, masks {g.masks}: {g.replays} replays{gone}")
        lines += [f"  eager x {n}: {reason}" for reason, n in self.eager.most_common()]
        lines += [f"  updates {how}: {n}" for how, n in self.updates.most_common()]
        lines += [f"  captured anew x {n}: other than before is {what}" for what, n in self.dropped.most_common()]
        return "\n".join(lines)
