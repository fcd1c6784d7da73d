"""Each stack against each: direct where a record has the two as its arms, else by way of their reference."""

import math

import pytest

from lorabench.record.contrast import Speedup
from lorabench.report.analysis import Analysis
from lorabench.report.duels import (
    DIRECT,
    INDIRECT,
    REFERENCE,
    UNPAIRED,
    each_against_each,
    inverse,
    matrix,
)


def duels(records):
    analysis = Analysis(records)
    found = each_against_each(records, analysis)
    return {duel[:2]: duel for duel in found}, analysis


def test_without_a_record_of_the_two_the_reference_cancels(record):
    found, analysis = duels([record(), record(["a"], speedup=2.0), record(["b"], speedup=1.6, seed=5)])
    assert list(found) == [(REFERENCE, "a"), (REFERENCE, "b"), ("a", "b")]
    duel = found["a", "b"]
    assert duel.how == INDIRECT
    a, b = (analysis.contrasts.of(r) for r in analysis.records[1:])
    assert duel.ratio == pytest.approx(a.difference(b).speedup)
    assert duel.ratio.centre == pytest.approx(1.25, rel=0.02)


def test_where_the_reference_waits_for_its_host_it_is_the_two_times_as_they_are(record):
    idle = {"forward": {"device_busy_ms": 3.0, "label": "host-bound"}}
    records = [record(["a"], speedup=2.0), record(["b"], speedup=1.6, seed=5, roofline={"reference": idle})]
    assert duels(records)[0]["a", "b"].how == UNPAIRED


def test_the_reference_against_a_stack_is_direct_and_inverted(record):
    found, analysis = duels([record(), record(["a"], speedup=2.0)])
    duel = found[REFERENCE, "a"]
    assert duel.how == DIRECT
    assert duel.ratio == pytest.approx(inverse(analysis.speedup(analysis.records[1])))


@pytest.mark.parametrize("forward", [True, False])
def test_a_record_with_both_as_arms_is_taken_whichever_is_its_reference(record, forward):
    base = ("sdpa", "adamw_fused")
    both = [record(["a"], speedup=2.0), record(["b"], speedup=1.6, seed=5)]
    reference, candidate = ("b", "a") if forward else ("a", "b")
    ratio = 1.4 if forward else 1 / 1.4
    versus = record(
        [candidate], speedup=ratio, reference=(*base, reference), candidate=[*base, candidate], design="versus", key="v"
    )
    found, _ = duels([record(), *both, versus])
    assert found["a", "b"].how == DIRECT
    assert found["a", "b"].ratio.centre == pytest.approx(1.4, rel=0.02)
    assert set(found) == {(REFERENCE, "a"), (REFERENCE, "b"), ("a", "b")}, "its own reference is no row of this table"


def test_where_the_references_were_not_equally_fast_it_is_the_two_times_as_they_are(record):
    slow = record(["b"], speedup=1.6, seed=5).model_dump(by_alias=True)
    for phase in slow["phases"].values():
        for arm in ("reference_ms", "candidate_ms"):
            phase[arm] = [2 * ms for ms in phase[arm]]
    other = type(record()).model_validate(slow)
    found, _ = duels([record(), record(["a"], speedup=2.0), other])
    assert found["a", "b"].how == UNPAIRED
    assert found["a", "b"].ratio.centre == pytest.approx(2 * 1.25, rel=0.05)


def test_what_has_no_time_is_no_stack(record):
    found, _ = duels([record(), record(["a"], speedup=2.0), record(["b"], status="crash")])
    assert list(found) == [(REFERENCE, "a")]
    assert duels([record(["b"], status="crash")])[0] == {}


def test_inverse_turns_the_bounds_round():
    assert inverse(Speedup(2.0, 1.6, 2.5)) == pytest.approx((0.5, 0.4, 0.625))


def test_the_matrix_says_each_ratio_twice_and_marks_what_is_direct(record):
    found, _ = duels([record(), record(["a"], speedup=2.0), record(["b"], speedup=1.6, seed=5)])
    texts = {t.get_text(): t.get_weight() for t in matrix(list(found.values())).axes[0].texts}
    said = [text.split("\n")[0] for text in texts]
    for value in (found["a", "b"].ratio.centre, 1 / found["a", "b"].ratio.centre):
        assert f"{value:.2f}" in said
    assert sum(weight == "bold" for weight in texts.values()) == 4 and len(texts) == 6
    half = 50 * (found["a", "b"].ratio.high / found["a", "b"].ratio.low - 1)
    assert any(math.isclose(float(t.split("±")[1].rstrip(" %")), half, rel_tol=0.1) for t in texts)
    assert matrix([]) is None
