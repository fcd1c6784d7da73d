"""The rounds of a family, over seats whose arms only say how long they take."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import MACHINE, cells
from run.scripted import FOUR, Script, alone_in_rounds, clocked, family, measured, raising, rounds_of, runner, turns

from lorabench.contract.family import REFERENCE, TWIN, Family
from lorabench.measure.seat import Failed, Ready
from lorabench.measure.trial import MOST_TRIALS
from lorabench.record.pairs import Siblings
from lorabench.record.schema import INTERRUPTED, ArmRecord
from lorabench.record.store import RecordError
from lorabench.run.entries import LEAST_ROUNDS, NO_TIME, UNLIMITED, Limits
from lorabench.run.journal import JOURNAL, Journal, Turn
from lorabench.run.process import Lost
from lorabench.run.rounds import LONG_MS, Rounds

LOW = "adapters_in_compute_dtype"


def test_every_arm_has_a_turn_in_every_round_in_an_order_of_its_own(tmp_path):
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "adamw_fused"), 200.0))
    found = measured(script, tmp_path)
    assert {record.status for record in found.values()} == {"ok"} and len(found) == 5
    assert all(record.rounds == list(range(12)) and set(record.seats) == {0} for record in found.values())
    by_round: dict[int, list[str]] = {}
    for _, name, numbers in turns(script):
        if name not in by_round.setdefault(rounds_of(numbers), []):
            by_round[rounds_of(numbers)].append(name)
    assert all(sorted(names) == sorted(found) for names in by_round.values())
    assert len({tuple(names) for names in by_round.values()}) > 6  # of 120 orders, twelve are hardly alike


def test_each_of_several_references_has_a_twin_that_is_measured(tmp_path):
    """Else the second one would be held against its own times, and nothing would seem as quiet."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", LOW, f"{LOW} again", f"{LOW} + eager"), 200.0))
    found = measured(script, tmp_path, "reference=[peft,peft_low]", "ablations=[eager]")
    family = Siblings(found.values())
    over = {arm.arm: [family.stack(shown.against) for shown in arm.shown] for arm in family.arms}
    assert over == {
        REFERENCE: [], TWIN: [found[REFERENCE]], "eager": [found[REFERENCE]],
        LOW: [], f"{LOW} again": [found[LOW]], f"{LOW} + eager": [found[LOW]],
    }  # fmt: skip


def test_a_turn_holds_as_many_trials_as_a_tenth_of_a_second_and_the_first_does_not_count(tmp_path):
    script = Script(ms={REFERENCE: 20.0})
    found = measured(script, tmp_path)
    assert {record.trials for record in found.values()} == {5}
    made = Counter((name, rounds_of(numbers)) for _, name, numbers in turns(script) for _ in numbers)
    assert set(made.values()) == {5}
    assert 1 <= MOST_TRIALS < 64


@pytest.mark.parametrize("ms, crowded, most", [(200.0, True, 2), (200.0, False, 1), (LONG_MS, True, 1)])
def test_a_first_trial_that_takes_memory_of_the_device_does_not_count(ms, crowded, most, tmp_path, monkeypatch):
    """Where all seats fit only if some give back what they have cached: what takes it again is none of a step."""
    monkeypatch.setattr(Rounds, "_crowded", crowded)
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "flex_attention"), ms))
    script.grows = {"eager"}
    found = alone_in_rounds(script, tmp_path, "eager")
    made = Counter((seat, name, rounds_of(numbers)) for seat, name, numbers in turns(script) for _ in numbers)
    assert {record.status for record in found.values()} == {"ok"}
    assert {(name, trials) for (_, name, _), trials in made.items()} == {
        (name, most if name == "eager" else 1) for name in found
    }
    assert {record.trials for record in found.values()} == {most}
    looks = Counter(name for _, what, name, *_ in (heard for heard in script.heard if heard[1] == "look"))
    assert looks["eager"] == most * looks[REFERENCE], "a trial that counts is looked at as often as one that does not"


