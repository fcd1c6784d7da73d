"""Names beside the points of a figure, none over another: greedy, nearest place first. All in inches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DISTANCES = (0.06, 0.14, 0.24, 0.36, 0.5, 0.66, 0.84, 1.05)  # from a point's marker to the edge of its name
DIRECTIONS = [math.pi * n / 12 for n in sorted(range(-11, 13), key=abs)]  # right comes first, left last
LED = DISTANCES[1]  # a name that is further away than this has a line to its point
AROUND = 0.06  # of a point: half of what its marker takes
SHUFFLES = 30  # orders that are tried after those from either side
STEPS = 12  # along a line, where it is looked whether it runs through a name


class Box(NamedTuple):
    """From the left and the bottom to the right and the top."""

    x0: float
    y0: float
    x1: float
    y1: float

    def meets(self, other: Box) -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def lies_in(self, other: Box) -> bool:
        return other.x0 <= self.x0 and other.y0 <= self.y0 and self.x1 <= other.x1 and self.y1 <= other.y1


class Place(NamedTuple):
    """Where a name lies, how far away, and the end of the line to its point, None where it needs none."""

    box: Box
    away: float
    line_to: tuple[float, float] | None


def around(x: float, y: float, by: float = AROUND) -> Box:
    return Box(x - by, y - by, x + by, y + by)


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], panel: Box, drawn: Sequence[Box] = ()
) -> list[Place] | None:
    """A place for the name of each point, of these widths and heights, inside the panel and over none of the points,
    of the other names and of what else is `drawn`; of several orders the one that leaves them nearest. None where they
    do not all find one."""
    ways = [[(s * x, t * y) for x, y in points] for s, t in itertools.product((1, -1), repeat=2)]
    ways += [[(y, x) for x, y in way] for way in ways]
    orders = [sorted(range(len(points)), key=way.__getitem__) for way in ways]
    orders += [random.Random(seed).sample(range(len(points)), len(points)) for seed in range(SHUFFLES)]
    found = (_in_turn(order, points, sizes, panel, drawn) for order in orders)
    return min(filter(None, found), key=lambda places: sum(place.away for place in places), default=None)


def _in_turn(
    order: Sequence[int], points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], panel: Box,
    drawn: Sequence[Box],
) -> list[Place] | None:  # fmt: skip
    found: dict[int, Place] = {}
    solid, thin = [around(*point) for point in points], list(drawn)  # a line to a point may cross what is thin
    for n in order:
        spots = (spot for spot in _places(points[n], sizes[n]) if spot.box.lies_in(panel))
        spot = next((spot for spot in spots if _is_free(spot, points[n], solid, thin)), None)
        if spot is None:
            return None
        found[n] = spot
        solid.append(spot.box)
        thin += _along(points[n], spot.line_to)
    return [found[n] for n in range(len(points))]


def _places(point: tuple[float, float], size: tuple[float, float]) -> Iterator[Place]:
    """Nearest first: the name's box lies beyond the distance in the direction."""
    (x, y), (width, height) = point, size
    for distance in DISTANCES:
        for angle in DIRECTIONS:
            dx, dy = math.cos(angle), math.sin(angle)
            left = x + dx * (distance + AROUND) + (dx - 1) / 2 * width
            low = y + dy * (distance + AROUND) + (dy - 1) / 2 * height
            box = Box(left, low, left + width, low + height)
            nearest = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
            yield Place(box, distance, nearest if distance > LED else None)


def _is_free(spot: Place, point: tuple[float, float], solid: Sequence[Box], thin: Sequence[Box]) -> bool:
    if any(spot.box.meets(other) for other in (*solid, *thin)):
        return False
    others = [box for box in solid if not box.meets(around(*point))]  # markers that lie over its own are no obstacle
    return not any(step.meets(box) for step in _along(point, spot.line_to) for box in others)


def _along(point: tuple[float, float], end: tuple[float, float] | None) -> list[Box]:
    """Small boxes along the line from the point to its name."""
    if end is None:
        return []
    shares = [n / STEPS for n in range(1, STEPS)]
    return [around(point[0] + s * (end[0] - point[0]), point[1] + s * (end[1] - point[1]), 0.01) for s in shares]
