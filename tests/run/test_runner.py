"""What the runner does around its seats, with seats that only pretend."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import MACHINE, cells
from run.scripted import Script, family, turns

from lorabench.contract.family import REFERENCE, Family, Stack, families
from lorabench.measure.fairness import Untrusted, check_clock
from lorabench.measure.judging.depth_noise import DepthNoise
from lorabench.measure.judging.witness import Observed, Testimony
from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Failed, Made, Ready
from lorabench.measure.trial import Trial
from lorabench.record.pairs import pairs
from lorabench.record.schema import Numerics
from lorabench.run.messages import Garbled
from lorabench.run.process import Desk, Lost, _Rank
from lorabench.run.progress import TOLD
from lorabench.run.rounds import _held_together
from lorabench.run.runner import Runner

TWO = "ablations=[eager,adamw]"
PASSED = Numerics(
    passed=True, loss_error=0.0, loss_allowed=1.0, grad_error=0.0, grad_allowed=1.0, plain_grad_error=0.0, worst="",
    tensors=1,
)  # fmt: skip


def runner(script: Script, folder: Path, **machine: Any) -> Runner:
    return Runner(script, MACHINE.model_copy(update=machine), None, "session", 9.0, folder)  # type: ignore[arg-type]


def measured(script: Script, folder: Path, *overrides: str) -> dict[str, Any]:
    (family,) = families(cells("trials=12", *(overrides or (TWO,))))
    with runner(script, folder) as running:
        return {record.arm: record for record in running.family(family)}


def at(calls: list[int], answer: Any) -> Callable[[], Any]:
    """Gives or raises `answer` at these calls, and nothing at the others."""
    counted = iter(range(100_000))

    def call() -> Any:
        if next(counted) in calls:
            if isinstance(answer, Exception):
                raise answer
            return answer
        time.sleep(0.001)
        return None

    return call


SLOWED = Failed("untrusted", "slowed", disturbed=True)


@pytest.mark.parametrize(("when", "status"), [([30], "ok"), ([30, 31], "untrusted")])
def test_a_disturbed_arm_is_measured_once_more_with_the_reference(tmp_path, when, status):
    script = Script(fails={("turn", "eager"): at(when, SLOWED)})
    found = measured(script, tmp_path)
    assert found["eager"].status == status and found["adamw"].status == "ok"
    again = [rest for seat, what, *rest in script.heard if what == "prepare" and seat == 2]
    assert again == [[REFERENCE], ["eager"]] and script.opened == 2


def test_a_disturbed_arm_that_is_alone_leaves_no_reference_of_its_first_time(tmp_path):
    """Of a family of one cell, as a node of a Ray cluster has it: it had a second row, of a time that was not up."""
    cell = cells("trials=12", "ablations=[eager]")[-1]
    with runner(Script(fails={("turn", "eager"): at([3], SLOWED)}), tmp_path) as running:
        records = running.family(Family((cell,)))
    assert [r.arm for r in records] == [REFERENCE, "eager"] and {r.status for r in records} == {"ok"}
    assert len({r.family for r in records}) == 1 and records[0].family.endswith("-2")
    assert [one.key for r in records for one in r.shown] == [cell.key]


@pytest.mark.parametrize(("late", "status"), [([3, 9], "ok"), (range(999), "untrusted")], ids=["two", "all"])
def test_turns_that_took_longer_than_their_answers_say_are_counted_together(tmp_path, late, status):
    """A busy machine let an answer wait for 0.15 s, and continuous integration failed (2026-11-28)."""
    script, turns = Script(), iter(range(999))
    script.unseen_s["eager"] = lambda: 0.15 if next(turns) in late else -0.05
    found = measured(script, tmp_path)
    assert found["eager"].status == status and found["adamw"].status == "ok"
    assert status == "ok" or "longer by the runner's clock" in str(found["eager"].reason)
    assert script.opened == (1 if status == "ok" else 2)  # it is said when it is so a second time


def test_what_is_held_against_a_disturbed_arm_comes_again_with_it(tmp_path):
    """A ladder's second rung is held against the first, which has no cell of its own where the design is another."""
    fails = {("turn", "packing"): at([30], SLOWED)}
    script = Script(fails=fails)
    (family,) = families(cells("trials=12", "design=ladder", "ablations=[packing,adamw_fused]"))
    with runner(script, tmp_path) as running:
        records = running.family(family)
    shown = [one.key for record in records for one in record.shown]
    assert sorted(shown) == sorted(cell.key for cell in family.cells)
    together = {record.family for record in records if any(c.key in shown for c in record.shown)}
    assert {r.status for r in records} == {"ok"} and len(together) == 2


