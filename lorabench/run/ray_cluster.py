"""What speaks to Ray, and nothing else does: a cluster joined or started, tasks sent, their news, their end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from lorabench.run import ray_node
from lorabench.run.queue import QueueError

POLL_S = 1.0
ANSWER_S = 10.0  # for the cluster that RAY_ADDRESS names
OBJECTS_BYTES = 100_000_000  # of the object store of a Ray of our own: records are small, and Ray would take gigabytes


class RayCluster:
    """The cluster that RAY_ADDRESS names, or that this process has joined already; else a Ray of our own on this
    machine, for as long as the sweep runs."""

    def __init__(self) -> None:
        """Raises QueueError where Ray is not installed; touches nothing."""
        try:
            import ray
            from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError:
            raise QueueError("queue=ray needs the package ray: pip install 'lorabench[ray]'") from None
        self.ray, self.version = ray, str(ray.__version__)
        # Cells must not disturb each other, so a node without GPUs takes one at a time. Of a resource with this
        # prefix every node of any cluster has exactly one without having been told (Ray Serve spreads its replicas with
        # it). All of a node's CPUs would say the same, but Ray wants a number, and nodes differ.
        self.whole_node = {f"{IMPLICIT_RESOURCE_PREFIX}lorabench": 1}
        self.joined = False
        self.cuda = False  # whether cells are for GPUs: decided at the start, because the plan is made for it
        self.asked: dict[Any, int] = {}  # how many GPUs each task asks for
        # Nothing is tried again by Ray. max_calls: Ray ends the worker of a task that had a GPU, unless told not
        # to, and our station would end with it; the Ray worker itself touches no GPU.
        self.remote = ray.remote(num_cpus=1, max_retries=0, max_calls=0, num_returns="streaming")(ray_node.task)

    def start(self) -> None:
        """Join or start. Raises QueueError."""
        if not self.ray.is_initialized():
            self._join()
        self.cuda = self._gpus() > 0

    def _join(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            _check(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._quieten()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECTS_BYTES}
        try:
            self.ray.init(**{"address": address} if address else {"address": "local", **own}, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            where = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined" if address else "Ray does not start"
            raise QueueError(f"{where}: {why}") from None
        self.joined = True

    def _quieten(self) -> None:
        """Ray prints what its nodes report, with the last lines of their logs, log_to_driver or not. That a node died
        the record says, or nobody needs to know."""
        from ray._private import worker

        if hasattr(worker, "listen_error_messages"):
            worker.listen_error_messages = lambda *_: None

    def size(self) -> int:
        return len(self._living())

    def _living(self) -> list[dict[str, float]]:
        """What each living node has in all."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _gpus(self) -> int:
        """The most GPUs that a living node has."""
        return max((int(node.get("GPU", 0)) for node in self._living()), default=0)

    def send(self, request: bytes, sweep: str, ranks: int) -> Any:
        """A task for one cell. With GPUs in the cluster it asks for one a rank, and runs beside others on other GPUs;
        of a cell that no node has enough for, the node with the most says so in its record."""
        gpus = max(1, min(ranks, self._gpus())) if self.cuda else 0
        asked: dict[str, Any] = {"num_gpus": gpus} if gpus else {"resources": self.whole_node}
        # Ray would give a cell the one thread of the one CPU that it asks for; it is to have as many as without Ray.
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        if not gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # planned for a CPU; Ray does not hide what was not asked for
        task = self.remote.options(**asked).remote(request, sweep, environment)
        self.asked[task] = gpus
        return task

    def news(self, tasks: Sequence[Any]) -> list[tuple[Any, str, Any]]:
        self.asked = {task: self.asked[task] for task in tasks}
        ready, _ = self.ray.wait(list(tasks), num_returns=1, timeout=POLL_S)
        return [(task, *self._next(task)) for task in ready]

    def _next(self, task: Any) -> ray_node.Event:
        """The next event of a task that has one. Raises QueueError where the sweep itself has lost its cluster."""
        try:
            return self.ray.get(next(task))
        except StopIteration:
            return "lost", "ended without a record"
        except self.ray.exceptions.LocalRayletDiedError:
            raise QueueError("this machine's Ray has died; the same command continues where it stopped") from None
        except self.ray.exceptions.RayError as error:
            return "lost", self._why(error)

    def _why(self, error: Exception) -> str:
        """What became of a task, to follow the node's name."""
        known = self.ray.exceptions
        if isinstance(error, known.NodeDiedError):
            return "died"
        if isinstance(error, known.WorkerCrashedError):
            return "died, or the Ray worker on it did,"
        cause = getattr(error, "cause", None)
        if isinstance(cause, ray_node.NodeError):
            return f"failed ({cause})"
        return f"failed ({type(cause or error).__name__}: {str(cause or error).strip().partition(chr(10))[0]})"

    def lacking(self, tasks: Sequence[Any]) -> dict[Any, str]:
        cpu = any(node.get("CPU", 0) >= 1 for node in self._living())
        most = self._gpus()
        missing = {task: "a CPU" if not cpu else f"{self.asked[task]} GPUs" for task in tasks}
        return {task: what for task, what in missing.items() if not cpu or self.asked[task] > most}

    def cancel(self, tasks: Sequence[Any]) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):  # a cluster that is gone has cancelled everything
            for task in tasks:
                self.ray.cancel(task, force=True)

    def stop(self) -> None:
        if self.joined:
            self.ray.shutdown()
            self.joined = False


def _check(address: str) -> None:
    """Raises QueueError for an address that Ray would try for minutes, or that is no place to run a sweep."""
    if "://" in address:
        raise QueueError(f"RAY_ADDRESS={address}: a sweep runs on a node of its cluster; there, RAY_ADDRESS=auto")
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise QueueError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error.strerror or error}") from None
