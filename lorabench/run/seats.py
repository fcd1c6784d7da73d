"""The seats of a family: which arms sit in which process, who fits beside whom, and who comes in a later block."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.cell import PROCESSES
from lorabench.contract.family import REFERENCE, TWIN, Family, Stack
from lorabench.contract.machine import Machine
from lorabench.contract.memory_fit import JOBS, TOKENS, Edge
from lorabench.measure.energy import Meter
from lorabench.measure.kind import ROUNDS, TURN
from lorabench.measure.memory import CONTEXT
from lorabench.measure.seat import Failed, Ready, Seating
from lorabench.measure.trial import trials_a_turn
from lorabench.record.schema import ArmRecord
from lorabench.run.entries import (
    NO_TIME,
    UNLIMITED,
    Entry,
    Limits,
    Replan,
    Seated,
    Staying,
    Suspicion,
    as_planned,
    verdict_s,
)
from lorabench.run.journal import Journal
from lorabench.run.process import Lost, Workers
from lorabench.run.ranks import notes_by_rank, on_one_gpu, whole_batch

# Who sits alone, a generation behind the other; None: its process is opened when its turn comes.
Generations = list[list[tuple[Entry, Seated | None]]]
EDGE_S = 600.0  # in which the edge of an arm's memory is looked for
ROOMY = 0.9  # share of a GPU's memory that may be used


@dataclass(eq=False)
class _Preparation:
    """Of an arm: the bytes that it is taken to need, and who was prepared at any moment of it, itself included."""

    name: str
    need: float
    beside: set[str]


class Seats:
    """A family's arms and processes. `entries` holds what became of each arm."""

    def __init__(
        self, family: Family, machine: Machine, workers: Workers, ceiling_tflops: float | None, scratch: Path,
        log: Path, timeout_s: float, tell: Callable[[str], None], journal: Journal | None = None,
        limits: Limits = UNLIMITED, noise: dict[str, Any] | None = None,
        drafts: Callable[[], list[ArmRecord]] = list, replan: Replan = as_planned, before: Staying | None = None,
    ) -> None:  # fmt: skip
        """`noise`: what two right runs differ by, by the name of its file, as it was told first in this sweep.
        `drafts`: the arms' records as they are now, for the journal. `before`: the seat of a family before this one, to
        go on in."""
        self.family, self.machine, self.workers, self.tell = family, machine, workers, tell
        self.ceiling, self.scratch, self.log, self.timeout_s = ceiling_tflops, scratch, log, timeout_s
        self.journal, self.limits, self.drafts, self.replan = journal, limits, drafts, replan
        self.staying = before  # until it is taken over; then what stays for the next family
        self.noise = {} if noise is None else noise
        self.entries = {stack.name: Entry(stack) for stack in family.stacks}
        self.dtype = getattr(torch, machine.dtype(family.reference.model.dtype))
        self.random = random.SystemRandom()  # a toggle must not know which trials are looked at
        self.final = self._number(0, 0)  # of the trial after the last turn
        self.seats: list[Seated] = []
        self.crowded_out: list[Entry] = []  # out of memory in a turn beside others: they come in another block
        self.preparing: list[_Preparation] = []  # now, two at most
        self.preparing_changes = threading.Condition()
        self.two_at_once = False
        self.spare: list[Seated] = []  # opened and still empty, each for an arm that will sit alone
        self.opened = 0
        self.trials_a_turn = 1
        self.crowded = False  # the seats of the present block: some give memory back before another one's turn
        self.second = False  # whether a turn's second trial is made only where the first one took memory
        self.stopped = False  # before the last round
        self.begun = self.count = 0  # rounds of the blocks so far, and of the present one
        self.overhead: dict[str, float] = {}  # seconds that belong to no arm
        self.uuid = (machine.gpu or {}).get("uuid")
        self.meter = Meter(self.uuid)

    def _empty(self) -> None:
        """Nobody stays of another family, or for one."""
        if self.staying:
            self.staying.seat.desk.close()
        self.staying = None

    def _close(self, seat: Seated, judged: bool = True) -> None:
        """End a seat; `judged`: after its last round, whose evidence is looked at."""
        raise NotImplementedError

    def _judge(self, entry: Entry) -> bool:
        """Whether an arm may stay, by the evidence so far."""
        raise NotImplementedError

    def _number(self, number: int, place: int) -> int:
        """Of a trial of this round."""
        return (self.random.getrandbits(32) * ROUNDS + number + 1) * TURN + place

    def _ready(self) -> list[Entry]:
        """Who sits somewhere."""
        names = {name for seat in self.seats for name in seat.names}
        return [e for e in self.entries.values() if e.ok and e.name in names]

    def _open(self, alone: bool) -> Seated:
        seating = Seating(self.family, self.machine, alone, self.ceiling, str(self.scratch))
        seat = Seated(self.opened, self.workers.open(seating, self.timeout_s, self.tell, self.log), alone)
        seat.desk.send("open", ranks=self.family.ranks)
        self.opened += 1
        self.seats.append(seat)
        return seat

    def _taken_over(self) -> Seated | None:
        """The seat of the family before, with those of its arms that are ours, too; None where there is none, or it
        answers no more."""
        if self.staying is None:
            return None
        seat, ranks, began = self.staying.seat, self.family.ranks, time.perf_counter()
        stay = {e.name: e for e in self.staying.entries if e.name in self.entries}
        seat.desk.tell = self.tell
        try:
            for name in set(seat.names) - set(stay):
                seat.desk.ask("drop", name, ranks=ranks)
            seat.desk.ask("give_back", ranks=ranks)
        except Lost:
            self._empty()
            return None
        self.staying = None
        for name, old in stay.items():
            entry = self.entries[name]
            entry.ready, entry.numerics, entry.evidence = old.ready, dict(old.numerics), list(seat.evidence[name])
        fresh = Seated(self.opened, seat.desk, alone=False, opened=True, names=list(stay), evidence=seat.evidence)
        self.opened += 1
        self.seats.append(fresh)
        self._over("spawn", time.perf_counter() - began)
        return fresh

    def _sit_together(self, entries: Sequence[Entry], seat: Seated | None = None) -> None:
        """One seat for all of them; those that run out of memory beside others wait for a later block."""
        entries = [e for e in entries if e.ok and not (seat and e.name in seat.names) and not self._late(e)]
        if not entries:
            return
        seat = seat or self._open(alone=False)
        lost = self._opened(seat)
        if lost:
            for entry in entries:
                entry.leave(lost.status, str(lost), lost.rank, lost.log)
            self._close(seat, judged=False)
            return
        todo = list(entries)
        while todo:
            entry = todo.pop(0)
            if not entry.stack.is_reference and self._late(entry):
                continue
            if entry.stack.ranks > 1:  # a rank without room leaves the others waiting for it: all would begin anew
                self._make_room()
                seat = seat.now  # which an arm may have ended on leaving
                if self._is_beside(seat, entry) and not self._fits(1):
                    self._crowd_out(entry)
                    continue
            failed = self._prepare(seat, entry, gate=entry.ready is None)
            if failed is None:
                continue
            if failed.spoilt:
                seat = self._again(seat)
            if not entry.ok:
                todo = self._planned_now(entry, todo)

    def _is_beside(self, seat: Seated, entry: Entry) -> bool:
        """Whether anything else has a place on the device beside an arm in this seat."""
        return any(name != entry.name for name in seat.names) or any(s.names for s in self.seats if s is not seat)

    def _crowd_out(self, entry: Entry, why: str = "") -> None:
        """An arm that ran out of memory beside others comes in a later block, unless it has had turns elsewhere. Where
        nobody was there but the reference and its twin, it comes without the twin, and then without either."""
        beside = {name for seat in self.seats for name in seat.names} - {entry.name}
        if all(self.entries[name].stack.is_reference for name in beside):
            entry.beside = () if entry.stack.alone else entry.beside[: len(beside) - 1]
        self._put_off(entry, why)

    def _put_off(self, entry: Entry, why: str = "") -> None:
        if entry not in self.crowded_out:
            self.crowded_out.append(entry)
            self.tell(f"no room beside the others: {entry.name} comes in a later block{why and f' ({why})'}")

    def _planned_now(self, failed: Entry, todo: Sequence[Entry]) -> list[Entry]:
        """Who is still to be seated, where a design goes on without what did not apply: some need not be, others come
        in their place."""
        now = self.replan(self.family, {cell.key: failed.status for cell in failed.stack.cells})
        if now is self.family:
            return list(todo)
        self.family, stacks = now, {stack.name: stack for stack in now.stacks}
        for entry in self.entries.values():
            if entry.name in stacks:
                entry.stack = stacks[entry.name]  # it may be shown against another arm now
        for entry in todo:
            if entry.name not in stacks:
                del self.entries[entry.name]
        fresh = [self.entries.setdefault(s.name, Entry(s)) for s in now.stacks if s.name not in self.entries]
        return [*(entry for entry in todo if entry.name in stacks), *fresh]

    def _opened(self, seat: Seated) -> Lost | None:
        """Wait until the seat's process has imported what it needs."""
        if seat.opened:
            return None
        began = time.perf_counter()
        try:
            seat.desk.answers(ranks=self.family.ranks)
            seat.opened = True
        except Lost as lost:
            return lost
        finally:
            self._over("spawn", time.perf_counter() - began)
        return None

    def _leave(self, entry: Entry, status: str, reason: str, rank: int | None = None, log: str | None = None) -> None:
        entry.leave(status, reason, rank, log)
        self.tell(f"left: {entry.name}, {status}: {reason}")

    def _prepare(self, seat: Seated, entry: Entry, gate: bool, offered: bytes | None = None) -> Failed | None:
        """Seat an arm; the failure with which it did not come to sit. `offered`: the base of the seat that most arms
        share, for this process alone. What is prepared beside it may need more than was thought: then it is prepared
        once more beside nothing else. Raises Suspicion, of all that were prepared meanwhile, if that base was written
        to."""
        began = time.perf_counter()
        self.tell(f"preparing {entry.name}")
        try:
            failed, answers = self._prepared(seat, entry, gate, offered, self._need(entry))
            if failed and failed.status == "oom" and not failed.spoilt and self.two_at_once:
                failed, answers = self._prepared(seat, entry, gate, offered, math.inf)
        except Lost as lost:
            self._leave(entry, lost.status, str(lost), lost.rank, lost.log)
            entry.spent("build", time.perf_counter() - began)
            return Failed(lost.status, str(lost), spoilt=True)
        took = time.perf_counter() - began
        if failed is None and not all(isinstance(a, Ready) and all(ms > 0 for ms in a.warm_ms) for a in answers):
            failed = Failed("untrusted", "what it answered is no answer", spoilt=True)
        ready: list[Ready] = [a for a in answers if isinstance(a, Ready)]
        for part, seconds in ready[0].seconds.items() if ready else ():
            entry.spent(part, seconds)
            took -= seconds
        entry.spent("build", took)
        elsewhere = any(entry.name in other.names for other in self.seats if other is not seat)
        if failed and failed.status == "oom" and self._is_beside(seat, entry):
            if gate or not elsewhere:  # else its rounds in the other seats stay
                self._crowd_out(entry, failed.reason)
            return failed  # whatever else fails is the arm's, in any seat
        if failed:
            self._leave(entry, failed.status, *said_by(failed, answers))
            entry.disturbed, entry.numerics = failed.disturbed, dict(failed.numerics)
            if failed.status == "oom":
                failed.spoilt |= not self._find_edge(seat, entry)
            return failed
        first = entry.ready is None
        if first:
            one = on_one_gpu(ready) if entry.stack.process_a_job else _of_ranks(ready, entry.stack)
            entry.ready = replace(one, jobs=whole_batch([r.jobs for r in ready]))
            for job, (file, own) in ready[0].noise.items():
                self.noise.setdefault(file, own)
                ready[0].noise[job] = file, self.noise[file]
        if gate:
            entry.numerics = {job: verdict for rank in ready for job, verdict in rank.numerics.items()}
        seat.names.append(entry.name)
        seat.evidence[entry.name] = [r.evidence for r in ready]
        if entry.stack.process_a_job:  # each process knows one job; together they know what another arm's one knows
            entry.evidence.append({job: own for r in ready for job, own in r.evidence.items()})
        else:
            entry.evidence += seat.evidence[entry.name]
        if not self._judge(entry):
            self._dismiss(seat, entry)
        return None

    def _prepared(
        self, seat: Seated, entry: Entry, gate: bool, offered: bytes | None, need: float
    ) -> tuple[Failed | None, list[Any]]:
        """What an arm's seat answers to its preparation, and the failure among it. It is asked once `need` bytes of the
        device are there beside what else is prepared, or nothing else is."""
        with self.preparing_changes:
            self.preparing_changes.wait_for(lambda: self._may_begin(need))
            own = _Preparation(entry.name, need, {entry.name, *(one.name for one in self.preparing)})
            for one in self.preparing:
                one.beside.add(entry.name)
            self.preparing.append(own)
        if not entry.stack.is_reference:
            seat.desk.timeout_s = min(self.timeout_s, self.limits.seat_s)
        try:
            answers = seat.desk.ask("prepare", entry.name, entry.stack, gate, offered, ranks=entry.stack.ranks)
            failed = next((a for a in answers if isinstance(a, Failed)), None)
            if written := next((a.reason for a in answers if isinstance(a, Failed) and a.everywhere), None):
                raise Suspicion(written, own.beside)
            return failed, answers
        finally:
            seat.desk.timeout_s = self.timeout_s
            with self.preparing_changes:
                self.preparing.remove(own)
                self.preparing_changes.notify_all()

    def _may_begin(self, need: float) -> bool:
        """Whether a preparation has room beside the others; one that needs all there is has it beside nothing."""
        others = [one.need for one in self.preparing]
        return not others or (need < math.inf and need <= self._left - sum(others))

    def _need(self, entry: Entry) -> float:
        """Bytes of the device that an arm's preparation is taken to need: what it took in another process; else what
        the middle one of the candidates that sit did, or the reference; all there are where nobody sits. A limit's step
        is no candidate's."""
        there, like = [entry] if entry.ready else self._ready(), self.family.reference.kind
        candidates = [e for e in there if not e.stack.is_reference and e.stack.kind == like] or there
        needs = [e.step_bytes + e.ready.own_bytes for e in candidates if e.ready]
        return statistics.median(needs) if needs else math.inf

    def _find_edge(self, seat: Seated, entry: Entry) -> bool:
        """How large a trial of an arm would have fitted that ran out of memory beside nobody, for its record; whether
        the process lives. It is not asked where arms have to hurry (`Limits.seat_s`)."""
        seconds = min(EDGE_S, self.timeout_s / 2, self.limits.stop_at - time.monotonic())
        if seconds <= 0 or self.limits.seat_s < math.inf or entry.stack.ranks > 1:
            return True
        began = time.perf_counter()
        try:
            (found,) = seat.desk.ask("edge", entry.name, entry.stack, seconds)
        except Lost:
            return False
        finally:
            entry.spent("build", time.perf_counter() - began)
        if _is_edge(found):
            entry.edge, entry.reason = found, f"{entry.reason}; {found}"
        return True

    def _again(self, seat: Seated) -> Seated:
        """The same seat in a new process, without who spoilt the old one. The rounds of the others stay."""
        names = [name for name in seat.names if self.entries[name].ok]
        self._close(seat, judged=False)
        if not self.two_at_once:  # there others are being asked, and have nothing cached
            self._all_give_back()
        fresh = seat.again = self._open(seat.alone)
        lost = self._opened(fresh)
        for name in names:
            entry = self.entries[name]
            if lost:
                entry.leave(lost.status, str(lost), lost.rank, lost.log)
            elif (failed := self._prepare(fresh, entry, gate=False)) and failed.spoilt:
                return self._again(fresh)
        return fresh

    def _dismiss(self, seat: Seated, entry: Entry) -> None:
        """An arm that has failed leaves its seat."""
        if entry.name in seat.names:
            seat.names.remove(entry.name)
        try:
            seat.desk.ask("drop", entry.name, ranks=entry.stack.ranks)
        except Lost:
            self._again(seat)

    def _sit_alone(self, alone: Sequence[Entry], slow: Sequence[Entry] = (), beside: bool = True) -> Generations:
        """Fresh processes for each arm that sits alone, and (`beside`) for the reference again: one in each generation,
        of which one after the other takes its part of the rounds. The first is prepared now, and meanwhile those of the
        shared seat for which the host compiles (`slow`); each later one when its turn comes, so that whatever ends the
        sweep leaves rounds behind."""
        again = [self.entries.get(TWIN) or self.entries[REFERENCE]] if beside else []
        entries = [e for e in (*again, *alone) if e.ok and not self._late(e)]
        shared = next((seat for seat in self.seats if not seat.alone and seat.names), None)
        generations = min(PROCESSES, self.family.rounds)
        everyone = generations * len(entries)
        self._make_room(alone)
        self._all_give_back()
        now = everyone if self._fits(len(entries), 1 + everyone) else len(entries)
        while len(self.spare) < now:
            self._spare()
        for seat in list(self.spare):
            if self._opened(seat):
                self._close(seat, judged=False)
                self.spare.remove(seat)
                self._spare()
        made: Generations = [
            [(entry, self.spare.pop(0) if self.spare else None) for entry in entries] for _ in range(generations)
        ]
        # Where nobody sits, an arm would run out of memory beside its own other processes and look as if it were alone.
        if shared and beside:
            self._one_by_one([(entry, seat) for entry, seat in made[0] if seat], slow, shared)
        return made

    def _one_by_one(
        self, pairs: Sequence[tuple[Entry, Seated]], slow: Sequence[Entry] = (), shared: Seated | None = None
    ) -> None:
        """Prepare these arms one after the other: processes that share a GPU have it in turns, and every transfer waits
        for its own. Those for which the host compiles (`slow`) are prepared meanwhile, in the seat `shared`; all
        seconds are then parts of one wall time. The reference again comes last then: as the largest it may have to wait
        until they are done, and whoever is behind it with it."""
        self.two_at_once = bool(slow)
        began, before = time.perf_counter(), {name: dict(e.seconds) for name, e in self.entries.items()}
        order = sorted(pairs, key=lambda pair: pair[0].stack.is_reference) if slow else pairs
        todo = [(seat, entry, entry.ready is None, self._offered()) for entry, seat in order]
        with ThreadPoolExecutor(1) as pool:
            started = [pool.submit(self._prepare, *arguments) for arguments in todo]
            try:
                self._sit_together(slow, shared)
                for one in started:
                    one.result()
            except Suspicion:  # all of it was for nothing
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.two_at_once = False
        everyone = {e.name for e, _ in pairs} | {name for seat in self.seats for name in seat.names}
        candidates = {name for name in everyone if not self.entries[name].stack.is_reference}
        for entry, seat in pairs:
            if entry in self.crowded_out:  # in one of its processes: all of them come later, and are judged then
                self._close(seat, judged=False)
                seat.names = []
                if not entry.turns:
                    entry.ready, entry.evidence = None, []
                entry.beside = () if candidates == {entry.name} else entry.beside
        spent = {
            (entry.name, part): seconds - before.get(entry.name, {}).get(part, 0.0)
            for entry in self.entries.values() for part, seconds in entry.seconds.items()
        }  # fmt: skip
        share = min(1.0, (time.perf_counter() - began) / max(sum(spent.values()), 1e-9))
        for (name, part), seconds in spent.items():
            self.entries[name].seconds[part] -= seconds * (1 - share)

    def _seated(self, generation: Sequence[tuple[Entry, Seated | None]]) -> list[Seated]:
        """Prepare these arms in their seats, where that is not done; the seats in which one sits."""
        waiting = [(e, seat) for e, seat in generation if e.ok and e not in self.crowded_out]
        for _ in range(sum(seat is None for _, seat in waiting)):
            self._spare()
        pairs = [(entry, seat or self.spare.pop(0)) for entry, seat in waiting]
        todo = [(entry, seat) for entry, seat in pairs if not seat.names and not self._opened(seat)]
        if todo:
            self._all_give_back()
            self._one_by_one(todo)
        for entry, seat in pairs:
            seat.active = entry.ok and bool(seat.names)
        for seat in [seat for _, seat in (*generation, *pairs) if seat and not seat.active]:
            self._close(seat, judged=False)
        return [seat for _, seat in pairs if seat.active]

    def _active(self) -> list[Seated]:
        return [seat for seat in self.seats if seat.active]

    def _spare(self) -> None:
        """A process for an arm that will sit alone: it imports while others are prepared."""
        seat = self._open(alone=True)
        seat.active = False
        self.spare.append(seat)

    def _offered(self) -> bytes | None:
        """The base of the seat that most arms share; None where there is none."""
        shared = next((seat for seat in self.seats if not seat.alone and seat.names), None)
        found = shared.desk.ask("offer")[0] if shared else None
        return found if isinstance(found, bytes) else None

    def _make_room(self, alone: Sequence[Entry] = ()) -> None:
        """Until the largest step fits beside what all others keep: processes that only wait for later generations end,
        and arms that keep most between two turns (captured graphs' pools, weights of their own) leave for a later
        block. One that will sit alone (`alone`) is taken to keep what the reference does."""
        more = len(alone) + 1 if alone else 0  # and the reference again
        while not self._fits(more, 1 + more):
            if len(self.spare) > more:
                self._close(self.spare.pop(), judged=False)
                continue
            keeping = [e for e in self._ready() if not e.stack.is_reference and e.ready and e.ready.own_bytes]
            if len(keeping) < (1 if alone else 2):  # the last one stays: a block has to come to something
                return
            most = max(keeping, key=lambda e: e.ready.own_bytes if e.ready else 0)
            for seat in [seat for seat in self.seats if most.name in seat.names]:
                if seat.alone:
                    self._close(seat, judged=False)
                else:
                    self._dismiss(seat, most)
            self._put_off(most)

    def _fits(self, more: int = 0, processes: int = 1) -> bool:
        """Whether the largest step fits beside what all arms keep, and what so many more would keep that are like the
        reference, with at least so many processes."""
        ready = self._ready()
        like = sum(e.ready.own_bytes for e in ready if e.name == REFERENCE and e.ready)
        largest = max((e.step_bytes for e in ready), default=0)
        return largest + more * like + max(0, processes - len(self.seats)) * CONTEXT <= self._left

    @property
    def _left(self) -> float:
        """Bytes of the device beside what all processes keep between two turns. Each has a context, be it that it
        imports a package."""
        seats = list(self.seats)  # which others that are prepared may change
        sits = [self.entries[name].ready for seat in seats for name in list(seat.names)]
        ready = [one for one in sits if one and one.memory]
        kept = sum(one.own_bytes for one in ready) + max((one.base_bytes for one in ready), default=0)
        return self._room - kept - CONTEXT * len(seats)

    @property
    def _room(self) -> float:
        """Bytes of the device that may be used; all that there are on a CPU, which swaps."""
        return ROOMY * (self.machine.gpu or {}).get("memory_bytes", math.inf)

    @property
    def _crowded(self) -> bool:
        """Whether all seats fit only where some give back what they have cached before another one's turn."""
        seats = [seat for seat in self._active() if seat.names]
        steps = sum(max(self.entries[name].step_bytes for name in seat.names) for seat in seats)
        return len(seats) > 1 and steps > self._left

    def _make_way(self, seat: Seated, entry: Entry) -> None:
        """Before an arm's turn the other processes give back what they have cached, one after the other until it fits;
        an arm leaves its own as large as the largest that had a turn here."""
        seat.cached = max(seat.cached, entry.step_bytes)
        others = [other for other in self.seats if other is not seat and other.cached]
        while others and sum(s.cached for s in (seat, *others)) > self._left:
            self._give_back(others.pop(0))

    def _give_back(self, seat: Seated, collect: bool = False) -> None:
        """Cached memory to the device."""
        began = time.perf_counter()
        seat.desk.ask("give_back", collect, ranks=self.family.ranks)
        seat.cached = 0
        self._over("other", time.perf_counter() - began)

    def _all_give_back(self) -> None:
        for seat in [s for s in self.seats if s.names]:
            self._give_back(seat, collect=True)

    def _late(self, entry: Entry) -> bool:
        """Whether there is no time left to seat it. One that never sat leaves, for the sake of the verdict of those
        who sit."""
        if entry.ready is not None:
            return time.monotonic() > self.limits.stop_at
        until = min(self.limits.stop_at, self.limits.seat_by)
        if seated := self._ready():
            like = seated[0]  # the reference
            processes = sum(like.name in seat.names for seat in self.seats)
            until = min(until, self.limits.stop_at - verdict_s(like, processes, trials_a_turn(like.warm_ms), seated))
        late = time.monotonic() > until
        if late:
            entry.leave("timeout", NO_TIME)
        return late

    def _over(self, part: str, seconds: float) -> None:
        self.overhead[part] = self.overhead.get(part, 0.0) + seconds


def _of_ranks(ready: Sequence[Ready], stack: Stack) -> Ready:
    """What rank 0 says, and of bytes what each says."""
    divide = [ablation.name for ablation in stack.ablations if ablation.parallel]
    return replace(ready[0], notes=notes_by_rank([r.notes for r in ready], divide))


def _is_edge(found: Any) -> bool:
    """Whether an answer is an edge of nothing but numbers: a toggle shares the process that gives it."""
    if type(found) is not Edge or found.of not in (TOKENS, JOBS):
        return False
    return all(isinstance(number, int | float | None) for number in astuple(found)[1:])


def said_by(failed: Failed, answers: Sequence[Any]) -> tuple[str, int | None]:
    """The reason of a failure, and the one of several ranks that ran out of memory."""
    if len(answers) == 1 or failed.status != "oom":
        return failed.reason, None
    rank = answers.index(failed)
    return f"rank {rank}: {failed.reason}", rank
