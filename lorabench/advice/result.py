"""What the search came to, in words: what to switch on, what it buys, what was lost, and why not the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lorabench.advice.expected import Toggles
from lorabench.advice.known import Choice, Known, joined, makes_it_fit, named
from lorabench.advice.search import more
from lorabench.plan.compose import RecommendConfig
from lorabench.plan.estimate import duration
from lorabench.record.contrast import Speedup
from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import noise_floor, without_figure
from lorabench.record.words import TOO_NOISY
from lorabench.report.analysis import Row
from lorabench.report.answers import buys
from lorabench.report.cells import whole
from lorabench.report.paste import blocks, found_size, sizes
from lorabench.report.recommendation import Recommendation, Tried
from lorabench.report.words import arrow, number, percent, speedup

NOTHING_SAID = "too noisy to say"
KEPT, HELPS, NO_TIME, UNTRIED = "switch on", "helps alone", "not measured", "not tried"
OUTCOMES = {
    "wrong_numerics": "refused by the gate",
    "untrusted": "not trusted",
    "oom": "does not fit",
    "timeout": "ended by its time limit",
    "crash": "crashed",
    "unsupported": "unsupported here",
    "not_applied": "nothing to do here",
    "conflict": "cannot be on",
}  # fmt: skip


class Batch(NamedTuple):
    """Samples of a micro-batch, and how many of these make a step."""

    size: int
    steps: int

    @property
    def words(self) -> str:
        again = f", gradient_accumulation_steps={self.steps}" if self.steps > 1 else ""
        return f"per_device_train_batch_size={self.size}{again}"


def recommendation(known: Known, config: RecommendConfig, where: str, spent: float, command: str) -> Recommendation:
    """`where`: the machine, in words; `spent`: seconds; `command`: what the user gave."""
    itself, choice = known.question.itself, known.choice
    tried = [_tried(toggles, known) for toggles in known.question.contenders]
    open_, seconds = more(known)
    return Recommendation(
        title=f"{itself.model.name} @ {itself.workload.name} on {where}",
        switch_on=[toggle.label for toggle in choice.toggles],
        paragraph=" ".join(_sentences(known, config, tried)),
        tried=tried,
        left_out=[t.toggles for t in tried if t.outcome == NO_TIME],
        code=_code(known) if choice.toggles else [],
        command=command,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        spent_s=round(spent, 1),
        more=f"{open_}: about {duration(seconds)}" if open_ else "",
    )


def _sentences(known: Known, config: RecommendConfig, tried: Sequence[Tried]) -> Iterator[str]:
    itself = known.question.itself
    reference = config.reference if isinstance(config.reference, str) else ", ".join(a.label for a in itself.reference)
    if (found := _chosen(known)) is not None:
        yield from _bought(known, *found, reference)
    else:
        yield _nothing(known, reference)
    if known.families:
        batch = _batch(known)
        yield f"A micro-batch has {batch.size} samples: {batch.words}."
    if drawn := itself.workload.drawn:
        yield f"Measured on {drawn.words}."
    yield from _others([t for t in tried if t.outcome not in (KEPT, NO_TIME, UNTRIED)], config.ablations is not None)
    open_, seconds = more(known)
    if open_:
        yield f"About {duration(seconds)} more would {open_}: the same command goes on."
    ended = [named(c) for c in known.untried if c not in known.measurable]
    if ended:
        yield f"A larger budget_minutes= would give {', '.join(ended)} longer than its share of this one."
    elif known.reference and not open_:
        yield "More minutes would change nothing: every question has its answer."


def _others(tried: Sequence[Tried], asked_for: bool) -> Iterator[str]:
    """What became of the rest: by name where the user named them, else how many; the table has them all."""
    alike = {outcome: [t for t in tried if t.outcome == outcome] for outcome in dict.fromkeys(t.outcome for t in tried)}
    if asked_for:
        yield from (f"{outcome.capitalize()}: {_alike(own)}." for outcome, own in alike.items())
    elif alike:
        yield f"Others that were considered: {', '.join(f'{len(own)} {outcome}' for outcome, own in alike.items())}."


def _alike(tried: Sequence[Tried]) -> str:
    """Those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for t in tried:
        by_reason.setdefault(t.why, []).append(t.toggles)
    return "; ".join(f"{', '.join(toggles)} ({why})" for why, toggles in by_reason.items())


def _chosen(known: Known) -> tuple[Choice, Record] | None:
    """What is recommended, with its record over the user's reference; alone where it is what others stand on."""
    choice = known.choice
    if not choice.toggles or choice.told is None:
        return None
    record = choice.told.record(known.question.labels(choice.toggles)) or known.record(choice.toggles)
    return (choice, record) if record else None


def _bought(known: Known, choice: Choice, record: Record, reference: str) -> Iterator[str]:
    assert choice.told
    stack, told = named(choice.toggles), choice.told
    if known.fits:
        row: Any = told.row(record)
        took = arrow(row[f"{TOTAL}_reference_ms"], row[f"{TOTAL}_candidate_ms"])
        yield f"Switch on {stack}: a step of {record.model} takes {took} ms against {reference}: {buys(row)}."
    else:
        took = number(told.ms(known.question.labels(choice.toggles)))
        yield f"Switch on {stack}: {reference} does not fit this machine, and with it a step does, in {took} ms."
    yield f"What was lost: {_lost(record)}."


