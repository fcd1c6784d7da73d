"""Published numbers, one file a source in claims/*.yaml, and which of our records stand beside them.

A claim is a comparison of two arms, `reference` → `candidate`, both as complete lists of toggles, so that its direction
and its baseline are written out and never guessed: "switching checkpointing off is 25–35 % faster" has a reference with
gradient_checkpointing and a candidate without. A record stands beside a claim if it tests the same toggles. Only if its
reference is the claim's too do the two numbers compare; else the record says how its baseline differs. A claim that
nothing can stand beside is `open`, with the reason.
"""

from __future__ import annotations

import csv
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from lorabench.contract.kind import kind
from lorabench.contract.memory_fit import JOBS
from lorabench.record.schema import ARMS, TOTAL, ArmMemory, ArmName, Record
from lorabench.report.contrasts import Contrasts

# A quantity is `{phase}_{measure}`: of a phase of the claim's kind, of the total, or of the peak over all phases.
SPEEDUP, SAVED, HELD = "speedup", "memory_saved_pct", "memory_gb"
PEAK = "peak"
MORE, LESS = "more", "less"
MEMORY = (SAVED, HELD)
BETTER = {SPEEDUP: MORE, SAVED: MORE, HELD: LESS}  # which way a measure is better
# What sources also state. A record holds one of these where the claim says of which phase it is, or where its kind says
# it of an arm (`quantities` in its notes).
OTHER_QUANTITIES = {
    "kernel_speedup": MORE, "tokens_s": MORE, "latency_h": LESS,
    "latency_days": LESS, "gpu_utilization_pct": MORE, "memory_traffic_saved_pct": MORE, "pipeline_bubble_pct": LESS,
    "minutes_saved_per_checkpoint": MORE, "quantizing_s": LESS, "partition_gb": LESS, "cost_usd": LESS,
    "jobs_that_fit": MORE, "jobs_that_fit_ratio": MORE,
}  # fmt: skip
TIMES = ("latency_h", "latency_days")
PASSED, BUSY, IDLE = "tokens_s", "gpu_utilization_pct", "pipeline_bubble_pct"
OF_STEPS = (*TIMES, PASSED, BUSY, IDLE)  # follow from whole steps
FIT = ("jobs_that_fit", "jobs_that_fit_ratio")  # follow from where an arm that ran out of memory had its edge
# How a number is printed → the same as a ratio of two times; every other unit is kept as it is.
AS_RATIO = {"x": lambda n: n, "% faster": lambda n: (100 + n) / 100, "% less time": lambda n: 100 / (100 - n)}

TOGETHER = ("average", "maximum")
UNKNOWN = (math.nan, math.nan, math.nan)
BY_DEFINITION = "1 by definition: others of this source are shown as their ratio to it"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tabled(Strict):
    """Which numbers of a published table that no sweep wrote stand beside a claim."""

    table: str  # a CSV file below results/
    column: str
    where: dict[str, str]  # column → value of the rows that are meant: their range is shown
    how: str  # they came to be, in words; of a simulation what was not measured


