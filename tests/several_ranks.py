"""A function in several processes that are joined as the ranks of an arm are: by gloo, or with a GPU each by NCCL; for
tests without a sweep."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from lorabench.contract.ranks import Ranks

GRACE_S = 5.0  # for the others to say what a rank that failed did to them


def on_ranks(
    size: int,
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120,
    device: str = "cpu",
) -> list[Any]:
    """What `function(ranks, *arguments)` returns on each rank, in their order; no tensors. Raises AssertionError with
    the traceback of a rank that raised, or says which one ended or does not answer. No process stays."""
    # A fork has imported torch and transformers already; one of a process that has looked at its GPU has none itself.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    workers = [
        context.Process(
            target=_main, args=(rank, size, folder / "rendezvous", device, pipes[rank][1], function, arguments)
        )
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    answers: dict[int, tuple[bool, Any]] = {}
    until = time.monotonic() + timeout_s
    try:
        while missing := [rank for rank in range(size) if rank not in answers]:
            both = [of for rank in missing for of in (pipes[rank][0], workers[rank].sentinel)]
            ready = wait(both, max(0.0, until - time.monotonic()))
            ended = {rank: workers[rank].exitcode for rank in missing}  # before the pipes: it may answer and end
            for rank in missing:
                if pipes[rank][0].poll():
                    answers[rank] = pipes[rank][0].recv()
                elif ended[rank] is not None:
                    answers[rank] = False, f"ended with {ended[rank]} and no answer"
                elif not ready:
                    answers[rank] = False, "does not answer"
            if not all(ok for ok, _ in answers.values()):  # the others wait for it, or say what it did to them
                until = min(until, time.monotonic() + GRACE_S)
        failed = [f"rank {rank}: {answers[rank][1]}" for rank in range(size) if not answers[rank][0]]
        assert not failed, "\n".join(failed)
        return [answers[rank][1] for rank in range(size)]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _main(
    rank: int, size: int, file: Path, device: str, pipe: Any, function: Callable[..., Any], arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # as torchrun has it
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)

        def total(value: float) -> float:
            number = torch.tensor(value, dtype=torch.float64, device=device)
            dist.all_reduce(number)
            return float(number)

        answer = function(Ranks(rank, size, dist.barrier, total), *arguments)
        dist.barrier()
        pipe.send((True, answer))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def compare(answers, wanted, rtol=1e-4, atol=1e-7):
    """What each rank has, (loss, gradients, error of the update, …), with what one process has."""
    for loss, gradients, update_error, *_ in answers:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert gradients.keys() == wanted.gradients.keys()
        assert update_error < 1e-6
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradients[name]), gradient, rtol=rtol, atol=atol)
