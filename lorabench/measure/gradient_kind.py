"""Base of the kinds whose arms make gradients: the numerics gate on a shallow model, and the full arms' agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm, bytes_of
from lorabench.contract.cell import Cell
from lorabench.contract.step import Step
from lorabench.measure import gold_cache, numerics
from lorabench.measure.kind import GateRequest, JobCounts, Kind, Request, Verdicts
from lorabench.record.schema import Numerics


class GradientKind(Kind):
    """Loss and every adapter gradient are compared with plain PEFT in float32, job by job, each as if it were alone."""

    def losses(self, arm: Arm, out: Any) -> dict[str, float]:
        return {step.name: sum(step.loss_of(x) for x in mine) for step, mine in zip(arm.steps, out, strict=True)}

    def clear(self, arm: Arm) -> None:
        for step in arm.steps:
            step.clear()

    def held(self, arm: Arm) -> dict[str, int]:
        return {**arm.parameter_bytes(), "optimizer": bytes_of([t for step in arm.steps for t in _states(step)])}

    def counts(self, arm: Arm) -> dict[str, JobCounts]:
        return {
            step.name: JobCounts(
                sum(b.real for b in step.batches), sum(b.padded for b in step.batches), step.items,
                bytes_of([p for _, p in arm.adapters(step)]), bytes_of(_states(step)),
            )
            for step in arm.steps
        }  # fmt: skip

    def gate(self, gate: GateRequest) -> Verdicts:
        both = (*gate.cell.reference, *gate.cell.candidate)
        masked = any(a.own_dropout_masks for a in both)
        request = partial(_shallow, gate, masked)
        plain = [] if gate.ranks.rank else list(self._golds(gate, request("gold", gate.cell.held_weights)))
        judged: list[Any] | None = None
        for name in gate.names:
            gate.working_on(name)
            if gate.cell.toggles or judged is None:
                judged = list(self._judged(gate, name, request, plain))
            yield from ((name, job, verdict) for _, job, verdict in judged)  # reference against itself: judged once

    def _golds(self, gate: GateRequest, request: Request) -> Iterator[tuple[numerics.Outcome, numerics.Outcome]]:
        """(gold, plain PEFT in the compute dtype) of each job, alone on its base; before anything is patched here."""
        gate.working_on("gold")
        held = request.ablations
        for i, job in enumerate(request.jobs):
            mine = request.only(i)
            spec = mine.model.with_lora(job.lora)
            file = gold_cache.path(request.scratch, spec, job.workload, job.seed, request.dtype, held)
            yield gold_cache.cached(file, request.device, partial(self._gold_and_plain, mine))

    def _gold_and_plain(self, request: Request) -> tuple[numerics.Outcome, numerics.Outcome]:
        gold = self._outcomes(replace(request, upcast=True))[""]
        if request.dtype == torch.float32:
            return gold, gold
        return gold, self._outcomes(request)[""]

    def _outcomes(self, request: Request) -> dict[str, numerics.Outcome]:
        """Of each job one step on a shallow model, under dropout masks that every model shares."""
        arm = self.build(request)
        numerics.share_masks(arm.model)
        return {step.name: numerics.one_step(arm, step) for step in arm.steps}

    def _judged(
        self, gate: GateRequest, name: str, request: Callable[..., Request],
        plain: Sequence[tuple[numerics.Outcome, numerics.Outcome]],
    ) -> Verdicts:  # fmt: skip
        """The verdicts on one arm's jobs. On a rank that does not report, only the steps that the others wait for."""
        ablations = gate.cell.arm(name)
        wanted = request(name, ablations)
        if gate.ranks.rank and wanted.ranks.size == 1:
            return
        found = self._outcomes(wanted)
        judged = [a for a in ablations if a not in gate.cell.held_weights]
        for (job, got), (gold, low) in zip(found.items(), plain, strict=False):
            yield name, job, numerics.judge(gold, low, got, wanted.dtype, judged)

    def first(self, arm: Arm, run: Callable[[], Any]) -> dict[str, Any]:
        return numerics.first_step(arm, run)

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        if verdict is None:
            return None
        dropout = max(job.lora.lora_dropout for job in cell.jobs)
        return numerics.agree(verdict, reference, candidate, dtype, dropout)

    def explain(self, numerics_: Numerics) -> str:
        return numerics.explain(numerics_)


def _shallow(gate: GateRequest, masked: bool, name: str, ablations: Sequence[Ablation]) -> Request:
    """What the gate builds: few layers, few short samples, no dropout where an arm draws masks of its own."""
    wanted = gate.arm(name, ablations)
    samples = [numerics.shorten(s) for s in wanted.samples]
    jobs = wanted.jobs
    if masked:
        jobs = [replace(j, lora=j.lora.model_copy(update={"lora_dropout": 0.0})) for j in jobs]
    model = wanted.model.without_dropout() if masked else wanted.model
    return replace(wanted, model=model, jobs=jobs, samples=samples, layers=numerics.GATE_LAYERS)


def _states(step: Step) -> list[torch.Tensor]:
    return [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
