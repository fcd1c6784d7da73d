"""Whatever a record holds can be read again: over all of its fields, and over whatever a toggle may have noted."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record.arms import written

from lorabench.contract.kind import registered
from lorabench.record.schema import (
    TOTAL,
    ArmJob,
    ArmMemory,
    ArmRecord,
    ArmTokens,
    Cost,
    Energy,
    Numerics,
    PhaseRoofline,
    RankSpread,
    Record,
    Shown,
    Status,
    Telemetry,
)  # fmt: skip
from lorabench.record.store import Store, read_arms, read_records

ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # JSON has no surrogates; see test_odd_answers
NUMBER = st.floats()  # not finite ones too, and the smallest
MS = st.floats(min_value=1e-6, max_value=1e10)
ARMS = st.sampled_from(["reference", "candidate"])
st.register_type_strategy(str, TEXT)
st.register_type_strategy(float, NUMBER)


def full(cls: Any, **given: Any) -> Any:
    """Every field of the type drawn, not the required ones alone."""
    return st.builds(cls, **{name: ... for name in cls.model_fields if name not in given}, **given)


numerics = full(Numerics)
tokens = full(ArmTokens)
json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), NUMBER, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
jobs = st.dictionaries(
    TEXT,
    full(ArmJob, tokens=tokens, numerics=st.none() | numerics, tflop=st.dictionaries(TEXT, NUMBER, max_size=2)),
    max_size=2,
)
optional = {
    "replicate": st.integers(min_value=0), "processes": st.none(),
    "arm": st.none() | ARMS, "rank": st.none() | st.integers(), "tokens": st.dictionaries(ARMS, tokens),
    "memory": st.dictionaries(ARMS, full(ArmMemory)),
    "numerics": st.none() | numerics, "jobs": st.dictionaries(ARMS, jobs),
    "ranks": st.dictionaries(ARMS, full(RankSpread)),
    "applied": st.none() | st.dictionaries(TEXT, st.integers(), max_size=2),
    "notes": st.dictionaries(TEXT, json_like, max_size=3),
    "roofline": st.dictionaries(ARMS, st.dictionaries(TEXT, full(PhaseRoofline), max_size=2)),
    "energy": st.dictionaries(ARMS, full(Energy, joules=MS, seconds=MS)),
    "rung": st.none() | st.integers(1, 9),
    "telemetry": st.none() | full(Telemetry), "cost": st.none() | full(Cost), "log": st.none() | TEXT,
}  # fmt: skip
named = {
    **dict.fromkeys(("family", "key", "session", "model", "workload", "design"), TEXT),
    **{f: st.lists(TEXT, max_size=3) for f in ("against", "candidate", "ablations")},
    "kind": st.sampled_from(sorted(registered())),
}


@st.composite
def phases(draw: Any, kind: str, pairing: str) -> dict[str, Any]:
    made, rounds = {}, draw(st.integers(1, 4))
    size = rounds if pairing == "paired" else draw(st.integers(1, 4))
    for name in (*draw(st.sets(st.sampled_from(registered()[kind].phases), min_size=1)), TOTAL):
        reference = draw(st.lists(MS, min_size=rounds, max_size=rounds))
        candidate = draw(st.lists(MS, min_size=size, max_size=size))
        made[name] = {"reference": reference, "candidate": candidate}
    return made


@st.composite
def records(draw: Any) -> Record:
    """A record of any status, with every field that the status may have."""
    fields = {name: draw(strategy) for name, strategy in {**named, **optional}.items()}
    status = draw(st.sampled_from(get_args(Status)))
    reason = draw(TEXT) or "why"
    if status in ("ok", "oom"):
        fields["pairing"] = draw(st.sampled_from(["paired", "abba"]))
        fields["phases"] = draw(phases(fields["kind"], fields["pairing"]))
    if status == "ok":
        fields["numerics"] = draw(numerics).model_copy(update={"passed": True})
        fields |= {
            "tokens": {"candidate": draw(tokens)},
            "applied": draw(st.dictionaries(TEXT, st.integers(), max_size=2)),
        }
        reason = draw(st.none() | TEXT)
    assert {*fields, "phases", "pairing", "status", "reason"} == {*Record.model_fields}  # none is left out
    return Record(**fields, status=status, reason=reason)


shown = full(Shown, rung=st.none() | st.integers(1, 9))
of_an_arm = {
    **dict.fromkeys(("family", "session", "model", "workload", "arm"), TEXT),
    "replicate": st.integers(min_value=0), "kind": named["kind"], "toggles": st.lists(TEXT, max_size=3),
    "role": st.sampled_from(["reference", "twin", "candidate"]), "shown": st.lists(shown, max_size=2),
    "rank": optional["rank"], "trials": st.integers(1, 9), "tokens": st.none() | tokens,
    "memory": st.none() | full(ArmMemory), "jobs": st.none() | jobs,
    "ranks": st.none() | full(RankSpread), "applied": optional["applied"], "notes": optional["notes"],
    "said": optional["notes"], "roofline": st.none() | st.dictionaries(TEXT, full(PhaseRoofline), max_size=2),
    "energy": st.none() | full(Energy, joules=MS, seconds=MS),
    **{name: optional[name] for name in ("telemetry", "cost", "log")},
}  # fmt: skip


@st.composite
def arm_records(draw: Any) -> ArmRecord:
    """A line of any status, with every field that the status may have."""
    fields = {name: draw(strategy) for name, strategy in of_an_arm.items()}
    status, turns = draw(st.sampled_from(get_args(Status))), draw(st.integers(1, 4))
    numbers, ms = (
        st.lists(st.integers(0, 99), min_size=turns, max_size=turns),
        st.lists(MS, min_size=turns, max_size=turns),
    )
    fields |= {"rounds": draw(numbers), "seats": draw(numbers), "phases": {}, "reason": draw(TEXT) or "why"}
    fields["numerics"] = draw(st.none() | numerics)
    if status == "ok":
        some = draw(st.sets(st.sampled_from(registered()[fields["kind"]].phases), min_size=1))
        fields |= {"phases": {name: draw(ms) for name in some}, "reason": draw(st.none() | TEXT)}
        fields["numerics"] = fields["numerics"] and fields["numerics"].model_copy(update={"passed": True})
    assert {*fields, "status", "schema_"} == {*ArmRecord.model_fields}  # none is left out
    return ArmRecord(**fields, status=status)


def stored(record: ArmRecord) -> ArmRecord:
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder)) as store:
            store.append(record)
        (found,) = read_arms(Path(folder))
        return found


def same(a: Any, b: Any) -> bool:
    """Equal, and where both are no number, that. A note's number that is not finite comes back as its word."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and not math.isfinite(a):
        return str(float(b)) == str(a)
    return a == b


