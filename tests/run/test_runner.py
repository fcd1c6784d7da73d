"""What the runner does around its workers, with workers that only pretend."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import cells

from lorabench.measure.cell import ArmResult, Result
from lorabench.measure.depth_noise import DepthNoise
from lorabench.measure.kind import JobCounts
from lorabench.measure.witness import SKETCH, Testimony
from lorabench.record.schema import Numerics
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
