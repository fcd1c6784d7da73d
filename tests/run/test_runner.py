"""What the runner does around its workers, with workers that only pretend."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import cells
from lorabench.measure.cell import ArmResult, Measurement, Result, Task

from lorabench.contract.kind import kind
from lorabench.measure.depth_noise import DepthNoise
from lorabench.measure.kind import JobCounts
from lorabench.measure.witness import SKETCH, Testimony
from lorabench.record.schema import ARMS, Numerics
from lorabench.run.process import _believed, _Rank
from lorabench.run.runner import Runner

MACHINE = SimpleNamespace(device="cpu", dtype=lambda wanted: "float32")


class Pretended:
    """Workers that answer at once: `answer(task)`."""

    def __init__(self, answer):
        self.answer, self.tasks = answer, []

    def run(self, task, timeout_s, tell, log):
        self.tasks.append(task)
        return self.answer(task)


def runner(answer, folder):
    return Runner(Pretended(answer), MACHINE, None, "session", 9.0, folder)  # type: ignore[arg-type]


def test_the_attempt_together_stays_in_the_cost(tmp_path):
    def answer(task):
        if len(task.arms) == 2:
            seconds = {"gate": 2.0, "build": 1.0, "trials": 5.0}
            return Result("oom", "no room", "candidate", resident=True, seconds=seconds)
        times = {phase: [1.0, 1.0] for phase in ("forward", "backward", "step", "total")}
        return Result(arms={task.arms[0]: ArmResult(times=times)}, seconds={"build": 0.5, "trials": 3.0})

    with runner(answer, tmp_path) as made:
        pair = made._together(cells("ablations=[eager]")[1], lambda text: None)
        assert len(made.workers.tasks) == 9
    assert pair.pairing == "abba"
    assert pair.seconds == pytest.approx({"gate": 2.0, "build": 5.0, "trials": 29.0})


def test_separate_arms_alternate_in_four_processes_each(tmp_path):
    def answer(task):
        times = {phase: [1.0] * task.rounds for phase in ("forward", "backward", "step", "total")}
        return Result(arms={task.arms[0]: ArmResult(times=times)})

    with runner(answer, tmp_path) as made:
        pair = made._separately(replace(cells("ablations=[eager]")[1], trials=30), lambda text: None)
        order = [task.arms[0] for task in made.workers.tasks]
        assert [task.gate for task in made.workers.tasks] == [True, True] + [False] * 6
    first, second = order[:2]
    assert first != second and order == [first, second, second, first] * 2
    assert pair.processes == {"reference": [8] * 4, "candidate": [8] * 4}
    assert len(pair.arms["reference"].times["total"]) == 32


@pytest.mark.parametrize("second", ["ok", "untrusted"])
def test_a_disturbed_cell_is_measured_once_more(tmp_path, second):
    times = {phase: [1.0] for phase in ("forward", "backward", "step", "total")}
    arms = {name: ArmResult(times=times) for name in ("reference", "candidate")}
    answers = iter(
        Result(status, "slowed", disturbed=status != "ok", arms=arms, seconds={"trials": 5.0})
        for status in ("untrusted", second)
    )
    told = []
    with runner(lambda task: next(answers), tmp_path) as made:
        pair = made._together(cells("ablations=[eager]")[1], told.append)
    assert pair.result.status == second and pair.seconds == {"trials": 10.0}
    assert told == ["once more: slowed"] and next(answers, None) is None


@pytest.mark.parametrize(("later", "told", "passes"), [(1.0, 0.0, True), (1.1, 0.0, False), (1.1, 0.2, True)])
def test_the_runner_judges_the_evidence_itself_by_the_noise_that_was_told_first(tmp_path, later, told, passes):
    """A pair's, too: the worker's verdict is that all is well, and the noise in its evidence is large."""
    times = {phase: [1.0, 1.0] for phase in ("forward", "backward", "step", "total")}
    passed = Numerics(
        passed=True, loss_error=0.0, loss_allowed=1.0, grad_error=0.0, grad_allowed=1.0, plain_grad_error=0.0,
        worst="", tensors=1,
    )  # fmt: skip

    def noise(loss):
        return DepthNoise({}, 0.0, loss)

    def answer(task):
        arms = {}
        for name, losses in (("reference", [1.0, 1.0]), ("candidate", [1.0, later])):
            sketches = [np.ones((1, SKETCH), np.float32)] * 2
            seen = Testimony(names=["a"], loss=1.0, losses=losses, sketches=sketches, noise=noise(9.0))
            counts = {"": JobCounts(1, 0, 1)}
            arms[name] = ArmResult(times=times, evidence=[{"": seen}], numerics={"": passed}, jobs=counts)
        own = told if len(made.workers.tasks) == 1 else 9.0
        return Result(arms=arms, noise={"": ("one.noise.json", noise(own))})

    cell = cells("ablations=[eager]")[1]
    with runner(answer, tmp_path) as made:
        for _ in range(2):
            result = made._together(cell, lambda text: None)
            made._agreement(cell, result)
            assert result.result.status == ("ok" if passes else "wrong_numerics"), result.result.reason
            assert passes or "the loss of each trial is off by 0.1 at trial 2" in str(result.result.reason)


def evidence(losses):
    """Of one job's trials."""
    sketches = [np.full((1, SKETCH), loss, np.float32) for loss in losses]
    return {"": Testimony(names=["a"], losses=losses, sketches=sketches, update_errors=[(0.0, "a")] * len(losses))}