@pytest.mark.parametrize("crowded", [True, False])
def test_arms_of_one_seat_take_their_turns_together_where_seats_give_memory_back(crowded, tmp_path, monkeypatch):
    monkeypatch.setattr(Rounds, "_crowded", crowded)
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "flex_attention"), 200.0))
    alone_in_rounds(script, tmp_path, "eager", "adamw")
    by_round: dict[int, list[int]] = {}
    for seat, _, numbers in turns(script):
        by_round.setdefault(rounds_of(numbers), []).append(seat)
    groups = {len(list(itertools.groupby(seats))) for seats in by_round.values()}
    assert groups == {3} if crowded else max(groups) > 3
    firsts = {seats[0] for seats in by_round.values()}
    assert len(firsts) > 1, "in random order"


def test_each_arm_has_a_turn_before_the_rounds_unless_its_trials_are_long(tmp_path):
    script = Script(
        ms={"eager": LONG_MS, "adamw": LONG_MS - 1, **dict.fromkeys((REFERENCE, TWIN, "adamw_fused"), 2000.0)}
    )
    measured(script, tmp_path)
    before = Counter(rest[0] for _, what, *rest in script.heard if what == "turn" and rounds_of(rest[1]) < 0)
    assert before == {REFERENCE: 1, TWIN: 1, "adamw": 1, "adamw_fused": 1}


def test_arms_get_the_same_data_in_a_round_and_other_data_in_each_trial(tmp_path):
    script = Script()
    measured(script, tmp_path)
    by_arm: dict[str, list[int]] = {}
    for _, name, numbers in turns(script):
        by_arm.setdefault(name, []).extend(numbers)
    assert len({tuple(sorted(numbers)) for numbers in by_arm.values()}) == 1
    assert all(len(set(numbers)) == len(numbers) for numbers in by_arm.values())


def test_an_arm_that_is_much_slower_takes_fewer_rounds_which_the_others_have_too(tmp_path):
    script = Script(ms={"eager": 4000.0, **dict.fromkeys((REFERENCE, TWIN, "adamw", "adamw_fused"), 150.0)})
    found = measured(script, tmp_path)
    assert len(found["eager"].rounds) == LEAST_ROUNDS < 12
    assert set(found["eager"].rounds) <= set(found[REFERENCE].rounds)
    assert {len(r.rounds) for name, r in found.items() if name != "eager"} == {12}


def test_an_arm_that_fails_in_a_turn_leaves_and_the_others_go_on(tmp_path):
    fails = {("turn", "adamw"): raising_failed(Failed("unsupported", "no more of it"), after=3)}
    found = measured(Script(fails=fails), tmp_path)
    assert (found["adamw"].status, found["adamw"].reason) == ("unsupported", "no more of it")
    assert not found["adamw"].phases
    assert {len(r.rounds) for name, r in found.items() if name != "adamw"} == {12}


def raising_failed(failed: Failed, after: int) -> Any:
    calls = iter(range(1000))
    return lambda: failed if next(calls) == after else None


def test_a_seat_that_dies_is_started_again_without_the_arm_that_killed_it(tmp_path):
    script = Script(fails={("turn", "adamw"): raising(Lost("crash", "it died", None, "its last words"), after=44)})
    found = measured(script, tmp_path)
    assert (found["adamw"].status, found["adamw"].reason, found["adamw"].log) == ("crash", "it died", "its last words")
    assert script.opened == 2
    assert set(found["eager"].seats) == {0, 1} and found["eager"].rounds == list(range(12))
    again = [rest[0] for seat, what, *rest in script.heard if (seat, what) == (2, "prepare")]
    assert sorted(again) == sorted([REFERENCE, TWIN, "eager", "adamw_fused"])


def test_an_arm_that_kills_its_seat_at_its_start_costs_the_others_nothing_but_another_start(tmp_path):
    script = Script(fails={("prepare", "eager"): raising(Lost("timeout", "it hung", None, None))})
    found = measured(script, tmp_path)
    assert found["eager"].status == "timeout"
    assert {r.status for name, r in found.items() if name != "eager"} == {"ok"}