@pytest.mark.parametrize(
    "fails",
    [
        {("turn", "eager"): at([], None)},
        {("turn", "eager"): at([90], SLOWED)},
        {("turn", REFERENCE): at([100], Failed("untrusted", "somebody changed it", spoilt=True))},
        {("turn", "adamw"): at([50], Lost("crash", "it died", None, None))},
    ],
    ids=["as planned", "once more", "each apart", "a seat dies"],
)
def test_what_all_arms_cost_is_what_the_family_took(tmp_path, fails):
    slow = {(what, name): at([], None) for what in ("turn", "prepare") for name in (REFERENCE, "adamw", "eager")}
    (family,) = families(cells("trials=12", TWO))
    with runner(Script(fails=slow | fails), tmp_path) as running:
        began = time.perf_counter()
        records = running.family(family)
        wall = time.perf_counter() - began
    assert sum(record.cost.wall for record in records) == pytest.approx(wall, rel=0.02)
    for record in records:
        parts = record.cost.model_dump(exclude={"wall"})
        assert sum(parts.values()) == pytest.approx(record.cost.wall, abs=0.01)


def test_where_somebody_spoils_the_reference_halves_of_the_family_say_who_did(tmp_path):
    """Here it happens beside `eager` alone; the others of the clean half keep their rounds together."""
    beside: list[str] = []

    class Spoilt(Script):
        def open(self, seating: Any, *arguments: Any) -> Any:
            beside[:] = [stack.name for stack in seating.family.stacks]
            return super().open(seating, *arguments)

    bad = Failed("untrusted", "the reference was changed", spoilt=True)
    ready = lambda name: Ready(numerics={"": PASSED}, jobs={"": JobCounts(1, 0, 1)})  # noqa: E731
    script = Spoilt(fails={("turn", REFERENCE): lambda: bad if "eager" in beside else None}, ready=ready)
    (family,) = families(cells("trials=12", "ablations=[eager,adamw,adamw_fused,packing]"))
    with runner(script, tmp_path) as running:
        found = {record.ablations[0]: record for record in pairs(running.family(family)) if record.ablations}
    assert {name: record.status for name, record in found.items()} == {
        "eager": "untrusted", "adamw": "ok", "adamw_fused": "ok", "packing": "ok",
    }  # fmt: skip
    assert found["adamw_fused"].family == found["packing"].family != found["eager"].family


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_who_writes_into_the_base_of_all_processes_costs_the_others_no_rounds(tmp_path, beside):
    """Unsloth zeroed a row of the base while it was loaded, and all rounds of an 8B were for nothing (2026-11-27)."""
    written = Failed("untrusted", "the weights were written to", spoilt=True, everywhere=True)
    both, met, told = threading.Barrier(2), list[str](), list[str]()
    other = "torch_compile" if beside else "flex_attention"  # the only one that is prepared while another one is

    def refuses(stack: Stack) -> Failed | None:
        if beside and stack.name in ("tf32", other) and stack.name not in met:
            met.append(stack.name)  # before it waits: once each, so that both are prepared at the same time
            both.wait(9.0)
        return written if stack.name == "tf32" else None

    script, names = Script(refuses=refuses), ["eager", "adamw", other, "tf32"]
    gpu = {"device": "cuda", "capability": (9, 0), "gpus": 1, "native_bfloat16": True}
    with runner(script, tmp_path, **gpu) as running:
        records = running.family(family("dtype=bfloat16", f"ablations=[{','.join(names)}]"), told.append)
    found = {record.arm: record for record in records}
    assert {name: found[name].status for name in names if name != "tf32"} == dict.fromkeys(names[:3], "ok")
    assert (found["tf32"].status, found["tf32"].reason) == ("untrusted", "the weights were written to")
    shared = {name for name in names if found[name].family == found["eager"].family}
    assert shared >= {"eager", "adamw"} and (other in shared) == (not beside)
    taken = Counter(name for _, name, _ in turns(script))
    assert not taken["tf32"] and taken["adamw"] == 12 * found["adamw"].trials  # of no round twice
    again = [words for words in told if words.endswith(": the weights were written to") and words.startswith("again")]
    assert again and all(words.startswith(TOLD) for words in again)  # a log has a line for it
    assert 1 not in {seat for seat, *_ in turns(script)}  # but in processes that have read the base anew


