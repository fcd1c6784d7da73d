"""A search over toggles whose speed is known: arms as a queue would return them, without measuring anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from helpers import cells

from lorabench.advice.known import Known, Question
from lorabench.advice.search import Step, following, seat_seconds
from lorabench.contract.ablation import Ablation
from lorabench.contract.family import REFERENCE, TWIN, Stack
from lorabench.record.schema import ArmMemory, ArmRecord, ArmTokens, Cost, Numerics
from lorabench.run.entries import NO_TIME
from lorabench.run.runner import record_of

MACHINE: Any = SimpleNamespace(device="cpu", name="a machine", gpus=0, capability=None, dtype=lambda wanted: "float32")
OPENING_S, START_S, TURN_S = 5.0, 1.0, 0.2  # of a simulated family, of an arm, of the reference's turn
GATE = Numerics(passed=True, worst="", tensors=1, grad_error=0.001, grad_allowed=0.01, loss_error=0.0)


@dataclass(frozen=True, kw_only=True)
class Faster(Ablation):
    """Makes a step so many times faster; on top of others `together` times."""

    name: ClassVar[str] = "faster"
    slot: ClassVar[str] = "third_party"
    start_s: ClassVar[float] = START_S
    found: ClassVar[int] = 0  # samples of a micro-batch, where it looks for them
    by: float = 1.0
    together: float | None = None
    noise: float = 0.0  # of its arms, beside that of all
    status: str = "ok"  # what its arms come to


def toggle(name: str, by: float = 1.0, slot: str | None = None, start_s: float = START_S, **fields: Any) -> Ablation:
    """A class of its own for each, as toggles have."""
    excludes = fields.pop("excludes", {})
    body = {"name": name, "slot": slot or f"slot_{name}", "excludes": excludes, "start_s": start_s, "__doc__": "."}
    return type(name.title(), (Faster,), body)(by=by, **fields)


def own(toggles: Sequence[Ablation]) -> list[Faster]:
    return [t for t in toggles if isinstance(t, Faster)]


def speed(toggles: Sequence[Ablation]) -> float:
    mine = own(toggles)
    return float(np.prod([t.together if t.together and len(mine) > 1 else t.by for t in mine]))


class Simulation:
    """A search that has run for some minutes. `steps`: the families it asked for, in their order; `rounds`: of each."""

    def __init__(
        self, *toggles: Ablation, minutes: float = 10, large: bool = False, arms: Sequence[ArmRecord] = (),
        in_need: Sequence[Ablation] = (), noise: float = 0.003, fails: Any = lambda stack: None, overrides: str = "",
        seed: int = 0, sooner: float = 1.0,
    ) -> None:  # fmt: skip
        """`large`: nothing fits without a toggle whose name begins with small. `fails`: of a stack the status that it
        comes to, or None. `sooner`: the share of its slowest toggle's start that a stack takes."""
        self.large, self.noise, self.fails, self.seed, self.sooner = large, noise, fails, seed, sooner
        (itself,) = cells("ablations=[]", *overrides.split())
        self.question = Question(
            itself, [(t,) for t in toggles], MACHINE, size=10**9, in_need=[(t,) for t in in_need], rounds=12
        )  # fmt: skip
        self.arms, self.steps, self.now, self.lost = list(arms), list[Step](), 0.0, dict[frozenset[str], str]()
        self.seconds, self.rounds = 60 * minutes, list[int]()
        self._known: tuple[Any, Known] | None = None
        self.seated, self.asked = frozenset[frozenset[str]](), ""  # who stays, of the family of which question
        while step := following(self.known, self.seconds - self.now, not self.steps):
            self.steps.append(step)
            self.measure(step)

    @property
    def known(self) -> Known:
        """One for as long as nothing more is measured: it keeps what it has computed."""
        state = len(self.arms), dict(self.lost), self.seated
        if self._known is None or self._known[0] != state:
            self._known = state, Known(self.question, self.arms, lost=self.lost, seated=self.seated)
        return self._known[1]

    def measure(self, step: Step) -> None:
        """As rounds go: who still sits is not prepared again, who is late is not seated, and no round begins after the
        end."""
        stays = self.seated if self.asked == step.family.question else frozenset()
        opening = 0.0 if stays else OPENING_S
        began, self.now = self.now, self.now + opening
        name, made = f"family-{len(self.arms)}", dict[str, dict[str, Any]]()
        for stack in step.family.stacks:
            status, reason = self.fate(stack), "it went wrong"
            if self.now > began + step.seat_by and not stack.is_reference:
                status, reason = "timeout", NO_TIME
            patience = seat_seconds(self.seconds, self.seconds - self.now)
            start = max([START_S, *(t.start_s for t in own(stack.ablations))]) if reason != NO_TIME else 0.0
            start *= frozenset(stack.labels) not in stays
            start *= self.sooner if len(own(stack.ablations)) > 1 else 1.0
            if start > patience:
                start, status, reason = patience, "timeout", "no answer"
                self.lost[frozenset(stack.labels)] = reason
            self.now += start
            before = opening if stack.name == REFERENCE else 0.0
            made[stack.name] = {"status": status, "start": start, "opening": before, "turns": []}
            if status != "ok":
                made[stack.name]["reason"] = reason
        rng = np.random.default_rng(len(self.arms) + 1000 * self.seed)
        seated = [stack for stack in step.family.stacks if made[stack.name]["status"] == "ok"]
        a_round = sum(TURN_S / speed(stack.ablations) for stack in seated)
        self.rounds.append(step.rounds(self.seconds - self.now, a_round))
        for _ in range(max(1, self.rounds[-1])):
            if self.now > self.seconds:
                break
            for stack in step.family.stacks:
                if made[stack.name]["status"] == "ok":
                    spread = self.noise + max((t.noise for t in own(stack.ablations)), default=0.0)
                    ms = 1000 * TURN_S / speed(stack.ablations) * float(np.exp(rng.normal(0, spread)))
                    made[stack.name]["turns"].append(ms)
                    self.now += ms / 1000
        self.seated = frozenset(frozenset(stack.labels) for stack in seated if not stack.alone)
        self.asked = step.family.question
        self.arms += [
            self.record(step, stack, name, **made[stack.name]) for stack in step.family.stacks
            if made[stack.name].get("reason") not in (NO_TIME, "no answer")
        ]  # fmt: skip

    def fate(self, stack: Stack) -> str:
        bad = next((t.status for t in own(stack.ablations) if t.status != "ok"), None)
        small = any(t.name.startswith("small") for t in own(stack.ablations))
        return bad or self.fails(stack) or ("oom" if self.large and not small else "ok")

    def record(
        self, step: Step, stack: Stack, name: str, status: str, start: float, opening: float, turns: list[float],
        reason: str = "",
    ) -> ArmRecord:  # fmt: skip
        cost = Cost(wall=opening + start + sum(turns) / 1000, build=start, spawn=opening, trials=sum(turns) / 1000)
        fields: dict[str, Any] = {"reason": reason, "cost": cost if status != "unsupported" else None}
        if status == "ok":
            phases = {phase: [ms / 3 for ms in turns] for phase in ("forward", "backward", "step")}
            rounds = list(range(len(turns)))
            fields = {
                "cost": cost, "rounds": rounds, "seats": [0] * len(turns), "phases": phases, "numerics": GATE,
                "applied": {}, "tokens": ArmTokens(real=10, trained=10, padded=0),
                "memory": ArmMemory(peak=100 if stack.is_reference else 70),
                "notes": {t.name: {"batch_size": t.found} for t in own(stack.ablations) if t.found},
            }  # fmt: skip
        return record_of(step.family, stack, "s", name=name, status=status, **fields)

    @property
    def titles(self) -> list[list[str]]:
        """The arms of each family beside the reference and the reference again."""
        return [
            ["+".join(t.name for t in own(s.ablations)) for s in step.family.stacks if s.name not in (REFERENCE, TWIN)]
            for step in self.steps
        ]

    @property
    def stack(self) -> list[str]:
        return [t.name for t in self.known.choice.toggles]