def test_arms_that_patch_classes_sit_alone_in_turns_with_the_others(tmp_path):
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "adamw", "flex_attention"), 150.0))
    found = alone_in_rounds(script, tmp_path, "adamw")
    alone = found["flex_attention"]
    assert len(set(alone.seats)) == 4 and alone.rounds == list(range(12))
    assert [len([s for s in alone.seats if s == seat]) for seat in sorted(set(alone.seats))] == [3, 3, 3, 3]
    twin = found[TWIN]
    assert Counter(twin.rounds) == dict.fromkeys(range(12), 2)  # once beside the reference, once alone
    assert len(set(twin.seats)) == 5 and not set(twin.seats) & set(alone.seats)
    assert set(found["adamw"].seats) == {0}


def test_what_the_host_compiles_for_is_prepared_last_beside_those_that_sit_alone(tmp_path):
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "adamw", "flex_attention", "torch_compile"), 150.0))
    found = alone_in_rounds(script, tmp_path, "torch_compile", "adamw")
    prepared = [(seat, rest[0]) for seat, what, *rest in script.heard if what == "prepare"]
    assert prepared[:3] == [(1, REFERENCE), (1, TWIN), (1, "adamw")]
    assert (1, "torch_compile") in prepared[3:] and len(prepared) == 3 + 1 + 4 * 2
    asked = [what for seat, what, *_ in script.heard if seat == 1]
    compiled = script.heard.index((1, "prepare", "torch_compile"))
    begun = next(i for i, (_, what, *_) in enumerate(script.heard) if what == "turn")
    assert "offer" in asked and (1, "offer") not in script.heard[compiled:begun], (
        "that seat answers nobody while it compiles"
    )
    first = [rest[0] for _, what, *rest in script.heard[:begun] if what == "prepare"]
    assert first.count("flex_attention") == 1, "whatever ends the sweep early finds rounds, not processes without any"
    assert {record.status for record in found.values()} == {"ok"}
    assert set(found["torch_compile"].seats) == {0} and found["torch_compile"].rounds == list(range(12))


def test_a_reference_again_that_does_not_fit_alone_beside_the_others_keeps_its_first_place(tmp_path):
    asked = Counter[str]()

    def refuses(stack: Any) -> Failed | None:
        asked[stack.name] += 1
        beside = stack.name == TWIN and asked[TWIN] > 1
        return Failed("oom", "it ran out of memory") if beside else None

    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "flex_attention"), 150.0), refuses=refuses)
    found = alone_in_rounds(script, tmp_path)
    assert {name: record.status for name, record in found.items()} == dict.fromkeys(found, "ok")
    assert set(found[TWIN].seats) == {0} and len(set(found["flex_attention"].seats)) == 4


