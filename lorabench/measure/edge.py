"""How much of its workload an arm has room for that ran out of memory: how long samples may be, or how many jobs.

Steps with less are tried, and the memory model of contract/memory_fit.py is fitted to them. It says the most that fits,
and steps there find the edge: so much ran, and a little more did not. Run: python -m pytest tests/measure/test_edge.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.hooks import first_line
from lorabench.contract.job import Job
from lorabench.contract.memory_fit import GIB, JOBS, TOKENS, Edge, Load, fit, largest
from lorabench.measure import memory
from lorabench.measure.build import laid_out, to_device
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import Kind, Request
from lorabench.measure.rehearsal import Rehearsing

GRAINS = 64  # lengths of a sample that are told apart, the workload's own the longest
SMALL = (1, 2, 4, 8, 16)  # of these, or jobs: the steps that the model is fitted to
ROOMY = 0.9  # share of the room above which a step is not tried for the model's sake

Run = Callable[[int], int]  # the peak of a step with so much, in bytes, or torch.OutOfMemoryError


def edge(request: Request, kind: Kind, until: float) -> Edge | None:
    """Of an arm that ran out of memory. None where there is no search: of several ranks, and with a toggle that looks
    for its own micro-batches or compiles for minutes. `until`: by perf_counter(), after which no step begins."""
    searches = any(type(a).size is not Ablation.size or a.slow_start for a in request.ablations)
    if request.ranks.size > 1 or searches:
        return None
    return _of_jobs(request, kind, until) if len(request.jobs) > 1 else _of_tokens(request, kind, until)


def _of_tokens(request: Request, kind: Kind, until: float) -> Edge | None:
    """How long its samples may be. None of samples that are too short to be cut into GRAINS."""
    job, samples, hooks = request.jobs[0], request.samples[0], Hooks(request.ablations)
    asked = max(len(s.tokens) for s in samples)
    if asked < 2 * GRAINS:
        return None

    def length(grains: int) -> int:
        return asked * grains // GRAINS

    def lay_out(tokens: int) -> list[Batch]:
        made = laid_out(request, hooks, _cut_job(job, tokens), [_cut(s, tokens) for s in samples])
        return [to_device(batch, request.device) for batch in made]

    def load(grains: int) -> Load:
        return max((Load.of(batch) for batch in lay_out(length(grains))), key=lambda found: found.positions)

    few = length(1)
    held, room = memory.allocated(request.device), memory.free(request.device)
    shortest = replace(request, jobs=[_cut_job(job, few)], samples=[[_cut(s, few) for s in samples]])
    try:
        arm = kind.build(shortest)
    except Exception as error:
        if not memory.out_of_memory(error):
            raise
        return Edge(TOKENS, asked, 0, few, _gib(room))
    with Rehearsing(
        arm.step, shortest.samples[0], job.workload, lambda some, size: lay_out(few), held=held, room=room,
        configuration={}, folder=request.scratch, device=request.device,
    ) as rehearsal:  # fmt: skip

        def run(grains: int) -> int:
            return rehearsal.run(lay_out(length(grains)), room).peak

        found = search(TOKENS, run, load, GRAINS, room, until)
    return replace(found, asked=asked, fits=length(found.fits), too_many=length(found.too_many))


def _of_jobs(request: Request, kind: Kind, until: float) -> Edge:
    """How many of its jobs may train: the first ones, each time on an arm built anew."""
    asked, shared = len(request.jobs), 0

    def two_steps(jobs: int) -> None:
        nonlocal shared
        arm = kind.build(replace(request, jobs=request.jobs[:jobs], samples=request.samples[:jobs]))
        shared = request.base.bytes_of(arm.model) if request.base else 0
        for _ in range(2):  # the optimizer's state is there from the second step on
            kind.trial(arm, lambda phase: None)
            kind.clear(arm)

    def run(jobs: int) -> int:
        try:
            return memory.growth(request.device, lambda: two_steps(jobs))
        except Exception as error:
            if not memory.out_of_memory(error):
                raise
            words = first_line(error)
        finally:
            memory.give_back(request.device)
        raise torch.OutOfMemoryError(words)  # here, where no frame of the step is left that holds what it saved

    try:
        run(1)  # what arms share is made by the first one, and stays
        one = run(1)
    except torch.OutOfMemoryError:
        return Edge(JOBS, asked, 0, 1, _gib(memory.free(request.device)))
    room = memory.free(request.device)
    found = search(JOBS, run, lambda jobs: Load(jobs, jobs * jobs), asked, room, until)
    return replace(found, processes=int((room + shared) // (shared + one + memory.CONTEXT)))


def search(of: str, run: Run, load: Callable[[int], Load], asked: int, room: int, until: float) -> Edge:
    """The edge below `asked`, with which there was too little memory. `load`: what the memory of a step with so much
    depends on."""
    peaks: dict[int, int] = {}
    failed = asked

    def runs(much: int) -> bool:
        nonlocal failed
        try:
            peaks[much] = run(much)
        except torch.OutOfMemoryError:
            failed = much
        return much in peaks

    def late() -> bool:
        return perf_counter() > until

    model = None
    for much in SMALL:
        too_much = model is not None and model(load(much)) > ROOMY * room
        if much >= failed or late() or too_much or not runs(much):
            break
        if len(peaks) > 1:
            model = fit([(load(n), peak) for n, peak in peaks.items()])
    if not peaks:
        return Edge(of, asked, 0, failed, _gib(room))
    best = max(peaks)
    if model is not None:
        best = max(best, largest(lambda n: model(load(n)) <= room, failed - 1))
    while best not in peaks and not late() and not runs(best):
        best -= 1
    while best + 1 < failed and not late() and runs(best + 1):
        best += 1
    best = max(peaks)
    predicted = None if model is None else _gib(model(load(best)))
    return Edge(of, asked, best, failed, _gib(room), _gib(peaks[best]), predicted)


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
