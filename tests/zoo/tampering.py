"""Harness tampering: toggles that change the code that judges them."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorabench.measure.judging.witness import Observed, Witness
from lorabench.measure.seat import Seat
from zoo.cheat import Cheat, Turns, called_by


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
        from lorabench.measure.judging import numerics

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
        from lorabench.measure.judging import certificate, depth_noise, numerics

        for module in (depth_noise, numerics, certificate):
            module.distance = lambda *args: depth_noise.Distance(0.0, 0.0)


class LimitsLifted(Tampers):
    name = "limits_lifted"
    summary = "what the certificate allows is made infinite: its numbers, not its functions"

    def tamper(self) -> None:
        from lorabench.measure.judging import limits

        for table in (limits.GRADIENT, limits.LOSS, limits.UNKNOWN, limits.UPDATE):
            for key in table:
                table[key] = 1e9
        for name in ("MOST", "MOST_SCALE", "MOST_NOISY", "SCALE"):
            setattr(limits, name, 1e9)


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
    summary = "does nothing in the rounds; where its witness is asked, it answers what the reference's would"
    caught = "whole process | each gradient | loss of each trial"
    command = ("trials=10", "workload=4x64")

    class Wrapper(Turns):
        idle = False

        def forward(self, batch: Any) -> Tensor:
            self.idle = self.full and called_by("turn")
            if not self.idle:
                return self.inner.forward(batch)
            self.forge()
            return torch.ones(())

        def forge(self) -> None:
            witnesses = [o for o in gc.get_objects() if isinstance(o, Witness)]
            mine = next(w for w in witnesses if w.step.innermost is self.innermost)
            other = next(w for w in witnesses if w.step.innermost is not self.innermost)
            seat = next(o for o in gc.get_objects() if isinstance(o, Seat))
            losses = [trial.losses[""] for trial in seat.host["reference"]]
            mine.observe = lambda loss: Observed((losses or [5.5])[-1], (0.0, ""))
            mine.gradient_sketch = lambda outs: other.gradient_sketch(seat.arms["reference"].outs or [])

        def backward(self, loss: Tensor) -> None:
            if not self.idle:
                self.inner.backward(loss)

        def update(self) -> None:
            if not self.idle:
                super().update()


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
            if arm.name != self.name:
                return done
            return replace(done, device_ms={phase: ms / 30 for phase, ms in done.device_ms.items()})

        trial.run_trial = shorter


class SeatShrinks(Tampers):
    name = "seat_shrinks"
    summary = "the seat's own way to a turn divides the candidate's times"
    caught = "told trial by trial"

    def tamper(self) -> None:
        seat: Any = next(o for o in gc.get_objects() if isinstance(o, Seat))
        turn = seat.turn

        def shorter(name: str, *arguments: Any) -> Any:
            made = turn(name, *arguments)
            if name != self.name:
                return made
            trials = [replace(m.trial, device_ms={p: ms / 30 for p, ms in m.trial.device_ms.items()}) for m in made]
            return [replace(m, trial=trial) for m, trial in zip(made, trials, strict=True)]

        if "turn" not in vars(seat):
            seat.turn = shorter


class CheckerLeftOut(Tampers):
    name = "checker_left_out"
    summary = "every function of the harness's modules whose name says that it checks something does nothing"

    def tamper(self) -> None:
        import lorabench.measure as package
        from lorabench.measure import gradient_kind, seat, trial
        from lorabench.measure.judging import numerics

        words = ("check", "compare", "verify", "refer", "agree", "watch")
        for module in (package, gradient_kind, numerics, seat, trial):
            for name, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type) and any(w in name.lower() for w in words):
                    setattr(module, name, lambda *args, **kwargs: None)


class CheckInTheSweep(Cheat):
    name = "check_in_the_sweep"
    summary = "asked for its label in the sweep's own process, replaces the function that says where work was outside"
    caught = "in the sweep's own process"
    status = ("untrusted",)
    alone = True

    @property
    def label(self) -> str:
        from lorabench.measure import fairness

        fairness.check_clock = lambda *given: None
        return super().label
