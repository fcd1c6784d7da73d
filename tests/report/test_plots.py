"""The plots: no label over another, what failed is shown, a front is a front, and a map says what its cells are."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.text
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from record.arms import slower

from lorabench.report.analysis import Analysis
from lorabench.report.panels import GREY, MANY
from lorabench.report.plots import figures, plots
from lorabench.report.shown import show
from lorabench.report.tradeoff import FEW, Point, front

RESULTS = Path(__file__).resolve().parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("records.jsonl"))
SLACK = 1.0  # pixels at 110 dpi: boxes hold the room for letters that a text has not


def texts(figure):
    """(text, its box in pixels) of all that a figure prints."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # puts everything in its place, without the pixels, which take twice as long
    unseen = {id(label) for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for label in beyond(axis)}
    found = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]
    found = [t for t in found if id(t) not in unseen]
    return [(t.get_text(), t.get_window_extent(renderer), t.get_rotation()) for t in found]


def beyond(axis):
    """The labels of ticks that matplotlib holds and does not draw: those outside of the axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
    return [label for tick in ticks for label in (tick.label1, tick.label2)]


def overlapping(figure):
    """Pairs of texts that lie over each other, and texts that leave the figure; not of slanted ones, whose boxes are
    larger than they."""
    straight = [(text, box) for text, box, rotation in texts(figure) if rotation in (0, 90)]
    pairs = [
        (a, b)
        for (a, p), (b, q) in itertools.combinations(straight, 2)
        if min(p.x1, q.x1) - max(p.x0, q.x0) > SLACK and min(p.y1, q.y1) - max(p.y0, q.y0) > 2 * SLACK
    ]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [
        t for t, b in straight if b.x0 < -SLACK or b.y0 < -SLACK or b.x1 > width + SLACK or b.y1 > height + SLACK
    ]
    return pairs, outside


@pytest.mark.parametrize(
    "folder",  # in make test every twelfth: neighbours have figures of one kind
    [pytest.param(f, id=f.name, marks=[pytest.mark.exhaustive] * bool(n % 12)) for n, f in enumerate(FOLDERS)],
)
def test_no_label_lies_over_another_or_leaves_its_figure(folder):
    found = figures(Analysis.read(folder))
    linears = ("lorafusion_kernels", "lorafusion_kernels_rounds")
    alone = "lorafusion_pipeline_70b_setting"  # nothing was measured beside it
    has_points = folder.parent.name != "cpu" and folder.name not in (*linears, alone)  # a CPU has no peaks
    assert "speedup" in found and ("tradeoff" in found) == has_points
    for name, (figure, _) in found.items():
        assert overlapping(figure) == ([], []), (folder.name, name)


def test_failed_rows_stand_in_every_figure_of_rows(sweep):
    records = sweep()
    failed = {r.status for r in records if r.status not in ("ok", "oom")}
    found = figures(Analysis(records))
    for name in ("speedup", "memory"):
        assert failed <= {text for text, _, _ in texts(found[name][0])}, name
    assert any("failed or without a peak" in text for text, _, _ in texts(found["tradeoff"][0]))


def test_an_unclear_row_has_no_centre_and_a_host_bound_one_milliseconds(record):
    waits = {"forward": {"device_busy_ms": 6.0, "label": "host-bound"}}
    hosts = record(["of_hosts"], speedup=1.3, roofline={"reference": waits, "candidate": waits})
    figure, _ = figures(Analysis([record(["quiet"], speedup=1.4), record(["loud"], speedup=1.02, sd=0.2), hosts]))[
        "speedup"
    ]
    said = [text for text, _, _ in texts(figure)]
    assert any(re.fullmatch(r"ms \(host\): [\d.]+ \(\d+ %\) → [\d.]+ \(\d+ %\)", text) for text in said)
    assert any(text.startswith("unclear [") for text in said)
    (ax,) = figure.axes
    marked = {line.get_ydata()[0] for line in ax.lines if line.get_marker() == "^"}
    assert marked == {0, 1}  # the quiet row and that of the host, each with a marker; the unclear one is the last
    dotted = [lines for lines in ax.collections if lines.get_linestyle()[0][1] is not None]
    assert len(dotted) == 1 and "host-bound" in said


def test_panels_that_belong_together_have_one_axis(record):
    cells = [record(["a"], speedup=s, model=m, peaks=(8.0 * s, 6.0)) for s, m in ((1.2, "small"), (3.0, "big"))]
    workloads = [
        record(["a"], speedup=1.2, model="small", workload=w, peaks=(p, 1.0)) for w, p in (("x", 4.0), ("y", 40.0))
    ]
    found = figures(Analysis([*cells, *workloads]))
    assert len({ax.get_xlim() for ax in found["speedup"][0].axes}) == 1
    by_model = {}
    for ax in found["memory"][0].axes:
        by_model.setdefault(ax.get_title(loc="left").split(" @ ")[0], set()).add(ax.get_xlim())
    assert [len(limits) for limits in by_model.values()] == [1, 1] and by_model["small"] != by_model["big"]


def test_sessions_are_dots_below_their_row(record):
    made = [record(["a"], speedup=s, seed=n).model_copy(update={"session": f"s{n}", "replicate": n})
            for n, s in enumerate((1.2, 1.25, 1.3))]  # fmt: skip
    figure, _ = figures(Analysis(made))["speedup"]
    (dots,) = [line for line in figure.axes[0].lines if line.get_marker() == "."]
    assert list(dots.get_xdata()) == pytest.approx([1.2, 1.25, 1.3], rel=0.02)


def test_many_groups_are_a_map_that_says_every_cell(record):
    models = [f"m{n}" for n in range(MANY + 1)]
    cells = [record(["a"], speedup=1 + n / 10, model=m, trials=12) for n, m in enumerate(models, start=1)]
    dead = [record(["b"], status="crash", model=m) for m in models]
    figure, _ = figures(Analysis([*cells, *dead]))["speedup"]
    assert len(figure.axes) == 1
    said = [text for text, _, _ in texts(figure)]
    assert said.count("crash") == len(models) and sum(bool(re.match(r"1\.\d\d ±", text)) for text in said) == len(
        models
    )
    assert overlapping(figure) == ([], [])


def test_the_front_holds_what_no_other_beats_in_both():
    points = [Point(ms, gib, {}) for ms, gib in ((10, 9), (12, 5), (11, 9), (20, 5), (30, 2), (31, 3))]
    assert [(p.ms, p.gib) for p in front(points)] == [(10, 9), (12, 5), (30, 2)]


def test_a_front_is_drawn_only_through_rows_that_compare(record):
    cells = [record(["a"], speedup=1.5), record(["b"], speedup=1.1, peaks=(8.0, 3.0))]
    dashed = lambda made: [x for x in figures(Analysis(made))["tradeoff"][0].axes[0].lines if x.get_linestyle() == "--"]  # noqa: E731
    assert len(dashed(cells)) == 1
    assert dashed([cells[0], slower(cells[1], 2)]) == []


@pytest.mark.parametrize(("rows", "models"), [(20, 1), (6, 3)])
def test_the_key_names_every_stack_once_by_a_look_of_its_own(record, rows, models):
    made = [
        record(names, speedup=1 + n / 7, peaks=(8.0, 8 - 0.37 * n), model=f"m{m}")
        for m in range(models)
        for n, names in enumerate([[], *([f"gradient_checkpointing(every_n_layers={n})"] for n in range(1, rows))])
    ]
    figure, _ = figures(Analysis(made))["tradeoff"]
    assert overlapping(figure) == ([], [])
    (key_of,) = figure.legends
    handles = {str(h.get_label()): (h.get_color(), h.get_marker()) for h in key_of.legend_handles}
    key = {name: look for name, look in handles.items() if "every_n" in name}
    assert len(key) == len(set(key.values())) == rows - 1
    assert [text for text, _, _ in texts(figure)].count("peak GiB") == 1


def test_the_race_is_sorted_its_phases_add_up_and_what_failed_is_below_in_grey(sweep):
    figure, _ = figures(Analysis(sweep()))["race"]
    (ax,) = figure.axes
    width: dict[float, float] = {}
    for bar in ax.patches:
        width[round(bar.get_y())] = width.get(round(bar.get_y()), 0.0) + bar.get_width()
    ends = [width[y] for y in sorted(width)]
    assert ends == sorted(ends) and len(ends) == 5  # four candidates, packing alone among them, and the reference
    grey = [text.get_text() for text in ax.texts if text.get_color() == GREY]
    assert set(grey) == {"conflict", "crash", "not applied", "timeout", "unsupported", "wrong numerics"}


def test_of_many_groups_those_of_few_points_are_left_to_the_tables(record):
    few = [record([f"toggle_{n}"], model=f"m{m}") for m in range(MANY + 1) for n in range(FEW)]
    assert "tradeoff" not in figures(Analysis(few))
    more = [record([f"toggle_{n}"], speedup=1 + n / 7, peaks=(8.0, 8 - n)) for n in range(FEW + 1)]
    figure, left_out = figures(Analysis([*few, *more]))["tradeoff"]
    assert len(figure.axes) == 1 and left_out.startswith(f"1 of {MANY + 2} groups")
    assert "tradeoff" in figures(Analysis(few[: FEW * MANY]))


def test_where_references_differ_rows_stand_in_parts_and_the_reference_is_a_bar(record, on_a_faster_host):
    made = [record([], speedup=1.0), record(["slow"], speedup=1.5), on_a_faster_host(record(["fast"], speedup=1.2))]
    analysis = Analysis([*made, record(["gone"], status="crash")])
    found = figures(analysis)
    headings = [group.title.partition(", ")[2] for group in show(analysis).groups]
    for name in ("speedup", "memory"):
        (ax,) = found[name][0].axes
        lines = {text.get_text(): text.get_position()[1] for text in ax.texts}
        order = [headings[0], "fast", headings[1], "reference again (A/A)", "slow", headings[2], "gone"]
        assert [lines[text] for text in order] == list(range(7)), name
        across = [line for line in ax.lines if set(line.get_ydata()) in ({1.5}, {4.5})]
        assert len(across) == 2, "a thin line above each part but the first"
    (ax,) = found["tradeoff"][0].axes
    (bar,) = [line for line in ax.lines if line.get_alpha() == 0.3]
    took = [analysis.row(r)["total_reference_ms"] for r in made]
    assert list(bar.get_ydata()) == [min(took), max(took)]
    assert re.match(r"the reference took \d+[.\d]* to [\d.]+ ms: no front\n", ax.get_xlabel())


def test_svg_is_text_that_does_not_change_and_names_nothing_of_markup(record):
    made = Analysis([record(["<b>&amp;</b> $\\frac{1}"], speedup=1.4)])
    drawn = plots(made)
    assert drawn["speedup"].svg == plots(made)["speedup"].svg
    root = ElementTree.fromstring(drawn["speedup"].svg)
    assert any(
        "<b>&amp;</b> $\\frac{1}" in "".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")
    )


@pytest.mark.parametrize("turned", [False, True])
def test_a_claim_without_an_upper_end_is_drawn_at_its_lower_one(record, turned):
    """The published loading time is "at least" 4 times shorter, and turned round at most a quarter."""
    toggles = ["prequantized_loading", "quantize_at_load"]
    tested, base = reversed(toggles) if turned else toggles
    own = {"kind": "load", "tokens": {}, "roofline": {}, "reference": (base,)}
    analysis = Analysis([record([], **own), record([tested], speedup=5.0, **own)])
    assert any(m.claim.statistic == "at least" for m in analysis.matches)
    ax = figures(analysis)["speedup"][0].axes[0]
    diamonds = sorted(x for line in ax.lines if line.get_marker() == "D" for x in line.get_xdata())
    assert diamonds == pytest.approx([0.25, 0.25, 1 / 3] if turned else [3, 4, 4])
