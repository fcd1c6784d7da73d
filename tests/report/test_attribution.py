"""Attribution against games whose answer is known."""

import itertools
import math

import numpy as np
import pytest
from record.arms import Simulated
from record.arms import ladder as ladder_of

from lorabench.record.pairs import pairs
from lorabench.report import attribution
from lorabench.report.analysis import Analysis
from lorabench.report.contrasts import Contrasts


def factorial(record, gains, **changes):
    """Every subset of the toggles, multiplied up; `gains` also holds the extra factor of a pair."""
    players = [k for k in gains if isinstance(k, str)]
    for n in range(1, len(players) + 1):
        for chosen in itertools.combinations(players, n):
            pairs = itertools.combinations(chosen, 2)
            speed = math.prod(gains[c] for c in chosen) * math.prod(gains.get(p, 1) for p in pairs)
            peak = 8 - sum(0.5 * (1 + players.index(c)) for c in chosen)
            yield record(list(chosen), speedup=speed, design="factorial", sd=0.003, peaks=(8, peak), **changes)


def test_shapley_of_two_players_by_hand():
    # v(a) = 1, v(b) = 2, v(ab) = 5: a gets ((1 - 0) + (5 - 2)) / 2 = 2, b gets ((2 - 0) + (5 - 1)) / 2 = 3
    worth = {frozenset("a"): np.array([1.0]), frozenset("b"): np.array([2.0]), frozenset("ab"): np.array([5.0])}
    assert attribution.shapley_values("ab", worth) == {"a": pytest.approx([2.0]), "b": pytest.approx([3.0])}


def test_shapley_is_efficient_symmetric_and_gives_a_dummy_nothing():
    rng = np.random.default_rng(0)
    subsets = [frozenset(s) for n in (1, 2, 3) for s in itertools.combinations("abc", n)]
    worth = {s: rng.normal(size=1) for s in subsets}
    assert sum(attribution.shapley_values("abc", worth).values()) == pytest.approx(worth[frozenset("abc")])
    equal = {s: np.array([float(len(s & {"a", "b"}) ** 2)]) for s in subsets}  # c adds nothing, a and b are alike
    values = attribution.shapley_values("abc", equal)
    assert values["c"] == pytest.approx([0.0])
    assert values["a"] == pytest.approx(values["b"])


def test_shapley_of_a_factorial_shares_the_interaction(record):
    records = [record([], design="factorial"), *factorial(record, {"a": 1.5, "b": 1.2, ("a", "b"): 0.81})]
    split = attribution.shapley(records, Contrasts())
    assert split.factors["a"].centre == pytest.approx(1.5 * 0.9, rel=0.01)
    assert split.factors["b"].centre == pytest.approx(1.2 * 0.9, rel=0.01)
    assert split.factors["a"].low < 1.35 < split.factors["a"].high
    assert split.saved_bytes == {"a": pytest.approx(0.5 * 2**30), "b": pytest.approx(1.0 * 2**30)}
    assert (split.missing, split.left_out) == ((), ())


def test_shapley_with_missing_cells_names_them_and_keeps_the_complete_part(record):
    records = list(factorial(record, {"a": 1.5, "b": 1.2, "c": 1.1}))
    lost = [r for r in records if set(r.ablations) == {"b", "c"}]
    failed = record(["b", "c"], design="factorial", status="oom", arm="candidate")
    split = attribution.shapley([failed if r in lost else r for r in records], Contrasts())
    assert split.players == ("a", "b")
    assert (split.left_out, split.missing) == (("c",), (("b", "c"),))
    assert attribution.shapley([r for r in records if len(r.ablations) == 1], Contrasts()) is None


def test_pairwise_interaction_recovers_the_extra_factor(record):
    (found,) = attribution.interactions(list(factorial(record, {"a": 1.5, "b": 1.2, ("a", "b"): 0.8})), Contrasts())
    assert {found.first, found.second} == {"a", "b"}
    assert found.effect.low < 0.8 < found.effect.high
    assert found.effect.high < 0.83


