"""Processes: starts a seat's workers, one a rank, from a server that has already imported torch, transformers and peft;
calls them, waits for their answers, says which one went wrong, kills."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lorabench.contract.hooks import described
from lorabench.contract.machine import Machine
from lorabench.measure.fairness import Untrusted
from lorabench.measure.seat import Failed, Made, Seating
from lorabench.run import server, worker
from lorabench.run.messages import Garbled, Inbox
from lorabench.run.ranks import Place, free_port
from lorabench.run.signals import uninterrupted

POLL_S = 0.2
ABORTED = signal.SIGABRT.name
COLLECTIVES, LIBRARY = (b"torch/distributed", b"nn/parallel/distributed"), (b"/torch/", b"/deepspeed/")
SLACK_S = 0.05  # that the runner's clock may see beside a trial, for its messages
GRACE_S = 0.5  # for other ranks to say what happened to them
LOG_TAIL = 4000  # characters of a failed worker's output that its record keeps


class ProbeError(RuntimeError):
    """The machine could not be looked at; the message is one line."""


class Workers:
    """The server of workers. Falls back to plain spawning where a forked process cannot use the GPU."""

    def __init__(self) -> None:
        server.set_up()
        self.method = "forkserver"
        self._context: Any = multiprocessing.get_context("forkserver")

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
            return None, " ".join(["the probing process died", *(tail(server.log()) or "").splitlines()[-1:]])
        finally:
            with uninterrupted():
                kill(process)

    def _start(self, process: BaseProcess) -> None:
        if self.method == "forkserver":
            server.start()
            process.start()
        else:
            with server.held_back():
                process.start()

    def open(self, seating: Seating, timeout_s: float, tell: Callable[[str], None], log: Path) -> Desk:
        """Start a seat, a process a rank. `timeout_s`: for each call."""
        size = seating.ranks
        port = free_port() if size > 1 else 0
        beats = self._context.RawArray("Q", size) if size > 1 else None
        ranks: list[_Rank] = []
        desk = Desk(ranks, timeout_s, beats, tell)
        try:
            for number in range(size):
                (ours, theirs), (reads, writes) = self._context.Pipe(duplex=False), self._context.Pipe(duplex=False)
                own_log = log_of(log, number)
                place = Place(number, size, port, str(own_log), os.getpid(), timeout_s, beats)
                pipes = worker.Pipes(reads, theirs)
                process = self._context.Process(target=worker.main, args=(seating, place, pipes), daemon=False)
                with uninterrupted():
                    self._start(process)
                    ranks.append(_Rank(number, process, Inbox(ours), writes, own_log))
                theirs.close()
                reads.close()
            return desk
        except BaseException:
            desk.close()
            raise


def log_of(log: Path, rank: int) -> Path:
    """Where a rank's output goes: rank 0's into the log itself."""
    return log if rank == 0 else log.with_name(f"{log.name}.rank{rank}")


class Lost(Exception):
    """A seat that answers no more; the text says what became of it."""

    def __init__(self, status: str, reason: str, rank: int | None, log: str | None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.rank, self.log = status, reason, rank, log


class Desk:
    """The runner's side of a seat."""

    def __init__(self, ranks: list[_Rank], timeout_s: float, beats: Any, tell: Callable[[str], None]) -> None:
        self.ranks, self.timeout_s, self.beats, self.tell = ranks, timeout_s, beats, tell
        self.phase = ""  # that was told last
        # Of the last turn: how much longer it took by this side's clock than its answer can explain.
        self.unseen_s = 0.0

    def ask(self, what: str, *arguments: Any, ranks: int = 1) -> list[Any]:
        """The answer of each of the first `ranks` ranks. Raises Lost where one gives none."""
        self.send(what, *arguments, ranks=ranks)
        return self.answers(ranks)

    def send(self, what: str, *arguments: Any, ranks: int = 1) -> None:
        """Ask without waiting for the answers."""
        for rank in self.ranks[:ranks]:
            rank.ask(what, arguments)

    def answers(self, ranks: int = 1) -> list[Any]:
        """What was sent for; where a rank has failed, nothing (None) of those that wait for it in a collective, and in
        which nothing can be asked any more. Raises Lost."""
        asked = self.ranks[:ranks]
        deadline, given_up = time.monotonic() + self.timeout_s, math.inf
        while not all(rank.answers for rank in asked):
            wait([rank.inbox.pipe for rank in asked if not rank.ended and not rank.answers], POLL_S)
            for rank in asked:
                rank.hear()
            if any(rank.ended for rank in asked):
                raise self._lost(asked)
            if asked[0].phase != self.phase:
                self.phase = asked[0].phase
                self.tell(self.phase)
            if given_up == math.inf and any(isinstance(a, Failed) for rank in asked for a in rank.answers):
                given_up = time.monotonic() + GRACE_S
            if time.monotonic() > given_up:
                break
            if time.monotonic() > deadline and not all(rank.answers for rank in asked):
                raise self._hung(asked)
        found = [rank.answers.pop(0) if rank.answers else None for rank in asked]
        return [replace(a, spoilt=True) if isinstance(a, Failed) and None in found else a for a in found]

    def turn(self, name: str, numbers: Sequence[int], on: bool, each: bool, ranks: int) -> list[list[Made]] | Any:
        """What each rank made of a turn, where it is what was told trial by trial. Raises Untrusted; returns what is no
        turn (a failure) as it is. Raises Lost."""
        for rank in self.ranks[:ranks]:
            rank.trial_ms, rank.elapsed = [], 0.0
        self.unseen_s = 0.0
        answers = self.ask("turn", name, list(numbers), on, each, ranks=ranks)
        if not any(isinstance(answer, Failed) for answer in answers):
            try:
                pairs = zip(self.ranks, answers, strict=False)
                self.unseen_s = max(_unseen_s(name, rank, answer, len(numbers)) for rank, answer in pairs)
            except (AttributeError, TypeError, ValueError) as error:
                raise Untrusted(f"the answer to a turn of {name} is none: {described(error)}") from None
        return answers

    def close(self) -> None:
        """End its processes."""
        with uninterrupted():
            for rank in self.ranks:
                kill(rank.process)
                rank.inbox.pipe.close()
                rank.outbox.close()

    def _lost(self, asked: Sequence[_Rank]) -> Lost:
        """What became of the rank that went wrong first. Who was killed took the others' connections with it, and they
        raise; who raised may make the others abort, as NCCL does when a connection breaks."""
        if len(asked) > 1:
            time.sleep(GRACE_S)  # who died takes others with it: let them all speak, then look who was first
            for rank in asked:
                rank.hear()
        killed = [rank for rank in asked if rank.died and ABORTED not in rank.died]
        raised = sorted((rank for rank in asked if rank.failed), key=lambda rank: rank.failed or (0.0, ""))
        first = (killed or raised or [rank for rank in asked if rank.died])[0]
        return self._lost_by(first, "crash", first.died or (first.failed or (0.0, ""))[1])

    def _hung(self, asked: Sequence[_Rank]) -> Lost:
        """A time-out, with the rank that the others wait for: the one that began least, and waits for nobody."""
        waiting, beats = [rank for rank in asked if not rank.answers], self.beats
        least = min(beats[rank.number] for rank in waiting) if beats is not None else 0
        behind = [rank for rank in waiting if beats is None or beats[rank.number] == least]
        calls = {rank.number: _innermost_call(rank) for rank in behind}  # the whole stack is in the rank's log then
        if len(behind) > 1:
            for where in (COLLECTIVES, LIBRARY):  # who waits for the others is in the first, who hangs in neither
                behind = [r for r in behind if not any(word in calls[r.number] for word in where)] or behind
        first = behind[0]
        doing = f"{first.phase}{_place(calls[first.number])}"
        reason = f"no answer after {self.timeout_s:g} s; it was {doing} (raise timeout_s= if that is only slow)"
        return self._lost_by(first, "timeout", reason)

    def _lost_by(self, rank: _Rank, status: str, reason: str) -> Lost:
        """By this rank, which is named where there are several."""
        if len(self.ranks) == 1:
            return Lost(status, reason, None, tail(rank.log))
        return Lost(status, f"rank {rank.number}: {reason}", rank.number, tail(rank.log))


