"""Names beside points: each beside its own, none over another, over a point or outside."""

import itertools
import math
import random

import pytest

from lorabench.report.placing import LED, Box, around, place

PANEL = Box(0.0, 0.0, 4.0, 3.0)
NAME = (0.9, 0.2)


@pytest.mark.parametrize("seed", range(5))
def test_names_lie_over_nothing_and_in_the_panel(seed):
    draw = random.Random(seed)
    points = [(draw.uniform(0.2, 3.8), draw.uniform(0.2, 2.8)) for _ in range(12)]
    drawn = [Box(x, y - 0.2, x, y + 0.2) for x, y in points]
    boxes = [spot.box for spot in place(points, [NAME] * 12, PANEL, drawn)]
    assert all(box.lies_in(PANEL) for box in boxes)
    assert not any(a.meets(b) for a, b in itertools.combinations(boxes, 2))
    assert not any(box.meets(other) for box in boxes for other in [*drawn, *(around(*p) for p in points)])


def test_a_name_keeps_its_size_and_stands_beside_its_point_where_nothing_is_in_the_way():
    (spot,) = place([(1.0, 1.0)], [NAME], PANEL)
    assert (spot.box.x1 - spot.box.x0, spot.box.y1 - spot.box.y0) == pytest.approx(NAME)
    assert spot.line_to is None and spot.box.x0 - 1.0 < LED and spot.box.y0 < 1.0 < spot.box.y1


def test_where_points_crowd_a_line_leads_from_the_name_to_its_own():
    points = [(2.0 + 0.05 * n, 1.5) for n in range(6)]
    spots = place(points, [NAME] * 6, PANEL)
    led = [(point, spot) for point, spot in zip(points, spots, strict=True) if spot.line_to]
    assert led
    for point, spot in led:
        assert spot.box.x0 <= spot.line_to[0] <= spot.box.x1 and spot.box.y0 <= spot.line_to[1] <= spot.box.y1
        assert math.dist(point, spot.line_to) > LED
        others = [other.box for other in spots if other is not spot]
        along = [[p + share * (q - p) for p, q in zip(point, spot.line_to, strict=True)] for share in (0.25, 0.5, 0.75)]
        assert not any(around(*at, 0.0).meets(box) for at in along for box in others)


def test_what_finds_no_room_is_said():
    assert place([(0.5, 0.5)] * 3, [(0.9, 0.9)] * 3, Box(0, 0, 1, 1)) is None