def each(examples: int) -> Any:
    """So many examples in make test, and three times as many besides."""
    return pytest.mark.parametrize("examples", [examples, pytest.param(3 * examples, marks=pytest.mark.exhaustive)])


@each(100)
def test_a_record_is_read_as_it_was_written(examples):
    settings(max_examples=examples, **ANY)(given(record=arm_records())(is_read_as_it_was_written))()


def is_read_as_it_was_written(record):
    found = stored(record)
    assert found.status == record.status, found.reason
    assert same(record.model_dump(exclude_none=True), found.model_dump(exclude_none=True))


@each(70)
def test_an_older_line_of_any_content_is_read_as_the_pair_that_it_was(examples):
    settings(max_examples=examples, **ANY)(given(pair=records())(is_read_as_the_pair_that_it_was))()


def is_read_as_the_pair_that_it_was(pair):
    """Its arms are a family; what a pair of arms has no place for (a failed arm's name, without times) may change."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = read_records(written(Path(folder), [pair]))
    same_as = ("key", "session", "replicate", "kind", "model", "workload", "design", "rung", "ablations", "against")
    of_failed = ("reason", "rank", "log") if pair.status != "ok" else ()
    for name in (*same_as, "candidate", "status", "telemetry", "cost", *of_failed):
        ours, its = (one.model_dump()[name] for one in (found, pair))
        assert same(ours, its), name
    if pair.status == "ok":
        assert found.phases.keys() <= pair.phases.keys() and found.applied == pair.applied


strange = st.recursive(
    st.one_of(st.binary(max_size=4), st.text(max_size=4), st.builds(object), st.just(len), st.complex_numbers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.tuples(inner), st.dictionaries(st.integers() | st.text(max_size=3), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=200, **ANY)
@given(notes=st.dictionaries(st.text(max_size=5), strange, max_size=2))
def test_whatever_notes_hold_the_record_can_be_read(notes):
    record = ArmRecord.model_construct(**{**BASE, "notes": notes})
    found = stored(record)
    assert found.arm == "a" and (found.status == "unsupported" or "cannot be written as JSON" in (found.reason or ""))


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"deeper": made}
    return made


@settings(max_examples=20, **ANY)
@given(depth=st.integers(1, 3000))
def test_notes_of_any_depth(depth):
    found = stored(ArmRecord.model_construct(**{**BASE, "notes": nested(depth)}))
    assert found.arm == "a" and json.loads(found.model_dump_json())["arm"] == "a"


BASE = {
    "schema_": 3, "family": "f", "session": "s", "kind": "train", "model": "m", "workload": "w", "arm": "a",
    "role": "candidate", "toggles": ["a"], "shown": [], "status": "unsupported", "reason": "why",
}  # fmt: skip
