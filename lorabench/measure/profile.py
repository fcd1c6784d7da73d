"""What ran: operator names of one step (the audit), and how long the device was busy in each phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from lorabench.contract.arm import Arm
from lorabench.measure.trial import Trial, run_trial, synchronize

T = TypeVar("T")


def traced(call: Callable[[], T]) -> tuple[T, Counter[str]]:
    """Run `call` and count the operators it dispatched, by name (`aten::mm`), whatever device they ran on."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        result = call()
    return result, Counter(event.name() for event in _raw(trace))


def collectives(call: Callable[[], T]) -> tuple[T, Counter[str], dict[str, int]]:
    """As `traced`, with the bytes that this process handed to each kind of collective. What gloo does by another one
    (reduce-scatter by all-reduce) counts as what was asked for. The harness's own numbers of 8 bytes are left out."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        result = call()
    events = sorted(_raw(trace), key=lambda event: event.start_ns())
    handed: Counter[str] = Counter()
    asked = ""
    for event in events:
        backend, _, name = event.name().partition(":")
        if name.startswith(":"):
            asked = name if backend in ("c10d", "_c10d_functional") else asked
        elif backend in ("gloo", "nccl") and (size := _nbytes(event)) > 8:
            handed[_kind(name, asked)] += size
    return result, Counter(event.name() for event in events), dict(handed)


KINDS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast")


def _kind(name: str, asked: str) -> str:
    if "reduce_scatter" in asked:
        return "reduce_scatter"
    plain = name.replace("alltoall", "all_to_all").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    return next((kind for kind in KINDS if kind in plain), name)


def _nbytes(event: Any) -> int:
    """Of what a collective was given first."""
    shape, dtype = next(zip(event.shapes(), event.dtypes(), strict=False), ([], ""))
    return math.prod(shape) * SIZES.get(dtype, 0)


SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}


def _raw(trace: profile) -> Sequence[Any]:
    """The events as Kineto has them. Not trace.events(): that builds a tree in Python, three seconds for the operators
    of a model of 30 layers."""
    return trace.profiler.kineto_results.events()  # type: ignore[union-attr]


class Busy(NamedTuple):
    """Milliseconds in which the GPU had at least one kernel or copy running (union of intervals); in which one of these
    was a collective's; and in which nothing else was."""

    device: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0


def watched_trial(arm: Arm, number: int | None = None) -> tuple[Trial, dict[str, Busy] | None]:
    """One trial that is not timed, on the data of `number`, and what the GPU did in each phase; None on a CPU. Comes
    after the timed trials: a profiler that was once on leaves a trace. One trace, in which a kernel of our own marks
    where a phase begins: to start a profiler for each phase takes longer than a step of many micro-batches."""
    if arm.device.type != "cuda":
        return run_trial(arm, number=number), None
    began: list[str] = []

    def at(phase: str) -> None:
        began.append(phase)
        synchronize(arm.device)
        torch.cuda._sleep(1)
        synchronize(arm.device)

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        done = run_trial(arm, at, number)
        synchronize(arm.device)
    return done, busy_by_phase(device_spans(trace), began, arm.kind.phases)


MARK = "spin_kernel"  # what torch.cuda._sleep launches
COLLECTIVE = "nccl"  # in the name of each of NCCL's kernels


def busy_by_phase(
    spans: Sequence[tuple[int, int, str]], began: Sequence[str], phases: Sequence[str]
) -> dict[str, Busy] | None:
    """`began`: the phases in the order in which each began, with a mark among the spans. None where the marks are not
    as many."""
    parts: list[list[tuple[int, int, str]]] = []
    for span in spans:
        if MARK in span[2]:
            parts.append([])
        elif parts:
            parts[-1].append(span)
    if len(parts) != len(began):
        return None
    busy = dict.fromkeys(phases, Busy())
    for phase, part in zip(began, parts, strict=True):
        sent = [span for span in part if COLLECTIVE in span[2]]
        whole, alone = union(part), union([span for span in part if COLLECTIVE not in span[2]])
        more = (ns / 1e6 for ns in (whole, union(sent), whole - alone))
        busy[phase] = Busy(*map(sum, zip(busy[phase], more, strict=True)))
    return busy


def device_spans(trace: profile) -> list[tuple[int, int, str]]:
    """(start, end, name) of everything that ran on the GPU, in order; in nanoseconds."""
    on_device = (e for e in _raw(trace) if e.device_type() == torch.autograd.DeviceType.CUDA)
    return sorted((e.start_ns(), e.end_ns(), e.name()) for e in on_device)


def union(spans: Sequence[tuple[int, int, str]]) -> int:
    """The length that sorted, possibly overlapping spans cover together."""
    total, reached = 0, 0
    for start, end, _ in spans:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def waits(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, str, str]]:
    """(length, what ran last before it, what ended it) of each stretch without any span, the longest first."""
    found: list[tuple[int, str, str]] = []
    reached, last = (spans[0][1], spans[0][2]) if spans else (0, "")
    for start, end, name in spans:
        if start > reached:
            found.append((start - reached, last, name))
        if end > reached:
            reached, last = end, name
    return sorted(found, key=lambda wait: -wait[0])
