"""The cell: a contrast that a design asks for, of a candidate with a reference; and its key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorabench.contract.ablation import Ablation
from lorabench.contract.hooks import Faulty
from lorabench.contract.job import Job, jobs_of
from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.workload import Workload

# Fields of a workload that came after the first published records: unset, they leave the keys as they were.
LATER = ("seed", "page_cache", "jobs", "format", "fingerprint", "drawn")
PROCESSES = 4  # of an arm that sits alone, one after the other: fewer do not show how far apart processes are


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Two arms that a design holds against each other. `toggles` are under test; none: the reference against itself.

    `kind` is the name of its kind; `kind_in_key` is off for the kinds that are older than the word, so that their keys
    stay. `timeout_s` and where it runs are not part of the content, so they do not change the key.
    """

    kind: str
    kind_in_key: bool
    model: ModelSpec
    workload: Workload
    design: str
    reference: tuple[Ablation, ...]
    candidate: tuple[Ablation, ...]
    toggles: tuple[Ablation, ...]
    trials: int
    warmup: int
    seed: int
    world_size: int = 1
    rung: int | None = None  # of a ladder, from 1; where a cell stands is no part of its content

    @property
    def key(self) -> str:
        """Hash of the content: what makes two cells the same measurement."""
        content: dict[str, Any] = {
            "model": self.model.content(),
            "workload": {k: v for k, v in self.workload.model_dump(mode="json").items() if k not in LATER or v},
            "reference": _content(self.reference),
            "candidate": _content(self.candidate),
            "toggles": _content(self.toggles),
            "design": self.design,
            "trials": self.trials,
            "warmup": self.warmup,
            "seed": self.seed,
        }
        if self.kind_in_key:
            content["kind"] = self.kind
        if self.ranks > 1:
            content["world_size"] = self.ranks
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def tested(self) -> str:
        """What is under test, in words."""
        return " + ".join(t.label for t in self.toggles) or "reference against itself"

    @property
    def title(self) -> str:
        return f"{self.model.name} @ {self.workload.name}: {self.tested}"

    @property
    def jobs(self) -> list[Job]:
        return jobs_of(self.model, self.workload, self.seed)

    @property
    def separate(self) -> bool:
        """Whether a toggle's patch reaches beyond its own model, so that the arms must not share a process."""
        return any(a.global_patch for a in (*self.reference, *self.candidate))

    @property
    def ranks(self) -> int:
        """How many processes the cell needs: one, unless an arm steps on several."""
        return max(self.ranks_of("reference"), self.ranks_of("candidate"))

    @property
    def held_weights(self) -> tuple[Ablation, ...]:
        """How both arms alike hold their frozen weights. It is then part of the model and not under test: the gate's
        gold has the same weights, and nothing is tolerated for their sake."""
        return tuple(a for a in self.reference if a.changes_weights and a in self.candidate)

    @property
    def own_weights(self) -> tuple[Ablation, ...]:
        """How the candidate holds or rounds its frozen weights where that is not how the reference does. The numbers
        are then others, and so are right gradients: it is held against plain PEFT over its own numbers in plain
        linears. A toggle that rounds the weights of linears with an adapter alone is asked where all have one."""
        everywhere = self.model.lora.target_modules in ("all-linear", Lora().target_modules)
        own = tuple(a for a in self.candidate if a.changes_weights or (a.rounds_weights and everywhere))
        return () if all(a in self.held_weights for a in own) else own

    def arm(self, name: str) -> tuple[Ablation, ...]:
        return self.reference if name == "reference" else self.candidate

    def ranks_of(self, name: str) -> int:
        """How many processes an arm steps on; an arm without a parallel toggle runs on rank 0 alone."""
        parallel = [a for a in self.arm(name) if a.parallel]
        if any(a.process_a_job for a in parallel):
            return max(1, len(self.workload.jobs))
        return self.world_size if parallel else 1

    @property
    def gpus(self) -> int:
        """How many GPUs the cell needs: one a process, unless its processes share the first one."""
        return 1 if any(a.process_a_job for a in (*self.reference, *self.candidate)) else self.ranks


def _content(ablations: Sequence[Ablation]) -> list[Any]:
    of = lambda a: dict(a.parameters) if isinstance(a, Faulty) else a.content  # noqa: E731
    return sorted(([a.name, of(a)] for a in ablations), key=lambda item: item[0])
