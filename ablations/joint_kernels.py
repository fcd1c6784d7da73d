"""The joint step on our own kernels: lorakernels for rows of several adapters, and its chunked head, once a job. A
module of its own because it is torch throughout.

In slots, a number that is not finite gets from one job's rows into the others'. So the step looks: at the losses after
each forward, and at the gradients before the optimizers step. Where one is not finite the jobs are tried apart, and the
others have what they have without that job's adapter, whose loss and gradients are NaN. Run: python -m pytest
tests/ablations/test_jobs_together.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from lorakernels.ops.job_rows import JobRows
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.step import Step
from lorabench.measure.trial import put_back, random_states
from lorabench_ablations.joint_step import JointStep, Part, all_finite
from lorabench_ablations.lora_kernels import on_kernels

MOST_ROWS = 64  # layouts of rows whose tables are kept: a step repeats its own
TRIED = 4  # tokens by which it is found out whether the logits are the head's product with what the layers give


def route(model: nn.Module, mark: str, name: str, slots: bool = True) -> int:
    """As `joint_linears.route`, by a `KernelRouter`."""
    router = KernelRouter(model, name, slots)
    setattr(model, mark, router)
    return router.linears


class KernelRouter:
    """lorakernels' `MultiAdapters`, told by the parts of a joint batch. name: of the toggle; slots: the fused form.
    Raises Unsupported where a layer cannot have an adapter for each row."""

    def __init__(self, model: nn.Module, name: str, slots: bool) -> None:
        import lorakernels

        if slots and on_kernels(model):
            lorakernels.remove(model)  # the norms or RoPE of another toggle, which the fused form has, too
        try:
            self.jobs = lorakernels.apply_multi(model, fused=slots)
        except ValueError as error:
            raise Unsupported(f"{name}: {error}") from None
        self.linears, self.slots, self.report = self.jobs.linears, slots, self.jobs.report
        self._plain_head: bool | None = None
        self._kept: list[int] = []
        self._rows: dict[tuple[tuple[int, int], ...], JobRows] = {}

    def plain_head(self, base: Any) -> bool:
        """Whether this model's logits are its head's product with what its layers give. It is tried once, and nothing
        of the model is kept: a stage of a pipeline gives its head back."""
        if self._plain_head is None:
            self.jobs.set(None)  # the rows of the last batch are not those that it is tried with
            self._plain_head = _is_product(base, base.base_model, base.get_output_embeddings())
        return self._plain_head

    def set(self, parts: Sequence[Part], without: Collection[int] = ()) -> None:
        """without: jobs whose rows have no adapter."""
        places = [self.jobs.adapters.index(part.adapter) for part in parts]
        runs = tuple((place, part.positions) for place, part in zip(places, parts, strict=True))
        if runs not in self._rows:
            if len(self._rows) == MOST_ROWS:
                self._rows.clear()
            self._rows[runs] = JobRows(runs)
        absent = [place for place, part in zip(places, parts, strict=True) if part.job in without]
        self.jobs.set(self._rows[runs], without=absent, resident=self._kept)

    @property
    def tables(self) -> list[JobRows]:
        return list(self._rows.values())

    def keep(self, adapters: Sequence[str]) -> None:
        """Which adapters are known to be finite."""
        self._kept = [self.jobs.adapters.index(adapter) for adapter in adapters]


class Passed(NamedTuple):
    """A forward that the gradients are of: its batch, the random numbers that it began with, the jobs whose loss was
    not finite, and the losses, where nobody has looked at them yet."""

    batch: Batch
    random: list[Tensor]
    broken: frozenset[int]
    unseen: Tensor | None = None


class KernelStep(JointStep):
    """With `chunked_head` the logits are never held: a job's loss is that of the head over its own rows."""

    def __init__(
        self, steps: Sequence[Step], router: Any, *, packed: bool, tokens: int | None, chunked_head: bool
    ) -> None:
        super().__init__(steps, router, packed=packed, tokens=tokens)
        base: Any = self.model.get_base_model()  # pyright: ignore[reportCallIssue]
        self.body, self.head = base.base_model, base.get_output_embeddings()
        self.chunked = chunked_head and router.plain_head(base)
        self._passed: list[Passed] = []

    def forward(self, batch: Batch) -> Tensor:
        return self.looked_at(batch, self._losses) if self.looks else self._losses(batch)

    def looked_at(self, batch: Batch, run: Callable[[Batch], Tensor], later: bool = False) -> Tensor:
        if not self.router.slots:
            return run(batch)
        random, broken = random_states(self.device), frozenset[int]()
        losses = run(batch)
        if not later and not losses.isfinite().all():  # here the host waits for the device
            broken = self._broken(batch, losses, random)
            losses = torch.stack(self._without(batch, broken, random))
        if torch.is_grad_enabled() and self.by_job is None:
            self._passed.append(Passed(batch, random, broken, losses if later else None))
        return losses

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def gradients_finite(self) -> Tensor | None:
        return self._finite_but(frozenset()) if self.router.slots else None

    def settle(self, finite: bool | None = None) -> None:
        if not finite:
            self._passed = [self._looked_back(passed) for passed in self._passed]
        broken = frozenset(job for passed in self._passed for job in passed.broken)
        if broken or finite is None:
            finite = not (self.router.slots and self._passed) or bool(self._finite_but(broken))
        if not finite:
            self._apart()
        self._passed.clear()

    def update(self) -> None:
        if self.looks:
            self.settle()
        super().update()

    def clear(self) -> None:
        self._passed.clear()
        super().clear()

    def cleared(self) -> None:
        self._passed.clear()
        super().cleared()

    # ---- a number that is not finite ---------------------------------------------------------------------------------
    def _looked_back(self, passed: Passed) -> Passed:
        """A pass whose losses were looked at now, and are what they should have been."""
        batch, random, _, losses = passed
        if losses is None or losses.isfinite().all():
            return passed._replace(unseen=None)
        broken = self._broken(batch, losses, random)
        with torch.no_grad():
            losses.copy_(torch.stack(self._without(batch, broken, random)))
        return Passed(batch, random, broken)

    def _broken(self, batch: Batch, losses: Tensor, random: Sequence[Tensor]) -> frozenset[int]:
        """Of the jobs whose loss is not finite those where it is not finite without the others' adapters either; all
        of them where it is with each."""
        here = {part.job for part in batch.inputs["parts"]}
        wrong = [job for job, finite in enumerate(losses.isfinite().tolist()) if not finite]
        with torch.no_grad():
            own = {job: self._without(batch, here - {job}, random)[job] for job in wrong}
        return frozenset(job for job, loss in own.items() if not loss.isfinite()) or frozenset(wrong)

    def _without(self, batch: Batch, absent: Collection[int], random: Sequence[Tensor]) -> list[Tensor]:
        """Each job's loss, with the rows of absent jobs in the frozen model alone; theirs is NaN, and so are the
        gradients of it. random: the numbers to begin with."""
        put_back(random, self.device)
        losses = list(self._losses(batch, absent).unbind())
        for job in absent:
            losses[job] = torch.stack([p.sum() for p in self.trained(job)]).sum().float() * torch.nan
        return losses

    def _finite_but(self, broken: Collection[int]) -> Tensor:
        """Of all jobs but those."""
        every = [p for job in range(len(self.steps)) if job not in broken for p in self.trained(job)]
        return all_finite([p.grad for p in every if p.grad is not None])

    def _apart(self) -> None:
        """The step's gradients once more, each job's in a pass in which the others' rows have no adapter."""
        passed = list(self._passed)
        super().clear()
        for batch, random, broken, _ in passed:
            here = {part.job for part in batch.inputs["parts"]}
            for job in here:
                absent = here if job in broken else here - {job}
                loss = self._without(batch, absent, random)[job]
                loss.backward(loss.new_tensor(self.steps[job].loss_scale))

    # ---- one pass ----------------------------------------------------------------------------------------------------
    def _losses(self, batch: Batch, absent: Collection[int] = ()) -> Tensor:
        inputs = dict(batch.inputs)
        parts, labels = inputs.pop("parts"), inputs.pop("labels")
        self.router.set(parts, absent)
        if not self.chunked:
            return self.losses(self.call(**inputs).logits, labels, parts)
        from lorakernels.ops.linear_cross_entropy import linear_cross_entropy

        hidden = self.body(**inputs).last_hidden_state.flatten(0, 1)
        following = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
        found, sizes = [hidden.new_zeros((), dtype=torch.float32)] * len(self.steps), [p.positions for p in parts]
        for part, own, target in zip(parts, hidden.split(sizes), following.split(sizes), strict=True):
            items, own = self.steps[part.job].items, own.to(self.head.weight.dtype)
            found[part.job] = linear_cross_entropy(own, self.head.weight, target, self.head.bias, num_items=items)
        return torch.stack(found)


def _is_product(base: Any, body: Any, head: Any) -> bool:
    """Whether the logits are those of a frozen, plain head: some families cap or scale them, and a head may have an
    adapter."""
    if type(head) is not nn.Linear or head.weight.requires_grad:
        return False
    seen: list[Tensor] = []
    handle = body.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    training = base.training
    try:
        base.eval()
        with torch.no_grad():
            logits = base(input_ids=torch.zeros(1, TRIED, dtype=torch.long, device=head.weight.device)).logits
            return torch.equal(logits, head(seen[0]))
    finally:
        handle.remove()
        base.train(training)
