"""Published numbers, one file a source in claims/*.yaml, and which of our records stand beside them.

A claim is a comparison: `reference` → `candidate`, both as toggles, so that its direction is written out and never
guessed: "switching checkpointing off is 25–35 % faster" has reference [gradient_checkpointing] and candidate [].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorabench.contract.kind import kind
from lorabench.record.schema import ARMS, TOTAL, ArmMemory, Record
from lorabench.report.contrasts import Contrasts, toggles

# A quantity is `{phase}_{measure}`: of a phase of the claim's kind, of the total, or of the peak over all phases.
SPEEDUP, SAVED, HELD = "speedup", "memory_saved_pct", "memory_gb"
PEAK = "peak"
# What sources also state. No record holds these, unless the claim says of which phase they are.
OTHER_QUANTITIES = (
    "attention_speedup", "kernel_speedup", "load_speedup", "tokens_s", "latency_h", "gpu_utilization_pct",
    "memory_traffic_saved_pct", "pipeline_bubble_pct", "minutes_saved_per_checkpoint",
)  # fmt: skip

TOGETHER = ("average", "maximum")
UNKNOWN = (math.nan, math.nan, math.nan)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Claim(Strict):
    """One published number (low = high) or range: `reference` and `candidate` are what tells the arms apart."""

    quantity: str
    kind: str = ""  # of cell that can stand beside it; the source's where the claim names none
    phase: str | None = None  # that the quantity is of, where its name does not say it
    low: float
    high: float
    statistic: Literal["average", "range", "maximum", "single run"]
    wording: str  # the source's own words
    baseline: str  # what it was compared with, in words
    reference: list[str] = Field(default_factory=list)
    candidate: list[str] = Field(default_factory=list)
    equivalents: list[list[str]] = Field(default_factory=list)  # other toggles that stand for `candidate`
    model: str | None = None  # only records of this model, or of models like this pattern (*, ?)
    over: list[str] = Field(default_factory=list)  # models over whose cells it is the average or the maximum
    note: str | None = None  # how we read an ambiguous wording
    unmatched: str | None = None  # why no record can stand beside it (yet)

    @model_validator(mode="after")
    def _check(self) -> Claim:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if set(self.reference) == set(self.candidate) and not self.unmatched:
            raise ValueError("reference and candidate are the same: say in `unmatched` why no record can match")
        if self.over and (self.statistic not in TOGETHER or self.measure != SPEEDUP):
            raise ValueError(f"`over` is for a speedup that is one of {', '.join(TOGETHER)}, not {self.statistic}")
        return self

    @property
    def measure(self) -> str:
        return self.quantity.partition("_")[2]

    @property
    def of_phase(self) -> str:
        """The phase, TOTAL or PEAK; a name that no record has for what none holds."""
        return self.phase or self.quantity.partition("_")[0]


class Source(Strict):
    """Where claims come from. `kind`: of those claims that name none."""

    id: str
    title: str
    publisher: str
    date: str | None = None
    url: str | None = None
    hardware: str
    protocol: str
    kind: str = ""
    caveats: list[str] = Field(default_factory=list)
    claims: list[Claim]

    @model_validator(mode="after")
    def _names_are_known(self) -> Source:
        for claim in self.claims:
            claim.kind = claim.kind or self.kind
            phases = (*kind(claim.kind).phases, TOTAL)
            known = {f"{p}_{m}" for p in (*phases, PEAK) for m in (SPEEDUP, SAVED, HELD)} | {*OTHER_QUANTITIES}
            if claim.quantity not in known or claim.phase not in (None, *phases):
                raise ValueError(f"kind {claim.kind} has no {claim.phase or ''} {claim.quantity}".replace("  ", " "))
        return self


class Match(NamedTuple):
    """A claim beside a record. low, high: the claim turned into the record's direction (inverted says whether)."""

    source: Source
    claim: Claim
    record: Record
    low: float
    high: float
    inverted: bool
    same_baseline: bool  # whether the record's reference holds the toggles of the claim's reference


@cache
def load_claims() -> tuple[Source, ...]:
    """Every source, by file name. Raises pydantic.ValidationError for a file that is not as described here."""
    folder = files("lorabench.report") / "claims"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return tuple(Source.model_validate(yaml.safe_load(p.read_text(encoding="utf-8"))) for p in paths)


def match(records: Sequence[Record], sources: Sequence[Source] | None = None) -> list[Match]:
    """Every claim beside every record that tests the same toggles (and model, where the claim names one)."""
    pairs = [(s, c) for s in (load_claims() if sources is None else sources) for c in s.claims if not c.unmatched]
    found = []
    for record in records:
        if not record.is_noise_floor:
            tested, base = _names(record.ablations), _names(record.reference)
            found += [m for s, c in pairs if _is_about(c, record) and (m := _match(s, c, record, tested, base))]
    return found


