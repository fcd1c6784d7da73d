"""The figure of jobs against tokens a second and memory: whose numbers it draws, and when there is none."""

import math
from types import SimpleNamespace

import pytest
from report.test_plots import overlapping

from lorabench.report.by_jobs import Point, by_jobs, series
from lorabench.report.panels import Mark, Panel
from lorabench.report.plots import NAMES


def mark(workload, jobs, toggles, rate, gib, status="ok"):
    """A row whose reference trains 100 tokens a second in 10 GiB, however many jobs there are."""
    record = SimpleNamespace(
        workload=workload, jobs={"candidate": range(jobs)} if jobs > 1 else {}, is_candidate=True,
        is_noise_floor=not toggles,
    )  # fmt: skip
    row = {
        "toggles": toggles, "status": status, "reference_tokens_s": 100.0, "reference_peak_gib": 10.0,
        "candidate_tokens_s": rate, "candidate_peak_gib": gib,
    }  # fmt: skip
    return Mark(record, row)


def panel(workload, jobs, *rows, model="llama"):
    marks = [mark(workload, jobs, "", 100.0, 10.0), *(mark(workload, jobs, *row) for row in rows)]
    return Panel(f"{model} @ {workload}", SimpleNamespace(), marks)


SEVERAL = [
    panel("jobs_4", 4, ("batched", 180.0, 30.0), ("fused_multi_lora", 200.0, 25.0)),
    panel("jobs_1", 1, ("batched", 100.0, 10.0), ("fused_multi_lora", 110.0, 9.0)),
    panel("jobs_8", 8, ("batched", math.nan, math.nan, "oom"), ("fused_multi_lora", 220.0, 45.0)),
]


def test_a_line_has_each_way_by_jobs_and_leaves_out_what_has_no_time():
    assert series(SEVERAL) == {
        "llama @ jobs_n": {
            "reference": [Point(1, 100.0, 10.0), Point(4, 100.0, 10.0), Point(8, 100.0, 10.0)],
            "batched": [Point(1, 100.0, 10.0), Point(4, 180.0, 30.0)],
            "fused_multi_lora": [Point(1, 110.0, 9.0), Point(4, 200.0, 25.0), Point(8, 220.0, 45.0)],
        }
    }


@pytest.mark.parametrize("panels", [[], SEVERAL[:1], [SEVERAL[0], panel("2x1024", 1), panel("4x512", 1)]])
def test_there_is_no_figure_of_one_number_of_jobs(panels):
    assert by_jobs(panels) is None


def test_models_have_panels_of_their_own_and_no_label_lies_over_another():
    other = [panel("jobs_2", 2, ("batched", 50.0, 3.0), model="smol"), panel("jobs_4", 4, model="smol")]
    figure, left_out = by_jobs([*SEVERAL, *other])
    assert not left_out and overlapping(figure) == ([], [])
    many = [
        panel(f"jobs_{n}", n, *((f"a_way_to_train_{i} + with_something_else", 9.0, 9.0) for i in range(14)))
        for n in (1, 2)
    ]
    assert overlapping(by_jobs(many)[0]) == ([], [])
    tokens, memory, *of_smol = figure.axes
    assert len(of_smol) == 2
    drawn = {tuple(line.get_ydata()) for line in tokens.lines}
    assert drawn == {(100.0, 100.0, 100.0), (100.0, 180.0), (110.0, 200.0, 220.0)}
    assert {tuple(line.get_ydata()) for line in memory.lines} == {(10.0,) * 3, (10.0, 30.0), (9.0, 25.0, 45.0)}
    assert [t.get_text() for t in tokens.get_xticklabels()] == ["1", "4", "8"]


def test_without_peaks_there_are_tokens_a_second_alone():
    bare = [panel(f"jobs_{n}", n, ("batched", 10.0 * n, math.nan)) for n in (1, 2)]
    for own in bare:
        for one in own.marks:
            one.row["reference_peak_gib"] = one.row["candidate_peak_gib"] = math.nan
    figure, _ = by_jobs(bare)
    assert [ax.get_ylabel() for ax in figure.axes] == ["real tokens a second"]


def test_it_is_one_of_the_plots():
    assert "jobs" in NAMES
