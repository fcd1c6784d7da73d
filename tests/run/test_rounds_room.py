"""Arms of a family that have no room beside each other: who leaves, and with whom it comes in a later block."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict, replace

import pytest
from helpers import MACHINE
from run.scripted import Script, alone_in_rounds, family, measured, raising, runner

from lorabench.contract.family import REFERENCE, TWIN
from lorabench.contract.memory_fit import Edge
from lorabench.measure.seat import Failed, Ready
from lorabench.record.schema import ArmMemory
from lorabench.run.process import Lost


def test_what_does_not_fit_beside_the_others_is_another_block_with_the_reference(tmp_path):
    script = Script(room=4.0)
    script.bytes = {"adamw": 2.0, "adamw_fused": 2.0}
    found = measured(script, tmp_path)
    assert {r.status for r in found.values()} == {"ok"}
    assert set(found[REFERENCE].seats) == {0, 1, 2} == set(found[TWIN].seats)
    assert {len(set(found[name].seats)) for name in ("eager", "adamw", "adamw_fused")} == {1}
    assert all(len(found[name].rounds) == 12 for name in ("eager", "adamw", "adamw_fused"))


def test_an_arm_that_keeps_too_much_between_its_turns_comes_in_a_block_of_its_own(tmp_path):
    """A captured graph's pool: it fits beside the others until one of them takes its step."""
    machine = MACHINE.model_copy(update={"gpu": {"memory_bytes": 100e9}})
    script = Script(ready=lambda name: Ready(own_bytes=int(95e9 if name == "adamw" else 1e9)))
    with runner(script, tmp_path, machine=machine) as running:
        found = {record.arm: record for record in running.family(family())}
    assert {record.status for record in found.values()} == {"ok"}
    assert {len(found[name].rounds) for name in ("eager", "adamw", "adamw_fused")} == {12}
    assert not set(found["adamw"].seats) & set(found["eager"].seats)
    assert set(found["adamw"].seats) < set(found[REFERENCE].seats)


@pytest.mark.parametrize("dies", [False, True])
def test_room_is_made_before_an_arm_of_several_ranks_is_prepared(dies, tmp_path):
    """One that finds none leaves the other ranks waiting for it, and every arm of its seat is prepared again."""
    machine = MACHINE.model_copy(update={"gpu": {"memory_bytes": 100e9}})
    script = Script(ready=lambda name: Ready(own_bytes=int(95e9 if name == "adamw" else 1e9)))
    script.fails = {("drop", "adamw"): raising(Lost("crash", "it died", None, None))} if dies else {}
    told, two = list[str](), ("ablations=[adamw,eager,ddp]", "world_size=2")
    with runner(script, tmp_path, machine=machine) as running:
        found = {r.arm: r for r in running.family(family(*two), told.append)}
    heard = [tuple(call[1:]) for call in script.heard]
    assert heard.index(("drop", "adamw")) < heard.index(("prepare", "ddp"))
    assert found["adamw"].status == "ok" and len(found["adamw"].rounds) == 12
    assert "no room beside the others: adamw comes in a later block" in told, "put off before it was tried"


def test_an_arm_of_several_ranks_that_cannot_fit_waits_for_a_block_without_being_prepared(tmp_path):
    """It is taken to keep what the reference does."""
    machine = MACHINE.model_copy(update={"gpu": {"memory_bytes": 100e9}})
    script = Script(ready=lambda name: Ready(own_bytes=int(25e9), base_bytes=int(30e9)))
    two = ("ablations=[ddp]", "world_size=2")
    with runner(script, tmp_path, machine=machine) as running:
        found = {r.arm: r for r in running.family(family(*two))}
    assert len(found[TWIN].rounds) == 12
    prepared = [(seat, *rest) for seat, what, *rest in script.heard if what == "prepare"]
    assert prepared[:4] == [(1, REFERENCE), (1, TWIN), (2, REFERENCE), (2, "ddp")]


CROWDED = MACHINE.model_copy(update={"gpu": {"memory_bytes": 100e9}, "cores": 64})  # of which 90 may be used


