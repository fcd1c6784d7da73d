"""How long a family will take, by what the arms of those before it took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lorabench.advice.expected import Toggles, expected
from lorabench.advice.known import Known, Labels
from lorabench.contract.cell import PROCESSES
from lorabench.record.schema import ArmRecord

# Of a family's processes, and of an arm until its rounds, before this machine has shown its own.
OPENING_S, START_S = 15.0, 4.0
MARGIN = 1.15  # what has to fit beside something else may take as much longer than is expected


class Pace:
    """What is known of a question's arms, as times in seconds."""

    def __init__(self, known: Known) -> None:
        self.question = known.question
        self.arms: dict[Labels, ArmRecord] = {}  # the last of each stack that had rounds
        self.began: dict[Labels, float] = {}  # the longest start of each: one that still sat was not prepared again
        self.opening = OPENING_S
        for told in known.families:
            ran = {labels: arm for labels, arm in told.arms.items() if arm.status == "ok" and arm.cost}
            self.arms |= ran
            self.began |= {labels: max(self.began.get(labels, 0.0), _start(arm)) for labels, arm in ran.items()}
            if told.reference and (own := frozenset(told.reference.toggles)) in ran:
                self.opening = self.began[own]  # what belongs to no arm stands with the reference
        base = known.question.labels(known.ground)
        starts = [seconds for labels, seconds in self.began.items() if labels != base]
        self.usual = statistics.median(starts) if starts else START_S
        reference = self.arms.get(base)
        self.round = _turn(reference) if reference else 0.0
        # Of those that sit, where the next family has their reference.
        self.seated = known.seated if base in known.seated else frozenset()

    def start(self, toggles: Toggles) -> float:
        """Until its rounds: as it took before, else as long as the slowest of its toggles, with what is expected."""
        labels = self.question.labels(toggles)
        if labels in self.seated:
            return 0.0
        if labels in self.began:
            return self.began[labels]
        own = [self.usual, *(self.began[part] for part in self._parts(toggles))]
        processes = PROCESSES if any(t.global_patch for t in toggles) else 1
        return processes * max(own) + (0 if len(own) > 1 else expected(toggles, self.question.size).start_s)

    def turn(self, toggles: Toggles) -> float:
        """A turn: as it took before, else as long as that of its fastest toggle."""
        arm = self.arms.get(self.question.labels(toggles))
        return _turn(arm) if arm else min([self.round, *(_turn(self.arms[part]) for part in self._parts(toggles))])

    def _parts(self, toggles: Toggles) -> list[Labels]:
        """Of each of several toggles alone, where that was measured."""
        return [labels for t in toggles if (labels := self.question.labels((t,))) in self.arms]

    def seconds(self, stacks: Sequence[Toggles], rounds: int) -> float:
        """Of a family of these arms, the reference and the reference again."""
        return MARGIN * self.starts(stacks) + self.turns(stacks, rounds)

    def turns(self, stacks: Sequence[Toggles], rounds: int) -> float:
        """Of the rounds alone."""
        return MARGIN * rounds * self._round(stacks)

    def rounds(self, stacks: Sequence[Toggles], seconds: float) -> int:
        """How many rounds of such a family so many seconds hold. Without a margin: none begins after the end."""
        return max(0, int((seconds - self.starts(stacks)) / max(self._round(stacks), 1e-3)))

    def starts(self, stacks: Sequence[Toggles]) -> float:
        """Seconds until the first round of a family of these arms, the reference and the reference again."""
        alone = any(t.global_patch for s in stacks for t in s)
        twins = PROCESSES if alone else 0  # the twin sits alone too, where one does
        opening = 0.0 if self.seated else self.opening + self.usual
        return opening + twins * self.usual + sum(map(self.start, stacks))

    def _round(self, stacks: Sequence[Toggles]) -> float:
        return 2 * self.round + sum(map(self.turn, stacks))


def _start(arm: ArmRecord) -> float:
    """All but its rounds."""
    assert arm.cost
    return arm.cost.wall - arm.cost.trials - arm.cost.evidence


def _turn(arm: ArmRecord) -> float:
    assert arm.cost
    return (arm.cost.trials + arm.cost.evidence) / max(1, len(arm.rounds))
