"""Processes: starts workers from a server that has already imported torch, transformers and peft, waits, kills."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lorabench.measure.machine import Machine
from lorabench.run import worker
from lorabench.run.record import ARMS

POLL_S = 0.2
LOG_TAIL = 4000  # characters of a failed worker's output that its record keeps


class ProbeError(RuntimeError):
    """The machine could not be looked at; the message is one line."""


class Workers:
    """The server of workers. Falls back to plain spawning where a forked process cannot use the GPU."""

    def __init__(self) -> None:
        # torch then counts GPUs through NVML: asking the driver would start it in the server, and a fork of a process
        # in which the driver has started cannot use the GPU.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # Two arms of different shapes share one process: growing segments keep the cache from fragmenting.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.method = "forkserver"
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lorabench.run.preload"])

    def probe(self, dtype: str) -> tuple[Machine, dict[str, Any]]:
        """(machine, ceilings), looked at and measured in a process of its own. Raises ProbeError."""
        answer = self._probe_once(dtype)
        gpu_expected = Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        if answer[0] is None or (answer[0].device == "cpu" and gpu_expected):
            self.method, self._context = "spawn", multiprocessing.get_context("spawn")
            answer = self._probe_once(dtype)
        machine, found = answer
        if machine is None:
            raise ProbeError(f"the machine cannot be looked at: {found}")
        return machine, found

    def _probe_once(self, dtype: str) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=worker.probe, args=(dtype, theirs), daemon=False)
        process.start()
        theirs.close()
        try:
            return ours.recv()
        except EOFError:
            return None, "the probing process died"
        finally:
            process.join()

    def run(self, job: worker.Job, timeout_s: float, tell: Callable[[str], None]) -> worker.Result:
        """Run one job to its Result; a hang becomes status `timeout`, a death `crash`."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=worker.main, args=(job, theirs), daemon=False)
        process.start()
        theirs.close()
        try:
            return _wait(process, ours, timeout_s, tell)
        finally:
            kill(process)
            ours.close()


def _wait(process: BaseProcess, pipe: Connection, timeout_s: float, tell: Callable[[str], None]) -> worker.Result:
    deadline, phase = time.monotonic() + timeout_s, "starting"
    while True:
        if pipe.poll(POLL_S):
            try:
                kind, value = pipe.recv()
            except EOFError:
                process.join()
                return worker.Result("crash", f"{_death(process)} while {phase}", arm=_arm_in(phase))
            if kind == "result":
                return value
            if kind == "failed":
                return worker.Result("crash", f"{value} (while {phase})", arm=_arm_in(phase))
            phase = value
            tell(phase)
        elif time.monotonic() > deadline:
            reason = f"no result after {timeout_s:g} s; it was {phase} (raise timeout_s= if that is only slow)"
            return worker.Result("timeout", reason, arm=_arm_in(phase))


def _arm_in(phase: str) -> str | None:
    return next((name for name in ARMS if phase.endswith(f"the {name}")), None)


def _death(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"the worker exited with code {code}"
    hint = ", as the kernel does when memory runs out," if -code == signal.SIGKILL else ""
    return f"the worker was killed by {signal.Signals(-code).name}{hint}"


def kill(process: BaseProcess) -> None:
    """End the worker and everything it started: it leads a process group of its own."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL) if process.is_alive() else None
    process.join()


def tail(log: Path) -> str | None:
    """The end of a worker's output, or None where it wrote nothing."""
    try:
        return log.read_text(errors="replace")[-LOG_TAIL:] or None
    except OSError:
        return None