def forged(seen, what):
    kept = getattr(seen[""], what)
    kept[1] = (0.1, "a") if what == "update_errors" else 2 * kept[1]
    return seen


@pytest.mark.parametrize("what", ["losses", "sketches", "update_errors"])
def test_evidence_that_is_not_what_was_told_trial_by_trial_is_not_believed(what):
    cell, own, told = cells("ablations=[eager]")[1], kind("train"), evidence([1.0, 2.0])
    rank = _Rank(0, None, None, Path())  # type: ignore[arg-type]
    rank.told, rank.elapsed = {"candidate": [1.0, 1.0]}, {"candidate": 0.0}
    rank.seen = {"candidate": [own.digest(told, number) for number in range(2)]}
    task = Task(cell, MACHINE, ("candidate",), 2, False, None, "")  # type: ignore[arg-type]
    for found, status in ((told, "ok"), (forged(evidence([1.0, 2.0]), what), "untrusted"), ({}, "untrusted")):
        rank.result = Result(arms={"candidate": ArmResult(times={"total": [1.0, 1.0]}, evidence=[found])})
        believed = _believed(task, rank)
        assert believed.status == status
    assert (
        believed.reason == "the answer's evidence of the candidate's trials is not what was seen of them trial by trial"
    )


def test_a_measurement_tells_the_noise_before_any_toggle_is_asked_and_each_trial_after_it(tmp_path):
    heard = []
    task = Task(cells("ablations=[eager]")[1], MACHINE, ARMS, 2, True, None, str(tmp_path))  # type: ignore[arg-type]
    result = Measurement(task, heard.append, told=lambda *message: heard.append(message)).run()
    assert result.status == "ok", result.reason
    noise = next(i for i, message in enumerate(heard) if message[0] == "noise")
    assert noise < heard.index("building the reference") and heard[noise][1][2] == result.noise[""][1] is not None
    for name in ARMS:
        told = [digest for what, (of, digest) in (m for m in heard if m[0] == "seen") if of == name]
        assert told == [kind("train").digest(result.arms[name].evidence[0], number) for number in range(2)]
        assert len(set(told)) == 2


def test_the_scratch_folder_is_every_worker_s_and_ends_with_the_sweep(tmp_path):
    with runner(lambda task: Result("crash", "why"), tmp_path) as made:
        for cell in cells("ablations=[eager]"):
            made._together(cell, lambda text: None)
        folder = {task.scratch for task in made.workers.tasks}
        assert len(folder) == 1
        path = Path(folder.pop())
        assert path.is_dir() and path != tmp_path and tmp_path not in path.parents
        (path / "one").write_bytes(b"1")
    assert not path.exists()
