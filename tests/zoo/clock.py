"""Work that is done where no clock runs, and clocks that run slow."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.cheat import Cheat, Turns, called_by, is_full, local, same

UNTRUSTED = ("untrusted", "wrong_numerics")


class Outside(Cheat):
    """Base: the full arm's steps are done by `work`, which something calls that no phase contains. Where nothing
    calls it, the step comes to nothing."""

    caught = "clock"
    status = UNTRUSTED

    class Wrapper(Turns):
        loss: Tensor | None = None  # of the step that `work` has done

        def work(self) -> None:
            loss = self.inner.forward(self.inner.batches[0])
            self.inner.backward(loss)
            self.inner.update()
            self.taken += 1
            self.loss = same(loss)

        def forward(self, batch: Any) -> Tensor:
            if not self.full:
                return self.inner.forward(batch)
            return torch.zeros(()) if self.loss is None else self.loss

        def backward(self, loss: Tensor) -> None:
            if not self.full:
                self.inner.backward(loss)

        def update(self) -> None:
            if not self.full:
                self.inner.update()


class WorkInClear(Outside):
    name = "work_in_clear"
    summary = "the whole step is done where the gradients are cleared, before the clock"
    caught = "changed nothing"
    status = ("not_applied",)

    class Wrapper(Outside.Wrapper):
        def clear(self) -> None:
            self.inner.clear()
            if self.full:
                self.work()


class WorkInLossOf(Outside):
    name = "work_in_loss_of"
    summary = "the whole step is done where the loss is asked for, after the clock"
    caught = "changed nothing"
    status = ("not_applied",)

    class Wrapper(Outside.Wrapper):
        def loss_of(self, out: Tensor) -> float:
            if self.full:
                self.work()
                out = self.loss if self.loss is not None else out
            return self.inner.loss_of(out)


class WorkInBatches(Outside):
    name = "work_in_batches"
    summary = "the whole step is done where the list of batches is asked for, before the first mark"
    caught = "each gradient"

    class Wrapper(Outside.Wrapper):
        @property
        def batches(self) -> Any:
            if self.full:
                self.work()
            return self.inner.batches

        @batches.setter
        def batches(self, value: Any) -> None:
            pass


class WorkInZeroGrad(Outside):
    name = "work_in_zero_grad"
    summary = "the whole step is done where the optimizer clears its gradients"
    caught = "changed nothing"
    status = ("not_applied",)
    slot = "optimizer"

    def optimize(self, params: Any, lr: float) -> Any:
        return ZeroGrad(params, lr=lr)

    class Wrapper(Outside.Wrapper):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            if self.full:
                inner.optimizer.then = self.work


class ZeroGrad(torch.optim.AdamW):
    then: Callable[[], None] | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.then:
            self.then()


class Later(Outside):
    """Base: the full arm's first step is an honest one."""

    class Wrapper(Outside.Wrapper):
        @property
        def full(self) -> bool:
            return super().full and self.taken > 0

        def update(self) -> None:
            super().update()
            self.taken += 1


class WorkInTheSetter(Later):
    name = "work_in_the_setter"
    summary = "the whole step is done where a parameter's gradient is set to None, by anybody"
    caught = "each gradient of each trial | the loss of each trial"

    class Wrapper(Later.Wrapper):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.kept: list[Any] = []
            if is_full(self.model):
                last: Any = self.params[-1]
                last.__class__ = Sneaky
                last.then = self.work

        def work(self) -> None:
            super().work()
            self.kept = [p.grad for p in self.params]

        def backward(self, loss: Tensor) -> None:
            super().backward(loss)
            for p, grad in zip(self.params, self.kept, strict=False):
                p.grad = grad


class Sneaky(torch.nn.Parameter):
    then: Callable[[], None] | None = None

    @property
    def grad(self) -> Any:
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)
        if value is None and self.then:
            self.then()


class WorkInTheFilling(Later):
    name = "work_in_the_filling"
    summary = "the whole step is done where somebody writes new tokens into its batches"
    caught = "Inputs for its batch's inputs"

    class Wrapper(Later.Wrapper):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            if is_full(self.model):
                self.batches = [replace(batch, inputs=Inputs(batch.inputs, self.work)) for batch in inner.batches]

        def work(self) -> None:
            plain = {name: x.as_subclass(torch.Tensor) for name, x in self.batches[0].inputs.items()}
            loss = self.inner.forward(replace(self.batches[0], inputs=plain))
            self.inner.backward(loss)
            self.inner.update()
            self.taken += 1
            self.loss = same(loss)


class Inputs(dict[str, Any]):
    """Calls `then` when an entry is replaced or its tensor written to."""

    def __init__(self, inputs: dict[str, Any], then: Callable[[], None]) -> None:
        super().__init__({name: x.as_subclass(Told) for name, x in inputs.items()})
        self.then = then
        for x in self.values():
            x.then = then

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.then()

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.then()


class Told(torch.Tensor):
    then: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.fill_) and isinstance(args[0], Told):
            args[0].then and args[0].then()
        return result


