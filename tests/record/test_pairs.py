"""Pairs made on reading: which turns go together, what a pair says of its arms, and what becomes of one that failed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from record.arms import BASE, Simulated, ladder, shown, written

from lorabench.contract.names import NameUnknown
from lorabench.record.contrast import contrast
from lorabench.record.pairs import Siblings, by_place, pairs
from lorabench.record.schema import ARMS, ArmJob, Record
from lorabench.record.store import RecordError, Store, read_arms, read_records


def by_name(records):
    return {" + ".join(r.ablations) or f"again, {r.pairing}": r for r in records}


def times(record, arm, phase="total"):
    return record.ms(arm, (phase,))


def ratio(record):
    found = contrast(times(record, "reference"), times(record, "candidate"), record.pairing != "abba",
                     processes=record.trials_by_process)  # fmt: skip
    return found.centre


@pytest.fixture
def simulated():
    return Simulated()


# -- which turns go together ------------------------------------------------------------------------------------------


def test_arms_of_one_seat_are_paired_over_the_rounds_that_both_had(simulated):
    reference, fast = simulated.arm(), simulated.arm(["a"], 1.5)
    slow = simulated.arm(["b"], 0.25, rounds=[29, 3, 7, 11, 19, 23])
    first, second = pairs([reference, fast, slow])
    assert (first.pairing, first.processes, len(times(first, "reference"))) == ("paired", None, 30)
    assert times(first, "candidate", "forward") == fast.phases["forward"]
    wanted = [reference.phases["forward"][r] for r in (3, 7, 11, 19, 23, 29)]
    assert times(second, "reference", "forward") == wanted
    assert times(second, "candidate", "forward") == [slow.phases["forward"][i] for i in (1, 2, 3, 4, 5, 0)]
    assert (ratio(first), ratio(second)) == pytest.approx((1.5, 0.25), rel=0.01)


@pytest.mark.parametrize(("field", "empty"), [("phases", {}), ("pairing", None), ("applied", None), ("tokens", {})])
def test_a_pair_that_was_measured_says_how_and_what_came_out(simulated, field, empty):
    (pair,) = pairs([simulated.arm(), simulated.arm(["a"])])
    with pytest.raises(ValueError, match=rf"status ok needs \['{field}'\]"):
        Record.model_validate(pair.model_dump() | {field: empty})


def test_the_total_is_the_sum_of_the_phases_in_every_round(simulated):
    (made,) = pairs([simulated.arm(), simulated.arm(["a"])])
    for arm in ("reference", "candidate"):
        parts = [times(made, arm, phase) for phase in ("forward", "backward", "step")]
        assert times(made, arm) == pytest.approx(np.sum(parts, axis=0))


def test_a_limit_has_no_step_and_neither_has_the_total_that_it_is_held_against(simulated):
    (made,) = pairs([simulated.arm(), simulated.limit(2.0)])
    assert list(made.phases) == ["forward", "backward", "total"] and made.kind == "limit"
    parts = [times(made, "reference", phase) for phase in ("forward", "backward")]
    assert times(made, "reference") == pytest.approx(np.sum(parts, axis=0))


def test_an_optional_phase_of_one_arm_is_kept_and_counts_in_that_arm_s_total():
    made = Simulated(kind="evaluate", sd=0)
    generate = {"generate": [50.0] * 30, "score": [100.0] * 30}
    whole = {"numerics": {"passed": True, "worst": "", "tensors": 1, "unequal": 0}}
    (found,) = pairs([made.arm(phases=generate, **whole), made.arm(["a"], **whole)])
    assert times(found, "reference", "generate") == [50.0] * 30 and times(found, "candidate", "generate") == []
    assert times(found, "reference") == [150.0] * 30 and "decode" not in found.phases


def test_arms_that_sat_alone_are_held_against_the_twin_s_own_seats_round_by_round():
    made = Simulated(process=0.1)
    reference, twin, alone = made.arm(), made.twin(alone=True), made.arm(["a"], 1.3, alone=True)
    found = by_name(pairs([reference, twin, alone]))
    one = found["a"]
    assert (one.pairing, one.processes) == ("turns", {"reference": [8, 8, 7, 7], "candidate": [8, 8, 7, 7]})
    rounds = [r for seat in range(4) for r in range(30) if r % 4 == seat]
    turns = dict(zip(zip(twin.rounds, twin.seats, strict=True), twin.phases["forward"], strict=True))
    assert times(one, "reference", "forward") == [turns[r, 1 + r % 4] for r in rounds]
    forward = dict(zip(alone.rounds, alone.phases["forward"], strict=True))
    assert times(one, "candidate", "forward") == [forward[r] for r in rounds]
    again = found["again, turns"]  # the twin's own seats over the seat that it shares with the reference
    assert again.processes == {"reference": [30], "candidate": [8, 8, 7, 7]}
    assert times(again, "reference", "forward") == [reference.phases["forward"][r] for r in rounds]
    assert times(again, "candidate", "forward") == times(one, "reference", "forward")
    assert found["again, paired"].key != again.key and again.is_noise_floor and again.design == "solo"


def test_there_is_one_noise_floor_where_nothing_sits_alone(simulated):
    assert [r.pairing for r in pairs([simulated.arm(), simulated.twin()])] == ["paired"]


def test_an_arm_alone_beside_one_of_the_shared_seat_meets_a_single_process():
    made = Simulated(process=0.05)
    shared, alone = made.arm(["a"], 1.5), made.arm(["b"], 1.2, alone=True, shown=[shown(["b"], [*BASE, "a"])])
    arms = [made.arm(), made.twin(alone=True), shared, alone]
    found = by_name(pairs(arms))["b"]
    assert found.processes == {"reference": [30], "candidate": [8, 8, 7, 7]}
    assert sorted(times(found, "reference", "step")) == sorted(shared.phases["step"])
    turned = Siblings(arms).between(shared, alone)
    assert turned.processes == {"reference": [8, 8, 7, 7], "candidate": [30]}


def test_what_is_held_against_an_arm_that_waits_for_its_turn_has_its_row_later(simulated):
    reference, before = simulated.arm(), simulated.arm(["a"], 1.5)
    after = simulated.arm(["a", "b"], 3.0, shown=[shown(["b"], [*BASE, "a"]), shown(["a", "b"], BASE)])
    assert [record.ablations for record in pairs([reference, after])] == [["a", "b"]]
    step = by_name(pairs([reference, before, after]))["b"]
    assert (step.status, step.pairing, ratio(step)) == ("ok", "paired", pytest.approx(2.0, rel=0.01))
    assert pairs([after])[0].status == "crash"  # nothing else is there: the reference is lost


def test_two_that_sat_alone_meet_process_by_process():
    made = Simulated(process=0.05)
    first, second = made.arm(["a"], 1.2, alone=True), made.arm(["b"], 1.5, alone=True, rounds=range(0, 30, 2))
    found = Siblings([made.arm(), first, second]).between(second, first)
    assert found.processes == {"reference": [8, 7], "candidate": [8, 7]}
    assert len(times(found, "reference")) == 15


def test_every_arm_alone_has_the_reference_against_its_twin_between_seats():
    made = Simulated(process=0.02)
    reference, twin = made.arm(alone=True), made.twin(alone=True, both=False)
    found = by_name(pairs([reference, twin, made.arm(["a"], alone=True)]))
    assert found.keys() == {"a", "again, turns"}
    assert times(found["again, turns"], "candidate", "step") != times(found["again, turns"], "reference", "step")
    assert sorted(times(found["a"], "reference", "step")) == sorted(reference.phases["step"])


def test_arms_that_were_never_in_one_round_are_two_lists_by_process(simulated):
    early, late = simulated.arm(rounds=range(12)), simulated.arm(["a"], 1.5, rounds=range(12, 30), alone=True)
    (found,) = pairs([early, late])
    assert found.pairing == "abba" and found.processes == {"reference": [12], "candidate": [5, 5, 4, 4]}
    assert found.separate and ratio(found) > 1.2


# -- what a pair says of its arms -------------------------------------------------------------------------------------


def test_a_pair_says_what_its_cell_is_and_what_each_arm_held(simulated):
    arms = [simulated.arm(said={"loss": 1.0}), simulated.arm(["packing"], notes={"bins": 3}, said={"loss": 2.0},
            shown=[shown(["packing"], key="k", rung=2, design="ladder")])]  # fmt: skip
    (made,) = pairs(arms)
    assert (made.key, made.design, made.rung, made.family) == ("k", "ladder", 2, "f")
    assert (made.reference, made.candidate, made.ablations) == (BASE, [*BASE, "packing"], ["packing"])
    assert (made.real_tokens, made.padding("reference"), made.padding("candidate")) == (4000, 1000, 0)
    assert {arm: held.peak for arm, held in made.memory.items()} == {"reference": 2**33, "candidate": 2**33 - 2**30}
    assert made.applied == {"packing": 30} and made.numerics == arms[1].numerics
    assert made.notes == {"bins": 3, "reference": {"loss": 1.0}, "candidate": {"loss": 2.0}}


def test_an_arm_that_several_designs_show_has_a_record_of_each(simulated):
    made = pairs(ladder(simulated, {"a": 1.2, "b": 1.5}))
    assert [(r.design, r.rung, r.ablations) for r in made if r.ablations] == [
        ("ladder", 1, ["a"]), ("ladder", 2, ["a", "b"]), ("steps", 2, ["b"]),
    ]  # fmt: skip
    assert ratio(made[-1]) == pytest.approx(1.25, rel=0.01)


def test_the_arm_that_a_contrast_names_is_found_in_any_order_of_its_toggles(simulated):
    above = simulated.arm(["b"], 2.0, base=[*BASE, "a"], shown=[shown(["b"], ["a", *BASE[::-1]])])
    found = by_name(pairs([simulated.arm(), simulated.arm(["a"], 1.6), above]))["b"]
    assert ratio(found) == pytest.approx(1.25, rel=0.01)


def test_jobs_ranks_energy_and_roofline_stand_by_arm(simulated):
    tokens = {"real": 10, "trained": 9, "padded": 2}
    job = {"r": 8, "tokens": tokens, "adapter_bytes": 5, "optimizer_bytes": 6, "tflop": {"forward": 1.0}}
    extra = {
        "jobs": {"x": job}, "energy": {"joules": 3.0, "steps": 2, "seconds": 1.0},
        "roofline": {"forward": {"label": "host-bound"}},
    }  # fmt: skip
    ranks = {"size": 2, "slowest": [0, 1], "spread": 0.1}
    (made,) = pairs([simulated.arm(**extra), simulated.arm(["a"], **extra, ranks=ranks)])
    assert made.jobs == {arm: {"x": ArmJob.model_validate(job)} for arm in ARMS}
    assert list(made.ranks) == ["candidate"] and list(made.energy) == ["reference", "candidate"]
    assert made.roofline["reference"]["forward"].label == "host-bound"


def test_what_the_records_cost_is_what_the_arms_cost():
    made = Simulated()
    arms = [*ladder(made, {"a": 1.2, "b": 1.5}), made.arm(["c"], alone=True), made.arm(["only a base"], shown=[])]
    for chosen in (arms, [arm for arm in arms if arm.role != "twin"], [*arms[:1], made.twin(alone=True), *arms[2:]]):
        costs = [r.cost for r in pairs(chosen) if r.cost]
        assert math.fsum(c.wall for c in costs) == pytest.approx(4.0 * len(chosen))
        assert math.fsum(c.trials for c in costs) == pytest.approx(3.0 * len(chosen))
    assert next(r for r in pairs(arms) if r.is_noise_floor).cost.wall == 12.0  # with the reference's


def test_families_and_sessions_do_not_mix():
    one, other = Simulated(seed=1), Simulated(seed=2, session="s2", replicate=1)
    arms = [one.arm(), other.arm(["a"], 1.5), other.arm(), one.arm(["a"], 1.5)]
    assert list(by_place(arms)) == [("f", "s1", 0), ("f", "s2", 1)]
    for record in pairs(arms):
        assert ratio(record) == pytest.approx(1.5, rel=0.01), "a drift of another session would be in it"


# -- what failed ------------------------------------------------------------------------------------------------------


def test_a_candidate_that_failed_says_why_and_has_no_times(simulated):
    (made,) = pairs([simulated.arm(), simulated.arm(["a"], status="wrong_numerics", log="the end")])
    assert (made.status, made.arm, made.phases, made.log) == ("wrong_numerics", "candidate", {}, "the end")
    assert made.reason == "wrong_numerics because of a cause"


def test_a_reference_that_does_not_fit_beside_a_candidate_that_does_is_a_result(simulated):
    (made,) = pairs([simulated.arm(status="oom"), simulated.arm(["a"])])
    assert (made.status, made.arm, made.reason) == ("oom", "reference", "oom because of a cause")
    assert times(made, "reference") == [] and len(times(made, "candidate")) == 30


def test_a_candidate_that_does_not_fit_leaves_the_reference_s_times(simulated):
    (made,) = pairs([simulated.arm(), simulated.arm(["a"], status="oom")])
    assert (made.status, made.arm) == ("oom", "candidate")
    assert times(made, "candidate") == [] and len(times(made, "reference")) == 30


def test_a_reference_that_failed_otherwise_leaves_nothing_to_hold_against(simulated):
    (made,) = pairs([simulated.arm(status="crash"), simulated.arm(["a"])])
    assert (made.status, made.arm, made.phases) == ("crash", "reference", {})
    (lost,) = pairs([simulated.arm(["a"])])
    assert (lost.status, lost.arm) == ("crash", "reference") and "no record in this session" in lost.reason


# -- against an arm that is chosen on reading -------------------------------------------------------------------------


def test_a_reference_whose_twin_had_no_time_keeps_its_times(simulated):
    """As of the 70B, of which one arm takes the GPUs."""
    (record,) = pairs([simulated.arm()])
    assert (record.status, record.arm, record.ablations) == ("timeout", "candidate", [])
    assert len(times(record, "reference")) > 2 and not times(record, "candidate")
    assert record.reason.startswith("the time was up before any other arm of the family")
    assert record.key not in {other.key for other in pairs([simulated.arm(), simulated.twin()])}, "the twin is not done"


def test_every_arm_against_one_that_is_named(simulated):
    arms = [simulated.arm(), simulated.twin(), simulated.arm(["a"], 1.2), simulated.arm(["b"], 1.5)]
    arms += [simulated.arm(["a", "b"], 2.0), simulated.arm(["c"], status="crash"), simulated.limit(3.0)]
    found = by_name(pairs(arms, against="b"))
    assert found.keys() == {"reference", "a", "a + b", "c", "frozen_limit", "again, paired"}, "by the arms' own names"
    assert (found["c"].status, found["c"].arm) == ("crash", "candidate"), "what failed stays in the table"
    assert ratio(found["reference"]) == pytest.approx(1 / 1.5, rel=0.01)
    assert all(r.reference == [*BASE, "b"] for r in found.values() if not r.is_noise_floor)
    assert found["frozen_limit"].kind == "limit"
    assert {frozenset(r.candidate) for r in pairs(arms, "b + a")} == {
        frozenset([*BASE, *own]) for own in ((), ("a",), ("b",), ("c",), ("frozen_limit",))
    }  # fmt: skip
    assert by_name(pairs(arms, "sdpa + padding + a")).keys() >= {"reference", "b"}
    assert pairs(arms, "reference") == pairs(arms)


def test_a_key_is_of_the_two_stacks_and_the_same_in_every_session():
    arms = [s.arm(own, x) for s in (Simulated(), Simulated(session="s2", replicate=1, seed=3))
            for own, x in (((), 1.0), (["a"], 1.2), (["b"], 1.5))]  # fmt: skip
    keys = [r.key for r in pairs(arms, "a")]
    assert len(keys) == 4 and keys[:2] == keys[2:] and len(set(keys)) == 2


def test_a_name_that_no_arm_has_costs_one_line_with_the_nearest(simulated):
    arms = [simulated.arm(), simulated.arm(["lora_kernels"])]
    with pytest.raises(NameUnknown, match="no arm named 'lora_kernel'; did you mean lora_kernels"):
        pairs(arms, "lora_kernel")


def test_what_nothing_can_be_held_against_costs_one_line(simulated):
    """Over a failed arm all others would seem to have failed, and a twin is the reference itself."""
    alone = Simulated(family="g").arm(["b"])
    arms = [simulated.arm(), simulated.twin(), simulated.arm(["a"]), simulated.arm(["c"], status="crash")]
    for name, why in (
        ("b", "no other arm was measured beside it"),
        ("c", "it is crash: "),
        ("reference again", "it is the reference once more, over which a report without against= shows every arm"),
    ):
        with pytest.raises(NameUnknown, match=f"^nothing can be held against '{name}': {why}"):
            pairs([*arms, alone], name)
    other = Simulated(family="h")
    found = pairs([*arms, other.arm(), other.arm(["a"]), other.arm(["c"], 1.3)], "c")
    assert [(r.family, r.status, r.ablations) for r in found] == [
        ("f", "crash", ["c"]), ("h", "ok", ["reference"]), ("h", "ok", ["a"]),
    ]  # fmt: skip


# -- in a folder ------------------------------------------------------------------------------------------------------


def test_what_the_store_appends_is_read_as_arms_and_as_pairs(tmp_path, simulated):
    arms = ladder(simulated, {"a": 1.2, "b": 1.5})
    with Store(tmp_path) as store:
        for arm in arms:
            store.append(arm)
        assert store.arms() == arms == read_arms(tmp_path)
    assert (tmp_path / "records.jsonl").read_text().startswith('{"schema":3,"family":"f"')
    assert read_records(tmp_path) == pairs(arms)
    assert {r.design for r in read_records(tmp_path, against="a")} == {"against", "ladder"}


def test_older_lines_stand_beside_newer_ones(tmp_path, simulated):
    (pair,) = pairs([simulated.arm(), simulated.arm(["a"])])
    older = pair.model_copy(update={"key": "older"})
    written(tmp_path, [older, simulated.arm(), simulated.arm(["a"])])
    assert [r.key for r in read_records(tmp_path)] == ["older", pair.key]
    assert [arm.arm for arm in read_arms(tmp_path)] == ["reference", "a"] * 2
    assert [r.ablations for r in read_records(tmp_path, against="a")] == [["reference"]], (
        "an older pair's was not judged"
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"role": "referee"}, "role"),
        ({"seats": [0]}, "rounds, seats and phases need lists of one length"),
        ({"schema": 4}, "reads schemas 1 to 3"),
    ],
)
def test_a_line_that_is_no_record_is_named_with_its_number(tmp_path, simulated, change, words):
    line = json.loads(simulated.arm().model_dump_json(by_alias=True))
    written(tmp_path, [simulated.arm()])
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write(json.dumps(line | change) + "\n")
    with pytest.raises(RecordError, match="line 2 is not a record") as raised:
        read_records(tmp_path)
    assert words in str(raised.value)


def test_arms_that_lack_what_their_kind_asks_of_a_pair_cost_one_line(tmp_path, simulated):
    written(tmp_path, [simulated.arm(), simulated.arm(["a"], numerics=None)])
    with pytest.raises(RecordError, match=r"two arms do not make a pair: .*numerics"):
        read_records(tmp_path)


def test_the_reference_and_its_twin_are_judged_once(simulated):
    (made,) = pairs([simulated.arm(), simulated.twin(numerics=None)])
    assert made.status == "ok" and made.numerics.passed


def test_an_arm_whose_notes_json_cannot_hold_is_stored_as_a_crash(tmp_path, simulated):
    arm = simulated.arm(["a"]).model_copy(update={"notes": {"x": object()}})
    with Store(tmp_path) as store:
        store.append(arm)
        (found,) = store.arms()
    assert (found.arm, found.status, found.shown) == ("a", "crash", arm.shown)
    assert "cannot be written as JSON" in found.reason
