"""Beside any pipeline: rank 1 goes wrong in the middle of a schedule. A third party's toggle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from plugin_toggles import RankFails, fail


@dataclass(frozen=True, kw_only=True)
class StageFails(RankFails):
    """With the `call`-th micro-batch of a stage of rank 1's; rank 0 waits for its gradients."""

    name: ClassVar[str] = "stage_fails"
    call: int = 2

    def step(self, step):
        from lorabench_ablations.pipeline_stages import ClockedStage

        inner, seen = ClockedStage.forward_one_chunk, []

        def forward(*args, **kwargs):
            seen.append(1)
            if len(seen) == self.call:
                fail(self.how)
            return inner(*args, **kwargs)

        if os.environ["RANK"] == "1":
            ClockedStage.forward_one_chunk = forward  # of this process, which is about to fail
        return step
