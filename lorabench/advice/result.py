"""What the search came to, in words: what to switch on, what it buys, what was lost, and why not the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lorabench.advice.paste import blocks
from lorabench.advice.search import Search, Toggles, makes_it_fit, named, shown_for
from lorabench.contract.cell import Cell
from lorabench.record.contrast import Speedup
from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import noise_floor
from lorabench.report.analysis import Analysis
from lorabench.report.answers import buys
from lorabench.report.cells import whole
from lorabench.report.recommendation import Recommendation, Tried
from lorabench.report.words import arrow, number, percent

NOISY = 1.0  # a noise floor: what is more than twice off says nothing of a speed-up
TOO_NOISY = "too noisy to say"
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


def recommendation(search: Search, where: str, dtype: str, command: str) -> Recommendation:
    """`where`: the machine, in words; `dtype`: the compute dtype; `command`: what the user gave."""
    analysis, itself = search.look(), search.itself
    tried = [*_tried(search, analysis)]
    return Recommendation(
        title=f"{itself.model.name} @ {itself.workload.name} on {where}",
        switch_on=[toggle.label for toggle in search.stack],
        paragraph=" ".join(_sentences(search, analysis, tried)),
        tried=tried,
        left_out=[f"{_title(cell, search)}: {why}" for cell, why in search.left_out],
        code=blocks(search.whole, dtype) if search.kept else [],
        command=command,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _sentences(search: Search, analysis: Analysis, tried: Sequence[Tried]) -> Iterator[str]:
    reference = ", ".join(a.label for a in search.itself.reference)
    if search.kept:
        yield from _bought(search, analysis)
    else:
        yield _nothing(search, analysis, reference)
    for outcome in dict.fromkeys(t.outcome for t in tried):
        if outcome not in (KEPT, NO_TIME, UNTRIED):
            yield f"{outcome.capitalize()}: {_alike([t for t in tried if t.outcome == outcome])}."
    if search.left_out:
        cells = "; ".join(f"{_title(cell, search)} ({why})" for cell, why in search.left_out)
        minutes = f"{search.budget.seconds / 60:g} minute{'s' * (search.budget.seconds != 60)}"
        yield f"Left out, for the budget is {minutes}: {cells}. The same command goes on with them."


def _alike(tried: Sequence[Tried]) -> str:
    """Those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for t in tried:
        by_reason.setdefault(t.why, []).append(t.toggles)
    return "; ".join(f"{', '.join(toggles)} ({why})" for why, toggles in by_reason.items())


def _bought(search: Search, analysis: Analysis) -> Iterator[str]:
    record = shown_for(search.records[search.whole.key], analysis)
    row: Any = analysis.row(record)
    took = arrow(row[f"{TOTAL}_reference_ms"], row[f"{TOTAL}_candidate_ms"])
    stack, reference = named(search.stack), ", ".join(record.reference)
    if makes_it_fit(record):
        yield f"Switch on {stack}: {reference} does not fit this machine, and with it a step does, in {took} ms."
    else:
        yield f"Switch on {stack}: a step of {record.model} takes {took} ms against {reference}: {buys(row)}."
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


def _nothing(search: Search, analysis: Analysis, reference: str) -> str:
    found = search.records.get(search.itself.key)
    if found is None:
        return "The budget is too small to measure even the reference against itself: give a larger budget_minutes=."
    if found.status == "oom":
        return f"{reference} does not fit this machine, and nothing that was tried makes it fit: try a smaller batch."
    if found.status != "ok":
        return f"Nothing can be said: the reference against itself came to {found.status}: {found.reason}."
    floor = analysis.row(shown_for(found, analysis))["noise_floor"]
    noise = percent(floor)
    if floor > NOISY:
        return (
            f"Nothing can be said: the reference is up to {noise} off itself, as on a machine on which other processes "
            "run. Measure again where none do, with another output=."
        )
    return (
        f"Leave {reference} as it is: nothing that was tried is clearly faster, on a machine on which the reference is "
        f"up to {noise} off itself."
    )


