"""The worker: the process of a seat, or of one rank of it.

It answers the runner's calls through its pipe, one after the other, and says what it does as it goes, so that a hang
can be named. What a toggle does is an answer or an exception, which is sent in words; then the seat is lost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

from lorabench.contract.hooks import described
from lorabench.measure.seat import Seat, Seating
from lorabench.run.messages import send
from lorabench.run.ranks import Place, joined
from lorabench.run.signals import has_ended


class Pipes(NamedTuple):
    """A worker's ends: the runner's calls come in, what it says goes out."""

    calls: Connection
    out: Connection


def main(seating: Seating, place: Place, pipes: Pipes) -> None:
    """Entry of the process: own session (so that it can be killed with its children), own log, then call after call
    until the runner closes the pipe."""
    os.setsid()
    _die_with(place.sweep, seating.scratch)
    _redirect(place.log)
    _without_others_pipes(pipes)
    _own_progress_lock()
    # The runner asks a hanging rank where it is. All threads: a library's own may take the signal, which has no stack.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    try:
        seat = _seat(seating, place, pipes.out)
        while True:
            call, what, arguments = pipes.calls.recv()
            _beat(place)
            send(pipes.out, ("answer", call, seat.call(what, *arguments)))
    except EOFError:
        return  # the runner needs it no more
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            send(pipes.out, ("failed", time.time(), described(error)))
        raise SystemExit(1) from None
    finally:
        pipes.out.close()


def _seat(seating: Seating, place: Place, connection: Connection) -> Seat:
    def tell(text: str) -> None:
        _beat(place)
        send(connection, ("phase", time.time(), text))

    def on_trial(name: str, ms: float | None) -> None:
        """Where a trial begins, and how long it took where it ends: the runner has a clock of its own."""
        send(connection, ("trial", time.time(), (name, ms)))

    if not seating.joins:
        return Seat(seating, tell, on_trial=on_trial)
    ranks, device = joined(place, seating.machine.device, lambda: _beat(place), seating.one_gpu)
    return Seat(seating, tell, ranks, device, on_trial)


def _beat(place: Place) -> None:
    if place.beats is not None:
        place.beats[place.rank] += 1


def _die_with(sweep: int, scratch: str | None) -> None:
    """A sweep that is killed must not leave a worker that disturbs the next one: wait, asleep, for its process to end.
    Nor its temporary folder, which it could not delete itself.

    (Not by PR_SET_PDEATHSIG: a worker's parent is the fork server, which lives as long as its workers do.)
    """

    def watch() -> None:
        with contextlib.suppress(OSError, AttributeError):
            has_ended(sweep, None)
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


def _without_others_pipes(pipes: Pipes) -> None:
    """The pipes that the fork server hands on, its own and that of Python's resource tracker, lead nowhere in an arm's
    process: a toggle that writes into them would end the server. Their numbers stay taken, for who knows them."""
    own = {pipe.fileno() for pipe in pipes}
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            mode = os.fstat(number).st_mode
            if number > 2 and number not in own and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


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
