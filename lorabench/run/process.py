"""Processes: starts workers, one a rank, from a server that has already imported torch, transformers and peft; waits
for them, says which one went wrong, kills."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from lorabench.contract.machine import Machine
from lorabench.measure.cell import Result, Task
from lorabench.record.schema import ARMS, TOTAL
from lorabench.run import worker
from lorabench.run.messages import Garbled, Inbox
from lorabench.run.ranks import Seat, free_port, merged
from lorabench.run.session import SERVER_FOLDER
from lorabench.run.signals import uninterrupted

POLL_S = 0.2
ABORTED = signal.SIGABRT.name
OF_ONE_RANK = ("crash", "oom")  # what happens to one rank; a refusal or a wrong gradient is the whole arm's
SLACK_S = 0.05  # a trial that the runner's clock may see beside the trial: messages, a busy machine
GRACE_S = 0.5  # for other ranks to say what happened to them
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
        os.environ[SERVER_FOLDER] = get_temp_dir()
        self.method = "forkserver"
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lorabench.run.leftovers", "lorabench.run.preload"])

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
        process = self._context.Process(target=worker.probe, args=(dtype, os.getpid(), theirs), daemon=False)
        try:
            self._start(process)  # where it waits for the server's imports, it may be interrupted
            theirs.close()
            answer = ours.recv()
            process.join()
            return answer
        except EOFError:
            return None, "the probing process died"
        finally:
            with uninterrupted():
                kill(process)

    def _start(self, process: BaseProcess) -> None:
        """Ctrl-C goes to every process of the terminal, and would meet the server of workers, or a spawned worker, in
        the middle of its imports. What is started here inherits that it is held back; the sweep ends it."""
        forked = self.method == "forkserver"
        resource_tracker.ensure_running()  # else it is started on the way, and lets SIGINT through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running() if forked else process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if forked:
            process.start()

    def run(self, task: Task, timeout_s: float, tell: Callable[[str], None], log: Path) -> Result:
        """Run one task to its Result, in a process a rank; a hang becomes status `timeout`, a death `crash`."""
        size = max(task.cell.ranks_of(name) for name in task.arms)
        port = free_port() if size > 1 else 0
        beats = self._context.RawArray("Q", size) if size > 1 else None
        ranks: list[_Rank] = []
        try:
            for number in range(size):
                ours, theirs = self._context.Pipe(duplex=False)
                own_log = log_of(log, number)
                seat = Seat(number, size, port, str(own_log), time.time(), os.getpid(), timeout_s, beats)
                process = self._context.Process(target=worker.main, args=(task, seat, theirs), daemon=False)
                with uninterrupted():
                    self._start(process)
                    ranks.append(_Rank(number, process, Inbox(ours), own_log))
                theirs.close()
            return _outcome(task, ranks, timeout_s, tell, beats)
        finally:
            with uninterrupted():
                for rank in ranks:
                    kill(rank.process)
                    rank.inbox.pipe.close()


def log_of(log: Path, rank: int) -> Path:
    """Where a rank's output goes: rank 0's into the log itself."""
    return log if rank == 0 else log.with_name(f"{log.name}.rank{rank}")


@dataclass
class _Rank:
    """One process of a task, as the runner sees it: what it said last, and what it came to."""

    number: int
    process: BaseProcess
    inbox: Inbox
    log: Path
    phase: str = "starting"
    result: Result | None = None
    failed: tuple[float, str] | None = None  # when it raised, and what
    died: str | None = None  # without a word
    told: dict[str, list[float]] = field(default_factory=dict)  # milliseconds of each timed trial, by arm
    elapsed: dict[str, float] = field(default_factory=dict)  # seconds that these took by our own clock, by arm
    began: float = 0.0
    noise: dict[str, tuple[str, Any]] = field(default_factory=dict)  # by job: what was told first

    @property
    def ended(self) -> bool:
        return self.result is not None or self.failed is not None or self.died is not None

    @property
    def went_wrong(self) -> bool:
        return bool(self.died or self.failed or (self.result and self.result.status != "ok"))

    def hear(self) -> None:
        """Take what lies in the pipe."""
        if self.ended:
            return
        try:
            for message in self.inbox.messages():
                self._take(message)
        except EOFError:
            if not self.ended:
                self.died = f"{_death(self.process)} while {self.phase}"
        except (Garbled, OSError) as error:
            self.died = f"the worker sent {error} while {self.phase}"

    def _take(self, message: Any) -> None:
        match message:
            case ("result", float(), Result() as result):
                self.result = replace(result, noise=self.noise)
            case ("noise", float(), (str() as job, str() as file, noise)):
                self.noise.setdefault(job, (file, noise))
            case ("failed", float() as when, str() as words):
                self.failed = when, f"{words} (while {self.phase})"
            case ("phase", float(), str() as phase):
                self.phase = phase
            case ("trial", float(), (str(), None)):
                self.began = time.monotonic()
            case ("trial", float(), (str() as name, float() as ms)):
                self.told.setdefault(name, []).append(ms)
                self.elapsed[name] = self.elapsed.get(name, 0.0) + time.monotonic() - self.began
            case _:
                raise Garbled(f"a {type(message).__name__} in place of a message")


def _believed(task: Task, rank: _Rank) -> Result:
    """The rank's result, where it is what was told trial by trial, in a time in which that can have happened."""
    result = rank.result
    assert result is not None
    if result.status != "ok":
        return result
    for name in task.arms:
        if rank.number >= task.cell.ranks_of(name):
            continue
        told, given = rank.told.get(name, []), result.arms[name].times.get(TOTAL, [])
        if len(told) != task.rounds or len(given) != task.rounds:
            reason = f"the answer came after {len(told)} of {task.rounds} trials of the {name}, and has {len(given)}"
        elif any(abs(ours - theirs) > 1e-6 * ours for ours, theirs in zip(told, given, strict=True)):
            reason = f"the answer's times of the {name} are not those that were told trial by trial"
        elif rank.elapsed[name] > 2 * sum(told) / 1000 + SLACK_S * task.rounds:
            reason = (
                f"{task.rounds} trials of the {name} took {rank.elapsed[name]:.3g} s by the runner's clock; the answer "
                f"says {sum(told) / 1000:.3g} s"
            )
        else:
            continue
        return Result("untrusted", reason, arm=name)
    return result


