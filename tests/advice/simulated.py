"""A search over toggles whose speed is known: records as a sweep would leave them, without measuring anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from helpers import cells

from lorabench.advice.budget import Budget
from lorabench.advice.search import Search
from lorabench.contract.ablation import Ablation, combine
from lorabench.contract.cell import Cell
from lorabench.record.schema import ArmMemory, Cost, Numerics, Phase, Record, Tokens
from lorabench.report.analysis import Analysis
from lorabench.run.runner import record_of

MACHINE: Any = SimpleNamespace(device="cpu", name="a machine", gpus=0, capability=None, dtype=lambda wanted: "float32")
STEP_S = 10.0  # what a simulated cell takes


@dataclass(frozen=True, kw_only=True)
class Faster(Ablation):
    """Makes a step so many times faster; on top of others `together` times."""

    name: ClassVar[str] = "faster"
    slot: ClassVar[str] = "third_party"
    by: float = 1.0
    together: float | None = None
    status: str = "ok"  # what its cells come to


def toggle(name: str, by: float = 1.0, slot: str | None = None, **fields: Any) -> Ablation:
    """A class of its own for each, as toggles have."""
    excludes = fields.pop("excludes", {})
    body = {"name": name, "slot": slot or f"slot_{name}", "excludes": excludes, "__doc__": "simulated"}
    return type(name.title(), (Faster,), body)(by=by, **fields)


class Clock:
    """Stands for time.monotonic: a cell moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulated(cell: Cell, number: int, *, large: bool = False, seconds: float = STEP_S, noise: float = 0.005) -> Record:
    """What this cell comes to. large: the reference without any toggle does not fit."""
    bad = next((t for t in cell.candidate if isinstance(t, Faster) and t.status != "ok"), None)
    cost = Cost(wall=seconds)
    if bad and bad.status == "unsupported":
        return record_of(cell, "s", status="unsupported", reason=f"{bad.label} needs the package x: pip install x")
    if bad:
        return record_of(cell, "s", status=bad.status, reason=f"{bad.label} went wrong", arm="candidate", cost=cost)
    rng = np.random.default_rng(number)
    factors = [speed(arm) for arm in (cell.reference, cell.candidate)]
    times = [list(100 / f * np.exp(rng.normal(0, noise, 20))) for f in factors]
    small = [any(getattr(t, "name", "").startswith("small") for t in arm) for arm in (cell.reference, cell.candidate)]
    if large and not all(small):
        held = {"reference": None if not small[0] else times[0], "candidate": None if not small[1] else times[1]}
        phases = (
            {"total": Phase(reference_ms=held["reference"], candidate_ms=held["candidate"])} if any(small) else None
        )
        arm = "candidate" if small[0] else "reference"
        return record_of(cell, "s", status="oom", reason="no room", arm=arm, phases=phases, pairing="paired", cost=cost)
    names = ("forward", "backward", "step", "total")
    phases = {
        n: Phase(
            reference_ms=times[0], candidate_ms=times[1], speedup=1.0, low=factors[1] / factors[0] * 0.99, high=9.0
        )
        for n in names
    }
    gate = Numerics(passed=True, worst="", tensors=1, grad_error=0.001, grad_allowed=0.01, loss_error=0.0)
    return record_of(
        cell, "s", status="ok", pairing="abba" if cell.separate else "paired", phases=phases, numerics=gate, cost=cost,
        tokens=Tokens(real=10, trained=10, reference_padded=0, candidate_padded=0), applied={},
        memory={"reference": ArmMemory(peak=100), "candidate": ArmMemory(peak=70)},
    )  # fmt: skip


def speed(arm: tuple[Ablation, ...]) -> float:
    own = [t for t in arm if isinstance(t, Faster)]
    return float(np.prod([t.together if t.together and len(own) > 1 else t.by for t in own]))


class Simulation:
    """A search that has run. `order`: the cells in the order in which they were measured."""

    def __init__(
        self, *toggles: Ablation, minutes: float = 60, large: bool = False, records: Any = None, in_need: Any = (),
        takes: Any = None, noise: float = 0.005, monkeypatch: Any = None,
    ) -> None:  # fmt: skip
        clock = Clock()
        monkeypatch.setattr("lorabench.advice.budget.time", SimpleNamespace(monotonic=clock))
        self.records: list[Record] = list(records or ())
        itself = cells("ablations=[]")[0]
        solos = [
            replace(itself, toggles=(t,), candidate=tuple(combine(itself.reference, [t]))) for t in toggles
        ]  # fmt: skip
        known = {r.key: r for r in self.records}
        self.search = Search(
            [itself, *solos], MACHINE, Budget(minutes, lambda cell: STEP_S), lambda: Analysis(self.records),
            in_need=[(t,) for t in in_need], records=known,
        )  # fmt: skip
        for cell in [itself, *solos]:
            if cell.key in known:
                self.search.budget.learn(cell, known[cell.key])
        self.order: list[Cell] = []
        for cell in self.search.cells():
            self.order.append(cell)
            seconds = (takes or {}).get(cell.toggles[0].name if cell.toggles else "", STEP_S)
            record = simulated(cell, len(self.records), large=large, seconds=seconds, noise=noise)
            clock.now += record.cost.wall if record.cost else 0
            self.records.append(record)
            self.search.learn(cell, record)

    @property
    def titles(self) -> list[str]:
        """What was measured: the toggles, and after a bar what they were put on."""
        base = {a.label for a in self.search.itself.reference}
        return [
            "+".join(t.name for t in c.toggles)
            + "".join(f" | {a.name}" for a in c.reference if a.label not in base)
            for c in self.order
        ]  # fmt: skip

    @property
    def stack(self) -> list[str]:
        return [t.name for t in self.search.stack]
