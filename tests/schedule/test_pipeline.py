"""The pipeline: against formulas, by hand, and against a second way to compute the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.schedule import SCHEDULERS, Budget, fill
from lorabench.schedule.lorafusion import lorafusion
from lorabench.schedule.pipeline import _order, ends_of_batches, flushed_bubble, pipeline, shared_bubble
from lorabench.schedule.stage_times import PROFILES, StageTimes, balanced, profiled, split


def equal(count, stages, ms=1.0):
    return [[ms] * stages] * count


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 16])
@pytest.mark.parametrize("back", [1.0, 2.0])
def test_a_flush_is_gpipes_formula(stages, micro_batches, back):
    turns = 3
    found = pipeline(
        equal(turns * micro_batches, stages),
        equal(turns * micro_batches, stages, back),
        flush_after=range(micro_batches - 1, turns * micro_batches, micro_batches),
    )
    assert found.ratio == pytest.approx(flushed_bubble(stages, micro_batches))
    assert found.total_ms == pytest.approx(turns * (micro_batches + stages - 1) * (1 + back))


@pytest.mark.parametrize(
    ("adapters", "micro_batches", "stages"),  # each two of the three once
    [
        pytest.param(adapters, micro_batches, stages, marks=[] if (i + j + k) % 3 == 0 else [pytest.mark.exhaustive])
        for i, adapters in enumerate((1, 2, 3, 4, 8))
        for j, micro_batches in enumerate((1, 2, 4))
        for k, stages in enumerate((2, 4, 6))
    ],
)
def test_without_a_flush_it_is_mloras_formula(stages, micro_batches, adapters):
    turns = 200
    jobs = [[[5] * micro_batches] * turns] * adapters
    stream = fill(lorafusion(jobs, Budget(5), stages, None, merging=False), stages)
    times = [[1.0 if held else 0.0] * stages for held in stream]
    found = pipeline(times, times)
    # The first and the last round have ramps in place of empty micro-batches: some of 200 rounds.
    assert found.without_ramp == pytest.approx(shared_bubble(stages, micro_batches, adapters), abs=0.02)
    assert found.ratio == pytest.approx(shared_bubble(stages, micro_batches, adapters), abs=0.03)


def test_the_formulas_agree_for_one_adapter():
    for stages, micro_batches in ((2, 1), (4, 4), (8, 32)):
        assert shared_bubble(stages, micro_batches, 1) == pytest.approx(flushed_bubble(stages, micro_batches))
    assert shared_bubble(4, 2, 3) == 0.0


def test_two_stages_by_hand():
    """Stage 0: F0 [0, 1], F1 [1, 4], B0 [5, 7] after stage 1's B0 [3, 5], B1. Stage 1: F0 [1, 3], B0 [3, 5], F1 …"""
    found = pipeline([[1, 2], [3, 2]], [[2, 2], [2, 2]])
    assert found.total_ms == 11  # stage 1: F1 [5, 7], B1 [7, 9]; stage 0: B1 [9, 11]
    assert found.busy_ms == (8, 8) and found.span_ms == (11, 8)
    assert found.by_stage == pytest.approx((3 / 11, 3 / 11))
    assert found.without_ramp == pytest.approx(1 - 16 / 19)
    later = pipeline([[1, 2], [3, 2]], [[2, 2], [2, 2]], transfer_ms=1)
    assert later.total_ms == 11 + 2  # the first micro-batch's way there, and the last one's way back


def test_updates_are_work_of_the_stage():
    found = pipeline([[1]], [[2]], update_ms=[[0.5]])
    assert found == (3.5, (3.5,), (3.5,))


TIMES = st.floats(0, 10)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_no_stage_works_more_than_all_the_time_and_a_flush_never_helps(data, stages, count):
    table = st.lists(st.lists(TIMES, min_size=stages, max_size=stages), min_size=count, max_size=count)
    forward, backward = data.draw(table), data.draw(table)
    flushes = data.draw(st.sets(st.integers(0, count - 1)))
    found, flushed = pipeline(forward, backward), pipeline(forward, backward, flush_after=sorted(flushes))
    assert flushed.total_ms >= found.total_ms - 1e-9
    assert found.busy_ms == pytest.approx([sum(row[s] for row in (*forward, *backward)) for s in range(stages)])
    spans = zip(found.busy_ms, found.span_ms, strict=True)
    assert all(busy <= span + 1e-9 <= found.total_ms + 2e-9 for busy, span in spans)
    assert -1e-9 <= found.without_ramp <= found.ratio + 1e-9 or not found.total_ms


@pytest.mark.parametrize(
    ("forward", "backward", "more"),
    [([], [], {}), ([[]], [[]], {}), ([[1]], [[1, 2]], {}), ([[1]], [[1], [1]], {}), ([[1]], [[-1]], {}),
     ([[1]], [[1]], {"transfer_ms": -1}), ([[1]], [[1]], {"update_ms": []})],
)  # fmt: skip
def test_times_that_do_not_fit_are_one_line(forward, backward, more):
    with pytest.raises(ValueError, match="expected") as error:
        pipeline(forward, backward, **more)
    assert "\n" not in str(error.value)