def _outcome(task: Task, ranks: list[_Rank], timeout_s: float, tell: Callable[[str], None], beats: Any) -> Result:
    """Wait for all ranks, or for the first that goes wrong."""
    deadline, said = time.monotonic() + timeout_s, ""
    while not all(rank.ended for rank in ranks):
        wait([rank.inbox.pipe for rank in ranks if not rank.ended], POLL_S)
        for rank in ranks:
            rank.hear()
        if any(rank.went_wrong for rank in ranks):
            break
        if ranks[0].phase != said:
            said = ranks[0].phase
            tell(said)
        if time.monotonic() > deadline:
            return _hung(ranks, timeout_s, beats)
    if not any(rank.went_wrong for rank in ranks):
        believed = [_believed(task, rank) for rank in ranks]
        doubtful = next((result for result in believed if result.status != "ok"), None)
        return doubtful or merged(task.cell, believed)
    if len(ranks) > 1:
        time.sleep(GRACE_S)  # who died takes others with it: let them all speak, then look who was first
        for rank in ranks:
            rank.hear()
    return _wrong(ranks)


def _wrong(ranks: list[_Rank]) -> Result:
    """The result of the rank that went wrong first. Who was killed took the others' connections with it, and they
    raise; who raised may make the others abort, as NCCL does when a connection breaks."""
    killed = [rank for rank in ranks if rank.died and ABORTED not in rank.died]
    own = [rank for rank in ranks if rank.result and rank.result.status != "ok"]
    raised = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.failed or (0.0, ""))
    first = (killed or own or raised or [rank for rank in ranks if rank.died])[0]
    if first.result:
        result = first.result
    else:
        reason = first.died or (first.failed or (0.0, ""))[1]
        result = Result("crash", reason, arm=_arm_in(first.phase))
    if len(ranks) > 1 and result.status in OF_ONE_RANK:
        result.rank = first.number
        result.reason = f"rank {first.number}: {result.reason}"
    return result


def _hung(ranks: list[_Rank], timeout_s: float, beats: Any) -> Result:
    """A time-out, with the rank that the others wait for: the one that began least, and waits for nobody."""
    waiting = [rank for rank in ranks if not rank.ended]
    least = min(beats[rank.number] for rank in waiting) if beats is not None else 0
    behind = [rank for rank in waiting if beats is None or beats[rank.number] == least]
    if len(behind) > 1:
        behind = [rank for rank in behind if not _in_a_collective(rank)] or behind
    first = behind[0]
    reason = f"no result after {timeout_s:g} s; it was {first.phase} (raise timeout_s= if that is only slow)"
    if len(ranks) == 1:
        return Result("timeout", reason, arm=_arm_in(first.phase))
    return Result("timeout", f"rank {first.number}: {reason}", arm=_arm_in(first.phase), rank=first.number)


def _in_a_collective(rank: _Rank) -> bool:
    """Whether a rank waits inside torch.distributed: it writes its stack into its log when asked (SIGUSR1)."""
    before = rank.log.stat().st_size if rank.log.exists() else 0
    if rank.process.pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    with contextlib.suppress(OSError), open(rank.log, "rb") as log:
        log.seek(before)
        stack = log.read()
        return any(word in stack for word in (b"torch/distributed", b"nn/parallel/distributed"))
    return False


def _arm_in(phase: str) -> str | None:
    return next((name for name in ARMS if phase.endswith(f"the {name}")), None)


def _death(process: BaseProcess) -> str:
    process.join(GRACE_S)
    if process.is_alive():
        return "the worker closed its connection without a word"
    code = process.exitcode or 0
    if code >= 0:
        return f"the worker exited with code {code}"
    hint = ", as the kernel does when memory runs out," if -code == signal.SIGKILL else ""
    return f"the worker was killed by {signal.Signals(-code).name}{hint}"


def kill(process: BaseProcess) -> None:
    """End the worker and everything it started: it leads a process group of its own."""
    if process.pid is None:
        return  # it was never started
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