class Joined(dict[str, Any]):
    """A batch's inputs that do the work where they are joined with others."""

    then: Callable[[Any], None] | None = None

    def __or__(self, other: Any) -> Any:
        made = Joined({**self, **other})
        made.then = self.then
        if self.then:
            self.then(made)
        return made


class WorkInTheOr(Cheat):
    name = "work_in_the_or"
    summary = "forward and backward are done where the harness joins a trial's tokens with the batch's inputs"
    caught = "Joined for its batch's inputs"
    status = ("untrusted",)

    class Wrapper(Turns):
        kept: tuple[Tensor, list[Any], list[int]] | None = None

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            if self.full:
                for i, batch in enumerate(inner.batches):
                    inputs = Joined(batch.inputs)
                    inputs.then = self.before
                    inner.batches[i] = replace(batch, inputs=inputs)

        def versions(self) -> list[int]:
            return [p._version for p in self.params]

        def before(self, inputs: Any) -> None:
            if self.taken == 0:
                return
            loss = self.inner.forward(replace(self.inner.batches[0], inputs=dict(inputs)))
            self.inner.backward(loss)
            self.kept = same(loss), [p.grad for p in self.params], self.versions()
            for p in self.params:
                p.grad = None

        def forward(self, batch: Any) -> Tensor:
            if self.kept and self.kept[2] == self.versions():
                return self.kept[0]
            self.kept = None
            return self.inner.forward(batch)

        def backward(self, loss: Tensor) -> None:
            if not self.kept:
                return self.inner.backward(loss)
            for p, grad in zip(self.params, self.kept[1], strict=True):
                p.grad = grad
            self.kept = None


class WorkInTheBarrier(Outside):
    name = "work_in_the_barrier"
    summary = "the whole step is done in the barrier before the first mark, which audit has put there"
    caught = "the audit of"

    class Wrapper(Outside.Wrapper):
        outside = False

        @property
        def full(self) -> bool:
            return self.outside

    def audit(self, evidence: Any) -> int:
        arm, step = evidence.arm, evidence.arm.step
        step.outside = True
        arm.ranks = replace(arm.ranks, barrier=step.work)
        return 1


class WorkInTheCollector(Outside):
    name = "work_in_the_collector"
    summary = "the next step is done when Python's garbage collector runs, which is between the rounds"
    caught = "gc.callbacks"

    class Wrapper(Outside.Wrapper):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.busy = False
            gc.callbacks.append(self.collected)

        def collected(self, phase: str, info: Any) -> None:
            if phase == "stop" and super().full and self.taken > 3 and not self.busy:
                self.busy = True
                self.work()
                self.kept = [p.grad for p in self.params]
                self.busy = False

        @property
        def full(self) -> bool:
            return super().full and self.loss is not None

        def backward(self, loss: Tensor) -> None:
            if not self.full:
                return self.inner.backward(loss)
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = grad
            return None

        def update(self) -> None:
            super().update()
            self.taken += 1


class NextRoundInTheCollector(WorkInTheOr):
    name = "next_round_in_the_collector"
    summary = "where Python's garbage is collected between two rounds, computes the next round's tokens and gradients"
    caught = "gc.callbacks"
    command = ("trials=10", "workload=4x64")

    class Wrapper(WorkInTheOr.Wrapper):
        def __init__(self, inner: Any) -> None:
            Turns.__init__(self, inner)
            self.busy = False
            self.tokens: Tensor | None = None
            if self.full:
                gc.callbacks.append(self.collected)

        def collected(self, phase: str, info: Any) -> None:
            if phase != "stop" or self.busy or not called_by("turn") or local("turn", "name") != self.cheat.name:
                return
            self.busy = True
            local("turn", "arm").feeds[0](local("turn", "numbers")[-1] + 1)
            batch = self.inner.batches[0]
            self.tokens = batch.inputs["input_ids"].clone()
            self.before(batch.inputs)
            self.busy = False

        def forward(self, batch: Any) -> Tensor:
            if self.tokens is None or not torch.equal(self.tokens, batch.inputs["input_ids"]):
                self.kept = None
            return super().forward(batch)


class LazyLoss(Cheat):
    name = "lazy_loss"
    summary = "forward returns a tensor that does the step when its number is asked for"
    caught = "loss"
    status = UNTRUSTED

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if not self.full:
                return self.inner.forward(batch)
            lazy = torch.zeros(()).as_subclass(Lazy)
            lazy.work = lambda: self.work(batch)
            return lazy

        def backward(self, loss: Tensor) -> None:
            if not self.full:
                self.inner.backward(loss)

        def update(self) -> None:
            if not self.full:
                self.inner.update()

        def work(self, batch: Any) -> Tensor:
            loss = self.inner.forward(batch)
            self.inner.backward(loss)
            self.inner.update()
            return loss.detach()


