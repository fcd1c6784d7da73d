"""Base of the kinds whose arms make gradients: the numerics gate on a shallow model, and the certificate of what was
timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from safetensors.torch import save_file

from lorabench.contract.ablation import Ablation, Tolerance, Unsupported
from lorabench.contract.arm import Arm, bytes_of
from lorabench.contract.cell import Cell
from lorabench.contract.job import Job
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import Ranks
from lorabench.contract.step import Step
from lorabench.measure.fairness import Untrusted
from lorabench.measure.judging import depth_noise, gold_cache, numerics
from lorabench.measure.judging.certificate import certify
from lorabench.measure.judging.witness import Glimpse, Last, Look, Observed, Witness, without_dropout
from lorabench.measure.kind import EVIDENCE, GateRequest, JobCounts, Kind, Request, Verdicts
from lorabench.measure.memory import give_back, out_of_memory
from lorabench.record.schema import Numerics

T = TypeVar("T")
YARDSTICK = ".yardstick.safetensors"
Plain = tuple[numerics.Outcome, numerics.Outcome]  # (gold, plain PEFT in the compute dtype) of one job


class GradientKind(Kind):
    """Loss and every adapter gradient are compared with plain PEFT in float32, job by job, each as if it were alone."""

    def bytes_per_token(self, model: ModelSpec) -> int:
        """About what one token takes in a float32 forward and backward of the shallow model."""
        raise NotImplementedError

    def losses(self, arm: Arm, out: Any) -> dict[str, float]:
        arm.outs = out
        for one in (x for mine in out for x in mine):
            if type(one) is not torch.Tensor:
                raise Untrusted(
                    f"the {arm.name}'s step returned a {type(one).__name__} for its loss, which may do work"
                )
        return {
            step.name: sum(step.innermost.loss_of(x) for x in mine) for step, mine in zip(arm.steps, out, strict=True)
        }

    def clear(self, arm: Arm) -> None:
        arm.outs = None
        numerics.clear(arm, *arm.steps)

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
        request = partial(_shallow, gate, masked, self.bytes_per_token(gate.cell.model))
        own = gate.cell.own_weights
        plain = self._golds(gate.ranks, replace(request("gold", own or gate.cell.held_weights), dense=bool(own)))
        self._measure_noise(gate)
        divided = any(a.leaves_out for a in gate.cell.candidate)  # a model that no process may run the whole of
        if own and not gate.ranks.rank and not divided:
            self._measure_yardstick(replace(gate.arm("plain", own), dense=True))
        yield from self._judged(gate, request, plain)

    def _golds(self, ranks: Ranks, request: Request) -> dict[str, Plain]:
        """Each job's outcomes alone on its base, by its name; before anything is patched here. Each rank computes those
        of some jobs, and the first one reads all."""
        held, files = request.ablations, list[Path]()
        for job, samples in zip(request.jobs, request.samples, strict=True):
            spec, cut = request.model.with_lora(job.lora), max(len(s.tokens) for s in samples)
            of = request.scratch, spec, job.workload, job.seed, request.dtype, held, cut, request.layers
            files.append(gold_cache.path(*of).with_suffix(".dense.safetensors" if request.dense else ".safetensors"))

        def outcomes(which: slice) -> dict[str, Plain]:
            jobs, every = request.jobs[which], dict[str, Plain]()

            def computed(name: str) -> Plain:
                some = replace(request, jobs=jobs, samples=request.samples[which])
                every.update(every or self._gold_and_plain(some))
                return every[name]

            return {
                job.name: gold_cache.cached(file, request.device, partial(computed, job.name))
                for job, file in zip(jobs, files[which], strict=True)
            }

        if ranks.size > 1:
            outcomes(slice(ranks.rank, None, ranks.size))
            ranks.barrier()
        return {} if ranks.rank else outcomes(slice(None))

    def _measure_noise(self, gate: GateRequest) -> None:
        """How far two right runs are apart at full depth, of each job alone; kept for `first`. Jobs alike have one
        answer. No process runs the whole of a model whose reference has its layers on several devices: there all of
        them run the reference."""
        divided = any(ablation.leaves_out for ablation in gate.cell.reference)
        if gate.ranks.rank and not divided:
            return
        request = gate.arm("plain", gate.cell.held_weights)
        files = [_noise_file(request, i) for i in range(len(request.jobs))]
        made: list[Arm] = []
        for i in sorted({_first_like(request, i) for i in range(len(request.jobs))}):
            missing = float(not files[i].exists())
            if not (gate.ranks.largest(missing) if divided else missing):  # else no other rank is here
                continue
            # Where plain PEFT does not fit, the limits are wider, as `Numerics.depth_noise` says.
            found = self._noise_of_reference(gate, i) if divided else self._of_plain(request, made, partial(_noise, i))
            if not gate.ranks.rank:
                depth_noise.keep(files[i], found)
        made.clear()
        give_back(request.device)
        if gate.ranks.rank:
            return
        for job, file in zip(request.jobs, files, strict=True):
            gate.noise(job.name, file.name, depth_noise.read(file))

    def _measure_yardstick(self, request: Request) -> None:
        """The gradients of plain PEFT at full depth, over an arm's own weights in plain linears; kept for
        `first_trial`. Where they do not fit there are none, and the arm is held against the reference's."""
        files, made = [_kept(request, i, YARDSTICK) for i in range(len(request.jobs))], list[Arm]()
        if all(file.exists() for file in files):
            return

        def keep(arm: Arm) -> None:
            with without_dropout(arm.model):
                for file, step in zip(files, arm.steps, strict=True):
                    save_file(numerics.one_pass(arm, step)[1], file)

        self._of_plain(request, made, keep)
        made.clear()
        give_back(request.device)

    def _of_plain(self, request: Request, made: list[Arm], asked: Callable[[Arm], T]) -> T | None:
        """What is asked of plain PEFT at full depth in this process; None where it does not fit. `made`: its arm, built
        for the first who asks."""
        for recompute in (False, True):  # which takes longer, and changes no number
            try:
                made[:] = made or [self.build(request)]
                if not recompute or _recomputes(made[0].model):
                    return asked(made[0])
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            give_back(request.device)
        return None

    def _noise_of_reference(self, gate: GateRequest, index: int) -> depth_noise.DepthNoise | None:
        """Of the reference on all ranks, with this job alone where its micro-batches are enough for them; None where
        another arm asks, of fewer ranks. Its layers run again in backward, which changes no number: on kernels of its
        own they have more to keep while every module's output is rounded in another way."""
        request = gate.arm("plain", gate.cell.reference)
        if request.ranks.size != gate.ranks.size:
            return None
        try:
            arm = self.build(replace(request, jobs=[request.jobs[index]], samples=[request.samples[index]]))
        except Unsupported:  # on every rank
            arm = self.build(request)
        _recomputes(arm.model)
        step = arm.steps[min(index, len(arm.steps) - 1)]
        return depth_noise.measure(arm, partial(numerics.one_pass, arm, step))

    def _gold_and_plain(self, request: Request) -> dict[str, Plain]:
        """Of each job. One model has the adapters of all, of which PEFT computes the active one."""
        golds = self._outcomes(replace(request, upcast=True))
        if request.dtype == torch.float32:
            return {name: (gold, gold) for name, gold in golds.items()}
        arm = self.build(request)
        numerics.share_masks(arm.model)
        return {s.name: (golds[s.name], numerics.plain_step(arm, golds[s.name], s)) for s in arm.steps}

    def _outcomes(self, request: Request) -> dict[str, numerics.Outcome]:
        """Of each job one step on a shallow model, under dropout masks that every model shares."""
        arm = self.build(request)
        numerics.share_masks(arm.model)
        return {step.name: numerics.one_step(arm, step) for step in arm.steps}

    def _judged(
        self, gate: GateRequest, request: Callable[..., Request], plain: Mapping[str, Plain]
    ) -> Verdicts:  # fmt: skip
        """The verdicts on the jobs that the candidate trains in this process. On a rank that does not report, only the
        steps that the others wait for."""
        wanted = request("candidate", gate.cell.candidate)
        if gate.ranks.rank and wanted.ranks.size == 1:
            return
        found = self._outcomes(wanted.own())
        if gate.ranks.rank:
            return
        declared = _exact(gate.cell, gate.cell.candidate)
        words = "; ".join(t.words for t in _declared(gate.cell, gate.cell.candidate)) or None
        longest = max(len(s.tokens) for samples in wanted.samples for s in samples)
        for job, got in found.items():
            verdict = numerics.judge(*plain[job], got, wanted.dtype, declared)
            yield job, verdict.model_copy(update={"shallow_tokens": longest, "tolerance": words})

    def first_trial(self, arm: Arm, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        held, weights = replace(request, ablations=request.cell.held_weights), request.cell.own_weights
        arm.witnesses = [Witness(arm, step, request.scratch / EVIDENCE) for step in arm.steps]
        trial = run()
        numbers = {job.name: number for number, job in enumerate(request.jobs)}
        for witness, outs in zip(arm.witnesses, arm.outs, strict=True):
            witness.testimony.phases = tuple(trial.device_ms)
            number = numbers[witness.step.name]
            witness.testimony.noise = depth_noise.read(_noise_file(held, number))
            if weights and arm.name != "reference":
                yardstick = _kept(replace(request, ablations=weights), number, YARDSTICK)
                witness.testimony.yardstick = yardstick if yardstick.exists() else None
            witness.first_trial(arm.ranks.total(trial.losses[witness.step.name]), outs)
        return {w.step.name: w.testimony for w in arm.witnesses}

    def settle(self, arm: Arm, run: Callable[[], Any]) -> None:
        """Under dropout: whether the arm can be run without it, and how far it moves the gradients where it is on, as
        in the first trial, whose gradients are still there."""
        if not any(step.job and step.job.lora.lora_dropout for step in arm.steps):
            return
        first = [w.glimpse(w.testimony.loss, outs, keep=False) for w, outs in zip(arm.witnesses, arm.outs, strict=True)]
        seen = [self._from_start(arm, run, seed, off) for seed, off in ((1, True), (2, True), (2, False))]
        for witness, on, (off, off_again, on_again) in zip(arm.witnesses, first, zip(*seen, strict=True), strict=True):
            witness.under_dropout((off, off_again), (on, on_again))

    def _from_start(self, arm: Arm, run: Callable[[], Any], seed: int, off: bool) -> list[Glimpse]:
        """One trial from where the first one began, with dropout `off` or on: what each job's gradients were."""
        for witness in arm.witnesses:
            witness.at_start()
        torch.manual_seed(seed)
        with without_dropout(arm.model) if off else contextlib.nullcontext():
            trial = run()
        return [
            witness.glimpse(arm.ranks.total(trial.losses[witness.step.name]), outs, keep=off and seed == 1)
            for witness, outs in zip(arm.witnesses, arm.outs, strict=True)
        ]

    def begin_turn(self, arm: Arm, number: int = 0, each: bool = True) -> None:
        for witness in arm.witnesses:
            witness.begin_turn(number, each)

    def observe(self, arm: Arm, number: int, losses: dict[str, float]) -> dict[str, Observed]:
        return {w.step.name: w.observe(arm.ranks.total(losses[w.step.name])) for w in arm.witnesses}

    def look(self, arm: Arm, number: int) -> dict[str, Look]:
        return {w.step.name: w.look(outs) for w, outs in zip(arm.witnesses, arm.outs, strict=True)}

    def last_trial(self, arm: Arm, run: Callable[[], Any]) -> dict[str, Last]:
        for witness in arm.witnesses:
            witness.end()
        off = all(witness.testimony.masks_off for witness in arm.witnesses)
        with without_dropout(arm.model) if off else contextlib.nullcontext():
            trial = run()
        return {
            w.step.name: w.last_trial(arm.ranks.total(trial.losses[w.step.name]), outs)
            for w, outs in zip(arm.witnesses, arm.outs, strict=True)
        }

    def said(self, arm: Arm, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        return {k: v for turn in arm.stepped for k, v in turn.innermost.said().items()}

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        if verdict is None:
            return None
        own, others = (_declared(cell, arm) for arm in (cell.reference, cell.candidate))
        verdict = verdict.model_copy(update={"depth_noise": reference.noise is not None})
        exact = _exact(cell, (*cell.reference, *cell.candidate))
        return numerics.with_checks(verdict, certify(reference, candidate, dtype, [*own, *others], own, exact))

    def explain(self, numerics_: Numerics) -> str:
        return numerics.explain(numerics_)


def _declared(cell: Cell, toggles: Sequence[Ablation]) -> list[Tolerance]:
    """What these toggles declare; what both arms alike hold in another form is part of the model."""
    return [a.tolerance for a in toggles if a.tolerance and a not in cell.held_weights]


def _exact(cell: Cell, toggles: Sequence[Ablation]) -> list[Tolerance]:
    """The same against plain PEFT over the candidate's own weights: that they are rounded is then no error, and what is
    left is that a toggle rounds inputs, too, as `eps` says."""
    return _declared(cell, [a for a in toggles if a not in cell.own_weights or (a.tolerance and a.tolerance.eps)])


def _shallow(
    gate: GateRequest, masked: bool, bytes_per_token: int, name: str, ablations: Sequence[Ablation]
) -> Request:
    """What the gate builds: few layers, few samples, no dropout where an arm draws masks of its own. The samples are
    whole where a float32 batch of them fits `_spare`, else cut to GATE_TOKENS."""
    wanted = gate.arm(name, ablations)
    longest = max(len(s.tokens) for samples in wanted.samples for s in samples)
    rows = max(min(job.workload.batch_size, numerics.GATE_SAMPLES) for job in wanted.jobs)
    whole = rows * longest * bytes_per_token <= _spare(wanted.device)
    tokens = longest if whole else min(longest, numerics.GATE_TOKENS)
    samples = [numerics.shorten(s, tokens) for s in wanted.samples]
    jobs = wanted.jobs
    if masked:
        jobs = [replace(j, lora=j.lora.model_copy(update={"lora_dropout": 0.0})) for j in jobs]
    model = wanted.model.without_dropout() if masked else wanted.model
    both = (*gate.cell.reference, *gate.cell.candidate)
    layers = max([numerics.GATE_LAYERS, *(a.least_layers(gate.ranks.size) for a in both)])
    return replace(wanted, model=model, jobs=jobs, samples=samples, layers=layers)


def _spare(device: torch.device) -> int:
    """Bytes that a shallow model in float32 may take: a third of the device's, and no more than 2 GiB on a CPU, where
    it would take minutes. Not of what is free just now: it has to be one answer for all that is compared."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 3
    return min(psutil.virtual_memory().total // 3, 2 << 30)


def _first_like(request: Request, index: int) -> int:
    """The first job that differs from this one in its name and its seed alone: in which samples of one distribution it
    drew, and not in what its noise follows from (model, adapter, lengths, number formats)."""

    def what(job: Job) -> tuple[Any, ...]:
        return job.workload.model_copy(update={"name": ""}), job.lora

    wanted = what(request.jobs[index])
    return next(i for i, job in enumerate(request.jobs) if what(job) == wanted)


def _recomputes(model: Any) -> bool:
    """Whether each layer of the model runs again in backward from here on; some models cannot."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "supports_gradient_checkpointing", False):
        return False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True


def _noise_file(request: Request, index: int) -> Path:
    """Where the noise of one job, and of all like it, is kept: see depth_noise.py."""
    return _kept(request, _first_like(request, index), ".noise.json")


def _kept(request: Request, index: int, suffix: str) -> Path:
    """The file of what plain PEFT over the weights of `request.ablations` comes to in a job."""
    job = request.jobs[index]
    spec = request.model.with_lora(job.lora)
    file = gold_cache.path(request.scratch, spec, job.workload, job.seed, request.dtype, request.ablations)
    return file.with_suffix(suffix)


def _noise(index: int, arm: Arm) -> depth_noise.DepthNoise:
    """Of one of the arm's jobs."""
    return depth_noise.measure(arm, partial(numerics.one_pass, arm, arm.steps[index]))


def _states(step: Step) -> list[torch.Tensor]:
    """What the optimizer holds: its state, and its own copies of parameters."""
    state = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [*state, *(part.copies[0] for part in step.innermost.parts or ())]
