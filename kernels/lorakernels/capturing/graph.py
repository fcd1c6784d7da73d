"""What records device work and replays it: CUDA graphs in one memory pool, captured on one side stream.

Whoever captures asks `graphs_for(device)`; None means that nothing can be captured there and everything runs as it is.
Run: python -m pytest tests/lorakernels/test_capture.py; with -m gpu, the graphs themselves
"""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch

Outputs = dict[str, torch.Tensor]
# transformers looks at values there only while no graph is captured; what it would find is settled in masks.py.
LOOKS_AWAY = ("transformers/masking_utils.py", "transformers/modeling_attn_mask_utils.py")
BRANCHES = 8  # a launch of an optimizer of one adapter has some 49 blocks, of which an H200 holds 264


class NotCaptured(Exception):
    """Why a function could not be captured, in words for whoever trains."""


class Recording:
    """A captured function: `replay` repeats its device work and gives the tensors that it returned, overwritten."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs):
        self._graph, self.outputs = graph, outputs

    def replay(self) -> Outputs:
        self._graph.replay()
        return self.outputs


class CudaGraphs:
    """Captures on one stream into one pool, so that graphs of several sizes share the memory of the largest. What a
    replay gives must be copied before another graph is replayed."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, work runs on the stream of the captures, behind and before that of the current one: library handles,
        workspaces and autograd's accumulators have then been on that stream when it is captured."""
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            main.wait_stream(self.stream)

    @contextlib.contextmanager
    def needs_of_host(self) -> Iterator[list[str]]:
        """A list of what inside needs the host, complete when it ends: the places at which the host waits for the
        device (file:line), and random numbers that it draws itself.

        Looked for in an ordinary step, because a capture that breaks off leaves allocator and generator odd.
        """
        found: list[str] = []
        drawn = torch.get_rng_state(), random.getstate()
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        for warning in caught:
            if "called a synchronizing" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            elif not warning.filename.endswith(LOOKS_AWAY):
                place = "/".join(PurePath(warning.filename).parts[-3:])
                found.append(f"it waits for the device at {place}:{warning.lineno}")
        if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
            found.append("it draws random numbers itself")

    def in_branches(self, functions: Sequence[Callable[[], Any]]) -> None:
        """While something is recorded: the work of these functions, which need nothing of each other, in a few branches
        of the graph. Kernels that fill a part of the GPU run beside each other so."""
        main = torch.cuda.current_stream(self.device)
        branches = [torch.cuda.Stream(self.device) for _ in range(BRANCHES)]
        for branch in branches:
            branch.wait_stream(main)
        for number, function in enumerate(functions):
            with torch.cuda.stream(branches[number % BRANCHES]):
                function()
        for branch in branches:
            main.wait_stream(branch)

    def random_state(self) -> torch.Tensor:
        """Bytes that change when a random number is drawn on the device."""
        return torch.cuda.get_rng_state(self.device)

    def record(self, function: Callable[[], Outputs]) -> Recording:
        """Captures without executing. Raises NotCaptured with the reason."""
        gc.collect()  # an autograd graph in a dead cycle would tie the parameters' accumulators to another stream
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context: a capture that breaks off leaves its own stream the current one.
            # thread_local: a data loader's thread may pin memory meanwhile.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                outputs = function()
        except Exception as error:
            self._recover()
            raise NotCaptured(_first_cause(error)) from error
        return Recording(graph, outputs)

    def _recover(self) -> None:
        """A capture that broke off leaves the generator waiting for its end, and a pool that nobody should use again;
        a capture that ends well closes the former."""
        self.pool = torch.cuda.graph_pool_handle()
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self.device)
        with (
            contextlib.suppress(Exception),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(self.device)),
        ):
            torch.rand(1, device=self.device)


def graphs_for(device: torch.device) -> CudaGraphs | None:
    """Of a device that can capture, else None."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _first_cause(error: BaseException) -> str:
    """The line that says what stopped a capture; ending the broken capture raises once more."""
    cause: Any = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
