"""What runs on a node of a Ray cluster: a Ray task that hands a family to a station, and the station that measures it.

The station is a process of its own because a Ray worker is no place to measure in. A Ray worker has other threads, sets
OMP_NUM_THREADS to the one processor that its task asked for, and changes its visible GPUs from task to task, which the
server of workers, once started, would never see. A station is what a sweep without Ray is: a process with nothing in it
but lorabench, whose environment does not change. It serves one family after the other, as long as its Ray worker lives.

The task imports nothing but the standard library: a request goes through it unread.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe, active_children
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

Event = tuple[str, Any]  # ("session", its dict), ("phase", text), ("records", their JSON), ("failed", why)
LAST = ("records", "failed", "seen")  # the events that end a request


class NodeError(RuntimeError):
    """A family could not even be tried on this node; the message is one line."""


def task(request: bytes, sweep: str, environment: Mapping[str, str | None]) -> Iterator[Event]:
    """The Ray task: first on which node it is, for the case that nothing else comes from there; then `serve`."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    node = {"host": socket.gethostname(), "address": ray.util.get_node_ip_address(), "id": node_id}
    yield "node", node
    yield from serve(request, sweep, node, environment)


def serve(request: bytes, sweep: str, node: dict[str, str], environment: Mapping[str, str | None]) -> Iterator[Event]:
    """The events of one request. `sweep`: its id; `environment`: variables to set (None: to remove) in the station.
    Raises NodeError."""
    what = ""
    try:
        connection = _station(sweep, environment)
        connection.send_bytes(request)
        connection.send(node)
        while what not in LAST:
            what, value = connection.recv()
            if what == "failed":
                raise NodeError(value)
            yield what, value
    except (EOFError, OSError):
        raise NodeError("the process that measures there was killed") from None
    finally:
        if what not in ("records", "seen"):
            _forget()  # what it may still answer must not be taken for the next request's answer


_now: list[tuple[object, Connection]] = []  # this Ray worker's station, and whom it serves in which environment


def _station(sweep: str, environment: Mapping[str, str | None]) -> Connection:
    """The station of this sweep and these visible GPUs; where there is none, or another's, it is started."""
    variables = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"), **environment}
    if not _now or _now[0][0] != (sweep, variables) or _ended(_now[0][1]):
        _forget()
        _now.append(((sweep, variables), _start(variables)))
    return _now[0][1]


def _ended(connection: Connection) -> bool:
    """Between two requests a station says nothing, so what can be read is its end."""
    return connection.poll()


def _forget() -> None:
    """A station whose connection is closed ends, and takes what it measures with it."""
    while _now:
        _now.pop()[1].close()


def _start(variables: Mapping[str, str | None]) -> Connection:
    ours, theirs = Pipe()
    environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
    command = [sys.executable, "-m", "lorabench.run.ray_node", str(theirs.fileno())]
    first = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    first.wait()  # it goes on as its own child, see `main`
    return ours


def main(descriptor: int) -> None:
    """The station: answer requests until the Ray worker is gone, then leave nothing behind.

    The station's parent ends at once. Ray kills a Ray worker's children with it, and a station that is killed could not
    delete its files; one that is nobody's child sees its connection end.
    """
    if os.fork():
        os._exit(0)
    folder = Path(get_temp_dir())  # multiprocessing's own: a socket's path is short, so nothing is put above it
    tempfile.tempdir = str(folder)  # for the runner's folder
    connection = Connection(descriptor)
    station = Station(connection, folder)
    try:
        while True:
            asked = connection.recv_bytes(), connection.recv()
            # Beside this thread, which so sees at any time that the Ray worker is gone.
            threading.Thread(target=station.answer, args=asked, daemon=True).start()
    except (EOFError, OSError):
        station.abandon()
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without waiting for the thread that may be measuring


class Station:
    """The measuring side: looks at the machine once, and is one session from then on."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self.connection, self.folder = connection, folder
        self.runner: Any = None
        self.session: dict[str, Any] = {}

    def answer(self, request: bytes, node: dict[str, str]) -> None:
        """Look at the machine, if that is not done; say the session, and once more where its links were timed; measure
        the family, if there is one."""
        from lorabench.run.links import with_links

        try:
            sweep, family = ForkingPickler.loads(request)  # pyright: ignore[reportAttributeAccessIssue]
            runner = self.runner or self._open(sweep, node)
            self._tell("session", self.session)
            if family is None:
                self._tell("seen", None)
                return
            before, self.session = self.session, with_links(self.session, family, runner.machine, runner.workers.method)
            if self.session is not before:
                self._tell("session", self.session)
            records = runner.family(family, lambda text: self._tell("phase", text))
            self._tell("records", [r.model_dump_json(by_alias=True, exclude_none=True) for r in records])
        except Exception as error:
            self._tell("failed", " ".join(f"{type(error).__name__}: {error}".split()))

    def abandon(self) -> None:
        """Kill what is being measured. (What could start after this watches the station, as it would a sweep.)"""
        from lorabench.run.process import kill

        for process in active_children():
            kill(process)

    def _tell(self, what: str, value: Any) -> None:
        self.connection.send((what, value))

    def _open(self, sweep: dict[str, Any], node: dict[str, str]) -> Any:
        from lorabench.run.process import Workers
        from lorabench.run.runner import Runner
        from lorabench.run.session import new_session

        workers = Workers()
        machine, ceilings = workers.probe(sweep["dtype"])
        own = new_session(sweep["command"])
        # Of one sweep they stand together, and on two nodes two stations may start under one number.
        own["id"] = f"{sweep['id']}-{node['id'][:8]}-{os.getpid()}"
        looked = {"machine": machine.model_dump(mode="json"), "ceilings": ceilings, "workers": workers.method}
        self.session = own | looked | {"node": node, "ray": sweep["ray"]}
        self.runner = Runner(workers, machine, ceilings, own["id"], sweep["timeout_s"], self.folder)
        return self.runner


if __name__ == "__main__":
    main(int(sys.argv[1]))