def _lost(record: Record) -> str:
    gate = record.numerics
    if gate is None:
        return "the gate had nothing to compare"
    error = ""
    if gate.grad_error is not None and gate.grad_allowed is not None:
        error = (
            f"the worst gradient is off by {number(gate.grad_error)} of its size from plain PEFT's in float32, "
            f"where {number(gate.grad_allowed)} is allowed"
        )
    if gate.tolerance:
        return f"what it changes on purpose ({gate.tolerance})" + (f": {error}" if error else "")
    return "nothing beyond rounding" + (f": {error}" if error else "")


def _nothing(known: Known, reference: str) -> str:
    found = known.reference
    if found is None:
        return "The budget is too small to measure even the reference against itself: give a larger budget_minutes=."
    if found.status == "oom":
        return f"{reference} does not fit this machine, and nothing that was tried makes it fit: try a smaller batch."
    if found.status != "ok":
        return f"Nothing can be said: the reference came to {found.status}: {found.reason}."
    floor = max((told.floor for told in known.families if told.measured(known.base)), default=0.0)
    if floor > TOO_NOISY:
        return (
            "Nothing can be said: the reference is far off itself, as on a machine on which other processes run. "
            "Measure again where none do, with another output=."
        )
    return (
        f"Leave {reference} as it is: nothing that was tried is clearly faster, on a machine on which the reference is "
        f"up to {percent(floor)} off itself."
    )


def _batch(known: Known) -> Batch:
    """As what is recommended found it, else as the workload has it."""
    load = known.question.itself.workload
    found = _chosen(known)
    size = found_size(known.choice.toggles, found[1].notes) if found else None
    size = min(size or load.batch_size, load.count)
    return Batch(size, -(-load.count // size))


def _code(known: Known) -> list[tuple[str, str, str]]:
    """With the micro-batch that was found as a setting, in place of the toggle that found it."""
    own, machine = known.question, known.question.machine
    cell = own.cell(known.choice.toggles)
    load = cell.workload.model_copy(update={"batch_size": _batch(known).size, "samples": cell.workload.count})
    kept = tuple(a for a in cell.candidate if not sizes(a))
    return blocks(replace(cell, workload=load, candidate=kept), machine.dtype(cell.model.dtype))


def _tried(toggles: Toggles, known: Known) -> Tried:
    """What became of a contender."""
    name, told = named(toggles), known.alone(toggles)
    record = told and told.record(known.question.labels(toggles))
    if record is None or told is None:
        if on_top := known.with_more_room(toggles):
            outcome = "faster" if on_top.low > 1 else "slower" if on_top.high < 1 else "unclear"
            outcome = KEPT if set(toggles) <= set(known.choice.toggles) else outcome
            return Tried(
                toggles=name,
                outcome=outcome,
                why=f"on top of {named(joined(known.around))} {speedup(on_top)} × as fast",
            )
        if toggles not in known.wanted:
            return Tried(toggles=name, outcome=UNTRIED, why="it saves memory, and the reference fits")
        why = known.lost.get(known.question.labels(toggles), "there was no time")
        return Tried(toggles=name, outcome=NO_TIME, why=why)
    row, on_top = told.row(record), _on_top(toggles, known)
    if set(toggles) <= set(known.choice.toggles):
        alone = "it makes it fit" if makes_it_fit(record) else f"alone {_as_fast(row)}"
        return Tried(toggles=name, outcome=KEPT, why="; ".join(filter(None, (alone, on_top))))
    if record.status != "ok" and not makes_it_fit(record):
        reason = str(record.reason).partition("\n")[0].removeprefix(f"{name} ")
        return Tried(toggles=name, outcome=OUTCOMES[record.status], why=reason)
    if record.status == "ok" and row["verdict"] != "faster":
        return Tried(toggles=name, outcome=row["verdict"] or "unclear", why=_as_fast(row))
    why = known.passed_over.get(toggles) or on_top or "there was no time to put it together with others"
    return Tried(toggles=name, outcome=HELPS, why=why)


def _on_top(toggles: Toggles, known: Known) -> str:
    """What a contender does on top of all others of its whole, or, where what is recommended is of another, what its
    whole does beside that; '' where that was not measured."""
    labels, told, around, chosen = known.question.labels, known.deciding, known.around, known.choice.toggles
    own = next((members for members in (around, *known.wholes) if toggles in members), [])
    whole_, others = labels(joined(own)), tuple(t for t in joined(own) if t not in toggles)
    if not own or told is None or (own is around and not others):
        return ""
    arm, together = told.arms.get(whole_), f"together with {named(others)}" if others else "alone"
    if arm and arm.status != "ok":
        return f"{together}: {OUTCOMES[arm.status]}, {arm.reason}"
    if own is around:
        found = told.beside(whole_, labels(others))
        return f"on top of {named(others)} {speedup(found)} × as fast" if found else ""
    found = told.beside(whole_, labels(chosen))
    return f"{together} {speedup(found)} × as fast as {named(chosen) or 'the reference'}" if found else ""


def _as_fast(row: Row) -> str:
    found = Speedup(row[f"{TOTAL}_speedup"], row[f"{TOTAL}_low"], row[f"{TOTAL}_high"])
    if without_figure(row["verdict"]) and (row["noise_floor"] > TOO_NOISY or noise_floor(found) > TOO_NOISY):
        return NOTHING_SAID
    ratio = re.sub("^[a-z]+ ", "", whole(row))
    return f"{ratio} × as fast" if ratio else "too few trials for a ratio"