@pytest.mark.parametrize("beside", ["others", "the reference"])
def test_what_sits_alone_and_does_not_fit_beside_others_is_measured_in_a_later_block(tmp_path, beside):
    """Beside the reference where there is room for both; else beside nobody."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "flex_attention"), 150.0))

    def refuses(stack: Any) -> Failed | None:
        names = {name for seat in script.seats if not seat.closed for name in seat.held}
        full = bool(names & ({"eager"} if beside == "others" else {REFERENCE, TWIN, "eager"}))
        return Failed("oom", "it ran out of memory") if stack.name == "flex_attention" and full else None

    script.refuses = refuses
    found = alone_in_rounds(script, tmp_path, "eager")
    assert {name: record.status for name, record in found.items()} == dict.fromkeys(found, "ok")
    alone, reference = found["flex_attention"], found[REFERENCE]
    assert len(set(alone.seats)) == 4 and len(alone.rounds) == 12 and alone.numerics == found["eager"].numerics
    assert not set(alone.rounds) & set(found["eager"].rounds) and len(found["eager"].rounds) == 12
    assert (set(alone.rounds) <= set(reference.rounds)) == (beside == "others")


def test_out_of_memory_is_the_status_of_what_had_the_device_for_itself(tmp_path):
    refuses = lambda stack: Failed("oom", "it ran out") if stack.name == "flex_attention" else None  # noqa: E731
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "flex_attention"), 150.0), refuses=refuses)
    found = alone_in_rounds(script, tmp_path, "eager")
    assert found["flex_attention"].status == "oom"
    assert {found[name].status for name in (REFERENCE, TWIN, "eager")} == {"ok"}
    assert {len(found[name].rounds) for name in (REFERENCE, "eager")} == {12}  # nobody had rounds for nothing


def test_after_the_budget_no_later_block_begins(tmp_path, monkeypatch):
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "flex_attention"), 150.0))
    clocked(monkeypatch, lambda: script.now)
    late: list[str] = []

    def refuses(stack: Any) -> Failed | None:
        held = {name for seat in script.seats if not seat.closed for name in seat.held}
        late.extend([stack.name] * (script.now >= 100))
        if stack.name == "adamw" and "eager" not in held:  # in the second block, which comes to nothing and takes long
            script.now = 100.0
        beside = {"adamw": True, "flex_attention": bool(held)}
        return Failed("oom", "it ran out of memory") if beside.get(stack.name) else None

    script.refuses = refuses
    found = alone_in_rounds(script, tmp_path, "eager", "adamw", limits=Limits(stop_at=50.0))
    assert len(found["eager"].rounds) == 12 and script.now >= 100 and late == []
    assert (found["flex_attention"].status, found["flex_attention"].reason) == ("timeout", NO_TIME)


@pytest.mark.parametrize("seconds, sits", [(45.0, False), (60.0, True)])
def test_no_arm_is_seated_where_those_that_sit_would_come_to_no_verdict(seconds, sits, tmp_path, monkeypatch):
    """Each takes ten seconds to be prepared, and one in a round: with a third arm the sixth round begins after 48
    seconds, with a fourth after 64."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw"), 1000.0))

    def ready(name: str) -> Ready:
        script.now += 10.0
        return Ready()

    script.ready = ready
    clocked(monkeypatch, lambda: script.now, perf_counter=lambda: script.now)
    with runner(script, tmp_path) as running:
        running.limits = Limits(stop_at=seconds)
        found = {record.arm: record for record in running.family(family("ablations=[eager,adamw]"))}
    assert len(found[REFERENCE].rounds) >= LEAST_ROUNDS and found["adamw"].reason == NO_TIME
    assert len(found["eager"].rounds) >= LEAST_ROUNDS if sits else found["eager"].reason == NO_TIME


@pytest.mark.parametrize("seconds, begins", [(65.0, False), (90.0, True)])
def test_no_later_block_begins_for_which_there_are_too_few_seconds(seconds, begins, tmp_path, monkeypatch):
    """Four arms of one second have a turn before twelve rounds and end after a minute; six rounds of the reference have
    to have room behind that."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "adamw_fused"), 1000.0), room=4.0)
    script.bytes = {"adamw": 3.0}
    script.fails = {("end", "eager"): lambda: setattr(script, "now", max(script.now, 60.0))}
    clocked(monkeypatch, lambda: script.now)
    with runner(script, tmp_path) as running:
        running.limits = Limits(stop_at=seconds)
        found = {record.arm: record for record in running.family(family())}
    assert len(found["eager"].rounds) == 12 and (len(found["adamw"].rounds) >= LEAST_ROUNDS) is begins
    assert found["adamw"].reason == (None if begins else NO_TIME)


def test_the_processes_of_an_arm_beside_nobody_are_prepared_one_after_the_other(tmp_path):
    """Else they run out of memory beside each other, and each looks as if it had the device for itself."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "flex_attention"), 150.0))
    busy, crowded = threading.Semaphore(1), list[str]()

    def refuses(stack: Any) -> Failed | None:
        held = {name for seat in script.seats if not seat.closed for name in seat.held}
        if stack.is_reference:
            return Failed("crash", "it died") if crowded else None  # and so nobody is there in the later block
        if stack.name == "eager":
            return None
        alone = busy.acquire(blocking=False)
        if alone:
            time.sleep(0.2)
            busy.release()
        crowded.extend([stack.name] * bool(held))
        return None if alone and not held else Failed("oom", "it ran out of memory")

    script.refuses = refuses
    found = alone_in_rounds(script, tmp_path, "eager", machine=MACHINE.model_copy(update={"cores": 8}))
    assert crowded and (found["flex_attention"].status, len(found["flex_attention"].rounds)) == ("ok", 12)


