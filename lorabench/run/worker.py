"""The worker: the process in which a cell, or one arm of it, or one rank of that, is measured.

It sends what it does through the pipe as it goes, so that a hang can be named, and a `Result` at the end; an exception
that is no expected failure is sent in words, and the runner sees it as a crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lorabench.contract.hooks import described
from lorabench.measure.cell import Measurement, Result, Task, Timed, Told
from lorabench.run.messages import send
from lorabench.run.ranks import Seat, joined


def main(task: Task, seat: Seat, connection: Connection) -> None:
    """Entry of the process: own session (so that it can be killed with its children), own log, then the measurement."""
    os.setsid()
    _die_with(seat.sweep, task.scratch)
    _redirect(seat.log)
    _own_progress_lock()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)  # the runner asks a hanging rank where
    try:
        send(connection, ("result", time.time(), _measure(task, seat, connection)))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(connection, ("failed", time.time(), described(error)))
        raise SystemExit(1) from None
    finally:
        connection.close()


def _teller(seat: Seat, connection: Connection) -> Callable[[str], None]:
    def tell(text: str) -> None:
        _beat(seat)
        send(connection, ("phase", time.time(), text))

    return tell


def _timer(connection: Connection) -> Timed:
    """Tells of each trial where it begins, and how long it took where it ends: the runner has a clock of its own."""

    def timed(name: str, ms: float | None) -> None:
        send(connection, ("trial", time.time(), (name, ms)))

    return timed


def _reporter(connection: Connection) -> Told:
    """Tells what is known now and must not be other in the answer."""

    def told(what: str, value: Any) -> None:
        send(connection, (what, time.time(), value))

    return told


def _beat(seat: Seat) -> None:
    if seat.beats is not None:
        seat.beats[seat.rank] += 1


def _measure(task: Task, seat: Seat, connection: Connection) -> Result:
    spawn = time.time() - seat.spawned
    tell, timed, told = _teller(seat, connection), _timer(connection), _reporter(connection)
    if seat.size == 1:
        measurement = Measurement(task, tell, timed=timed, told=told)
    else:
        ranks, device = joined(seat, task.machine.device, lambda: _beat(seat))
        measurement = Measurement(task, tell, ranks, device, timed, told)
    measurement.result.seconds["spawn"] = spawn
    return measurement.run()


def _die_with(sweep: int, scratch: str | None) -> None:
    """A sweep that is killed must not leave a worker that disturbs the next one: wait, asleep, for its process to end.
    Nor its temporary folder, which it could not delete itself.

    (Not by PR_SET_PDEATHSIG: a worker's parent is the fork server, which lives as long as its workers do.)
    """

    def watch() -> None:
        with contextlib.suppress(OSError, AttributeError):  # pidfd: Linux only
            with contextlib.suppress(ProcessLookupError):  # it has ended before we began
                select.select([os.pidfd_open(sweep)], [], [])
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _own_progress_lock() -> None:
    """Libraries' progress bars share a lock among processes: a semaphore, which a worker that is killed at its end does
    not give back, and of which Python's resource tracker then complains on the sweep's stderr."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _redirect(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def probe(dtype: str, sweep: int, connection: Connection) -> None:
    """Entry of the process that looks at the machine and measures its ceilings, once a sweep."""
    os.setsid()
    _die_with(sweep, None)
    try:
        import torch

        from lorabench.measure.machine import describe
        from lorabench.measure.roofline import ceilings

        machine = describe()
        found = ceilings(torch.device(machine.device), getattr(torch, machine.dtype(dtype)))
        connection.send((machine, found))
    except BaseException as error:
        connection.send((None, described(error)))
    finally:
        connection.close()
