"""Published numbers, one file a source in claims/*.yaml, and which of our records stand beside them.

A claim is a comparison: `reference` → `candidate`, both as toggles, so that its direction is written out and never
guessed: "switching checkpointing off is 25–35 % faster" has reference [gradient_checkpointing] and candidate [].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorabench.report.analysis import mean_speedup, phase_speedup, toggles
from lorabench.record.schema import Record

LINEAR = "linear"
Quantity = Literal[
    "forward_speedup", "backward_speedup", "step_speedup", "total_speedup",
    "forward_memory_saved_pct", "backward_memory_saved_pct", "peak_memory_saved_pct", "peak_memory_gb",
    "attention_speedup", "kernel_speedup", "load_speedup", "tokens_s", "latency_h", "gpu_utilization_pct",
    "memory_traffic_saved_pct", "pipeline_bubble_pct", "minutes_saved_per_checkpoint",
]  # fmt: skip

TOGETHER = ("average", "maximum")
UNKNOWN = (math.nan, math.nan, math.nan)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Claim(Strict):
    """One published number (low = high) or range: `reference` and `candidate` are what tells the arms apart."""

    quantity: Quantity
    low: float
    high: float
    statistic: Literal["average", "range", "maximum", "single run"]
    wording: str  # the source's own words
    baseline: str  # what it was compared with, in words
    reference: list[str] = Field(default_factory=list)
    candidate: list[str] = Field(default_factory=list)
    equivalents: list[list[str]] = Field(default_factory=list)  # other toggles that stand for `candidate`
    model: str | None = None
    over: list[str] = Field(default_factory=list)  # models over whose cells it is the average or the maximum
    note: str | None = None  # how we read an ambiguous wording
    unmatched: str | None = None  # why no record can stand beside it (yet)

    @model_validator(mode="after")
    def _check(self) -> Claim:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if set(self.reference) == set(self.candidate) and not self.unmatched:
            raise ValueError("reference and candidate are the same: say in `unmatched` why no record can match")
        if self.over and (self.statistic not in TOGETHER or not self.quantity.endswith("speedup")):
            raise ValueError(f"`over` is for a speedup that is one of {', '.join(TOGETHER)}, not {self.statistic}")
        return self


class Source(Strict):
    """Where claims come from."""

    id: str
    title: str
    publisher: str
    date: str | None = None
    url: str | None = None
    hardware: str
    protocol: str
    caveats: list[str] = Field(default_factory=list)
    claims: list[Claim]


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
    found = [_match(s, c, r) for r in records if not r.is_noise_floor for s, c in pairs]
    return [m for m in found if m]


def _match(source: Source, claim: Claim, record: Record) -> Match | None:
    named = claim.over or ([claim.model] if claim.model else [])
    if named and record.model.lower() not in named:
        return None
    # A kernel's own speed stands beside single linears and nothing else does: a whole model's speed says nothing there.
    if record.model.startswith(f"norm-{LINEAR}-"):
        return None
    if record.model.startswith(f"{LINEAR}-") != (claim.quantity == "kernel_speedup"):
        return None
    tested, base = _names(record.ablations), _names(record.reference)
    removed = set(claim.reference) - set(claim.candidate)
    if any(tested == set(c) - set(claim.reference) for c in [claim.candidate, *claim.equivalents]):
        same = set(claim.reference) <= base
        return Match(source, claim, record, claim.low, claim.high, inverted=False, same_baseline=same)
    # The other way round: the record switches on what the source switched off. Only a ratio can be inverted.
    if tested == removed and set(claim.candidate) <= base and claim.quantity.endswith("speedup"):
        return Match(source, claim, record, 1 / claim.high, 1 / claim.low, inverted=True, same_baseline=True)
    return None


def _names(labels: Sequence[str]) -> set[str]:
    """Toggles without their parameters: `lora_kernels(rank=8)` is tested against claims for lora_kernels."""
    return {label.partition("(")[0].strip() for label in labels}


def measured(record: Record, quantity: str) -> tuple[float, float, float]:
    """Our (value, low, high) for a claim's quantity; NaN for what a record of a training step does not hold."""
    phase, kind = _phase(quantity)
    if kind == "speedup":
        return phase_speedup(record, phase) or UNKNOWN
    memory = record.memory or {}
    before, after = (_held(memory.get(arm), phase) for arm in ("reference", "candidate"))
    if kind == "memory_saved_pct" and before and after is not None:
        return 100 * (1 - after / before), math.nan, math.nan
    if kind == "memory_gb" and after is not None:
        return after / 1e9, math.nan, math.nan
    return UNKNOWN


def _held(memory: Any, phase: str) -> int | None:
    return (memory.peaks or {}).get(phase, memory.peak if phase == "peak" else None) if memory else None


def _phase(quantity: str) -> tuple[str, str]:
    """(phase, kind). A kernel is a single linear, see `_match`: its total is the kernels' own time."""
    phase, _, kind = quantity.partition("_")
    return "total" if phase == "kernel" else phase, kind


def outcome(match: Match) -> str:
    """Our number against theirs: 'within' where the interval meets their range, else 'above', 'below', or ''."""
    return _outcome(match, *measured(match.record, match.claim.quantity))


def _outcome(match: Match, value: float, low: float, high: float) -> str:
    low, high = (value if math.isnan(low) else low), (value if math.isnan(high) else high)
    if math.isnan(value):
        return ""
    if high < match.low:
        return "below"
    return "above" if low > match.high else "within"


def claims_frame(records: Sequence[Record], sources: Sequence[Source] | None = None) -> pd.DataFrame:
    """Claims beside our numbers, a row a pair (or a row a claim and candidate, where it is over several cells); empty
    where none applies."""
    groups: dict[Any, list[Match]] = {}
    for n, m in enumerate(match(records, sources)):
        key = (id(m.claim), toggles(m.record), frozenset(m.record.reference)) if m.claim.over else n
        groups.setdefault(key, []).append(m)
    rows = [_row(found[0]) | (_over(found) if found[0].claim.over else {}) for found in groups.values()]
    names = ["source", "model", "workload", "toggles", "quantity", "claimed_low", "claimed_high", "statistic"]
    names += ["measured", "measured_low", "measured_high", "outcome", "status", "same_baseline", "inverted"]
    return pd.DataFrame(rows, columns=pd.Index([*names, "hardware", "baseline", "wording", "note"]))


def _over(matches: Sequence[Match]) -> dict[str, Any]:
    """What differs from the row of the first one: the geometric mean of these cells, or the best of them."""
    claim, done = matches[0].claim, [m.record for m in matches if m.record.status == "ok"]
    found = UNKNOWN
    if done and claim.statistic == "average":
        found = mean_speedup(done, _phase(claim.quantity)[0]) or UNKNOWN
    elif done:
        found = max(measured(r, claim.quantity) for r in done)
    return {
        "model": f"{claim.statistic} of {len(done)} cells",
        "workload": "",
        **dict(zip(("measured", "measured_low", "measured_high"), found, strict=True)),
        "outcome": _outcome(matches[0], *found),
        "status": "ok" if done else matches[0].record.status,
    }


def _row(m: Match) -> dict[str, Any]:
    value, low, high = measured(m.record, m.claim.quantity)
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
        "outcome": outcome(m),
        "status": m.record.status,
        "same_baseline": m.same_baseline,
        "inverted": m.inverted,
        "hardware": m.source.hardware,
        "baseline": m.claim.baseline,
        "wording": m.claim.wording,
        "note": m.claim.note,
    }
