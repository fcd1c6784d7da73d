"""Rows of a pipeline's step: as many, and as long, as make the step shortest."""

from __future__ import annotations

import math
from functools import partial

import pytest

from lorabench.plan import registry
from lorabench_ablations.pipeline_rows import ROW, shortest_step

MANY = [900, 800, 700, 600, 500, 400, 300, 200]


def ablation(name, **parameters):
    return registry.ablation({name: {"tokens": 1, **parameters}})


def sums(lengths, tokens, toggle, ranks=2):
    """The tokens of each job's rows."""
    found = shortest_step(lengths, tokens, partial(toggle.passes, ranks=ranks))
    for own, rows in zip(lengths, found, strict=True):
        assert sorted(n for row in rows for n in row) == list(range(len(own)))
    return [[sum(own[n] for n in row) for row in rows] for own, rows in zip(lengths, found, strict=True)]


def took(rows, ranks=2):
    """Of one pipeline that nothing empties: positions, one row after the other."""
    return (sum(map(len, rows)) + ranks - 1) * (max(map(max, rows)) + ROW)


def test_a_step_of_several_rows_is_shorter_than_one_of_full_rows():
    (rows,) = sums([MANY], 7168, ablation("pipeline_1f1b"))
    assert 2 < len(rows) < 8 and max(rows) - min(rows) < 300, "neither half of it, nor each sample alone"
    assert took([rows]) < took([[2200, 2200]])


def test_rows_are_as_even_as_they_can_be_for_each_is_filled_up_to_the_longest():
    assert sums([[50, 40, 30, 20]], 100, ablation("pipeline_1f1b")) == [[70, 70]], "and not 90 and 50"
    assert sums([[16, 16]], 16, ablation("pipeline_1f1b")) == [[16, 16]]


def test_jobs_share_one_length_of_rows():
    """A row of all samples of the second job would have all of the first one's filled up to it."""
    toggle = ablation("pipeline_multi_adapter")
    rows = sums([[1000] * 8, [1500, 1500]], 8000, toggle)
    assert max(map(max, rows)) <= 3000 and took(rows) < took([[4000, 4000], [3000]])
    assert sums([[30, 20], [40]], 100, toggle) == [[50], [40]], "short rows cost launches: as few as fill the ranks"


def test_each_job_fills_the_pipeline_alone_where_it_is_emptied_behind_each():
    toggle = ablation("pipeline_multi_adapter", flush=True)
    assert [len(rows) for rows in sums([[30, 20, 10], [40, 30]], 100, toggle)] == [2, 2]
    assert toggle.passes([3, 2], 2) == 4 + 3 and toggle.passes([3, 1], 2) == math.inf


def test_several_stages_a_rank_fill_faster_and_want_whole_groups_of_rows():
    toggle = ablation("pipeline_interleaved", v=2)
    assert toggle.passes([4], 2) == 4.5 and toggle.passes([5], 2) == math.inf


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([[8, 90]], "a sample of 90 tokens does not fit a row of 80"), ([[8]], "there are no rows of 1 samples")],
)
def test_what_no_rows_hold_is_said(lengths, said):
    with pytest.raises(ValueError, match=said):
        sums(lengths, 80, ablation("pipeline_multi_adapter"))
