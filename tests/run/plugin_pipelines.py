"""Pipelines of which rank 1 fails in the middle of a schedule: a third party's toggles, as in plugin_toggles.py."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from lorabench_ablations.pipeline import PipelineGpipe


@dataclass(frozen=True, kw_only=True)
class StageRaises(PipelineGpipe):
    """`go_wrong` happens on rank 1 alone, with the second micro-batch in its stage; rank 0 waits for its gradients."""

    name: ClassVar[str] = "stage_raises"

    def go_wrong(self):
        raise LookupError("only here")

    def step(self, step):
        made = super().step(step)
        if os.environ["RANK"] == "1":
            stage = made.machinery.pipelines[0].stages[0]
            inner, seen = stage.forward_one_chunk, []

            def forward(*args, **kwargs):
                seen.append(1)
                if len(seen) == 2:
                    self.go_wrong()
                return inner(*args, **kwargs)

            stage.forward_one_chunk = forward
        return made


@dataclass(frozen=True, kw_only=True)
class StageKilled(StageRaises):
    name: ClassVar[str] = "stage_killed"

    def go_wrong(self):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class StageHangs(StageRaises):
    name: ClassVar[str] = "stage_hangs"

    def go_wrong(self):
        time.sleep(10_000)


@dataclass(frozen=True, kw_only=True)
class StageGreedy(StageRaises):
    name: ClassVar[str] = "stage_greedy"

    def go_wrong(self):
        torch.ones(1 << 50)


@dataclass(frozen=True, kw_only=True)
class StageLeaves(StageRaises):
    name: ClassVar[str] = "stage_leaves"

    def go_wrong(self):
        os._exit(0)