@pytest.mark.parametrize("ready", [True, False], ids=["when it is ready", "in a turn that does not count"])
def test_an_arm_that_says_that_it_takes_no_time_leaves_alone(tmp_path, ready):
    script = Script(ms={"eager": 0.0 if ready else 10.0})
    script.phase_ms = {} if ready else {("eager", phase): 0.0 for phase in script.phases}
    with runner(script, tmp_path) as running:
        found = {record.arm: record for record in running.family(family(TWO))}
    assert (found["adamw"].status, len(found["adamw"].rounds)) == ("ok", 12)
    said = (found["eager"].status, found["eager"].reason)
    if ready:
        assert said == ("untrusted", "what it answered is no answer")
    else:
        assert said == ("crash", "eager took 0.0 ms; expected a time between zero and some months")


@pytest.mark.parametrize(("off", "told", "passes"), [(0.0, 0.0, True), (0.1, 0.0, False), (0.1, 0.2, True)])
def test_the_runner_judges_the_evidence_itself_by_the_noise_that_was_told_first(tmp_path, off, told, passes):
    """Each arm says itself that it passed, and what it tells of the noise later is not believed."""
    asked: list[str] = []

    def ready(name: str) -> Ready:
        asked.append(name)
        own = DepthNoise({}, 0.0, told if len(asked) == 1 else 9.0)
        seen = Testimony(loss=1.0 + off * (name == "eager"), noise=DepthNoise({}, 0.0, 9.0))
        return Ready(numerics={"": PASSED}, evidence={"": seen}, noise={"": ("one.noise.json", own)})

    script = Script(ready=ready)
    with runner(script, tmp_path) as running:
        for _ in range(2):
            (family,) = families(cells("trials=12", "ablations=[eager]"))
            found = {record.arm: record for record in running.family(family)}
            assert found["eager"].status == ("ok" if passes else "wrong_numerics"), found["eager"].reason
            assert passes or "the loss is off by 0.1" in found["eager"].reason
    assert asked[0] == REFERENCE  # before any toggle is asked


def test_trials_after_a_seat_was_started_again_are_held_against_the_reference_s_of_then(tmp_path):
    """Its first process took no timed trial, or other ones."""
    ready = lambda name: Ready(numerics={"": PASSED}, evidence={"": Testimony(loss=1.0)})  # noqa: E731
    script = Script(fails={("turn", "adamw"): at([0], Lost("crash", "it died", None, None))}, ready=ready)
    script.observed["eager"] = {"": Observed(2.0, None)}
    found = measured(script, tmp_path)
    assert script.opened == 2
    assert found["eager"].status == "wrong_numerics" and "the loss of each trial" in found["eager"].reason


def held(name: str, ranks: int, seats: int, job_each: bool = False) -> Any:
    """An entry with the evidence of each seat and rank, which knows what it is."""
    made = range(seats if job_each else seats * ranks)
    stack = SimpleNamespace(ranks=ranks, process_a_job=job_each)
    return SimpleNamespace(stack=stack, evidence=[{"": (name, n)} for n in made])


