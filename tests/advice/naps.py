"""A third party's toggles whose speed is certain: the reference sleeps in a phase, and they fill the slot without."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from lorabench.contract.ablation import Ablation, Requires
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.step import Wrapped

NAP_S = 0.06  # several times a step of the tiny model: no noise of a machine hides it


class _Forward(Wrapped):
    def forward(self, batch):
        time.sleep(NAP_S)
        return self.inner.forward(batch)


class _Backward(Wrapped):
    def backward(self, loss):
        time.sleep(NAP_S)
        self.inner.backward(loss)


@dataclass(frozen=True, kw_only=True)
class Awake(Ablation):
    name: ClassVar[str] = "awake"
    slot: ClassVar[str] = "nap"
    worth_trying: ClassVar[Worth | None] = "time"

    def patch(self, model):
        setattr(model, self.name, True)
        return 1

    def settings(self):
        return Settings(trainer={"seed": 7})


@dataclass(frozen=True, kw_only=True)
class Sleepy(Awake):
    name: ClassVar[str] = "sleepy"
    worth_trying: ClassVar[Worth | None] = None

    def step(self, step):
        return _Forward(step)


@dataclass(frozen=True, kw_only=True)
class AwakeBack(Awake):
    name: ClassVar[str] = "awake_back"
    slot: ClassVar[str] = "nap_back"


@dataclass(frozen=True, kw_only=True)
class SleepyBack(AwakeBack):
    name: ClassVar[str] = "sleepy_back"
    worth_trying: ClassVar[Worth | None] = None

    def step(self, step):
        return _Backward(step)


@dataclass(frozen=True, kw_only=True)
class Useless(Awake):
    name: ClassVar[str] = "useless"
    slot: ClassVar[str] = "useless"


@dataclass(frozen=True, kw_only=True)
class Absent(Awake):
    name: ClassVar[str] = "absent"
    slot: ClassVar[str] = "absent"
    requires: ClassVar[Requires] = Requires(packages={"no_such_package": "pip install no-such-package"})


@dataclass(frozen=True, kw_only=True)
class Hangs(Awake):
    name: ClassVar[str] = "hangs"
    slot: ClassVar[str] = "hangs"

    def patch(self, model):
        time.sleep(10_000)


TOGGLES = {cls.name: cls for cls in (Awake, Sleepy, AwakeBack, SleepyBack, Useless, Absent, Hangs)}