class Claim(Strict):
    """One published number, or a range of two, in the source's own words, and what would have to be measured for it."""

    id: str  # within its source
    wording: str  # the source's own words, letter by letter; the numbers stand in it
    printed: list[float] = Field(min_length=1, max_length=2)  # as the source prints them
    unit: Literal["x", "% faster", "% less time", "%", "h", "days", "min", "s", "GB", "token/s", "jobs", "$"]
    quantity: str
    kind: str = ""  # of cell that can stand beside it; the source's where the claim names none
    phase: str | None = None  # that the quantity is of, where its name does not say it
    of: str | None = None  # what was measured, where the source tells several apart
    statistic: Literal["average", "range", "maximum", "at least", "single run"]
    baseline: str  # what it was compared with, in words
    reference: list[str] = Field(default_factory=list)  # the baseline's toggles, all of them
    candidate: list[str] = Field(default_factory=list)  # the candidate's, all of them
    equivalents: list[list[str]] = Field(default_factory=list)  # toggles that stand for those which the candidate adds
    may_hold: list[str] = Field(default_factory=list)  # toggles of a record's reference that change nothing about it
    # Those without which it would compare with something else: names, or patterns of a toggle with its settings.
    must_hold: list[str] = Field(default_factory=list)
    must_not_hold: list[str] = Field(default_factory=list)  # likewise, those with which it would
    must_add: list[str] = Field(default_factory=list)  # likewise, of what a record puts on top of its reference
    forms: list[str] = Field(default_factory=list)  # of the toggles, where several are shown: likewise, with settings
    model: str | None = None  # only records of this model, or of models like this pattern (*, ?)
    workload: str | None = None  # likewise of workloads
    over: list[str] = Field(default_factory=list)  # models over whose cells it is the average or the maximum
    note: str | None = None  # how we read an ambiguous wording
    caveat: str | None = None  # where the source disagrees with itself or with its own data
    same_as: str | None = None  # id of a claim of the source that states the same in another unit
    ratio_to: str | None = None  # id of its baseline's claim: hours of another machine compare as the ratio to that one
    of_reference: bool = False  # the quantity is the baseline's own
    is_one: bool = False  # a baseline to which others are a ratio, in a unit that does not compare by itself
    open: str | None = None  # why no record can stand beside it (yet)
    simulated: Tabled | None = None  # what a simulation says until it is measured: never shown as measured
    counted: Tabled | None = None  # what was measured beside sweeps, which do not measure it
    _base: float | None = PrivateAttr(None)  # printed of the claim that `ratio_to` names

    @model_validator(mode="after")
    def _check(self) -> Claim:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.counted and (self.open or self.reference):
            raise ValueError("`counted` is for a claim that is neither open nor one of a sweep's toggles")
        if (
            not self.open
            and not self.counted
            and not self.is_one
            and (not self.reference or set(self.reference) == set(self.candidate))
        ):
            raise ValueError(
                "write out the toggles of reference and candidate, or say in `open` why no record can match"
            )
        if self.over and (self.statistic not in TOGETHER or self.measure != SPEEDUP):
            raise ValueError(f"`over` is for a speedup that is one of {', '.join(TOGETHER)}, not {self.statistic}")
        if self.simulated and self.counted:
            raise ValueError("`simulated` is for a claim that is open: what was counted needs no simulation beside it")
        if self.measure == SPEEDUP and self.unit not in AS_RATIO:
            raise ValueError(f"{self.quantity} in {self.unit!r}: a ratio is printed in {', '.join(AS_RATIO)}")
        return self

    @property
    def low(self) -> float:
        """The number, or the lower end of the range; of a ratio always as a ratio."""
        return self._read(self.printed[0])

    @property
    def high(self) -> float:
        """The number again, or the upper end; infinite for "at least"."""
        return math.inf if self.statistic == "at least" else self._read(self.printed[-1])

    def _read(self, number: float) -> float:
        if self._base is not None:
            return self._base / number if self.quantity in TIMES else number / self._base
        return AS_RATIO[self.unit](number) if self.unit in AS_RATIO else number

    @property
    def is_ratio(self) -> bool:
        """Whether it is shown and compared as a ratio; of times as a speed-up, of all else as a share of the
        baseline's."""
        return self.unit in AS_RATIO or self.ratio_to is not None

    @property
    def compared(self) -> str:
        """The quantity as it is compared."""
        return f"{self.quantity}_as_a_ratio" if self.ratio_to else self.quantity

    @property
    def measure(self) -> str:
        return self.quantity.partition("_")[2]

    @property
    def better(self) -> str:
        """Which way the quantity is better, "more" or "less"."""
        if self.ratio_to and self.quantity in TIMES:
            return MORE
        return OTHER_QUANTITIES.get(self.quantity) or BETTER[self.measure]

    @property
    def of_phase(self) -> str:
        """The phase, TOTAL or PEAK; a name that no record has for what none holds."""
        return self.phase or (TOTAL if self.quantity in OF_STEPS else self.quantity.partition("_")[0])

    @property
    def ways(self) -> list[set[str]]:
        """The sets of toggles that the candidate may add to the reference: the source's own first."""
        return [set(self.candidate) - set(self.reference), *map(set, self.equivalents)]