def test_an_arm_that_is_wrong_in_one_of_its_processes_leaves_though_it_sits_in_another(tmp_path):
    asked = Counter[str]()

    def refuses(stack: Any) -> Failed | None:
        asked[stack.name] += 1
        wrong = stack.name == "flex_attention" and asked[stack.name] > 1
        return Failed("wrong_numerics", "its gradients are others") if wrong else None

    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "flex_attention"), 150.0), refuses=refuses)
    found = alone_in_rounds(script, tmp_path)
    assert found["flex_attention"].status == "wrong_numerics"
    assert found[REFERENCE].status == found[TWIN].status == "ok"
    assert asked["flex_attention"] == 2, "whoever has left is not prepared in two more processes"


def test_where_every_candidate_patches_classes_the_reference_sits_alone_as_they_do(tmp_path):
    script = Script(ms=dict.fromkeys((REFERENCE, "flex_attention"), 150.0))
    with runner(script, tmp_path) as running:
        alone = next(c for c in cells("trials=12", "ablations=[flex_attention]") if c.toggles)
        rounds = Rounds(Family((alone,)), MACHINE, script, None, tmp_path, tmp_path / "log", 9.0, print)  # type: ignore[arg-type]
        rounds.run()
        found = {record.arm: record for record in running.drafts(rounds)}
    assert {record.status for record in found.values()} == {"ok"}
    assert all(r.rounds == list(range(12)) and len(set(r.seats)) == 4 for r in found.values())
    assert not set(found[REFERENCE].seats) & set(found["flex_attention"].seats)


def test_finished_rounds_are_in_the_journal_and_become_records(tmp_path):
    """A sweep that is killed in its tenth round has nine."""
    journal = Journal(tmp_path)
    fails = {("turn", "eager"): raising(KeyboardInterrupt(), after=10)}
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "adamw_fused"), 150.0), fails=fails)
    with runner(script, tmp_path, journal) as running, pytest.raises(KeyboardInterrupt):
        running.family(family())
    whole = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    assert [line["round"] for line in whole[1:]] == list(range(9))
    with open(tmp_path / JOURNAL, "a") as file:
        file.write('{"round": 9, "turns": {"refer')  # cut off
    text = (tmp_path / JOURNAL).read_text()
    third = '{"round": 3'
    spoilt = [text.replace(third, "%" + third), text.replace(third, "[3], " + third), text.replace('{"ref', '{"no_ref')]
    for odd in (*spoilt, re.sub(r"(\d+\.\d+)}", r"-\1}", text)):
        (tmp_path / JOURNAL).write_text(odd)
        with pytest.raises(RecordError, match=r"^\S*rounds.jsonl cannot be read: .*; expected what a sweep wrote"):
            journal.recovered()
    (tmp_path / JOURNAL).write_text(text)
    recovered = {record.arm: record for record in Journal(tmp_path).recovered()}
    assert len(recovered) == 5 and all(r.rounds == list(range(9)) for r in recovered.values())
    assert recovered["eager"].notes[INTERRUPTED] == 9
    journal.end()
    assert not Journal(tmp_path).recovered()


def test_what_a_block_before_has_measured_to_its_end_is_not_measured_again(tmp_path):
    """`eager` and the twin have twelve rounds of the first block; `adamw` sat in the second, which was ended early."""
    with runner(Script(), tmp_path) as running:
        arms = [r for r in running.family(family()) if r.arm in (REFERENCE, TWIN, "eager", "adamw")]
    for record in arms:
        record.rounds, record.seats, record.phases = list(range(12)), [0] * 12, {"forward": [1.0] * 12}
    last = next(r for r in arms if r.arm == "adamw")
    last.rounds, last.seats, last.phases = [], [], {}
    journal = Journal(tmp_path)
    journal.begin(arms, 12)
    for number in (12, 13):
        journal.round(number, {n: [Turn(number, 1, {"forward": 1.0})] for n in (REFERENCE, TWIN, "adamw")})
    found = {record.arm: record for record in journal.recovered()}
    assert {name: record.notes.get(INTERRUPTED) for name, record in found.items()} == {
        REFERENCE: None, TWIN: None, "eager": None, "adamw": 2,
    }  # fmt: skip
    assert {name: len(record.rounds) for name, record in found.items()} == {
        REFERENCE: 14, TWIN: 14, "eager": 12, "adamw": 2,
    }  # fmt: skip


