"""Cheats in one process with several other arms: what all share, what others have left, what a turn shows of itself."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from zoo.cheat import Cheat, Honest, Turns, called_by, layers, local, others, same

TOGETHER = ("isolate=false", "trials=6")


class Beside(Cheat):
    command = TOGETHER
    caught = "each gradient | loss of each trial"

    class Wrapper(Turns):
        @property
        def timed(self) -> bool:
            return self.full and called_by("turn")


class HonestBeside(Honest):
    name = "honest_beside"
    summary = "sits beside all of them, and changes nothing"
    command = TOGETHER


class WritesIntoTheBase(Beside):
    name = "writes_into_the_base"
    summary = "changes a frozen weight that all arms share, in one of its own turns"
    caught = "weights that all arms share"

    class Wrapper(Beside.Wrapper):
        def update(self) -> None:
            super().update()
            if self.timed and not vars(self).get("written"):
                self.written = True
                layers(self.model)[-1].self_attn.q_proj.base_layer.weight.data[0, 0] *= 1.5


class ChangesTheReferenceInItsTurn(Beside):
    name = "changes_the_reference_in_its_turn"
    summary = "in its own turn hooks something slow onto the layers of every other arm, the reference's among them"
    caught = "reference was changed | changed the reference"

    class Wrapper(Beside.Wrapper):
        def update(self) -> None:
            super().update()
            if self.timed and not vars(self).get("hooked"):
                self.hooked = [
                    layers(other)[0].register_forward_hook(lambda module, args, out: time.sleep(0.0005))
                    for other in others(self.model)
                ]


class FirstOfItsTurn(Beside):
    name = "first_of_its_turn"
    summary = "is honest in the first trial of each turn, whose gradients serve for the others"

    class Wrapper(Beside.Wrapper):
        def backward(self, loss: Tensor) -> None:
            if not self.timed or not local("turn", "on"):
                self.inner.backward(loss)
                self.kept = [None if p.grad is None else p.grad.clone() for p in self.params]
                return
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = None if grad is None else grad.clone()


class LooksForTheSketch(Beside):
    name = "looks_for_the_sketch"
    summary = "is honest in the last trial of a call that is shorter than others: there its gradients are looked at"

    class Wrapper(Beside.Wrapper):
        longest = 1

        def backward(self, loss: Tensor) -> None:
            numbers = local("turn", "numbers") if self.timed else []
            self.longest = max(self.longest, len(numbers))
            looked_at = len(numbers) < self.longest and local("turn", "number") == numbers[-1]
            if not self.timed or looked_at:
                self.inner.backward(loss)
                self.kept = [None if p.grad is None else p.grad.clone() for p in self.params]
                return
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = None if grad is None else grad.clone()


class TakesWhatIsLeft(Beside):
    name = "takes_what_is_left"
    summary = "takes the gradients that another arm's last trial has left, which had the same tokens"

    class Wrapper(Beside.Wrapper):
        def backward(self, loss: Tensor) -> None:
            if not self.timed:
                return self.inner.backward(loss)
            theirs = dict(others(self.model)[0].named_parameters())
            for name, p in self.model.named_parameters():
                p.grad = theirs[name].grad if p.requires_grad else None
            return None


class WorksAhead(Beside):
    name = "works_ahead"
    summary = "does the work of the whole turn in its first trial, which does not count"

    class Wrapper(Beside.Wrapper):
        ahead: tuple[tuple[Tensor, list[Any]], ...] = ()

        def forward(self, batch: Any) -> Tensor:
            if self.timed and not local("turn", "on"):
                arm, number = local("turn", "arm"), local("turn", "number")
                self.ahead = tuple(self.done(arm, number + i) for i in range(1, 20))
                arm.feeds[0](number)
            elif self.timed and self.ahead:
                return self.ahead[0][0]
            return self.inner.forward(batch)

        def done(self, arm: Any, number: int) -> tuple[Tensor, list[Any]]:
            arm.feeds[0](number)
            loss = self.inner.forward(arm.step.batches[0])
            self.inner.backward(loss)
            kept = same(loss), [p.grad for p in self.params]
            for p in self.params:
                p.grad = None
            return kept

        def backward(self, loss: Tensor) -> None:
            if not self.timed or not local("turn", "on") or not self.ahead:
                return self.inner.backward(loss)
            (_, grads), *self.ahead = self.ahead
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad
            return None