class Source(Strict):
    """Where claims come from. `kind`: of those claims that name none."""

    id: str
    name: str  # short, for tables
    title: str
    publisher: str
    date: str | None = None
    url: str | None = None
    hardware: str
    protocol: str
    kind: str = ""
    caveats: list[str] = Field(default_factory=list)
    text_sha256: str | None = None  # of the text that was read, its white space as single spaces; None where not quoted
    wordings_sha256: str | None = None  # of all that is quoted, when it was last found in that text
    beside: list[str] = Field(default_factory=list)  # the text's other numbers, quoted: names, versions, set-up
    claims: list[Claim]

    @model_validator(mode="after")
    def _names_are_known(self) -> Source:
        ids = [claim.id for claim in self.claims]
        for claim in self.claims:
            claim.kind = claim.kind or self.kind
            phases = (*kind(claim.kind).phases, TOTAL)
            known = {f"{p}_{m}" for p in (*phases, PEAK) for m in BETTER} | {*OTHER_QUANTITIES}
            if claim.quantity not in known or claim.phase not in (None, *phases):
                raise ValueError(f"kind {claim.kind} has no {claim.phase or ''} {claim.quantity}".replace("  ", " "))
            if ids.count(claim.id) > 1 or not {claim.same_as, claim.ratio_to} <= {None, *ids}:
                other = claim.same_as or claim.ratio_to
                raise ValueError(f"claim {claim.id}: its id is there twice, or there is no {other}")
            if claim.ratio_to:
                base = self.claims[ids.index(claim.ratio_to)]
                if base.quantity != claim.quantity:
                    raise ValueError(f"claim {claim.id}: {claim.quantity} is no ratio to {base.quantity}")
                claim._base = base.printed[0]
        return self

    @property
    def quotes(self) -> list[str]:
        """All that is quoted, white space as single spaces."""
        return [in_one_line(words) for words in (*(claim.wording for claim in self.claims), *self.beside)]

    def quotes_sha256(self) -> str:
        """What `wordings_sha256` has to be."""
        return sha256("\n".join(self.quotes))


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Match(NamedTuple):
    """A claim beside a record. low, high: the claim turned into the record's direction (inverted says whether)."""

    source: Source
    claim: Claim
    record: Record
    low: float
    high: float
    inverted: bool
    differs: str  # in words, how the record's baseline differs from the claim's; '' where it is the same
    stands_for: str  # the claim's own toggles, where the record has others in their place; else ''

    @property
    def changed(self) -> bool:
        """Whether the record's workload is not as a file has it: then its settings stand behind its name."""
        return "(" in self.record.workload


@cache
def load_claims() -> tuple[Source, ...]:
    """Every source, by file name. Raises pydantic.ValidationError for a file that is not as described here."""
    folder = files("lorabench.report") / "claims"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return tuple(Source.model_validate(yaml.safe_load(p.read_text(encoding="utf-8"))) for p in paths)


def match(records: Sequence[Record], sources: Sequence[Source] | None = None) -> list[Match]:
    """Every claim beside every record that tests the same toggles (and model, where the claim names one)."""
    found = []
    for record in records:
        if not record.is_noise_floor:
            found += about(record, record.ablations, record.reference, sources)
    return found


def about(
    record: Record, tested: Sequence[str], base: Sequence[str], sources: Sequence[Source] | None = None
) -> list[Match]:
    """Every claim about toggles that are put on top of a base, on models and in the kind of this record: of a cell its
    own, of a ladder's rung also the one that it adds to those below."""
    every = load_claims() if sources is None else sources
    pairs = [(s, c) for s in every for c in s.claims if c.reference and not c.same_as and _is_about(c, record)]
    return [m for s, c in pairs if _has(tested, c.must_add) and (m := _match(s, c, record, _names(tested), base))]


def _is_about(claim: Claim, record: Record) -> bool:
    named = claim.over or ([claim.model] if claim.model else [])
    if claim.kind != record.kind or (claim.workload and not fnmatchcase(record.workload.lower(), claim.workload)):
        return False
    return not named or any(fnmatchcase(record.model.lower(), pattern) for pattern in named)