def test_no_round_begins_after_the_budget(tmp_path):
    script = Script()
    with runner(script, tmp_path) as running:
        running.limits = Limits(stop_at=0.0)
        found = running.family(family())
    assert not turns(script)
    assert {record.status for record in found} == {"timeout"}


@pytest.mark.parametrize("seconds, rounds", [(65.0, 9), (31.0, LEAST_ROUNDS)])
def test_a_budget_has_room_for_what_follows_the_last_round_unless_there_would_be_no_verdict(
    tmp_path, monkeypatch, seconds, rounds
):
    """Five arms of one second, so that a round takes five and the ends are taken to need five times four."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "eager", "adamw", "adamw_fused"), 1000.0))
    clocked(monkeypatch, lambda: script.now)
    with runner(script, tmp_path) as running:
        running.limits = Limits(stop_at=seconds)
        found = running.family(family())
    assert {len(record.rounds) for record in found} == {rounds}
    assert {record.notes[INTERRUPTED] for record in found} == {rounds}


@pytest.mark.parametrize("seconds, prepared, rounds", [(90.0, 2, LEAST_ROUNDS), (122.0, 3, 9), (1e3, 4, 12)])
def test_no_process_is_prepared_for_a_part_of_the_rounds_that_the_budget_has_no_room_for(
    seconds, prepared, rounds, tmp_path, monkeypatch
):
    """Of three rounds each, behind twenty seconds for its process."""
    script = Script(ms=dict.fromkeys((REFERENCE, TWIN, "flex_attention"), 1000.0))

    def ready(name: str) -> Ready:
        script.now += 20.0 * (name == "flex_attention")
        return Ready()

    script.ready = ready
    clocked(monkeypatch, lambda: script.now, perf_counter=lambda: script.now)
    found = alone_in_rounds(script, tmp_path, limits=Limits(stop_at=seconds))
    assert [rest[0] for _, what, *rest in script.heard if what == "prepare"].count("flex_attention") == prepared
    assert {len(set(record.rounds)) for record in found.values()} == {rounds}


def test_no_candidate_is_seated_after_its_time_and_the_others_have_their_rounds(tmp_path, monkeypatch):
    now = [0.0]
    clocked(monkeypatch, lambda: now[0])
    script = Script(fails={("prepare", "adamw"): lambda: now.__setitem__(0, 20.0)})
    with runner(script, tmp_path) as running:
        running.limits = Limits(seat_by=10.0)
        found = {record.arm: record for record in running.family(family())}
    assert [rest[0] for _, what, *rest in script.heard if what == "prepare"] == [REFERENCE, TWIN, "eager", "adamw"]
    late = found.pop("adamw_fused")
    assert (late.status, late.reason) == ("timeout", NO_TIME)
    assert [len(record.rounds) for record in found.values()] == [12] * 4


def test_a_candidate_has_so_many_seconds_to_be_seated_the_reference_all_and_a_family_so_many_rounds(tmp_path):
    script = Script()
    with runner(script, tmp_path) as running:
        asked: list[float] = []
        running.limits = Limits(seat_s=2.0, rounds=lambda seconds: asked.append(seconds) or 7)
        found = running.family(family())
    assert {len(record.rounds) for record in found} == {7}
    assert asked == [pytest.approx(0.5)], "five arms, ten trials of 10 ms each"
    assert script.given == {REFERENCE: None, TWIN: 9.0, "eager": 2.0, "adamw": 2.0, "adamw_fused": 2.0}


def one_after_the_other(script: Script, folder: Path, *asked: Family, stays: bool = True) -> list[dict[str, ArmRecord]]:
    """Families of one run, with those who shared a seat staying there."""
    with runner(script, folder) as running:
        running.limits = Limits(stays=stays)
        return [{record.arm: record for record in running.family(own)} for own in asked]


def prepared(script: Script) -> list[tuple[int, str]]:
    return [(seat, rest[0]) for seat, what, *rest in script.heard if what == "prepare"]


def test_who_shared_a_seat_stays_for_the_next_family_of_the_same_question(tmp_path):
    script, next_one = Script(), family("ablations=[eager,torch_compile]")
    script.ready = lambda name: Ready(own_bytes=len(name))
    first, then = one_after_the_other(script, tmp_path, family("ablations=[eager,adamw]"), next_one)
    assert prepared(script) == [(1, name) for name in (REFERENCE, TWIN, "eager", "adamw", "torch_compile")]
    assert [rest for _, what, *rest in script.heard if what == "drop"] == [["adamw"]], "it is none of the next family's"
    assert {name: record.status for name, record in then.items()} == dict.fromkeys(
        (REFERENCE, TWIN, "eager", "torch_compile"), "ok"
    )
    assert all(len(record.rounds) == 12 for record in (*first.values(), *then.values()))
    assert then["eager"].cost and (then["eager"].cost.build, then["eager"].cost.gate) == (0, 0)
    assert then["eager"].memory is not None and then["eager"].applied == first["eager"].applied
    assert first["eager"].family != then["eager"].family, "they share no rounds"
    ends = Counter(rest[0] for _, what, *rest in script.heard if what == "end")
    assert (ends[REFERENCE], ends["eager"], ends["adamw"]) == (2, 2, 1), "each family's arms are looked at behind it"
    assert script.seats[0].closed and not (tmp_path / ".worker.log").exists()


@pytest.mark.parametrize(
    ("overrides", "stays"),
    [
        ((FOUR,), False),
        (("workload=1x16", FOUR), True),
        (("reference=peft_low", FOUR), True),
        (("seed=1", FOUR), True),
    ],
    ids=["nobody asked", "another workload", "another reference", "another seed"],
)
def test_nobody_stays_for_another_question_or_where_nobody_asked(tmp_path, overrides, stays):
    script = Script()
    one_after_the_other(script, tmp_path, family(), family(*overrides), stays=stays)
    assert script.opened == 2 and all(seat.closed for seat in script.seats)
    assert [name for seat, name in prepared(script) if seat == 2][:2] == [REFERENCE, TWIN]
    closed = next(n for n, (seat, *_) in enumerate(script.heard) if seat == 2)
    assert all(seat == 2 for seat, *_ in script.heard[closed:]), "the first one's memory is given back before"


def test_a_seat_that_has_died_meanwhile_is_started_again_and_no_arm_is_blamed(tmp_path):
    script = Script(fails={("give_back",): raising(Lost("crash", "gone", None, None))})
    _, then = one_after_the_other(script, tmp_path, family(), family())
    assert script.opened == 2 and all(seat.closed for seat in script.seats)
    assert {record.status for record in then.values()} == {"ok"} and len(then) == 5


def test_nobody_stays_where_something_was_wrong_at_the_end(tmp_path):
    wrong = {("closing",): raising(Lost("crash", "a toggle ended it", None, None))}
    script = Script(fails=wrong)
    first, then = one_after_the_other(script, tmp_path, family("ablations=[eager]"), family("ablations=[adamw]"))
    assert first["eager"].status == "crash" and {record.status for record in then.values()} == {"ok"}
    assert [name for seat, name in prepared(script) if seat == 2] == [REFERENCE, TWIN, "adamw"]


@pytest.mark.parametrize(("left", "opened"), [(True, 3), (False, 1)])
def test_who_did_something_wrong_is_looked_for_only_while_there_is_time(left, opened, tmp_path):
    """In halves, from the start: all rounds once more."""
    wrong = raising(Lost("crash", "a toggle ended it", None, None))

    def closing() -> None:
        running.limits = UNLIMITED if left else Limits(stop_at=0.0)
        wrong()

    script = Script(fails={("closing",): closing})
    with runner(script, tmp_path) as running:
        found = running.family(family("ablations=[eager,adamw]"))
    assert script.opened == opened
    assert {(r.status, r.reason) for r in found} == {("ok", None) if left else ("timeout", NO_TIME)}


def test_an_arm_that_ends_a_seat_which_stayed_takes_nobody_along(tmp_path):
    script = Script(fails={("prepare", "adamw"): raising(Lost("crash", "it went", None, None))})
    _, then = one_after_the_other(script, tmp_path, family("ablations=[eager]"), family("ablations=[adamw,eager]"))
    assert {name: record.status for name, record in then.items()} == {
        REFERENCE: "ok", TWIN: "ok", "eager": "ok", "adamw": "crash",
    }  # fmt: skip
    assert len(then["eager"].rounds) == 12 and all(seat.closed for seat in script.seats)
