"""A step whose optimizer updates copies of its own, a part on each rank: the harness reads their gradients, sets them
back, and is not told anything that did not happen. Without DeepSpeed: ZeRO-1 in a few lines stands for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers import arm, request
from ranks_of import samples
from safetensors.torch import load_file
from several_ranks import on_ranks

from lorabench.contract.parts import Part, follow, gradients
from lorabench.contract.step import Wrapped
from lorabench.measure.judging import limits, numerics
from lorabench.measure.judging.witness import Witness
from lorabench.measure.kinds.train import Train
from lorabench.measure.trial import run_trial
from lorabench_ablations.parallel import Parallel

NAMES = ("sdpa", "adamw_foreach", "padding")
FAULTS = {
    "the sign": ["gradients", "updates"],  # told are other gradients than those of the update
    "nothing told": ["gradients", "updates"],
    "other copies": ["updates"],  # told are other tensors than those that the optimizer goes on from
}


@dataclass(frozen=True, kw_only=True)
class Halves(Parallel):
    """Each rank's AdamW updates its half of all adapters in a flat copy. `fault`: what it does wrong."""

    name: ClassVar[str] = "halves"
    fault: str = ""

    def step(self, step):
        return Halved(step, self.fault)

    def audit(self, evidence):
        return 2


class Halved(Wrapped):
    def __init__(self, inner, fault):
        super().__init__(inner)
        self.fault, self.done = fault, 0
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        rank, sizes = dist.get_rank(), [p.numel() for p in self.params]
        half = sum(sizes) // 2
        assert 2 * half == sum(sizes)
        self.own = slice(rank * half, (rank + 1) * half)
        self.master = torch.nn.Parameter(flat(self.params)[self.own].clone())
        self.optimizer.param_groups[0]["params"] = [self.master]
        self.mine: list[Part] = []
        begin = 0
        for param, size in zip(self.params, sizes, strict=True):
            first, last = max(begin, self.own.start), min(begin + size, self.own.stop)
            if first < last:
                mine = self.master.detach()[first - self.own.start : last - self.own.start]
                self.mine.append(Part(param, first - begin, [mine.clone() if fault == "other copies" else mine]))
            begin += size
        self.innermost.parts = self.mine

    def backward(self, loss):
        self.inner.backward(loss)
        self.done = (self.done + 1) % len(self.batches)
        if self.done:
            return
        whole = flat([p.grad for p in self.params])
        dist.all_reduce(whole)
        for param in self.params:
            param.grad = None
        self.master.grad = whole[self.own].clone()
        if self.fault == "nothing told":
            return
        told = -self.master.grad if self.fault == "the sign" else self.master.grad
        begin = 0
        for part in self.mine:
            part.grad = told[begin : begin + part.copies[0].numel()]
            begin += part.copies[0].numel()

    def update(self):
        self.inner.update()
        halves = [torch.empty_like(self.master) for _ in range(2)]
        dist.all_gather(halves, self.master.detach())
        whole, begin = torch.cat(halves), 0
        for param in self.params:
            param.data.copy_(whole[begin : begin + param.numel()].view_as(param))
            begin += param.numel()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def witnessed(ranks, folder, fault):
    """What a witness finds in two turns of two trials: how far the gradients of the first trial and of one after all
    turns are from one process's, and the updates' errors."""
    wanted = request(*NAMES, samples=samples(), ranks=ranks)
    made = Train().build(replace(wanted, ablations=(*wanted.ablations, Halves(fault=fault))))
    _, plain = numerics.one_pass(alone := arm(*NAMES, samples=samples()), alone.step)
    witness = Witness(made, made.step, Path(folder))
    run_trial(made)
    witness.first_trial(0.0, made.outs[0])
    updates = []
    for number in (1, 2):
        witness.begin_turn(number)
        for _ in range(2):
            error = witness.observe(run_trial(made).loss).update_error
            assert error is not None
            updates.append(error[0])
    witness.end()
    after = witness.last_trial(run_trial(made).loss, made.outs[0]).after
    assert witness.testimony.before
    return {
        "before": worst(load_file(witness.testimony.before), plain), "after": worst(load_file(after), plain),
        "updates": updates, "held": Train().held(made)["optimizer"], "adapters": made.parameter_bytes()["adapters"],
    }  # fmt: skip


def worst(found, plain):
    assert found.keys() == plain.keys()
    return max(float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in plain.items())


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By fault what each rank's witness found."""
    folder = tmp_path_factory.mktemp("parts")
    return on_ranks(2, folder, lambda ranks: {fault: witnessed(ranks, str(folder), fault) for fault in ("", *FAULTS)})


def test_gradients_are_put_together_and_copies_are_set_back(seen):
    for found in (rank[""] for rank in seen):
        assert found["before"] < limits.GRADIENT[torch.float32] and found["after"] < limits.GRADIENT[torch.float32]
        assert max(found["updates"]) < limits.UPDATE[False]
        assert found["held"] == pytest.approx(1.5 * found["adapters"], rel=0.01)  # its half: two moments and the copy


@pytest.mark.parametrize("fault", FAULTS)
def test_gradients_that_are_invented_and_copies_that_are_not_the_optimizer_s_show(seen, fault):
    for found in (rank[fault] for rank in seen):
        wrong = {"gradients": found["before"] > 0.1, "updates": max(found["updates"]) > 0.1}
        assert [name for name in wrong if wrong[name]] == FAULTS[fault]


def test_a_step_without_parts_has_its_gradients_where_torch_puts_them():
    param = torch.nn.Parameter(torch.ones(2))
    assert gradients(None, [param]) == [None]
    param.grad = torch.ones(2)
    assert gradients(None, [param])[0] is param.grad
    follow(None)


def test_a_part_takes_over_what_was_written_into_its_parameter():
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    part = Part(param, 2, [torch.zeros(3), torch.zeros(2)])
    follow([part])
    assert [copy.tolist() for copy in part.copies] == [[2.0, 3.0, 4.0], [2.0, 3.0]]