def _match(source: Source, claim: Claim, record: Record, tested: set[str], labels: Sequence[str]) -> Match | None:
    own, base = claim.ways[0], _names(labels)
    held = [*labels, *base]
    fits = _has(held, claim.must_hold) and not any(_has(held, [pattern]) for pattern in claim.must_not_hold)
    if tested in claim.ways and fits:
        stands_for = "" if tested == own else " + ".join(t for t in claim.candidate if t in own)
        differs = _differs(claim.reference, base, claim.may_hold)
        return Match(source, claim, record, claim.low, claim.high, False, differs, stands_for)
    # The other way round: the record switches on what the source switched off. A ratio is then its inverse; what the
    # source saved is what the record spends; memory does not say.
    there = next((way for way in claim.ways if way <= base), None)
    switched_off = tested == set(claim.reference) - set(claim.candidate) and tested.issuperset(claim.must_hold)
    if switched_off and there is not None and claim.measure not in MEMORY:
        stands_for = "" if there == own else " + ".join(t for t in claim.candidate if t in own)
        baseline = [t for t in claim.candidate if t not in own] + sorted(there)
        differs = _differs(baseline, base, claim.may_hold)
        ratio = claim.measure == SPEEDUP
        low, high = (1 / claim.high, 1 / claim.low) if ratio else (claim.low, claim.high)
        return Match(source, claim, record, low, high, ratio, differs, stands_for)
    return None