@dataclass
class _Rank:
    """One process of a seat, as the runner sees it: what it said last, and what it came to."""

    number: int
    process: BaseProcess
    inbox: Inbox
    outbox: Connection
    log: Path
    phase: str = "starting"
    calls: int = 0
    owes: bool = False  # an answer to the last call
    answers: list[Any] = field(default_factory=list)
    failed: tuple[float, str] | None = None  # when it raised, and what
    died: str | None = None  # without a word
    trial_ms: list[float] = field(default_factory=list)  # milliseconds of each trial of the present turn
    elapsed: float = 0.0  # seconds that these took by our own clock
    began: float = 0.0

    @property
    def ended(self) -> bool:
        return self.failed is not None or self.died is not None

    def ask(self, what: str, arguments: Sequence[Any]) -> None:
        self.hear()
        self.calls, self.owes = self.calls + 1, True
        try:
            self.outbox.send((self.calls, what, arguments))
        except OSError:
            self.hear()  # it has ended, and may have said why

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
            case ("answer", call, answer):
                if call != self.calls or not self.owes:
                    raise Garbled("an answer that nobody has asked for")
                self.owes = False
                self.answers.append(answer)
            case ("failed", float() as when, str() as words):
                self.failed = when, f"{words} (while {self.phase})"
            case ("phase", float(), str() as phase):
                self.phase = phase
            case ("trial", float(), (str(), None)):
                self.began = time.monotonic()
            case ("trial", float(), (str(), float() as ms)):
                self.trial_ms.append(ms)
                self.elapsed += time.monotonic() - self.began
            case _:
                raise Garbled(f"a {type(message).__name__} in place of a message")


