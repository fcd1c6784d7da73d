"""A family's arms as a sweep writes them, with simulated times of known ratios.

A turn takes what the arm takes, times what the round and the process do to every arm in it, times noise of its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorabench.contract.kind import kind
from lorabench.record.schema import ARMS, ArmRecord, Record, Shown

BASE = ["sdpa", "padding"]
SHARES = {"forward": 0.3, "backward": 0.6, "step": 0.1, "read": 0.5, "place": 0.5, "score": 1.0}
FOUR = 4  # seats of an arm that sits alone


def shown(own: Sequence[str], against: Sequence[str] = tuple(BASE), design: str = "solo", **more: Any) -> Shown:
    """A contrast as a design asks for it; `own` are the toggles under test."""
    key = "|".join([design, *sorted(own), "over", *sorted(against)])
    return Shown.model_validate({"key": key, "design": design, "ablations": list(own), "against": list(against)} | more)


class Simulated:
    """A family whose arms are made one by one. `process`: how far processes differ (standard deviation of the log)."""

    def __init__(self, rounds: int = 30, *, sd: float = 0.004, process: float = 0.0, seed: int = 0, **common: Any):
        self.rounds, self.sd, self.process, self.seed = rounds, sd, process, seed
        self.common: dict[str, Any] = {
            "family": "f", "session": "s1", "kind": "train", "model": "smollm2-135m", "workload": "alpaca",
        } | common  # fmt: skip
        self._seats = 0
        self._drift = np.exp(np.cumsum(np.random.default_rng(seed).normal(0, 0.01, rounds)))

    def arm(
        self, own: Sequence[str] = (), speedup: float = 1.0, *, alone: bool = False, status: str = "ok",
        name: str | None = None, base: Sequence[str] = tuple(BASE), both: bool = False,
        rounds: Sequence[int] | None = None, skip: Sequence[str] = (), **fields: Any,
    ) -> ArmRecord:  # fmt: skip
        """An arm with these toggles over the base. alone: in four seats of its own; both: in seat 0 as well.
        skip: phases that it does without. Everything else is a field of the record."""
        toggles = [*base, *own]
        made: dict[str, Any] = {
            **self.common, "arm": name or " + ".join(own) or "reference", "toggles": toggles, "status": status,
            "role": "candidate", "shown": [shown(own)] if own else [],
            "cost": {"wall": 4.0, "trials": 3.0, "build": 0.5}, "applied": dict.fromkeys(own, 30),
        }  # fmt: skip
        if not own:
            made["role"] = "reference"
        if status != "ok":
            return ArmRecord.model_validate(made | {"reason": f"{status} because of a cause"} | fields)
        turns = self._turns(range(self.rounds) if rounds is None else rounds, alone, both)
        made |= {"rounds": [r for r, _ in turns], "seats": [s for _, s in turns]}
        of_kind = kind(fields.get("kind", made["kind"]))
        random = np.random.default_rng(zlib.crc32(f"{made['arm']}{self.seed}".encode()))
        made["phases"] = {
            p: [
                100 * SHARES[p] / speedup * self._drift[r] * self._effect(s) * float(np.exp(random.normal(0, self.sd)))
                for r, s in turns
            ]
            for p in of_kind.phases
            if p in SHARES and p not in skip
        }
        made["tokens"] = {"real": 4000, "trained": 3000, "padded": 0 if "packing" in own else 1000}
        made["memory"] = {"peak": 2**33 - 2**30 * len(own)}
        if of_kind.candidate:
            made["numerics"] = {"passed": True, "worst": "", "tensors": 56, "grad_error": 0.004, "grad_allowed": 0.02}
        return ArmRecord.model_validate(made | fields)

    def twin(self, *, alone: bool = False, **fields: Any) -> ArmRecord:
        """The reference again. alone: in seats of its own as well, as where other arms sit alone."""
        own = {"name": "reference again", "role": "twin", "shown": [shown([])]}
        return self.arm(alone=alone, **own | {"both": alone} | fields)

    def limit(self, speedup: float = 2.0, **fields: Any) -> ArmRecord:
        """The least work, which has no step."""
        return self.arm(["frozen_limit"], speedup, kind="limit", **fields)

    def _turns(self, rounds: Sequence[int], alone: bool, both: bool) -> list[tuple[int, int]]:
        here = [(r, 0) for r in rounds] if both or not alone else []
        if not alone:
            return here
        first, self._seats = self._seats + 1, self._seats + FOUR
        return here + [(r, first + r % FOUR) for r in rounds]

    def _effect(self, seat: int) -> float:
        return float(np.exp(self.process * np.random.default_rng([self.seed, seat]).normal()))


def ladder(simulated: Simulated, speeds: dict[str, float]) -> list[ArmRecord]:
    """Reference, twin, and one arm a rung: over the start, and from the second on over the rung below it too."""
    made = [simulated.arm(), simulated.twin(shown=[shown([], design="ladder")])]
    standing: list[str] = []
    for number, (name, speedup) in enumerate(speeds.items(), start=1):
        below, standing = standing, [*standing, name]
        contrasts = [shown(standing, design="ladder", rung=number)]
        if below:
            contrasts.append(shown([name], [*BASE, *below], design="steps", rung=number))
        made.append(simulated.arm(standing, speedup, shown=contrasts))
    return made


def tokens(real: int, trained: int, reference: int = 0, candidate: int = 0) -> dict[str, Any]:
    """Of both arms; the last two are what each pads."""
    padded = zip(ARMS, (reference, candidate), strict=True)
    return {arm: {"real": real, "trained": trained, "padded": own} for arm, own in padded}


def slower(pair: Record, by: Any, *arms: str) -> Record:
    """The same, but these arms (or else both) took so many times as long, in each trial or in all."""
    longer = {arm: by if arm in (arms or ARMS) else 1.0 for arm in ARMS}
    phases = {p: {a: list(np.array(ms) * longer[a]) for a, ms in own.items()} for p, own in pair.phases.items()}
    return pair.model_copy(update={"phases": phases})


def line_of(one: Any) -> dict[str, Any]:
    """As it stands in records.jsonl: an arm as it is, a pair as schema 2 had it."""
    made = json.loads(one.model_dump_json(by_alias=True, exclude_none=True))
    if "schema" in made:
        return made
    del made["family"]
    made["reference"] = made.pop("against")
    by_arm = {name: made.pop(name) for name in ("phases", "tokens", "jobs")}
    made["phases"] = {p: {f"{arm}_ms": ms for arm, ms in own.items()} for p, own in by_arm["phases"].items()}
    made["tokens"] = _tokens_of_pair(by_arm["tokens"])
    jobs: dict[str, dict[str, Any]] = {}
    for arm, own in by_arm["jobs"].items():
        for name, job in own.items():
            jobs.setdefault(name, {})[arm] = job
    made["jobs"] = {name: _job_of_pair(own) for name, own in jobs.items()}
    return {"schema": 2} | {name: value for name, value in made.items() if value != {} or name in ("notes", "applied")}


def _tokens_of_pair(own: dict[str, Any]) -> dict[str, Any]:
    if not own:
        return {}
    one = own.get("candidate") or own["reference"]
    padded = {f"{arm}_padded": own[arm]["padded"] if arm in own else 0 for arm in ARMS}
    return {"real": one["real"], "trained": one["trained"]} | padded


def _job_of_pair(own: dict[str, Any]) -> dict[str, Any]:
    one = own.get("candidate") or own["reference"]
    bytes_of = {name: {arm: job[name] for arm, job in own.items()} for name in ("adapter_bytes", "optimizer_bytes")}
    return one | bytes_of | {"tokens": _tokens_of_pair({arm: job["tokens"] for arm, job in own.items()})}


def written(folder: Path, arms: Sequence[Any], session: dict[str, Any] | None = None) -> Path:
    """A results folder with these lines; of pairs they are of schema 2, as older sweeps wrote them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(line_of(arm))}\n" for arm in arms))
    environment = {"schema": 1, "sessions": [session or {"id": "s1", "commit": "c"}]}
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder
