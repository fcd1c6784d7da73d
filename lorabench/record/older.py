"""Lines of schemas 1 and 2, which were two arms held together, as the family of these two; what lies on the disk is
never rewritten. And what can be said of two arms that were never measured together, as most of those.

Schema 1 knew one kind of cell and told two others by a flag and by the model's name; phases were fields; the total of a
limit held the reference's optimizer step, which the limit has not (a ratio of 72.71 for one of 69.83). The ratios that
stood in a line are computed anew; a total is kept, because it was rounded after it was summed up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lorabench.contract.kind import kind, registered
from lorabench.record.schema import ARMS, PAIRS, REFERENCE, SCHEMA, Record

if TYPE_CHECKING:
    from lorabench.record.contrast import Contrast

# Two families whose references are further apart than this were measured on machines too unlike for what follows.
REFERENCES_APART = 0.10


def across(
    one: tuple[Record, Contrast], other: tuple[Record, Contrast], phases: Sequence[str]
) -> tuple[Contrast | None, bool]:
    """(how many times as fast the one's candidate is as the other's, whether that is by way of the reference of both).

    Each is a record with its contrast over these phases. The ratio of the two ratios cancels what differs between two
    GPUs or their clocks. Where a reference waits for its host, or took a tenth longer in one of the two, it would bring
    in what differs between the hosts instead; then it is the ratio of the two times as they are, not paired.
    """
    from lorabench.record.contrast import contrast  # scipy, which takes longer than all that reads records

    (record, ours), (beside, theirs) = one, other
    took = [statistics.median(one.ms("reference", phases)) for one in (record, beside)]
    if abs(math.log(took[0] / took[1])) > REFERENCES_APART or _reference_waits(record):
        return contrast(beside.ms("candidate", phases), record.ms("candidate", phases), paired=False), False
    return ours.difference(theirs), True


def _reference_waits(record: Record) -> bool:
    """Whether the reference spends most of its time in phases in which the device waits for its host, by the profile: a
    short phase does on any machine."""
    profiled = record.roofline.get("reference", {})
    took = {p: statistics.median(record.ms("reference", (p,)) or [0.0]) for p in record.own_phases}
    return (
        sum(ms for p, ms in took.items() if p in profiled and profiled[p].label == "host-bound")
        > sum(took.values()) / 2
    )


class NoPair(ValueError):
    """An older line whose arms do not go together; the message says what."""


def is_made_of(family: str) -> bool:
    """Whether a family is an older line's: today's are named by a hash."""
    return " " in family


def arms(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms of a line, by today's fields: of schemas 1 and 2 a reference, as far as anything is known of it, and a
    candidate, or the reference again. What is of neither stays with the candidate, for the schema to judge."""
    if line.get("schema") not in (1, PAIRS):
        return [line]
    pair = _of_schema_1(line) if line["schema"] == 1 else dict(line)
    pair.pop("schema")
    names = {"reference": REFERENCE, "candidate": " + ".join(pair["ablations"]) or f"{REFERENCE} again"}
    roles = {"reference": "reference", "candidate": "candidate" if pair["ablations"] else "twin"}
    shown = {name: pair.pop(name) for name in ("key", "design", "rung", "ablations") if name in pair}
    toggles = {arm: pair.pop(arm) for arm in ARMS}
    turns = _turns(pair)
    failed, status = pair.pop("arm", None) or "candidate", pair.pop("status")
    of_failed = ("reason", "rank", "log", "numerics") if status != "ok" else ()
    why = {name: pair.pop(name) for name in of_failed if name in pair}
    notes, jobs, tokens = pair.pop("notes", {}), pair.pop("jobs", None), pair.pop("tokens", None)
    apart = {name: pair.pop(name, None) or {} for name in ("memory", "ranks", "roofline", "energy")}
    common = {name: pair.pop(name) for name in ("kind", "session", "replicate", "model", "workload") if name in pair}
    common |= {"schema": SCHEMA, "family": f"{common.get('kind')} {shown['key']}"}
    made = []
    for arm in ARMS:
        own = common | {"arm": names[arm], "role": roles[arm], "toggles": toggles[arm], "shown": [], "status": "ok"}
        own |= {name: of[arm] for name, of in apart.items() if arm in of} | turns[arm]
        own |= {"said": notes[arm]} if arm in notes else {}
        own |= {"tokens": _tokens(tokens, arm)} if tokens else {}
        own |= {"jobs": {name: _job(job, arm) for name, job in jobs.items()}} if jobs else {}
        if arm == "candidate":
            own |= pair | {"shown": [shown | {"against": toggles["reference"]}]}
            own["notes"] = {name: note for name, note in notes.items() if name not in ARMS}
            own |= {"applied": own.get("applied") or {}} if status == "ok" else {}
        if status != "ok" and (arm == failed or not turns[arm]):
            own |= why | {"status": status} | dict.fromkeys(("rounds", "seats"), ()) | {"phases": {}}
        if arm in ("candidate", failed) or turns[arm] or any(arm in of for of in apart.values()):
            made.append(own)
    return made