class Lazy(torch.Tensor):
    work: Callable[[], Tensor]
    done: Tensor | None = None

    def detach(self) -> Tensor:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = [arg.value() if isinstance(arg, Lazy) else arg for arg in args]
        return func(*real, **(kwargs or {}))

    def value(self) -> Tensor:
        if self.done is None:
            self.done = self.work()
        return self.done


class DeferredUpdate(Cheat):
    name = "deferred_update"
    summary = "the update is done before the next forward, and where the gradients are cleared if that comes first"
    caught = "update against AdamW"

    class Wrapper(Turns):
        owed = False

        def pay(self) -> None:
            if self.owed:
                self.owed = False
                self.inner.update()

        def clear(self) -> None:
            self.pay()
            self.inner.clear()

        def forward(self, batch: Any) -> Tensor:
            self.pay()
            return self.inner.forward(batch)

        def update(self) -> None:
            self.owed = self.late
            self.taken += 1
            if not self.owed:
                self.inner.update()


class BackwardInAThread(Cheat):
    name = "backward_in_a_thread"
    summary = "backward and update end in a thread after the clock has stopped"
    # Its thread may still compute on what the main one has given back: then its process dies, and gets no time either.
    caught = "update against AdamW | each gradient | killed by SIGSEGV"
    status = (*UNTRUSTED, "crash")

    class Wrapper(Turns):
        thread: threading.Thread | None = None

        def forward(self, batch: Any) -> Tensor:
            if self.thread:
                self.thread.join()
            return self.inner.forward(batch)

        def backward(self, loss: Tensor) -> None:
            if not self.late:
                return self.inner.backward(loss)
            self.thread = threading.Thread(target=self.rest, args=(loss,), daemon=True)
            return self.thread.start()

        def rest(self, loss: Tensor) -> None:
            time.sleep(0.001)
            self.inner.backward(loss)
            self.inner.update()

        def update(self) -> None:
            if not self.late:
                self.inner.update()
            self.taken += 1


class SlowClock(Cheat):
    """Base: a tenth of the candidate's time goes by on a clock that `install` has put in place of the host's."""

    caught = "whole process"
    status = ("untrusted",)

    def install(self, skipped: list[float], real: Callable[[], float]) -> None:
        raise NotImplementedError

    class Wrapper(Turns):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.skipped, self.real = [0.0], time.perf_counter

        def skipping(self, call: Callable[[], Any]) -> Any:
            if self.full and self.taken == 0:
                self.cheat.install(self.skipped, self.real)
                self.taken = 1
            began = self.real()
            try:
                return call()
            finally:
                self.skipped[0] += 0.9 * (self.real() - began)

        def forward(self, batch: Any) -> Tensor:
            return self.skipping(lambda: self.inner.forward(batch))

        def backward(self, loss: Tensor) -> None:
            self.skipping(lambda: self.inner.backward(loss))

        def update(self) -> None:
            self.skipping(self.inner.update)


class ClockOfTime(SlowClock):
    name = "clock_of_time"
    summary = "time.perf_counter is replaced by a clock that stands still for most of the candidate's step"

    def install(self, skipped: list[float], real: Callable[[], float]) -> None:
        time.perf_counter = lambda: real() - skipped[0]


class EveryClockOfTime(SlowClock):
    name = "every_clock_of_time"
    summary = "all clocks of the module time are replaced alike"

    def install(self, skipped: list[float], real: Callable[[], float]) -> None:
        for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time"):
            own = getattr(time, name)
            setattr(time, name, lambda own=own: own() - skipped[0])
            own_ns = getattr(time, f"{name}_ns")
            setattr(time, f"{name}_ns", lambda own=own_ns: own() - int(1e9 * skipped[0]))


class ClockOfTheTrial(SlowClock):
    name = "clock_of_the_trial"
    summary = "the timing loop's own name for the clock is replaced"

    def install(self, skipped: list[float], real: Callable[[], float]) -> None:
        from lorabench.measure import trial

        trial.perf_counter = lambda: real() - skipped[0]


class ClockClass(SlowClock):
    name = "clock_class"
    summary = "the harness's class of clocks divides the candidate's times by ten"

    def install(self, skipped: list[float], real: Callable[[], float]) -> None:
        from lorabench.measure.trial import Clock

        read = Clock.device_ms

        def shorter(clock: Any) -> list[float]:
            ours, skipped[0] = skipped[0] > 0, 0.0
            return [ms / 10 if ours else ms for ms in read(clock)]

        Clock.device_ms = shorter


class PhasesLeftOut(Cheat):
    name = "phases_left_out"
    summary = "says after the first step that it has no update"
    caught = "has the phases"
    status = UNTRUSTED

    class Wrapper(Turns):
        def update(self) -> None:
            super().update()
            self.updates = not self.full


class NoBatches(Cheat):
    name = "no_batches"
    summary = "has no batches left after the first steps, so a trial is nothing but an update"
    caught = "each gradient | has the phases"
    status = UNTRUSTED

    class Wrapper(Turns):
        def update(self) -> None:
            super().update()
            if self.full and self.taken == 4:
                self.batches = []
