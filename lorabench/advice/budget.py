"""The budget: how long the next cell will take by what others took, and the end that no cell may pass."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from lorabench.contract.cell import PROCESSES, Cell
from lorabench.measure.seat import Seating
from lorabench.record.schema import Record
from lorabench.run.process import Desk, Workers

MARGIN = 1.25  # a cell may take as much longer than the others did
MOST_OF_ALL = 0.25  # of the budget: one cell that compiles for ever, or hangs, must leave time for the others
LEAST_S = 1.0


class Budget:
    """Seconds to measure for, from now on. `guess`: of a cell, where nothing like it was measured."""

    def __init__(self, minutes: float, guess: Callable[[Cell], float]) -> None:
        self.seconds, self.guess = 60 * minutes, guess
        self._began = time.monotonic()
        self._took: list[tuple[Cell, float]] = []

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def learn(self, cell: Cell, record: Record) -> None:
        """What a cell took; one that was refused beforehand took nothing, and says nothing of others."""
        if record.cost:
            self._took.append((cell, record.cost.wall))

    def estimate(self, cell: Cell) -> float:
        """Seconds: what cells paired alike took, and no less than one with a part of its toggles."""
        if not self._took:
            return self.guess(cell)
        alike = [seconds for other, seconds in self._took if other.separate == cell.separate]
        if alike:
            usual = statistics.median(alike)
        else:
            usual = statistics.median(seconds for _, seconds in self._took) * (PROCESSES if cell.separate else 1)
        parts = [s for other, s in self._took if other.toggles and all(t in cell.candidate for t in other.toggles)]
        return MARGIN * max([usual, *parts])

    def allows(self, cell: Cell, reserved: float = 0.0) -> bool:
        """Whether the cell will have ended before the budget has, with so many seconds to spare."""
        return self.estimate(cell) + reserved <= self.left

    def limit(self, cell: Cell) -> float:
        """Seconds after which the cell is stopped: at the end of the budget, or earlier where it takes far longer than
        it should. The reference against itself may take all of it: nothing can be said without."""
        most = max(MOST_OF_ALL * self.seconds, 2 * self.estimate(cell)) if cell.toggles else math.inf
        return max(min(self.left, most), LEAST_S)


class StoppedInTime(Workers):
    """Workers of which none lives beyond `deadline` (seconds of time.monotonic), however many a cell needs."""

    deadline = math.inf

    def open(self, seating: Seating, timeout_s: float, tell: Callable[[str], None], log: Path) -> Desk:
        return super().open(seating, min(timeout_s, max(self.deadline - time.monotonic(), LEAST_S)), tell, log)

    def stopped(self, record: Record) -> bool:
        """Whether it was the deadline that ended this cell: then it says nothing of the cell."""
        return record.status == "timeout" and time.monotonic() >= self.deadline
