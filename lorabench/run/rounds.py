"""The rounds of a family: who is resident, whose turn it is, who failed, and the judge of all evidence.

Most arms share one process, seat 0. Arms whose patches reach further sit alone, in as many processes one after the
other as PROCESSES says, each of which takes its part of the rounds; the reference again sits so as well. Whatever
happens to an arm, it leaves with its status and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lorabench.contract.cell import PROCESSES
from lorabench.contract.family import REFERENCE, TWIN
from lorabench.contract.hooks import described
from lorabench.contract.kind import kind
from lorabench.measure import fairness
from lorabench.measure.seat import Ended, Failed, Made
from lorabench.measure.telemetry import Sampler
from lorabench.measure.trial import Trial, of_turn, trials_a_turn
from lorabench.record.schema import LONGEST_MS
from lorabench.run.entries import (
    LEAST_ROUNDS,
    NO_TIME,
    Entry,
    Left,
    Seated,
    Staying,
    Suspicion,
    Taking,
    verdict_s,
)
from lorabench.run.journal import Turn
from lorabench.run.process import Lost
from lorabench.run.ranks import slowest, spread_of
from lorabench.run.seats import Generations, Seats, said_by

SKETCHED = 12  # rounds whose gradients are compared beside the losses of all, picked when they are there
SLOWER = 3.0  # an arm may take this many times as long as the median arm before it gets fewer rounds
ENDING_S = 2.0  # that an arm's end is taken to need beside two of its trials
BY_TURNS_MS = 300.0  # a turn of so long moves the GPU's energy counter three times
BEFORE = -1  # the round of turns that do not count
LONG_MS = 5000.0  # of a trial that takes longer, what a turn before it brings back to the device is a small part
NO_EVIDENCE = (AttributeError, KeyError, TypeError, ValueError)  # where an answer is not what its kind's arms say
DIGITS = 4  # of a millisecond that a record keeps: tenths of a microsecond are below what any clock here resolves


class Rounds(Seats):
    """One family, from its seats to its last round."""

    # ---- from the start to the end

    def run(self) -> None:
        """Raises Suspicion where an arm cannot be told from another that did something wrong."""
        began = time.perf_counter()
        try:
            self._run()
        except BaseException as error:
            self._empty()
            if isinstance(error, Lost):  # when it was nobody's turn
                raise Suspicion(str(error)) from None
            raise
        finally:
            for seat in self.seats:
                seat.desk.close()
            known = sum(sum(e.seconds.values()) for e in self.entries.values()) + sum(self.overhead.values())
            self.wall = time.perf_counter() - began
            self._over("other", self.wall - known)

    def _run(self) -> None:
        shared = [e for e in self.entries.values() if not e.stack.alone]
        alone = [e for e in self.entries.values() if e.stack.alone]
        if alone and all(e.stack.role == "reference" for e in shared):
            shared = []  # it sits alone too, and nobody shares a seat with it
        first = None
        if shared:
            first = self._taken_over() or self._open(alone=False)  # seat 0: what it holds most rows are of
        else:
            self._empty()
        for _ in range(min(2 * (self.machine.cores - 1), PROCESSES * (len(alone) + 1)) if alone else 0):
            self._spare()
        # Others choose their kernels by timing them, which they do with nobody beside them.
        slow = [e for e in shared if e.stack.slow_start] if alone else []
        self._sit_together([e for e in shared if e not in slow], first)
        generations = self._sit_alone(alone, slow) if alone else []
        while True:
            self._play(generations)
            for seat in list(self.seats):
                self._close(seat)
            self.spare = []
            waiting = [e for e in self.crowded_out if e.ok and not e.turns and not self._late(e)]
            self.crowded_out = []
            if not waiting or self.stopped or not self._has_time():
                break
            self._empty()
            generations = self._next_block(waiting)
        for entry in self.entries.values():
            if entry.ok and not entry.turns:
                entry.leave("timeout", NO_TIME)

    def _has_time(self) -> bool:
        """Whether a block can come to a verdict in what is left of the time; whether any is left, where the reference
        has no times."""
        reference = self.entries[REFERENCE]
        seats = {turn.seat for turn in reference.turns}
        needed = verdict_s(reference, len(seats), self.trials_a_turn) if reference.ok and seats else 0.0
        return time.monotonic() + needed <= self.limits.stop_at

    def _next_block(self, waiting: list[Entry]) -> Generations:
        """Arms that did not fit beside the others: with the reference and its twin, or one of them with as much of the
        two as there is room for. Those that sit in processes of their own come last, one after the other. What has no
        place here waits on."""
        together = [e for e in waiting if not e.stack.alone and TWIN in e.beside]
        now = together or [next((e for e in waiting if TWIN not in e.beside), waiting[0])]
        self.crowded_out = [e for e in waiting if e not in now]
        self.tell(f"another block: {', '.join(e.name for e in now)}")
        first = now[0]
        again = [self.entries[n] for n in first.beside if n in self.entries and self.entries[n].ok]
        if again or not first.stack.alone:
            self._sit_together([*again, *(e for e in now if not e.stack.alone and e not in again)])
        return self._sit_alone(now, beside=bool(first.beside)) if first.stack.alone else []

    # ---- rounds

    def _play(self, generations: Generations) -> None:
        """The rounds of who is seated. `generations`: who sits alone, one after the other for a part of the rounds."""
        generations = generations or [[]]
        own = self._seated(generations[0])
        self._make_room()
        self._warm()
        everyone = self._ready()
        idle = all(e.stack.is_reference and (e.turns or generations[0]) for e in everyone)
        if not everyone or (self.begun and idle):  # who came for their sake found no room
            return
        usual = everyone[0].warm_ms  # the reference is the first of them
        self.trials_a_turn, self.crowded = trials_a_turn(usual), self._crowded
        # A turn may begin without memory. A first trial that takes it does not count.
        self.second = self.crowded and self.trials_a_turn == 1 and usual < LONG_MS
        self.trials_a_turn += self.second
        # Numbers of their own in each block: what was not in one round must not look as if it were.
        self.count = self._count(everyone)
        rounds = list(range(self.begun, self.begun + self.count))
        self.begun += self.count
        parts = self._parts(rounds, len(generations))
        ends = sum(map(_end_s, everyone))
        taking = self._shares(rounds, everyone)
        # The last one among them: after it nobody would look any more.
        early, last = taking.common[:-1], taking.common[-1:]
        sketched = {*last, *self.random.sample(early, min(SKETCHED - 1, len(early)))}
        if self.journal:
            self.journal.begin(self.drafts(), self.count)
        with Sampler(
            self.uuid, lambda: {rank.process.pid or 0 for seat in self.seats for rank in seat.desk.ranks}
        ) as sampler:
            for before, (part, seated) in enumerate(zip(parts, generations, strict=True)):
                for number in part:
                    # The ends have to fit into what there is of time, and what is prepared for this part, as long as it
                    # took for those before; but for the sake of a verdict.
                    first = number == part[0]
                    coming = sum(e.prepared_s for e, _ in seated) / before if first and before else 0.0
                    reserved = ends + coming if number - rounds[0] >= LEAST_ROUNDS else 0.0
                    if time.monotonic() > self.limits.stop_at - reserved:
                        self.stopped = True
                        break
                    if first:
                        own = self._seated(seated) if before else own
                        self._warm()
                    self._round(number, [e for e in self._ready() if taking.takes(e, number)], number in sketched)
                for seat in own:
                    self._close(seat)
                own = []
                if self.stopped:
                    break
        for entry in everyone:
            if self.stopped:
                entry.stopped_after = number - rounds[0]
            if entry.trials and entry.ready:
                entry.telemetry = sampler.summary(entry.trials)

    def _count(self, entries: Sequence[Entry]) -> int:
        """How many rounds a block of these arms has."""
        if self.limits.rounds is None:
            return self.family.rounds
        return max(1, self.limits.rounds(sum(e.warm_ms for e in entries) * self.trials_a_turn / 1000))

    def _shares(self, rounds: Sequence[int], ready: Sequence[Entry]) -> Taking:
        """Which arm takes which rounds. Those of fewer rounds are among those of more, so that all share them."""
        order = self.random.sample(rounds, len(rounds))
        usual = statistics.median(e.warm_ms for e in ready)
        counts = {}
        for entry in ready:
            slow = SLOWER * usual / entry.warm_ms
            counts[entry.name] = min(len(rounds), max(LEAST_ROUNDS, math.floor(len(rounds) * min(1.0, slow))))
        return Taking(order, counts)

    def _parts(self, rounds: Sequence[int], count: int) -> list[list[int]]:
        """The rounds of each generation of seats: one, unless arms sit alone."""
        cuts = [round(n * len(rounds) / count) for n in range(count + 1)]
        return [list(rounds[a:b]) for a, b in itertools.pairwise(cuts)]

    def _warm(self) -> None:
        """A turn of every arm that does not count: what an arm's start gave back to the device is taken again. None of
        arms whose trials are long."""
        while seat := next((s for s in self._active() if s.names and not s.warm), None):
            for name in [n for n in seat.names if self.entries[n].warm_ms < LONG_MS]:
                entry = self.entries[name]
                self._make_way(seat, entry)
                began = time.perf_counter()
                with contextlib.suppress(Left):
                    answers = self._tried(seat, entry, self._number(BEFORE, 0), False)
                    self._check(entry, [one.trial for made in answers for one in made], BEFORE)
                    entry.warmed(max(made[-1].trial.total_ms for made in answers))
                if seat not in self.seats:  # it was started again without this arm: all of the new one's turns
                    break
                entry.spent("warmup", time.perf_counter() - began)
            seat.warm = True

    def _round(self, number: int, entries: Sequence[Entry], sketch: bool) -> None:
        """One turn of every arm, in fresh random order; of one seat's arms after the other's, where seats have to give
        memory back for each other."""
        self.tell(f"round {number + 1} of {self.count}")
        at = self.random.randrange(self.trials_a_turn) if sketch else None
        numbers = [self._number(number, place) for place in range(self.trials_a_turn)]
        turns: dict[str, list[Turn]] = {}
        places = [(seat.alone, e) for e in entries for seat in self._active() if e.name in seat.names]
        groups = [[place] for place in places]
        if self.crowded:
            groups = [[p for p in places if not p[0]], *([p] for p in places if p[0])]
        for alone, entry in [p for g in self.random.sample(groups, len(groups)) for p in self.random.sample(g, len(g))]:
            # Asked anew each time: a seat may have been started again since the round began.
            seat = next((s for s in self._active() if s.alone == alone and entry.name in s.names), None)
            if entry.ok and seat is not None and (turn := self._turn(seat, entry, number, numbers, at)):
                turns.setdefault(entry.name, []).append(turn)
        if self.journal:
            self.journal.round(number, turns)

    def _turn(
        self, seat: Seated, entry: Entry, number: int, numbers: Sequence[int], sketch_at: int | None
    ) -> Turn | None:  # fmt: skip
        """A call for each trial: the arm must not know which one is looked at, nor what comes next."""
        self._make_way(seat, entry)
        began, energy, made = time.perf_counter(), self.meter.read(), list[Trial]()
        try:
            for place, own in enumerate(numbers):
                # Whoever takes a second trial has the first looked at like all others.
                sketch = sketch_at is not None and (self.second or place == sketch_at)
                one = self._made(seat, entry, own, on=place > 0, sketch=sketch)
                made.append(one.trial)
                if self.second and not one.grew:
                    break
            self._check(entry, made, number)
        except Left:
            return None
        after = self.meter.read()
        took = time.perf_counter() - began
        inside = sum(one.ended - one.began for one in made)
        entry.spent("trials", inside)
        entry.spent("evidence", took - inside)
        counted, medians = of_turn(made)
        entry.trials += counted
        if energy is not None and after is not None:
            entry.millijoules.append((after - energy, took, len(made)))
        turn = Turn(number, seat.number, {phase: round(ms, DIGITS) for phase, ms in medians.items()})
        entry.turns.append(turn)
        return turn

    def _made(self, seat: Seated, entry: Entry, number: int, on: bool, sketch: bool) -> Made:
        """One trial, of the slowest rank; what was observed goes to the evidence. `on`: its turn has begun before;
        `sketch`: its gradients are looked at, which it does not know before. Raises Left."""
        ranks = entry.stack.ranks
        answers = self._tried(seat, entry, number, on)
        looks: list[Any] = [{}] * ranks
        if sketch:
            looks = self._asked(seat, entry, "look", entry.name, number)
        try:
            for evidence, (one,), look in zip(seat.evidence[entry.name], answers, looks, strict=True):
                kind(entry.stack.kind).take(evidence, number, one.observed, look)
        except NO_EVIDENCE as error:
            self._gone(seat, entry, "untrusted", f"its evidence is none: {described(error)}", spoilt=True)
            raise Left from None
        if ranks > 1:
            which, found = slowest(answers)
            entry.slowest_rank += which
            entry.spreads.append(spread_of(answers))
        else:
            found = answers[0]
        return replace(found[0], grew=any(one.grew for (one,) in answers))

    def _tried(self, seat: Seated, entry: Entry, number: int, on: bool) -> list[Any]:
        """One timed trial, as each rank made it. Raises Left."""
        each, ranks = self.trials_a_turn > 1, entry.stack.ranks
        answers = self._answered(seat, entry, lambda: seat.desk.turn(entry.name, [number], on, each, ranks))
        entry.unseen_s += seat.desk.unseen_s
        return answers

    def _asked(self, seat: Seated, entry: Entry, what: str, *arguments: Any) -> list[Any]:
        """Raises Left."""
        return self._answered(seat, entry, lambda: seat.desk.ask(what, *arguments, ranks=entry.stack.ranks))

    def _answered(self, seat: Seated, entry: Entry, ask: Callable[[], Any]) -> Any:
        """What a seat answers that is no failure. Raises Left."""
        try:
            answers = ask()
        except fairness.Untrusted as doubt:
            self._gone(seat, entry, "untrusted", str(doubt), spoilt=True)
            raise Left from None
        except Lost as lost:
            self._gone(seat, entry, lost.status, str(lost), lost.rank, lost.log, spoilt=True)
            raise Left from None
        self._look_for_failure(seat, entry, answers)
        return answers

    def _look_for_failure(self, seat: Seated, entry: Entry, answers: Sequence[Any]) -> None:
        failed = next((a for a in answers if isinstance(a, Failed)), None)
        if failed is not None and failed.status == "oom" and self._is_beside(seat, entry):
            seat.names.remove(entry.name)
            entry.turns = [turn for turn in entry.turns if turn.seat != seat.number]
            self._crowd_out(entry, failed.reason)
            if seat.alone:
                self._close(seat, judged=False)
            elif failed.spoilt:  # other ranks wait for the one that has failed
                self._again(seat)
            raise Left
        if failed is not None:
            entry.disturbed = failed.disturbed
            self._gone(seat, entry, failed.status, *said_by(failed, answers), spoilt=failed.spoilt)
            raise Left

    def _gone(
        self, seat: Seated, entry: Entry, status: str, reason: str, rank: int | None = None, log: str | None = None, *,
        spoilt: bool,
    ) -> None:  # fmt: skip
        self._leave(entry, status, reason, rank, log)
        if entry.name in seat.names:
            seat.names.remove(entry.name)
        if self.journal:
            self.journal.left(entry.name, status, reason)
        if entry.stack.is_reference and (spoilt or status == "untrusted") and len(self._candidates()) > 1:
            raise Suspicion(reason)
        if not spoilt:
            return
        if seat.alone:
            self._close(seat, judged=False)
        else:
            self._again(seat)

    def _check(self, entry: Entry, made: Sequence[Trial], number: int) -> None:
        """Raises Left for times that no clock can give, and for a loss that is not finite."""
        assert entry.ready is not None
        for one in made:
            if one.device_ms.keys() != {*entry.ready.phases}:
                phases = f"{[*one.device_ms]}, its first one {[*entry.ready.phases]}"
                self._leaves("untrusted", f"a trial of {entry.name} has the phases {phases}", entry)
            odd = [ms for ms in one.device_ms.values() if not 0 < round(ms, DIGITS) <= LONGEST_MS]
            if odd:
                reason = f"{entry.name} took {odd[0]!r} ms; expected a time between zero and some months"
                self._leaves("crash", reason, entry)
            if not math.isfinite(one.loss):
                self._leaves("wrong_numerics", f"the loss of {entry.name} is {one.loss} in round {number + 1}", entry)

    def _leaves(self, status: str, reason: str, entry: Entry) -> None:
        entry.leave(status, reason)
        for seat in self.seats:
            if entry.name in seat.names:
                self._dismiss(seat, entry)
                break
        raise Left

    # ---- the end of a seat, and the judge

    def _close(self, seat: Seated, judged: bool = True) -> None:
        """After its last round: what is still to be seen of its arms, and whether anything went on beside them."""
        if seat not in self.seats:
            return  # that was done
        if judged:
            for name in list(seat.names):
                if self.entries[name].ok and self.entries[name].turns:
                    self._end(seat, self.entries[name])
                    seat = seat.now
            self._closing(seat)
        if seat in self.seats:
            self.seats.remove(seat)
        here = [self.entries[name] for name in seat.names]
        stays = judged and self.limits.stays and not seat.alone and not any(e.stack.process_a_job for e in here)
        if stays and here and all(e.ok for e in here):
            self.staying = Staying(self.family, seat, here)
        else:
            seat.desk.close()

    def _end(self, seat: Seated, entry: Entry) -> None:
        self._make_way(seat, entry)
        usual = statistics.median(sum(turn.phases.values()) for turn in entry.turns)
        by_turns = usual * self.trials_a_turn >= BY_TURNS_MS
        first = entry.ended is None
        arguments = entry.name, self.final, usual, first and not by_turns
        evidence = seat.evidence[entry.name]
        try:
            answers: list[Ended] = self._asked(seat, entry, "end", *arguments)
            crossed: Any = None
            if entry.name != REFERENCE and REFERENCE in seat.names:
                (crossed,) = seat.desk.ask("cross", entry.name, REFERENCE)
            for own, ended in zip(evidence, answers, strict=True):
                kind(entry.stack.kind).finish(own, ended.last)
            if crossed and not isinstance(crossed, Failed):
                kind(entry.stack.kind).finish(evidence[0], crossed)
        except Left:
            return
        except Lost as lost:
            self._gone(seat, entry, lost.status, str(lost), lost.rank, lost.log, spoilt=True)
            return
        except NO_EVIDENCE as error:
            self._gone(seat, entry, "untrusted", f"its evidence is none: {described(error)}", spoilt=True)
            return
        entry.ended = entry.ended or answers[0]
        for part, seconds in answers[0].seconds.items():
            entry.spent(part, seconds)
        began = time.perf_counter()
        self._judge(entry)
        entry.spent("evidence", time.perf_counter() - began)

    def _candidates(self) -> list[Entry]:
        return [e for e in self.entries.values() if not e.stack.is_reference and e.ok]

    def _judge(self, entry: Entry) -> bool:
        """Hold the full arm against the reference, by limits and noise that no toggle can have changed in this process.
        Whether it may stay."""
        reference = self.entries[REFERENCE]
        if not reference.evidence or entry.stack.kind != self.family.reference.kind:
            return True
        of_kind = kind(entry.stack.kind)
        noise = {job: own for job, (_, own) in (reference.ready.noise if reference.ready else {}).items()}
        for evidence, measure in _held_together(reference, entry):
            for job, found in evidence.items():
                own = replace(measure[job], noise=noise[job]) if job in noise else measure[job]
                before = entry.numerics.get(job)
                verdict = of_kind.agree(entry.stack.cell, before, own, found, self.dtype)
                if verdict is None:
                    continue
                if before is None or not verdict.passed or len(verdict.checks) >= len(before.checks):
                    entry.numerics[job] = verdict
                if not verdict.passed:
                    reason = of_kind.explain(verdict)
                    entry.leave("wrong_numerics", f"job {job}: {reason}" if job else reason)
                    return False
        return True

    def _closing(self, seat: Seated) -> None:
        """Raises Suspicion, or says it of the only one who can have done it."""
        here = [self.entries[n] for n in seat.names if self.entries[n].ok and not self.entries[n].stack.is_reference]
        try:
            answers = seat.desk.ask("closing", ranks=1) if seat.names else []
            for name in seat.names:
                self._fair(self.entries[name])
            for answer in answers:
                if isinstance(answer, Failed):
                    raise fairness.Untrusted(answer.reason)
                spent = sum(t.ended - t.began for n in seat.names for t in self.entries[n].trials)
                fairness.check_busy(answer, spent)
        except Lost as lost:
            self._suspect(here, "crash", f"{lost} at the end")
        except fairness.Untrusted as error:
            self._suspect(here, "untrusted", str(error), isinstance(error, fairness.Disturbed))

    def _suspect(self, here: Sequence[Entry], status: str, reason: str, disturbed: bool = False) -> None:
        if len(here) > 1:
            raise Suspicion(reason)
        for entry in here:
            entry.leave(status, reason)
            entry.disturbed = disturbed

    def _fair(self, entry: Entry) -> None:
        """Whether the arm's own times are what they seem; it leaves where they are not."""
        if not entry.ok or not entry.trials or entry.stack.is_reference:
            return
        try:
            fairness.check_clock(entry.name, entry.trials, entry.unseen_s)
        except fairness.Disturbed as error:
            entry.leave("untrusted", str(error))
            entry.disturbed = True


def _end_s(entry: Entry) -> float:
    """About how many seconds an arm takes after its last round."""
    return 2 * entry.warm_ms / 1000 + ENDING_S


def _held_together(reference: Entry, entry: Entry) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each evidence of an arm with that of the reference. A rank is held against the one of its number, where both arms
    have several: of four ranks of a 70B to hold each against each took a minute. The reference's own against its
    first."""
    one, others = _a_seat(entry), _a_seat(reference)
    for place, mine in enumerate(entry.evidence):
        rank = 0 if entry is reference else place % one % others
        for own in _alike(reference.evidence[rank::others], mine):
            if own is not mine:
                yield mine, own


def _a_seat(entry: Entry) -> int:
    """How many evidences an arm has of each of its seats: one a rank, and one where each process has a job of its
    own."""
    return 1 if entry.stack.process_a_job else entry.stack.ranks


def _alike(reference: Sequence[dict[str, Any]], mine: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The reference's evidence of those of its processes in which it took trials that this evidence has, too; of none,
    that of its first process."""
    numbers = {number for own in mine.values() for number in getattr(own, "losses", ())}
    shared = [own for own in reference if any(numbers & set(getattr(o, "losses", ())) for o in own.values())]
    return shared or reference[:1]
