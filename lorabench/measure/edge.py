"""How long samples may be for an arm's step to fit the device, where those that the workload has do not.

The arm is built on samples that are cut to a part of their length. The memory model of contract/memory_fit.py is fitted
to steps of growing length and says the longest that fits. Steps there find the edge: one length ran, and the next one,
a sixty-fourth of the workload's longer, did not. Run: python -m pytest tests/measure/test_edge.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.job import Job
from lorabench.contract.memory_fit import GIB, Edge, Load, fit, largest
from lorabench.measure import memory
from lorabench.measure.build import laid_out, to_device
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import Kind, Request
from lorabench.measure.rehearsal import Rehearsing

GRAINS = 64  # lengths that are told apart, the workload's own the longest
SMALL = (1, 2, 4, 8, 16)  # grains of the steps that the model is fitted to
ROOMY = 0.9  # share of the room above which a step is not tried for the model's sake


def edge(request: Request, kind: Kind, until: float) -> Edge | None:
    """Of an arm that ran out of memory. None where there is no search: of several jobs or ranks, and with a toggle that
    looks for its own micro-batches or compiles for minutes. `until`: by perf_counter(), after which no step begins."""
    asked = max((len(s.tokens) for own in request.samples for s in own), default=0)
    searches = any(type(a).size is not Ablation.size or a.slow_start for a in request.ablations)
    if len(request.jobs) > 1 or request.ranks.size > 1 or searches or asked < 2 * GRAINS:
        return None
    job, samples, hooks = request.jobs[0], request.samples[0], Hooks(request.ablations)

    def lay_out(tokens: int) -> list[Batch]:
        return laid_out(request, hooks, _cut_job(job, tokens), [_cut(s, tokens) for s in samples])

    def load(tokens: int) -> Load:
        return max((Load.of(batch) for batch in lay_out(tokens)), key=lambda found: found.positions)

    few = asked // GRAINS
    held, room = memory.allocated(request.device), memory.free(request.device)
    try:
        arm = kind.build(replace(request, jobs=[_cut_job(job, few)], samples=[[_cut(s, few) for s in samples]]))
    except Exception as error:
        if not memory.out_of_memory(error):
            raise
        return Edge(asked, 0, few, _gib(room))
    with Rehearsing(
        arm.step, [_cut(s, few) for s in samples], job.workload, lambda some, size: lay_out(few), held=held, room=room,
        configuration={}, folder=request.scratch, device=request.device,
    ) as rehearsal:  # fmt: skip

        def run(tokens: int) -> int:
            return rehearsal.run([to_device(batch, request.device) for batch in lay_out(tokens)], room).peak

        return search(run, load, asked, room, until)


def search(run: Callable[[int], int], load: Callable[[int], Load], asked: int, room: int, until: float) -> Edge:
    """The edge below `asked` tokens, with which there was too little memory. `run`: the peak of a step with samples of
    so many, or torch.OutOfMemoryError; `load`: its heaviest micro-batch."""
    peaks: dict[int, int] = {}  # by grains
    failed = GRAINS

    def length(grains: int) -> int:
        return asked * grains // GRAINS

    def runs(grains: int) -> bool:
        nonlocal failed
        try:
            peaks[grains] = run(length(grains))
        except torch.OutOfMemoryError:
            failed = grains
        return grains in peaks

    def late() -> bool:
        return perf_counter() > until

    model = None
    for grains in SMALL:
        too_much = model is not None and model(load(length(grains))) > ROOMY * room
        if late() or too_much or not runs(grains):
            break
        if len(peaks) > 1:
            model = fit([(load(length(n)), peak) for n, peak in peaks.items()])
    if not peaks:
        return Edge(asked, 0, length(failed), _gib(room))
    best = max(peaks)
    if model is not None:
        best = max(best, largest(lambda n: model(load(length(n))) <= room, failed - 1))
    while best not in peaks and not late() and not runs(best):
        best -= 1
    while best + 1 < failed and not late() and runs(best + 1):
        best += 1
    best = max(peaks)
    predicted = None if model is None else _gib(model(load(length(best))))
    return Edge(asked, length(best), length(failed), _gib(room), _gib(peaks[best]), predicted)


def _gib(nbytes: float) -> float:
    return round(nbytes / GIB, 4)


def _cut(sample: Sample, tokens: int) -> Sample:
    """Its first tokens; all of them trained where only later ones are."""
    cut = Sample(sample.tokens[:tokens], sample.labels[:tokens])
    return cut if cut.trained else Sample(cut.tokens, cut.tokens)


def _cut_job(job: Job, tokens: int) -> Job:
    """With rows of so many tokens, which is what packing fills."""
    seq_len = min(tokens, job.workload.seq_len)
    return replace(job, workload=job.workload.model_copy(update={"seq_len": seq_len}))