def _turns(pair: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rounds, seats and phases of each arm that has times. What ran A B B A shared neither rounds nor processes; lines
    that do not say how many those were had two of each arm."""
    phases, sizes = pair.pop("phases", None) or {}, pair.pop("processes", None) or {}
    together = pair.pop("pairing", None) != "abba"
    for name, phase in phases.items() if together and pair["status"] == "ok" else ():
        times = [phase.get(f"{arm}_ms") for arm in ARMS]
        alone = None in times and pair["kind"] in registered() and name in kind(pair["kind"]).optional
        if not alone and len({len(ms or ()) for ms in times}) > 1:
            raise NoPair(f"{name}: paired trials need lists of one length")
    found: dict[str, dict[str, Any]] = {}
    for n, arm in enumerate(ARMS):
        own = {name: phase[f"{arm}_ms"] for name, phase in phases.items() if phase.get(f"{arm}_ms")}
        count = len(next(iter(own.values()), ()))
        seats, first = [0] * count, 0
        if not together:
            of = sizes.get(arm) or [math.ceil(count / 2), count // 2]
            seats, first = [2 * k + n for k, size in enumerate(of) for _ in range(size)], n * count
        rounds = list(range(first, first + count))
        found[arm] = {"phases": own, "rounds": rounds, "seats": seats} if own else {}
    return found


def _tokens(tokens: dict[str, Any], arm: str) -> dict[str, Any]:
    return {"real": tokens["real"], "trained": tokens["trained"], "padded": tokens[f"{arm}_padded"]}


def _job(job: dict[str, Any], arm: str) -> dict[str, Any]:
    own = {"r": job["r"], "tokens": _tokens(job["tokens"], arm), "tflop": job.get("tflop", {})}
    own |= {name: job.get(name, {}).get(arm, 0) for name in ("adapter_bytes", "optimizer_bytes")}
    return own | ({"numerics": job.get("numerics")} if arm == "candidate" else {})


def _of_schema_1(line: dict[str, Any]) -> dict[str, Any]:
    """A line of schema 1 as one of schema 2."""
    name = next((k.name for k in registered().values() if k.older(line)), None)
    made = {k: v for k, v in line.items() if k not in ("limit", "bound")} | {"kind": name}
    if "bound" in line:
        made["roofline"] = line["bound"]
    if isinstance(line.get("memory"), dict):
        made["memory"] = {arm: _memory(held) for arm, held in line["memory"].items()}
    if name is not None and isinstance(line.get("phases"), dict) and not kind(name).candidate:
        made["phases"] = {p: own for p, own in line["phases"].items() if p in kind(name).phases}
    return made


def _memory(held: dict[str, Any]) -> dict[str, Any]:
    peaks = {phase: held[phase] for phase in ("forward", "backward", "step") if held.get(phase) is not None}
    return {k: v for k, v in held.items() if k not in peaks} | ({"peaks": peaks} if peaks else {})