def _unseen_s(name: str, rank: _Rank, made: Sequence[Made], trials: int) -> float:
    """Seconds of a turn that the runner's clock saw beyond twice what the rank says and the messages' time; below zero
    where all is as it should be. Raises Untrusted."""
    given = [one.trial.total_ms for one in made]
    if len(rank.trial_ms) != trials or len(given) != trials:
        raise Untrusted(
            f"the answer came after {len(rank.trial_ms)} of {trials} trials of {name}, and has {len(given)}"
        )
    if any(abs(ours - theirs) > 1e-6 * ours for ours, theirs in zip(rank.trial_ms, given, strict=True)):
        raise Untrusted(f"the answer's times of {name} are not those that were told trial by trial")
    return rank.elapsed - 2 * sum(given) / 1000 - SLACK_S * trials


def _innermost_call(rank: _Rank) -> bytes:
    """Where a rank is: it writes its threads' stacks into its log when asked (SIGUSR1), the main thread's last, each
    with the innermost call first. Only that call counts: a stage of a pipeline computes within a schedule of
    torch.distributed."""
    before = rank.log.stat().st_size if rank.log.exists() else 0
    if rank.process.pid is None:
        return b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    with contextlib.suppress(OSError), open(rank.log, "rb") as log:
        log.seek(before)
        _, _, main = log.read().rpartition(b"(most recent call first)")
        frames = [line for line in main.splitlines() if b"File " in line and b"torch/_ops.py" not in line]
        return next(iter(frames), b"")
    return b""


def _place(call: bytes) -> str:
    """In words: ` at FILE:LINE`, of a line of a stack; nothing where it has none."""
    found = re.search(rb'File "([^"]+)", line (\d+)', call)
    return f" at {Path(found[1].decode(errors='replace')).name}:{int(found[2])}" if found else ""


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
