"""Optimizers that are AdamW for as long as somebody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.cheat import Cheat, Turns

RATE = 1e-4
DECAY = 0.01


class Update(Cheat):
    """Base: the optimizer is `made` by the class; the first update is AdamW's."""

    slot = "optimizer"
    caught = "update"


class SignDescent(Update):
    name = "sign_descent"
    summary = "the gradient's sign, which is what AdamW's first update comes to, and no state at all"
    caught = "update against AdamW"

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return Sign(params, {"lr": lr})


class Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * DECAY).sub_(group["lr"] * p.grad / (p.grad.abs() + 1e-8))


class OtherBetas(Update):
    name = "other_betas"
    summary = "AdamW without momentum: its first update does not depend on it"
    caught = "update against AdamW"

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, betas=(0.0, 0.9))


class NoDecay(Update):
    name = "no_decay"
    summary = "Adam: no weight decay, from the first update"

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.0)


class DeepLeftOut(Update):
    name = "deep_left_out"
    summary = "only the tensors of the first two layers are updated"
    caught = "update against AdamW"

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params[: 2 * 7 * 2], lr=lr)


class Rate(Update):
    """Base: after some steps a setting of torch's AdamW is another."""

    setting = ("lr", 1.1 * RATE)
    after = 1

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr)

    class Wrapper(Turns):
        def update(self) -> None:
            if self.taken == self.cheat.after:
                name, value = self.cheat.setting
                self.optimizer.param_groups[0][name] = value
            super().update()


class OtherRateLater(Rate):
    name = "other_rate_later"
    summary = "a learning rate of ten per cent more after the warm-up"
    caught = "the optimizer's settings"
    after = 5


class NoDecayLater(Rate):
    name = "no_decay_later"
    summary = "no weight decay after the warm-up"
    caught = "the optimizer's settings"
    setting = ("weight_decay", 0.0)
    after = 5


class MovesOnce(Cheat):
    name = "moves_once"
    summary = "the first update is the only one"
    caught = "update against AdamW"

    class Wrapper(Turns):
        def update(self) -> None:
            if self.taken < 1:
                self.inner.update()
            self.taken += 1


class EveryOtherUpdate(Cheat):
    name = "every_other_update"
    summary = "every other update is left out"
    caught = "update against AdamW"

    class Wrapper(Turns):
        def update(self) -> None:
            if self.taken % 2 == 0:
                self.inner.update()
            self.taken += 1


class OnlyB(Cheat):
    name = "only_b"
    summary = "lora_A stays where it is after the first update"
    caught = "update against AdamW"

    class Wrapper(Turns):
        def update(self) -> None:
            before = {p: p.detach().clone() for n, p in self.model.named_parameters() if ".lora_A." in n}
            self.inner.update()
            with torch.no_grad():
                for p, old in before.items() if self.late else ():
                    p.copy_(old)
            self.taken += 1


class TakenBack(Cheat):
    name = "taken_back"
    summary = "before each forward the adapters are what they were at the start, so nothing is ever learned"
    caught = "update against AdamW"

    class Wrapper(Turns):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.start = [p.detach().clone() for p in self.params]

        def forward(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                for p, old in zip(self.params, self.start, strict=True):
                    p.copy_(old)
            return self.inner.forward(batch)