def _of(keeps: dict[str, float]) -> Script:
    """Arms of trials that the reference again alone is worth a seat for; what they keep, in GB (1 where not named), and
    60 that each takes for its step."""

    def ready(name: str) -> Ready:
        own = int(1e9 * keeps.get(name, 1.0))
        return Ready(own_bytes=own, memory=ArmMemory(static=own, peak=own + int(60e9)))

    return Script(dict.fromkeys((REFERENCE, TWIN, "eager", "flex_attention"), 150.0), ready=ready)


def test_what_sits_alone_and_turns_out_to_keep_too_much_comes_in_a_later_block(tmp_path):
    """With weights of its own: before it is prepared it is taken to keep what the reference does."""
    script = _of({"flex_attention": 30.0})
    found = alone_in_rounds(script, tmp_path, "eager", machine=CROWDED)
    assert {name: record.status for name, record in found.items()} == dict.fromkeys(found, "ok")
    alone, beside = found["flex_attention"], found["eager"]
    assert len(alone.rounds) == len(beside.rounds) == 12 and not set(alone.rounds) & set(beside.rounds)
    assert len(set(alone.seats)) == 4


@pytest.mark.parametrize(("keeps", "processes"), [(1.0, 9), (22.0, 5)])
def test_processes_wait_for_later_generations_only_where_there_is_room_for_them(keeps, processes, tmp_path):
    """Each has a context on the device from its imports on."""
    script, there = _of({"eager": keeps}), list[int]()
    script.fails[("turn", "eager")] = lambda: there.append(sum(not seat.closed for seat in script.seats))
    found = alone_in_rounds(script, tmp_path, "eager", machine=CROWDED)
    assert there[0] == processes
    assert {len(found[name].rounds) for name in (REFERENCE, "eager", "flex_attention")} == {12}
    assert len(set(found["flex_attention"].seats)) == 4


class Beside:
    """How many prepare at once. torch_compile takes long."""

    def __init__(self):
        self.lock, self.names, self.most = threading.Lock(), list[str](), 0

    def refuses(self, stack):
        with self.lock:
            self.names.append(stack.name)
            self.most = max(self.most, len(self.names))
            beside = len(self.names) > 1
        time.sleep(1.0 if stack.name == "torch_compile" else 0.1)
        with self.lock:
            beside |= len(self.names) > 1
            self.names.remove(stack.name)
        return beside


@pytest.mark.parametrize(("takes", "at_once"), [(60.0, 1), (20.0, 2)])
def test_processes_are_prepared_one_after_the_other_but_for_one_that_compiles_and_has_room(takes, at_once, tmp_path):
    """Of 90 GB a tenth is kept by arms and contexts. What flex_attention takes is a guess until one was prepared."""
    memory = lambda name: ArmMemory(static=int(1e9), peak=int(1e9 * (1 + takes)))  # noqa: E731
    script, beside = Script(ready=lambda name: Ready(own_bytes=int(1e9), memory=memory(name))), Beside()
    script.refuses = lambda stack: beside.refuses(stack) and None
    found = alone_in_rounds(script, tmp_path, "eager", "torch_compile", machine=CROWDED)
    assert {record.status for record in found.values()} == {"ok"}
    assert beside.most == at_once


def test_the_reference_s_own_processes_wait_for_the_room_that_the_compiling_arm_has_and_nobody_waits_for_them(tmp_path):
    """They need 70 GB each, the others 20, and 81 are there beside what is kept."""
    memory = lambda name: ArmMemory(static=int(1e9), peak=int(1e9 * (71 if "reference" in name else 21)))  # noqa: E731
    script, beside, began = Script(ready=lambda name: Ready(own_bytes=int(1e9), memory=memory(name))), Beside(), []

    def refuses(stack):
        began.append((stack.name, "torch_compile" in beside.names))
        beside.refuses(stack)

    script.refuses = refuses
    found = alone_in_rounds(script, tmp_path, "eager", "torch_compile", machine=CROWDED)
    assert {record.status for record in found.values()} == {"ok"}
    names = [name for name, _ in began]
    own = names.index("reference again", names.index("torch_compile"))  # behind the one in the seat of the others
    assert "flex_attention" in names[:own] and not any(compiles for name, compiles in began if "reference" in name)


