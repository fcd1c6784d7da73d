"""Several ranks, of which only one reports."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from lorabench_ablations.parallel import Ddp
from zoo.cheat import Cheat, Turns, same

COMMAND = ("world_size=2", "workload=4x16")


def on_rank_0() -> bool:
    return os.environ["RANK"] == "0"


class Ranked(Cheat, Ddp):
    """Base: DDP, but."""

    slot = "parallel"
    caught = "gradient"
    command = COMMAND


class RightOnRank0(Ranked):
    name = "right_on_rank_0"
    summary = "the other rank has every gradient's sign wrong after the first step"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            self.inner.backward(loss)
            for p in self.params if self.late and not on_rank_0() else ():
                if p.grad is not None:
                    p.grad.neg_()


class NoReduction(Ranked):
    name = "no_reduction"
    summary = "each rank trains on its own share after the first step"
    caught = "each gradient"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            self.innermost.call.require_backward_grad_sync = not self.late
            return self.inner.forward(batch)


class Rank1Idles(Ranked):
    name = "rank_1_idles"
    summary = "the other rank does nothing after the second step, and rank 0 counts its own share twice"
    caught = "each gradient"

    class Wrapper(Turns):
        @property
        def late(self) -> bool:
            return self.full and self.taken > 1  # DDP makes its buckets anew in the second step, all ranks together

        def forward(self, batch: Any) -> Tensor:
            ddp = self.innermost.call
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = not self.late
            if not self.late or on_rank_0():
                self.loss = self.inner.forward(batch)
            return self.loss

        def backward(self, loss: Tensor) -> None:
            if not self.late or on_rank_0():
                self.inner.backward(loss)
            self.loss = same(loss)


class Rank1NeverMoves(Ranked):
    name = "rank_1_never_moves"
    summary = "the other rank leaves its update out after the first step"
    caught = "each gradient | update against AdamW"

    class Wrapper(Turns):
        def update(self) -> None:
            if not self.late or on_rank_0():
                self.inner.update()
            self.taken += 1
