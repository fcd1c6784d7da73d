"""repeat=n: every cell in n sessions, each in an order of its own; what is there is not measured again."""

from __future__ import annotations

import io
import json
import math
import time

import pytest
from helpers import config
from rich.console import Console
from run.scripted import Script, ScriptedQueue

from lorabench import sweep
from lorabench.contract.machine import Machine
from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Failed, Ready
from lorabench.measure.trial import MOST_TRIALS
from lorabench.plan.compose import ConfigError
from lorabench.record.schema import Numerics
from lorabench.record.store import Store, read_arms, read_records
from lorabench.run.entries import Limits

OVERRIDES = ("models=[tiny-llama]", "workload=2x16", "trials=3", "ablations=[eager,sdpa_math,adamw,adamw_fused]")


class Queue(ScriptedQueue):
    """Every arm comes to `status`. `orders`: of each session the arms, in the order in which they were to be seated."""

    def __init__(self, folder, machine, status=lambda stack: "unsupported"):
        super().__init__(folder, Script(refuses=lambda stack: Failed(status(stack), "why")), machine)

    @property
    def orders(self):
        return [[cell.title for family in families for cell in family.cells] for families in self.asked]


@pytest.fixture(scope="module")
def machine():
    from lorabench.measure.machine import describe

    return Machine.model_validate(describe().model_dump() | {"device": "cpu"})


def measure(folder, machine, *overrides, **queue):
    """What a sweep with these overrides measures: its queue and what it said."""
    asked, out = Queue(folder, machine, **queue), io.StringIO()
    with Store(folder) as store:
        sweep._measure(store, asked, config(*OVERRIDES, f"output={folder}", *overrides), [], Console(file=out))
    return asked, out.getvalue()


def test_every_session_has_its_own_entry_order_and_number(tmp_path, machine):
    queue, said = measure(tmp_path, machine, "repeat=3")
    assert len(queue.orders) == 3 and len(set(map(tuple, queue.orders))) == 3
    assert len({frozenset(order) for order in queue.orders}) == 1 and len(queue.orders[0]) == 5
    records = read_records(tmp_path)
    assert [r.replicate for r in records] == [0] * 5 + [1] * 5 + [2] * 5
    assert [r.session for r in records[::5]] == ["session 0", "session 1", "session 2"]
    entries = json.loads((tmp_path / "environment.json").read_text())["sessions"]
    assert [e["id"] for e in entries] == ["session 0", "session 1", "session 2"]
    assert "session 3 of 3" in said and "5 cells in each of 3 sessions, 0 already recorded" in said


def test_too_few_trials_for_a_verdict_are_said_before_they_are_measured(tmp_path, machine):
    _, said = measure(tmp_path / "few", machine)
    assert "trials=3: no ratio will be a figure, which needs 6 trials" in said
    _, said = measure(tmp_path / "enough", machine, "trials=6")
    assert "verdict" not in said


def test_a_larger_repeat_adds_sessions_and_the_same_measures_nothing(tmp_path, machine):
    first, _ = measure(tmp_path, machine)
    plain = [cell.title for cell in sweep.plan(config(*OVERRIDES), "cpu").cells]
    assert first.orders == [plain]
    more, said = measure(tmp_path, machine, "repeat=2")
    assert len(more.orders) == 1 and "5 already recorded" in said
    assert sorted(more.orders[0]) == sorted(plain) and more.orders[0] != plain
    assert measure(tmp_path, machine, "repeat=2")[0].orders == []
    assert len(read_records(tmp_path)) == 10


def test_a_session_that_was_stopped_goes_on_and_failed_cells_are_tried_again_in_theirs(tmp_path, machine):
    measure(tmp_path, machine, "repeat=2", status=lambda stack: "crash" if "eager" in stack.labels else "unsupported")
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(
        b"".join(lines[:9])
    )  # of the second session the reference, its twin, and one
    crashed = sum(r.status == "crash" for r in read_records(tmp_path))
    again, _ = measure(tmp_path, machine, "repeat=2")
    assert [len(order) for order in again.orders] == [3]
    failed, _ = measure(tmp_path, machine, "repeat=2", "resume=failed")
    assert [len(order) for order in failed.orders] == [1] * crashed and crashed
    assert len(read_records(tmp_path)) == 10 + crashed


def test_no_sessions_are_a_wrong_number():
    with pytest.raises(ConfigError, match="repeat"):
        config("repeat=0")


PASSED = Numerics(
    passed=True, loss_error=0.0, loss_allowed=1.0, grad_error=0.0, grad_allowed=1.0, plain_grad_error=0.0, worst="",
    tensors=1,
)  # fmt: skip


def test_a_sweep_whose_budget_is_spent_goes_on_with_the_rounds_that_are_left(tmp_path, machine):
    """The second one waits in its fifth turn until there is no time left."""

    class Budgeted(ScriptedQueue):
        budget_s = math.inf

        def run(self, *arguments):
            self.limits = Limits(time.monotonic() + self.budget_s)
            yield from super().run(*arguments)

    def sweep_of(budget_s):
        calls = iter(range(1000))
        fifth = 1 + 4 * MOST_TRIALS  # behind one trial that does not count
        slow = {("turn", "eager"): lambda: time.sleep(1.1 if next(calls) == fifth and budget_s == 1 else 0)}
        ready = lambda name: Ready(numerics={"": PASSED}, jobs={"": JobCounts(1, 0, 1)})  # noqa: E731
        ms = dict.fromkeys(("reference", "reference again", "eager", "adamw"), 0.1)
        queue, out = Budgeted(tmp_path, Script(ms, ready=ready, fails=slow), machine), io.StringIO()
        queue.budget_s = budget_s
        own = config(*OVERRIDES[:2], "trials=12", "ablations=[eager,adamw]", f"output={tmp_path}")
        with Store(tmp_path) as store:
            sweep._measure(store, queue, own, [], Console(file=out))
        return queue, out.getvalue()

    _, said = sweep_of(1)
    assert "the budget is spent; the same command goes on" in said
    first = read_arms(tmp_path)
    assert {arm.arm for arm in first} == {"reference", "reference again", "eager", "adamw"}
    assert {len(arm.rounds) for arm in first} == {5} and {arm.status for arm in first} == {"ok"}
    sweep_of(math.inf)
    rounds = {arm.arm: 0 for arm in first}
    for arm in read_arms(tmp_path):
        rounds[arm.arm] += len(arm.rounds)
    assert set(rounds.values()) == {12}
    assert len({arm.session for arm in read_arms(tmp_path)}) == 2
    again, said = sweep_of(math.inf)
    assert not again.asked and "3 cells, 3 already recorded" in said


def test_what_had_no_round_in_the_budget_has_no_record(tmp_path, machine):
    queue = ScriptedQueue(tmp_path, Script(), machine)
    queue.limits = Limits(0.0)
    with Store(tmp_path) as store:
        sweep._measure(store, queue, config(*OVERRIDES, f"output={tmp_path}"), [], Console(file=io.StringIO()))
        assert not store.records()


def test_a_sweep_ends_where_an_arm_had_no_time_left_although_some_of_the_budget_is(tmp_path, machine):
    """What is left of it would prepare arms that never come to a round."""
    queue, out = ScriptedQueue(tmp_path, Script(), machine), io.StringIO()
    queue.limits = Limits(stop_at=math.inf, seat_by=0.0)
    with Store(tmp_path) as store:
        sweep._measure(store, queue, config(*OVERRIDES, "design=ladder", f"output={tmp_path}"), [], Console(file=out))
    assert len(queue.asked) == 1 and "the budget is spent; the same command goes on" in out.getvalue()