def test_a_job_steps_behind_its_last_micro_batch():
    jobs = [[[3, 3], [3]], [[3]]]
    stream = fill(lorafusion(jobs, Budget(3), 2, None, merging=False), 2)
    ends = ends_of_batches(stream)
    assert sorted(job for own in ends.values() for job in own) == [0, 0, 1]
    for at, own in ends.items():
        assert {s.job for s in stream[at]} >= set(own)


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_lie_on_lines_between_and_beyond_the_measured():
    times = StageTimes((100, 200, 400), [[1.0, 2.0, 3.0]], [[2.0, 4.0, 6.0]])
    forward, backward = times.of([0, 50, 100, 150, 300, 600])
    assert [ms for (ms,) in forward] == pytest.approx([0, 0.5, 1, 1.5, 2.5, 4])
    assert [ms for (ms,) in backward] == pytest.approx([0, 1, 2, 3, 5, 8])


def test_the_last_stage_has_the_head():
    times = split([2, 1], (1, 2), (10.0, 20.0), (4.0, 8.0), 0.25)
    assert times.forward_ms == [[5.0, 10.0], [3.5, 7.0]]
    assert times.backward_ms == [[15.0, 30.0], [10.5, 21.0]]


@pytest.mark.parametrize("model", PROFILES)
def test_the_published_profiles(model):
    layers = PROFILES[model][0]
    whole = profiled(model, 1)
    for stages in (2, 4, 5):
        own = profiled(model, stages)
        assert own.stages == stages
        assert sum(row[-1] for row in own.forward_ms) == pytest.approx(whole.forward_ms[0][-1])
    with pytest.raises(ValueError, match=f"1 to {layers}"):
        profiled(model, layers + 1)
    # the head of the 70B's last of four stages is 6 % of its layers at 4096 tokens
    if model == "llama-3.1-70b":
        first, *_, last = profiled(model, 4).forward_ms
        assert last[3] / first[3] == pytest.approx(1 + 33.4 / (20 * 27.4))


@pytest.mark.parametrize(
    "wrong",
    [((1,), [[1]], [[1]]), ((2, 1), [[1, 1]], [[1, 1]]), ((1, 2), [[1]], [[1]]), ((1, 2), [[1, 0]], [[1, 1]]),
     ((1, 2), [], []), ((0, 2), [[1, 1]], [[1, 1]])],
)  # fmt: skip
def test_tables_that_are_none(wrong):
    with pytest.raises(ValueError, match="expected"):
        StageTimes(*wrong)


# -- the lemma is what the pipeline needs -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(st.lists(st.integers(1, 64), max_size=5), max_size=4), min_size=1, max_size=4),
    stages=st.integers(1, 5),
    name=st.sampled_from(sorted(SCHEDULERS)),
)
def test_no_stage_begins_a_global_batch_before_it_has_ended_the_jobs_last_one(jobs, stages, name):
    schedule = fill(SCHEDULERS[name](jobs, Budget(64), stages), stages)
    for stage in range(stages):
        order = _order("1f1b", range(len(schedule)), stage, stages, stages)
        ended = {}  # of each job the global batches whose last backward is done
        left = Counter((s.job, s.batch) for held in schedule for s in held)
        for work in order:
            for s in schedule[work.batch]:
                if work.backward:
                    left[s.job, s.batch] -= 1
                    if not left[s.job, s.batch]:
                        ended.setdefault(s.job, set()).add(s.batch)
                else:
                    before = {n for n, own in enumerate(jobs[s.job][: s.batch]) if own}
                    assert before <= ended.get(s.job, set())


def test_one_empty_micro_batch_less_is_too_early():
    jobs, stages = [[[5], [5]]], 3
    filled = fill(SCHEDULERS["fifo"](jobs, Budget(5), stages), stages)
    assert [len(held) for held in filled] == [1, 0, 0, 1]
    order = _order("1f1b", range(3), 0, stages, stages)  # with one less, the second micro-batch would be the third
    assert order.index((2, False, 0)) < order.index((0, True, 0))


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8), (4, 16), (3, 3)])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_equal_stages_wait_as_megatron_s_formula_says(ranks, count, each):
    """(p - 1) / (v·m + p - 1), of m micro-batches, p ranks and v stages each; of GPipe with v = 1 as of 1F1B."""
    table = [[1.0] * (ranks * each)] * count
    order = "interleaved" if each > 1 else "gpipe"
    found = pipeline(table, table, order=order, ranks=ranks)
    assert found.ratio == pytest.approx((ranks - 1) / (each * count + ranks - 1))
    assert len(found.by_stage) == ranks
    if each == 1:
        assert found.ratio == pytest.approx(pipeline(table, table).ratio)


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({"order": "gpip"}, "did you mean gpipe?"),
        ({"ranks": 2}, "order=1f1b, 4 stages on 2 ranks: expected a stage a rank, or interleaved"),
        ({"ranks": 3, "order": "interleaved"}, "4 stages on 3 ranks"),
    ],
)
def test_orders_that_are_none(kwargs, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        pipeline([[1.0] * 4], [[1.0] * 4], **kwargs)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [((32, 4, 1.0, 2.41), [9, 9, 8, 6]), ((80, 4, 1.0, 1.23), [21, 20, 20, 19]), ((64, 4, 1.0, 1.6), [17, 16, 16, 15]),
     ((3, 3, 1.0, 9.0), [1, 1, 1]), ((5, 1, 1.0, 0.0), [5]), ((8, 2, 1.0, 100.0), [7, 1])],
)  # fmt: skip
def test_the_last_stage_has_fewer_layers_for_its_head(model, wanted):
    assert balanced(*model) == wanted


def test_no_stage_is_without_a_layer():
    with pytest.raises(ValueError, match="stages=4: expected 1 to 3"):
        balanced(3, 4, 1.0, 0.0)
