"""The queue over the nodes of a Ray cluster: which family is where, what is tried again, what becomes of what is lost.

A family is measured once because it has at most one task at any time and leaves the list with its records. Ray
itself tries nothing again: it would not say where, nor how often. What speaks to Ray is in ray_cluster.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from lorabench.contract.family import Family
from lorabench.contract.machine import Machine
from lorabench.record.schema import ArmRecord
from lorabench.run.entries import Replan, as_planned
from lorabench.run.process import ProbeError
from lorabench.run.queue import QueueError, Watch
from lorabench.run.runner import record_of
from lorabench.run.session import Session, new_session

ATTEMPTS = 3  # a node's death is not the family's doing, but one that has brought down three is not sent to a fourth
PATIENCE_S = 60.0  # for a node that could hold a family, where there is none (any more)

Task = Any  # a request on its way, as the cluster knows it: an ObjectRefGenerator


class Cluster(Protocol):
    """What the queue asks of Ray. `news`, an event each: those of ray_node.py, ("node", the node's host, address and
    id), and ("lost", why) for a task from which nothing more comes."""

    version: str

    def start(self) -> None: ...

    def size(self) -> int: ...

    def send(self, request: bytes, sweep: str, ranks: int) -> Task: ...

    def news(self, tasks: Sequence[Task]) -> list[tuple[Task, str, Any]]:
        """What came from these tasks; waits a second for something, and may return with nothing."""
        ...

    def lacking(self, tasks: Sequence[Task]) -> dict[Task, str]:
        """The tasks that no living node could hold if it were idle, and what none of them has, in words."""
        ...

    def cancel(self, tasks: Sequence[Task]) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Sent:
    """A family on its way: the nodes it has been on, what became of it there, and what its present one said last."""

    family: Family
    attempts: int = 0
    losses: list[str] = field(default_factory=list)
    node: str = ""  # "" while it waits for one
    phase: str = "starting"
    session: str | None = None


class RayQueue:
    """Families as tasks on the nodes of a cluster, as many at once as those hold. Each node is a session of its own."""

    def __init__(self, cluster: Cluster, dtype: str, timeout_s: float) -> None:
        self.cluster, self.where = cluster, ""
        self.sweep: dict[str, Any] = {"dtype": dtype, "timeout_s": timeout_s, "ray": cluster.version}
        self.sessions: dict[str, Session] = {}
        self.tasks: dict[Task, Sent] = {}
        self.homeless_since: float | None = None

    def __enter__(self) -> RayQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.cancel(list(self.tasks))
        self.cluster.stop()

    def look(self, command: list[str]) -> Machine:
        """The machine of whichever node answers first; Ray sends only to nodes with GPUs where there are any.

        The sweep has a session of its own, without ceilings: what it planned for. Only the records of a family that was
        lost before its node had said what it is names that one.
        """
        self.cluster.start()
        own = new_session(command)
        self.sweep |= {"id": own["id"], "command": command}
        seen = self._first_session()
        self.sessions[own["id"]] = own | {"machine": seen["machine"], "ray": self.cluster.version}
        self.sessions[seen["id"]] = seen
        machine, nodes = Machine.model_validate(seen["machine"]), self.cluster.size()
        self.where = f"{nodes} {'node' if nodes == 1 else 'nodes'} of a Ray cluster, planned for {machine.name}"
        return machine

    def _first_session(self) -> Session:
        task, session = self._send(None), {}
        while True:
            for _, what, value in self._news([task]):
                if what == "session":
                    session = value
                elif what == "seen":
                    return session
                elif what == "lost":
                    raise ProbeError(f"a node of the Ray cluster {value} (every node needs this lorabench installed)")
                elif what == "homeless":
                    raise ProbeError(f"no node of the Ray cluster has {value} for a family")

    def run(
        self, families: Iterable[Family], watch: Watch, replan: Replan = as_planned
    ) -> Iterator[tuple[Family, list[ArmRecord]]]:
        """A node does not replan: what a design does without is measured in another family afterwards."""
        for family in families:
            self._dispatch(Sent(family))
        while self.tasks:
            for task, what, value in self._news(list(self.tasks)):
                if records := self._heard(task, what, value, watch):
                    yield self.tasks.pop(task).family, records

    def _dispatch(self, sent: Sent) -> None:
        sent.attempts, sent.node, sent.phase, sent.session = sent.attempts + 1, "", "starting", None
        self.tasks[self._send(sent.family)] = sent

    def _send(self, family: Family | None) -> Task:
        request = bytes(ForkingPickler.dumps((self.sweep, family)))
        return self.cluster.send(request, self.sweep["id"], family.gpus if family else 1)

    def _news(self, tasks: Sequence[Task]) -> list[tuple[Task, str, Any]]:
        """The cluster's news of these tasks. ("homeless", what is lacking) is news of ours: no living node could hold
        it for a while. Ray would wait for one for ever."""
        if news := self.cluster.news(tasks):
            return news
        lacking = self.cluster.lacking(tasks)
        if not lacking:
            self.homeless_since = None
            return []
        self.homeless_since = self.homeless_since or time.monotonic()
        waited = time.monotonic() - self.homeless_since
        return [(task, "homeless", what) for task, what in lacking.items()] if waited >= PATIENCE_S else []

    def _heard(self, task: Task, what: str, value: Any, watch: Watch) -> list[ArmRecord] | None:
        """Take one event in; its family's records, if this was the last one."""
        sent = self.tasks[task]
        if what == "node":
            sent.node = f"{value['host']} ({value['address']}, node {value['id'][:8]})"
            watch.start(sent.family)
        elif what == "session":
            self._join_session(sent, value)
        elif what == "phase":
            sent.phase = value
            watch.phase(value if len(self.tasks) == 1 else f"{sent.family.title}: {value}")
        elif what == "records":
            return self._checked(sent, [ArmRecord.model_validate_json(line) for line in value])
        elif what == "lost":
            sent.losses.append(f"{f'the node {sent.node}' if sent.node else 'a node'} {value} while {sent.phase}")
            return self._again(task)
        elif what == "homeless":
            self.cluster.cancel([task])
            sent.losses.append(f"no living node of the cluster has {value} for it")
            return self._crash(sent)
        return None

    def _join_session(self, sent: Sent, session: Session) -> None:
        found, planned = session["machine"]["device"], self.sessions[self.sweep["id"]]["machine"]["device"]
        if found != planned:  # the arms are others there: another workload, another number of trials
            raise QueueError(f"the sweep is planned for {planned}, and lorabench finds only {found} on {sent.node}")
        self.sessions[session["id"]] = session
        sent.session = session["id"]

    def _checked(self, sent: Sent, records: list[ArmRecord]) -> list[ArmRecord]:
        if {c.key for r in records for c in r.shown} != {c.key for c in sent.family.cells}:
            raise QueueError(f"the node {sent.node} has another version of lorabench; install this one on every node")
        return records

    def _again(self, task: Task) -> list[ArmRecord] | None:
        """Send a lost family once more, or make the records of one that was lost too often."""
        sent = self.tasks[task]
        if sent.attempts == ATTEMPTS:
            return self._crash(sent)
        self._dispatch(self.tasks.pop(task))
        return None

    def _crash(self, sent: Sent) -> list[ArmRecord]:
        *before, last = sent.losses
        tried = "tried once" if sent.attempts == 1 else f"tried {sent.attempts} times"
        reason = f"{last} ({tried}{'; before that ' if before else ''}{', '.join(before)})"
        session, family = sent.session or self.sweep["id"], sent.family
        return [record_of(family, stack, session, status="crash", reason=reason) for stack in family.stacks]
