"""The grid of coloured cells: every text in its place, legible, inside its column and inside the figure."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize

from lorabench.report.grid import Cell, grid

ROWS = ["one", "a stack + of_several_toggles_with + rather_long_names"]
COLUMNS = [f"model {n}x512" for n in range(9)]


def drawn(cells):
    figure = grid(ROWS, COLUMNS, cells, "what the cells say", "Oranges", Normalize(0, 1))
    FigureCanvasAgg(figure).draw()
    return figure, figure.axes[0]


def test_cells_stand_where_their_row_and_column_are_and_missing_ones_stay_empty():
    figure, ax = drawn({("one", COLUMNS[2]): Cell(0.1, "10 %"), (ROWS[1], COLUMNS[0]): Cell(0.9, "90 %", bold=True)})
    placed = {t.get_text(): (t.get_position(), t.get_weight()) for t in ax.texts}
    assert placed == {"10 %": ((2, 0), "normal"), "90 %": ((0, 1), "bold")}
    assert len(ax.patches) == 2
    assert "what the cells say" in [t.get_text() for t in figure.texts]


def test_ink_is_light_on_dark_and_dark_on_light():
    _, ax = drawn({("one", COLUMNS[0]): Cell(0.0, "light"), ("one", COLUMNS[1]): Cell(1.0, "dark")})
    inks = {t.get_text(): t.get_color() for t in ax.texts}
    assert inks["light"] < inks["dark"]


def test_no_text_leaves_its_column_or_the_figure():
    cells = {(row, column): Cell(0.5, "1.23\n±0.45 %") for row in ROWS for column in COLUMNS}
    figure, ax = drawn(cells)
    boxes = [t.get_window_extent() for t in ax.texts]
    column = ax.get_window_extent().width / len(COLUMNS)
    assert max(box.width for box in boxes) < column
    heads = [t.get_window_extent() for t in ax.get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(heads))
    for box in (*boxes, *heads, *(t.get_window_extent() for t in ax.get_yticklabels())):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_a_grid_without_cells_is_drawn():
    assert not drawn({})[1].texts