def test_what_runs_out_of_memory_beside_another_preparation_is_prepared_once_more_beside_none(tmp_path):
    """It needs 60 GB where eager needed 20, which was the guess."""

    def ready(name):
        return Ready(own_bytes=int(1e9), memory=ArmMemory(static=int(1e9), peak=int(21e9)))

    script, beside, tried = Script(ready=ready), Beside(), Counter[str]()

    def refuses(stack):
        tried[stack.name] += 1
        full = beside.refuses(stack) and stack.name == "flex_attention"
        return Failed("oom", "it ran out of memory") if full else None

    script.refuses = refuses
    found = alone_in_rounds(script, tmp_path, "eager", "torch_compile", machine=CROWDED)
    assert {record.status for record in found.values()} == {"ok"}
    assert tried["flex_attention"] == 4 + 1 and len(set(found["flex_attention"].seats)) == 4
    assert found["flex_attention"].rounds == found["eager"].rounds, "no block of its own"


def test_out_of_memory_is_said_of_an_arm_that_was_alone(tmp_path):
    script = Script(room=4.0)
    script.bytes = {"adamw": 9.0}
    found = measured(script, tmp_path)
    assert found["adamw"].status == "oom" and found["eager"].status == "ok"
    last = max(seat for seat, what, *rest in script.heard if (what, *rest) == ("prepare", "adamw"))
    assert [rest for seat, what, *rest in script.heard if seat == last and what == "prepare"] == [["adamw"]]


def test_an_arm_without_room_beside_the_reference_and_its_twin_sits_beside_the_reference_alone(tmp_path):
    script = Script(room=4.0)
    script.bytes = {"adamw": 3.0}
    found = measured(script, tmp_path)
    assert {r.status for r in found.values()} == {"ok"}
    (seat,) = set(found["adamw"].seats)
    assert len(found["adamw"].rounds) == 12 and set(found["adamw"].rounds) < set(found[REFERENCE].rounds)
    assert seat in found[REFERENCE].seats and seat not in found[TWIN].seats


def test_nobody_has_rounds_where_the_arm_that_they_are_for_found_no_room(tmp_path):
    script = Script(room=4.0)
    script.bytes = {"adamw": 9.0}
    found = measured(script, tmp_path)
    assert found["adamw"].status == "oom" and found[REFERENCE].rounds == list(range(12))


FITS = Edge("jobs", 8, 3, 4, 80.0, 70.0, 71.0, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (FITS, "; 3 jobs fit, 4 do not"),
        (None, ""),
        (replace(FITS, of="a" * 1000), ""),
        (replace(FITS, fits=[1]), ""),  # a toggle's process can answer anything
        ("3 jobs", ""),
    ],
)
def test_what_ran_out_of_memory_alone_is_asked_how_much_fits(answer, said, tmp_path):
    script = Script(room=4.0, answers={("edge", "adamw"): [answer]})
    script.bytes = {"adamw": 9.0}
    found = measured(script, tmp_path)
    assert found["adamw"].reason == f"it ran out of memory{said}"
    assert found["adamw"].said == ({"edge": asdict(FITS)} if said else {})
    assert [rest for _, what, *rest in script.heard if what == "edge"] == [["adamw"]]


def test_a_process_that_ends_while_it_is_asked_costs_nobody_anything(tmp_path):
    script = Script(room=4.0, fails={("edge", "adamw"): raising(Lost("crash", "it died", None, None))})
    script.bytes = {"adamw": 9.0}
    found = measured(script, tmp_path)
    assert found["adamw"].reason == "it ran out of memory"
    assert {r.status for name, r in found.items() if name != "adamw"} == {"ok"}


def test_a_reference_that_does_not_fit_leaves_the_others(tmp_path):
    script = Script(room=4.0)
    script.bytes = {REFERENCE: 9.0, TWIN: 9.0}
    found = measured(script, tmp_path)
    assert found[REFERENCE].status == found[TWIN].status == "oom"
    assert {found[name].status for name in ("eager", "adamw", "adamw_fused")} == {"ok"}