def _has(toggles: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether each pattern is one of these toggles."""
    return all(any(fnmatchcase(one, pattern) for one in toggles) for pattern in patterns)


def _differs(baseline: Sequence[str], base: set[str], may_hold: Iterable[str]) -> str:
    """How a record's reference differs from a claim's baseline: `without x + y, with z`; '' where it does not."""
    lacks = " + ".join(t for t in baseline if t not in base)
    has = " + ".join(sorted(base - {*baseline, *may_hold}))
    return ", ".join(filter(None, (lacks and f"without {lacks}", has and f"with {has}")))


def _names(labels: Sequence[str]) -> set[str]:
    """Toggles without their parameters: `lora_kernels(rank=8)` is tested against claims for lora_kernels."""
    return {label.partition("(")[0].strip() for label in labels}


def whether_measured(claim: Claim, matches: Iterable[Match]) -> str:
    """In words, how a claim stands where these are all matches: measured, against which baseline, or open and why."""
    if claim.open or claim.same_as:
        return f"open: {claim.open}" if claim.open else f"the same as {claim.same_as}"
    if claim.is_one:
        return BY_DEFINITION
    if claim.counted:
        return "measured"
    done = [m for m in matches if m.claim is claim and answers(m)]
    if any(not m.differs for m in done):
        return "measured"
    return "measured against another baseline" if done else "open: not measured here"


def answers(match: Match) -> bool:
    """Whether the record says anything about the claim: it was measured, or ran out of memory where that is asked, or
    failed where the baseline's own is asked, which did not."""
    record, claim = match.record, match.claim
    if record.status == "ok" or record.arm != ARMS[1]:
        return record.status == "ok"
    return (claim.of_reference or claim.quantity in FIT) and _of_arms(record, claim) is not None


def _edge(record: Record) -> Mapping[str, Any]:
    """Of the candidate, how many jobs fit (measure/edge.py); empty where it did not run out of memory."""
    found = record.notes.get("candidate", {}).get("edge") or {}
    return found if found.get("of") == JOBS else {}


def measured(record: Record, claim: Claim, contrasts: Contrasts) -> tuple[float, float, float]:
    """Our (value, low, high) for a claim's quantity; NaN for what a record does not hold."""
    if claim.measure == SPEEDUP or (claim.ratio_to and claim.quantity in TIMES):
        return contrasts.speedup(record, (claim.of_phase,)) or UNKNOWN
    if claim.quantity == PASSED:
        return _passed(record, claim, contrasts)
    value = _of_arms(record, claim)
    return UNKNOWN if value is None else (value, math.nan, math.nan)


def _of_arms(record: Record, claim: Claim) -> float | None:
    """What needs no interval: memory, how busy the GPU was or a pipeline's were not, and what the kind says."""
    if claim.quantity in FIT:
        return _fitting(_edge(record), claim)
    if claim.quantity in SHARES:
        share = SHARES[claim.quantity]
        before, after = share(record, "reference"), share(record, "candidate")
    else:
        before, after = (_bytes(record.held(arm), claim.of_phase) for arm in ARMS)
    if claim.of_reference:
        after = before
    if claim.measure == SAVED and before and after is not None:
        return 100 * (1 - after / before)
    if claim.ratio_to and before and after is not None:
        return after / before
    if claim.measure == HELD and after is not None:
        return after / 1e9
    if claim.quantity in SHARES:
        return after
    return said(record, claim).get("value")


def _fitting(edge: Mapping[str, Any], claim: Claim) -> float | None:
    """Jobs that train together, None where the time was up before one more was tried; of the baseline, processes of one
    job each that have room beside each other."""
    together, beside = edge.get("fits"), edge.get("processes")
    if together is not None and edge.get("too_many") != together + 1:
        together = None
    if claim.quantity == "jobs_that_fit":
        return beside if claim.of_reference else together
    return together / beside if together is not None and beside else None


def _busy(record: Record, arm: ArmName) -> float | None:
    """Per cent of a step in which the GPU had at least one kernel running, which is what NVML calls utilization."""
    busy, took = 0.0, 0.0
    for name, found in record.roofline.get(arm, {}).items():
        ms = record.ms(arm, (name,))
        if found.device_busy_ms is None or not ms:
            return None
        busy, took = busy + found.device_busy_ms, took + statistics.median(ms)
    return min(100.0, 100 * busy / took) if took else None


def _idle(record: Record, arm: ArmName) -> float | None:
    """Per cent of a pipeline's step in which its stages had nothing to do, over all of them."""
    return record.notes.get(arm, {}).get("pipeline", {}).get("bubble_pct")


SHARES: dict[str, Callable[[Record, ArmName], float | None]] = {BUSY: _busy, IDLE: _idle}


def _passed(record: Record, claim: Claim, contrasts: Contrasts) -> tuple[float, float, float]:
    """Tokens a second with padding, as m-LoRA counts them: of the baseline, or as a ratio to it."""
    found, real = contrasts.speedup(record, (claim.of_phase,)), record.real_tokens
    if found is None or real is None:
        return UNKNOWN
    before, after = (real + record.padding(arm) for arm in ARMS)
    if not claim.of_reference:
        value, low, high = (ratio * after / before for ratio in found)
        return value, low, high
    return 1000 * before / statistics.median(record.ms("reference", (claim.of_phase,))), math.nan, math.nan


def said(record: Record, claim: Claim) -> Mapping[str, Any]:
    """What the kind says of the claim's quantity: `value`, and `how` it came to be; empty where it says nothing."""
    arms = [note for arm in ARMS if isinstance(note := record.notes.get(arm), Mapping)]
    return next((q[claim.quantity] for note in arms if claim.quantity in (q := note.get("quantities", {}))), {})


def tabled(found: Tabled, results: Path) -> list[float]:
    """The numbers, from the folder `results`. Raises OSError for a table that is not there, ValueError where no row is
    meant."""
    with open(results / found.table, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if found.where.items() <= row.items()]
    if not rows:
        raise ValueError(f"{found.table} has no row of {found.where}")
    return [float(row[found.column]) for row in rows]


def _bytes(held: ArmMemory, phase: str) -> int | None:
    return held.peak if phase == PEAK else (held.peaks or {}).get(phase)


def against(match: Match, value: float, low: float, high: float) -> str:
    """Our number against theirs: 'within' where the interval meets their range, else 'above', 'below'; '' for what was
    not measured, and where the two have not the same baseline."""
    low, high = (value if math.isnan(low) else low), (value if math.isnan(high) else high)
    if math.isnan(value) or match.differs:
        return ""
    if high < match.low:
        return "below"
    return "above" if low > match.high else "within"