def test_ladder_increments_multiply_up_and_a_failed_rung_has_none(record):
    names, speeds = ["a", "b", "c"], [1.2, 1.5, 1.35]
    steps = [record(names[: i + 1], speedup=s, design="ladder") for i, s in enumerate(speeds)]
    rungs = attribution.ladder([steps[2], record([], design="ladder"), steps[0], steps[1]], Contrasts())  # any order
    assert [r.added for r in rungs] == names
    product = math.prod(r.increment.centre for r in rungs)
    assert product == pytest.approx(rungs[-1].cumulative.centre)
    assert rungs[2].increment.high < 1 < rungs[1].increment.low
    broken = record(["a", "b"], design="ladder", status="crash")
    rungs = attribution.ladder([steps[0], broken, steps[2]], Contrasts())
    assert [r.increment is None for r in rungs] == [False, True, True]
    assert rungs[2].cumulative.centre == pytest.approx(1.35, rel=0.02)


def test_a_rung_in_the_slot_of_the_one_below_stands_on_it_and_one_that_did_not_apply_carries_nothing(record):
    made = [
        record(["adamw"], speedup=1.1, design="ladder", rung=1),
        record(["adamw_fused"], speedup=1.3, design="ladder", rung=2),
        record(["adamw_fused", "flash"], status="unsupported", design="ladder", rung=3),
        record(["adamw_fused", "packing"], speedup=2.6, design="ladder", rung=4),
    ]
    rungs = attribution.ladder(made[::-1], Contrasts())  # the rung decides, whatever the order
    assert [r.added for r in rungs] == ["adamw", "adamw_fused", "flash", "packing"]
    assert [r.below and r.below.ablations for r in rungs] == [
        None, ["adamw"], ["adamw_fused"], ["adamw_fused"],
    ]  # fmt: skip
    assert rungs[1].increment.centre == pytest.approx(1.3 / 1.1, rel=0.02)
    assert rungs[3].increment.centre == pytest.approx(2.0, rel=0.02)
    assert rungs[3].before == rungs[1].after and math.isnan(rungs[2].after)


def test_milliseconds_of_a_ladder_add_up_on_a_machine_that_changes_its_pace():
    made = Simulated()
    made._drift[15:] /= 2  # in the middle of the rounds, which all rungs share
    arms = ladder_of(made, {"a": 1.2, "b": 2.0, "c": 4.0})
    analysis = Analysis(pairs(arms), arms=arms)
    rungs = attribution.ladder(analysis.groups[0].records, analysis.contrasts)
    start = rungs[0].before
    assert start + sum(r.after - r.before for r in rungs) == pytest.approx(rungs[-1].after)
    assert start / rungs[1].after == pytest.approx(2.0, rel=0.02)
    assert not rungs[1].unpaired and rungs[1].increment.centre == pytest.approx(2.0 / 1.2, rel=0.02)


def test_rungs_that_shared_no_rounds_on_machines_of_another_pace_have_their_own_times(record, on_a_faster_host):
    steps = [record(list("ab"[: n + 1]), speedup=s, design="ladder", rung=n + 1) for n, s in enumerate((1.2, 2.0))]
    rungs = attribution.ladder([steps[0], on_a_faster_host(steps[1])], Contrasts())
    assert rungs[1].unpaired and rungs[1].increment.centre == pytest.approx(2 * 2.0 / 1.2, rel=0.03)
    assert rungs[0].before + sum(r.after - r.before for r in rungs) == pytest.approx(rungs[-1].after)


def test_shapley_finds_the_cells_that_another_design_has_measured(record):
    records = list(factorial(record, {"a": 1.5, "b": 1.2}))
    shared = [r.model_copy(update={"design": "ladder"}) if r.ablations == ["a"] else r for r in records]
    strange = record(["z"], speedup=9.0)
    assert attribution.shapley([*shared, strange], Contrasts()).players == ("b", "a")


def test_leave_one_out_is_ordered_by_worth(record):
    cells = [record(["a"], reference=("b",), speedup=1.1), record(["b"], reference=("a",), speedup=1.6)]
    cells = [c.model_copy(update={"design": "leave_one_out"}) for c in cells]
    found = attribution.leave_one_out([*cells, record(["x"], speedup=9.0)], Contrasts())
    assert [x.toggle for x in found] == ["b", "a"]
    assert found[0].speedup.centre == pytest.approx(1.6, rel=0.02)