def _is_about(claim: Claim, record: Record) -> bool:
    named = claim.over or ([claim.model] if claim.model else [])
    if claim.kind != record.kind:
        return False
    return not named or any(fnmatchcase(record.model.lower(), pattern) for pattern in named)


def _match(source: Source, claim: Claim, record: Record, tested: set[str], base: set[str]) -> Match | None:
    removed = set(claim.reference) - set(claim.candidate)
    if any(tested == set(c) - set(claim.reference) for c in [claim.candidate, *claim.equivalents]):
        same = set(claim.reference) <= base
        return Match(source, claim, record, claim.low, claim.high, inverted=False, same_baseline=same)
    # The other way round: the record switches on what the source switched off. Only a ratio can be inverted.
    if tested == removed and set(claim.candidate) <= base and claim.measure == SPEEDUP:
        return Match(source, claim, record, 1 / claim.high, 1 / claim.low, inverted=True, same_baseline=True)
    return None


def _names(labels: Sequence[str]) -> set[str]:
    """Toggles without their parameters: `lora_kernels(rank=8)` is tested against claims for lora_kernels."""
    return {label.partition("(")[0].strip() for label in labels}


def measured(record: Record, claim: Claim, contrasts: Contrasts) -> tuple[float, float, float]:
    """Our (value, low, high) for a claim's quantity; NaN for what a record does not hold."""
    if claim.measure == SPEEDUP:
        return contrasts.speedup(record, (claim.of_phase,)) or UNKNOWN
    held: dict[Any, ArmMemory] = dict(record.memory or {})
    before, after = (_bytes(held.get(arm), claim.of_phase) for arm in ARMS)
    if claim.measure == SAVED and before and after is not None:
        return 100 * (1 - after / before), math.nan, math.nan
    if claim.measure == HELD and after is not None:
        return after / 1e9, math.nan, math.nan
    return UNKNOWN


def _bytes(held: ArmMemory | None, phase: str) -> int | None:
    if held is None:
        return None
    return held.peak if phase == PEAK else (held.peaks or {}).get(phase)


def outcome(match: Match, contrasts: Contrasts) -> str:
    """Our number against theirs: 'within' where the interval meets their range, else 'above', 'below', or ''."""
    return _outcome(match, *measured(match.record, match.claim, contrasts))


def _outcome(match: Match, value: float, low: float, high: float) -> str:
    low, high = (value if math.isnan(low) else low), (value if math.isnan(high) else high)
    if math.isnan(value):
        return ""
    if high < match.low:
        return "below"
    return "above" if low > match.high else "within"


def claims_frame(matches: Sequence[Match], contrasts: Contrasts) -> pd.DataFrame:
    """Claims beside our numbers, a row a pair (or a row a claim and candidate, where it is over several cells); empty
    where none applies."""
    groups: dict[Any, list[Match]] = {}
    for n, m in enumerate(matches):
        key = (id(m.claim), toggles(m.record), frozenset(m.record.reference)) if m.claim.over else n
        groups.setdefault(key, []).append(m)
    rows = [_row(m[0], contrasts) | (_over(m, contrasts) if m[0].claim.over else {}) for m in groups.values()]
    names = ["source", "model", "workload", "toggles", "quantity", "claimed_low", "claimed_high", "statistic"]
    names += ["measured", "measured_low", "measured_high", "outcome", "status", "same_baseline", "inverted"]
    return pd.DataFrame(rows, columns=pd.Index([*names, "hardware", "baseline", "wording", "note"]))


def _over(matches: Sequence[Match], contrasts: Contrasts) -> dict[str, Any]:
    """What differs from the row of the first one: the geometric mean of these cells, or the best of them."""
    claim, done = matches[0].claim, [m.record for m in matches if m.record.status == "ok"]
    found = UNKNOWN
    if done and claim.statistic == "average":
        together = contrasts.mean(done, (claim.of_phase,))
        found = together.speedup if together else UNKNOWN
    elif done:
        found = max(measured(r, claim, contrasts) for r in done)
    return {
        "model": f"{claim.statistic} of {len(done)} cells",
        "workload": "",
        **dict(zip(("measured", "measured_low", "measured_high"), found, strict=True)),
        "outcome": _outcome(matches[0], *found),
        "status": "ok" if done else matches[0].record.status,
    }


def _row(m: Match, contrasts: Contrasts) -> dict[str, Any]:
    value, low, high = measured(m.record, m.claim, contrasts)
    return {
        "source": m.source.title,
        "model": m.record.model,
        "workload": m.record.workload,
        "toggles": toggles(m.record),
        "quantity": m.claim.quantity,
        "claimed_low": m.low,
        "claimed_high": m.high,
        "statistic": m.claim.statistic,
        "measured": value,
        "measured_low": low,
        "measured_high": high,
        "outcome": _outcome(m, value, low, high),
        "status": m.record.status,
        "same_baseline": m.same_baseline,
        "inverted": m.inverted,
        "hardware": m.source.hardware,
        "baseline": m.claim.baseline,
        "wording": m.claim.wording,
        "note": m.claim.note,
    }
