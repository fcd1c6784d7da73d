"""Harness tampering: toggles that change the code that judges them."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorabench.measure.witness import Witness
from zoo.cheat import Cheat, Turns


class Tampers(Cheat):
    """Base: leaves backward out altogether in the full arm, and changes the harness so that it does not see it."""

    caught = "whole process"
    status = ("untrusted", "wrong_numerics")

    def tamper(self) -> None:
        raise NotImplementedError

    def patch(self, model: Any) -> None:
        self.tamper()

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.late:
                self.inner.backward(loss)


class JudgeAlwaysPasses(Tampers):
    name = "judge_always_passes"
    summary = "the gate's verdict is always that it passed; there is no backward but in the step that is audited"

    def tamper(self) -> None:
        from lorabench.measure import numerics

        judge, with_checks = numerics.judge, numerics.with_checks
        numerics.judge = lambda *args: judge(*args).model_copy(update={"passed": True})
        numerics.with_checks = lambda *args: with_checks(*args).model_copy(update={"passed": True})

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if self.full and self.taken == 0:
                self.inner.backward(loss)


class NothingDiffers(Tampers):
    name = "nothing_differs"
    summary = "the relative error of anything is zero"

    def tamper(self) -> None:
        from lorabench.measure import certificate, depth_noise, numerics

        for module in (depth_noise, numerics, certificate):
            module.distance = lambda *args: depth_noise.Distance(0.0, 0.0)


class LimitsLifted(Tampers):
    name = "limits_lifted"
    summary = "what the certificate allows is made infinite: its numbers, not its functions"

    def tamper(self) -> None:
        from lorabench.measure import certificate

        for table in (certificate.GRADIENT, certificate.LOSS, certificate.UNKNOWN, certificate.UPDATE):
            for key in table:
                table[key] = 1e9
        for name in ("MOST", "MOST_SCALE", "MOST_MASKED", "SCALE", "MOVED", "MOVED_SCALE"):
            setattr(certificate, name, 1e9)


class NoiseRewritten(Cheat):
    name = "noise_rewritten"
    summary = "writes into the file that says how far two right runs are apart, and trains all samples but the last"
    caught = "each gradient"
    command = ("workload=10x64",)

    def patch(self, model: Any) -> int:
        for file in Path(tempfile.gettempdir()).glob("lorabench*/**/*.noise.json"):
            found = json.loads(file.read_text())
            large = {"tensors": {name: [9.0, 9.0] for name in found["tensors"]}, "loss": 9.0, "scale": 9.0}
            file.write_text(json.dumps(found | large))
        return 1

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            n = len(batch.inputs["input_ids"])
            fewer = {name: x[: n - 1] for name, x in batch.inputs.items()}
            return self.inner.forward(replace(batch, inputs=fewer)) * (n / (n - 1))


class TestimonyCopied(Cheat):
    name = "testimony_copied"
    summary = "does nothing in the rounds; in the step after them its evidence is overwritten by the reference's"
    caught = "evidence of the candidate's trials"
    status = ("untrusted",)
    command = ("trials=10", "workload=4x64")

    class Wrapper(Turns):
        idle = False

        def forward(self, batch: Any) -> Tensor:
            self.idle = self.full and called_by("run_rounds")
            if self.idle:
                return torch.ones(())
            if self.full and called_by("last"):
                self.forge()
            return self.inner.forward(batch)

        def forge(self) -> None:
            witnesses = [o for o in gc.get_objects() if isinstance(o, Witness)]
            mine = next(w.testimony for w in witnesses if w.step.innermost is self.innermost)
            other = next(w.testimony for w in witnesses if w.step.innermost is not self.innermost)
            mine.losses[:], mine.sketches[:] = other.losses, other.sketches
            mine.update_errors[:], mine.moved = other.update_errors, other.moved

        def backward(self, loss: Tensor) -> None:
            if not self.idle:
                self.inner.backward(loss)

        def update(self) -> None:
            if not self.idle:
                super().update()


def called_by(name: str) -> bool:
    """Whether a function of this name is among those that wait for the caller."""
    frame: Any = sys._getframe()
    while frame and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class TrialsShrink(Tampers):
    name = "trials_shrink"
    summary = "the timing loop's trial of a candidate is thirty times as short"

    def tamper(self) -> None:
        from lorabench.measure import trial

        run = trial.run_trial
        if run.__name__ != "run_trial":
            return

        def shorter(arm: Any, *args: Any) -> Any:
            done = run(arm, *args)
            if arm.name == "reference":
                return done
            return replace(done, device_ms={phase: ms / 30 for phase, ms in done.device_ms.items()})

        trial.run_trial = shorter


class MeasurementShrinks(Tampers):
    name = "measurement_shrinks"
    summary = "the measurement's own way from trials to times divides the faster arm's"
    caught = "the measurement's own"

    def tamper(self) -> None:
        from lorabench.measure.cell import Measurement

        measurement: Any = next(o for o in gc.get_objects() if isinstance(o, Measurement))
        times = measurement._times
        asked: list[int] = []

        def shorter(done: Any) -> dict[str, list[float]]:
            asked.append(1)
            return {phase: [ms / len(asked) ** 4 for ms in found] for phase, found in times(done).items()}

        if "_times" not in vars(measurement):
            measurement._times = shorter


class CheckerLeftOut(Tampers):
    name = "checker_left_out"
    summary = "every function of the harness's modules whose name says that it checks something does nothing"

    def tamper(self) -> None:
        import lorabench.measure as package
        from lorabench.measure import cell, gradient_kind, numerics, trial

        words = ("check", "compare", "verify", "refer", "agree", "watch")
        for module in (package, cell, gradient_kind, numerics, trial):
            for name, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type) and any(w in name.lower() for w in words):
                    setattr(module, name, lambda *args, **kwargs: None)


class StatisticsInTheSweep(Cheat):
    name = "statistics_in_the_sweep"
    summary = "asked for its label in the sweep's own process, replaces the function that makes the ratio"
    caught = "in the sweep's own process"
    status = ("untrusted",)
    alone = True

    @property
    def label(self) -> str:
        from lorabench.run import runner

        ratio = runner.speedup
        if ratio.__name__ == "speedup":
            runner.speedup = lambda reference, *args, **kwargs: ratio([30 * ms for ms in reference], *args, **kwargs)
        return super().label