def _title(cell: Cell, search: Search) -> str:
    """A cell that was left out, by what it would have told."""
    if not cell.toggles:
        return "the reference against itself" + (" in processes of its own" if cell.separate else "")
    base = [t.label for t in cell.reference if t not in search.itself.reference]
    return named(cell.toggles) + (f" on top of {' + '.join(base)}" if base else "")


def _tried(search: Search, analysis: Analysis) -> Iterator[Tried]:
    """Every contender, in the order in which they were planned."""
    for cell in search.solos:
        toggles = cell.toggles
        if toggles in search.kept:
            yield Tried(toggles=named(toggles), outcome=KEPT, why=_ratio(cell, search, analysis))
        elif (record := search.records.get(cell.key)) is not None:
            yield _without(toggles, shown_for(record, analysis), search, analysis)
        elif why := next((why for left, why in search.left_out if left.key == cell.key), None):
            yield Tried(toggles=named(toggles), outcome=NO_TIME, why=why)
        elif toggles in search.in_need:
            yield Tried(toggles=named(toggles), outcome=UNTRIED, why="it saves memory, and the reference fits")


def _without(toggles: Toggles, record: Record, search: Search, analysis: Analysis) -> Tried:
    """A contender that is not on the stack."""
    name = named(toggles)
    row = analysis.row(record)
    if record.status != "ok" and not makes_it_fit(record):
        reason = str(record.reason).partition("\n")[0].removeprefix(f"{name} ")
        return Tried(toggles=name, outcome=OUTCOMES[record.status], why=reason)
    if record.status == "ok" and row["verdict"] != "faster":
        return Tried(toggles=name, outcome=row["verdict"] or "unclear", why=_as_fast(row))
    why = search.passed_over.get(name) or _rung(toggles, search, analysis)
    return Tried(toggles=name, outcome=HELPS, why=why or "there was no time to put it on top")


def _said(record: Record, analysis: Analysis) -> str:
    """Its verdict and ratio, or what it came to instead."""
    row = analysis.row(record)
    if record.status != "ok":
        return f"{OUTCOMES[record.status]}, {record.reason}"
    return f"{row['verdict'] or 'unclear'}, {_as_fast(row)}"


def _as_fast(row: Any) -> str:
    if row["verdict"] == "unclear" and _too_noisy(row):
        return TOO_NOISY
    ratio = whole(row).removeprefix("unclear ")
    return f"{ratio} × as fast" if ratio else "too few trials for a ratio"


def _too_noisy(row: Any) -> bool:
    """Whether the reference is more than twice off itself, or the candidate may be anything to more than twice off."""
    found = Speedup(row[f"{TOTAL}_speedup"], row[f"{TOTAL}_low"], row[f"{TOTAL}_high"])
    return row["noise_floor"] > NOISY or (math.isfinite(found.centre) and noise_floor(found) > NOISY)


def _below(rung: Record, search: Search) -> str:
    """What of a rung's reference the search has put there."""
    own = {a.label for a in search.itself.reference}
    return " + ".join(label for label in rung.reference if label not in own)


def _rung(toggles: Toggles, search: Search, analysis: Analysis) -> str:
    """What a contender did on top of others; '' where it was not put there."""
    cell = search.rungs.get(named(toggles))
    record = cell and search.records.get(cell.key)
    return f"on top of {_below(record, search)}: {_said(shown_for(record, analysis), analysis)}" if record else ""


def _ratio(cell: Cell, search: Search, analysis: Analysis) -> str:
    record = shown_for(search.records[cell.key], analysis)
    alone = "it makes it fit" if makes_it_fit(record) else f"alone {_said(record, analysis)}"
    return "; ".join(filter(None, (alone, _rung(cell.toggles, search, analysis))))
