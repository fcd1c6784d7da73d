"""Every scheduler on any jobs: each sample once, in order, within the budget; and what each is for."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.schedule import SCHEDULERS, Budget, Sample, ScheduleError, fill, verify
from lorabench.schedule.batches import real
from lorabench.schedule.fifo import one_job_each
from lorabench.schedule.lorafusion import groups, lorafusion, merge
from lorabench.schedule.packing import fewest, first_fit, first_fit_decreasing
from lorabench.schedule.residual_capacity import residual

MOST = 512
TOKENS = st.integers(1, MOST)
JOBS = st.lists(st.lists(st.lists(TOKENS, max_size=6), max_size=4), max_size=5)
BUDGETS = st.builds(Budget, st.just(MOST), st.sampled_from([1, 8, 128]), st.booleans())
NAMES = [*SCHEDULERS, "lorafusion, greedy"]


def scheduled(name, jobs, budget, stages):
    if name == "lorafusion, greedy":
        return lorafusion(jobs, budget, stages, time_limit_s=None)
    return SCHEDULERS[name](jobs, budget, stages)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(jobs=JOBS, budget=BUDGETS, stages=st.integers(1, 5))
def test_every_sample_once_in_order_within_the_budget_and_the_lemma_holds(name, jobs, budget, stages):
    schedule = scheduled(name, jobs, budget, stages)
    assert all(schedule), "an empty micro-batch is the lemma's, not the scheduler's"
    verify(schedule, jobs, budget)
    verify(fill(schedule, stages), jobs, budget, stages)


@settings(max_examples=60, deadline=None)
@given(jobs=JOBS, samples=st.integers(1, 4), stages=st.integers(1, 5))
def test_so_do_micro_batches_of_one_job(jobs, samples, stages):
    verify(fill(one_job_each(jobs, samples), stages), jobs, None, stages)
    assert all(len({s.job for s in held}) == 1 and len(held) <= samples for held in one_job_each(jobs, samples))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("jobs", "expected"), [([], 0), ([[]], 0), ([[], []], 0), ([[[]], [[], []]], 0), ([[[7]]], 1), ([[], [[9]]], 1)]
)
def test_one_sample_or_none(name, jobs, expected):
    assert len(scheduled(name, jobs, Budget(16), 4)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("jobs", "budget", "said"),
    [
        (
            [[[5], [3, 200]]],
            Budget(100),
            "sample 1 of job 0, global batch 1 has 200 tokens; a micro-batch holds at most",
        ),
        (
            [[[90]]],
            Budget(100, 64),
            "sample 0 of job 0, global batch 0 has 90 tokens (128 with padding); a micro-batch",
        ),
        ([[[5, 0]]], Budget(100), "has 0 tokens; expected at least one"),
    ],
)
def test_a_sample_that_fits_nowhere_is_one_line(name, jobs, budget, said):
    with pytest.raises(ValueError) as error:
        scheduled(name, jobs, budget, 2)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 1.5}, {"tokens": 9, "multiple": 0}])
def test_a_budget_that_is_none(wrong):
    with pytest.raises(ValueError, match="expected a whole number above 0"):
        Budget(**wrong)


def test_what_a_micro_batch_holds():
    held = [Sample(0, 0, 0, 100), Sample(0, 0, 1, 30), Sample(1, 0, 0, 1)]
    assert Budget(999).used(held) == 131
    assert Budget(999, 128).used(held) == 256 + 128  # each job's rows by themselves
    assert Budget(999, padded=True).used(held) == 300
    assert Budget(999, 64, padded=True).used(held) == 3 * 128
    assert not Budget(999).takes(held, [Sample(0, 1, 0, 1)])


# -- packing ----------------------------------------------------------------------------------------------------------


def samples_of(*tokens):
    return [Sample(0, 0, place, n) for place, n in enumerate(tokens)]


def test_the_programme_finds_what_first_fit_decreasing_misses():
    samples, budget = samples_of(4, 4, 3, 3, 3, 3), Budget(10)  # greedy takes 4 + 4, 3 + 3 + 3, 3
    assert (len(first_fit_decreasing(samples, budget)), len(fewest(samples, budget))) == (3, 2)
    assert len(fewest(samples, budget, time_limit_s=0)) == 3


def test_the_last_micro_batch_is_as_empty_as_can_be():
    samples, budget = samples_of(7, 6, 3, 3, 2, 2), Budget(10)
    packed = fewest(samples, budget)
    assert [real(held) for held in packed] == sorted((real(held) for held in packed), reverse=True)
    assert len(packed) == 3 and real(packed[-1]) <= real(first_fit_decreasing(samples, budget)[-1])


@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(st.integers(1, 60), max_size=9), multiple=st.sampled_from([1, 8]))
def test_the_programme_never_needs_more_and_ends_emptier(tokens, multiple):
    budget = Budget(64, multiple)
    greedy, best = (way(samples_of(*tokens), budget) for way in (first_fit_decreasing, fewest))
    assert sorted(s for held in best for s in held) == sorted(samples_of(*tokens))
    assert all(budget.used(held) <= budget.tokens for held in best)
    fewer = len(best) < len(greedy)
    assert fewer or (len(best) == len(greedy) and (not best or real(best[-1]) <= real(greedy[-1])))


def test_a_padded_budget_has_no_programme():
    with pytest.raises(ValueError, match="end to end"):
        fewest(samples_of(3), Budget(10, padded=True))


# -- what each is for -------------------------------------------------------------------------------------------------


def test_fifo_keeps_the_order_and_fast_fit_goes_back():
    jobs, budget = [[[6, 6, 3]]], Budget(10)
    assert [[s.tokens for s in held] for held in SCHEDULERS["fifo"](jobs, budget)] == [[6], [6, 3]]
    assert [[s.tokens for s in held] for held in SCHEDULERS["fast_fit"](jobs, budget)] == [[6, 3], [6]]
    assert first_fit([], budget) == []


def test_optimal_fit_pads_least():
    random.seed(0)
    jobs = [[[random.choice((16, 250)) for _ in range(8)]] for _ in range(4)]
    budget = Budget(1024, padded=True)
    padding = {n: sum(budget.used(h) - real(h) for h in SCHEDULERS[n](jobs, budget)) for n in ("fifo", "optimal_fit")}
    assert padding["optimal_fit"] < padding["fifo"] / 4


def test_a_job_that_fills_the_gpu_stays_alone():
    full, half, short = [[100, 100]] * 2, [[50]] * 2, [[40]] * 2
    jobs, budget = [full, half, short], Budget(100)
    together = [sorted({s.job for s in held}) for held in SCHEDULERS["residual_capacity"](jobs, budget)]
    assert together == [[1, 2], [0], [0]] * 2
    left = [residual([[Sample(0, 0, i, n) for i, n in enumerate(own[0])]], budget) for own in jobs]
    assert left == pytest.approx([0, 0.5, 0.6])


def test_the_longest_goes_with_the_shortest_where_the_others_fill_the_pipeline():
    jobs = [[[100] * 16], [[200] * 16], [[400] * 16], [[300] * 16]]
    assert groups(jobs, Budget(400), stages=4) == [[2, 0], [3, 1]]
    assert groups(jobs, Budget(400), stages=30) == [[2], [3], [1], [0]]  # nothing can fill it: each alone
    assert groups(jobs[:1], Budget(400), stages=4) == [[0]]
    assert groups([[], [[5]]], Budget(400), stages=1) == [[1]]


def test_merging_saves_micro_batches_and_breaks_nothing():
    saved, budget, stages = [], Budget(1024), 4
    for seed in range(8):
        draw = random.Random(seed)
        jobs = [[[draw.randint(20, 400) for _ in range(12)] for _ in range(6)] for _ in range(4)]
        apart, merged = (lorafusion(jobs, budget, stages, None, merging) for merging in (False, True))
        verify(fill(merged, stages), jobs, budget, stages)
        saved.append(len(fill(apart, stages)) - len(fill(merged, stages)))
    assert min(saved) >= 0 and max(saved) > 0


def test_no_samples_overtake_the_next_global_batch_of_their_job():
    """Two blocks of one group behind each other, whose last micro-batches hold different jobs."""
    first, second = [(Sample(0, 0, 0, 9), Sample(1, 0, 0, 1))], [(Sample(0, 1, 0, 9),), (Sample(1, 1, 0, 1),)]
    tail = (Sample(0, 0, 1, 2),)
    blocks = [[*first, tail], second]
    merge(blocks, Budget(10), 1, 1)
    assert blocks[0][-1] == tail


@pytest.mark.exhaustive
def test_staggered_needs_fewer_micro_batches_and_hardly_an_empty_one():
    draw = random.Random(1)
    jobs = [[[draw.randint(20, 400) for _ in range(16)] for _ in range(10)] for _ in range(4)]
    budget, stages = Budget(1024), 4
    made = {name: SCHEDULERS[name](jobs, budget, stages) for name in ("fast_fit", "lorafusion", "staggered")}
    filled = {name: len(fill(schedule, stages)) for name, schedule in made.items()}
    assert filled["staggered"] < filled["lorafusion"] < filled["fast_fit"]
    least = -(-sum(n for batches in jobs for batch in batches for n in batch) // budget.tokens)
    assert filled["staggered"] <= 1.05 * least


# -- the lemma --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapters", "each", "stages"), itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 4, 8)), ids=str
)
def test_equal_micro_batches_need_as_many_empty_ones_as_counted_by_hand(adapters, each, stages):
    jobs, turns = [[[5] * each] * 10] * adapters, 10
    filled = fill(lorafusion(jobs, Budget(5), stages, merging=False), stages)
    empty = sum(not held for held in filled)
    assert empty == (turns - 1) * max(0, stages - 1 - (adapters - 1) * each)


JOBS_OF_TWO = [[[5], [6]]]
A, B = (Sample(0, 0, 0, 5),), (Sample(0, 1, 0, 6),)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ([A], "is there 0 times, expected 1"),
        ([A, A, B], "is there 2 times"),
        ([A, B, (Sample(7, 0, 0, 1),)], "is of none of the jobs"),
        ([B, A], "after a later global batch"),
        ([A + B], "two global batches of one job"),
        ([A, B], "begins a global batch; with 2 stages expected it at 2 or later"),
    ],
)
def test_the_verifier_says_what_is_wrong(schedule, said):
    with pytest.raises(ScheduleError, match=said):
        verify(schedule, JOBS_OF_TWO, Budget(99), stages=2)
    verify([A, (), B], JOBS_OF_TWO, Budget(6), stages=2)
    with pytest.raises(ScheduleError, match="holds 6 tokens, expected at most 5"):
        verify([A, (), B], JOBS_OF_TWO, Budget(5), stages=2)