@pytest.mark.parametrize(
    ("reference", "entry", "wanted"),
    [
        (held("r", 4, 1), held("c", 4, 1), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (held("r", 1, 1), held("c", 2, 1), [(0, 0), (1, 0)]),
        (held("r", 2, 1), held("c", 1, 1), [(0, 0)]),
        (held("r", 1, 1), held("c", 3, 2, job_each=True), [(0, 0), (1, 0)]),
        (held("r", 1, 1), held("c", 1, 4), [(0, 0), (1, 0), (2, 0), (3, 0)]),
    ],
)
def test_a_rank_is_held_against_the_reference_s_rank_of_its_number(reference, entry, wanted):
    """Of four ranks each against each had taken a minute of a 70B's five."""
    found = [(mine[""][1], own[""][1]) for mine, own in _held_together(reference, entry)]
    assert found == wanted
    own = [(mine[""][1], first[""][1]) for mine, first in _held_together(reference, reference)]
    assert own == [(n, 0) for n in range(1, len(reference.evidence))], "the reference's ranks against its first"


def test_evidence_that_is_none_is_one_arm_s_and_not_the_family_s(tmp_path):
    def ready(name: str) -> Ready:
        return Ready(numerics={"": PASSED}, evidence={"": Testimony()})

    for seen in ({}, {"": 3}, {"": Observed("much", None)}, None):  # type: ignore[arg-type]
        script = Script(ready=ready)
        script.observed["eager"] = seen
        found = measured(script, tmp_path)
        assert found["eager"].status == "untrusted" and "its evidence is none" in found["eager"].reason
        assert found["adamw"].status == "ok"


@pytest.mark.parametrize("answer", [[{}], [[]], [None], ["ready"]])
def test_an_answer_that_is_none_is_one_arm_s_too(tmp_path, answer):
    script = Script(answers={("prepare", "eager"): answer})
    found = measured(script, tmp_path)
    assert (found["eager"].status, found["adamw"].status) == ("untrusted", "ok")


def rank(told: list[float], elapsed: float) -> _Rank:
    made = _Rank(0, None, None, None, Path())  # type: ignore[arg-type]
    made.calls, made.owes, made.trial_ms, made.elapsed = 7, True, told, elapsed
    return made


def made(ms: Any) -> list[Made]:
    return [Made(Trial({"forward": ms}, {"forward": ms}, {}, 0.0, 1.0))]


@pytest.mark.parametrize(
    ("told", "elapsed", "answer", "says"),
    [
        ([30.0], 0.03, made(30.0), None),
        ([1.0], 5.0, made(1.0), None),
        ([30.0], 0.03, made(1.0), "not those that were told trial by trial"),
        ([], 0.0, made(30.0), "after 0 of 1 trials"),
        ([30.0, 30.0], 0.06, made(30.0), "after 2 of 1 trials"),
        ([30.0], 0.03, made("30"), "is none"),
        ([30.0], 0.03, 30.0, "is none"),
        ([30.0], 0.03, ["much"], "is none"),
    ],
)
def test_a_turn_is_believed_where_it_is_what_was_told_of_it(told, elapsed, answer, says):
    class Alone(Desk):
        def ask(self, *arguments: Any, ranks: int = 1) -> list[Any]:
            self.ranks[0].trial_ms, self.ranks[0].elapsed = told, elapsed
            return [answer]

    desk = Alone([rank([], 0.0)], 9.0, None, print)
    if says is None:
        assert desk.turn("eager", [1], False, True, 1) == [answer]
        assert desk.unseen_s == pytest.approx(elapsed - 2 * told[0] / 1000 - 0.05)
        return
    with pytest.raises(Untrusted, match=says):
        desk.turn("eager", [1], False, True, 1)


@pytest.mark.parametrize(("before", "call"), [(0, 6), (0, 8), (1, 7)], ids=["older", "of none", "twice"])
def test_an_answer_belongs_to_the_call_that_waits_for_it(before, call):
    own = rank([], 0.0)
    for _ in range(before):
        own._take(("answer", 7, "right"))
    with pytest.raises(Garbled, match="nobody has asked for"):
        own._take(("answer", call, "wrong"))
    assert own.answers == ["right"] * before


def test_a_clock_that_saw_less_than_the_runner_is_disturbed():
    short = Trial({"forward": 1.0}, {"forward": 1.0}, {}, 0.0, 1.0)
    with pytest.raises(Exception, match="work outside the clock"):
        check_clock("eager", [short])
    check_clock("eager", [replace(short, ended=0.001)])


def test_the_scratch_folder_is_every_seat_s_and_ends_with_the_sweep(tmp_path):
    folders = set()

    class Noting(Script):
        def open(self, seating: Any, *arguments: Any) -> Any:
            folders.add(seating.scratch)
            return super().open(seating, *arguments)

    with runner(Noting(), tmp_path) as running:
        for family in families(cells("trials=12", TWO), together=False):
            running.family(family)
        (folder,) = (Path(folder) for folder in folders)
        assert folder.is_dir() and folder != tmp_path and tmp_path not in folder.parents
        (folder / "one").write_bytes(b"1")
    assert not folder.exists()
