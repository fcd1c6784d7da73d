"""How many samples go into a micro-batch: the fit, the three searches on a meter of known behaviour, and real steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import arm, cells, random_samples, seat_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.batch import pad
from lorabench.contract.hooks import HookError, asked
from lorabench.contract.kind import kind
from lorabench.contract.memory_fit import GIB, Fit, Load, fit, largest, on_a_line
from lorabench.contract.rehearsal import Reading, Sizing
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.plan import registry
from lorabench_ablations.batch_size import AutoBatchSize, DoublingBatchSize, FindExecutableBatchSize

SETUP = ("sdpa", "adamw_foreach", "padding")
MIB = 1 << 20
LENGTHS = [60, 20, 45, 10, 33, 52, 28, 15, 40, 8, 22, 57]


@dataclass
class FakeRehearsal:
    """A device whose memory is known: `static` and `per_position` bytes, what `beyond` adds, seconds as `pace` says."""

    folder: Any
    samples: list[Any] = field(default_factory=lambda: random_samples(LENGTHS * 4))
    workload: Workload = field(default_factory=lambda: Workload(name="t", kind="fixed", batch_size=1, seq_len=64))
    room: int = 64 * GIB
    on_cpu: bool = False
    static: int = GIB
    per_position: int = MIB
    beyond: Any = lambda positions: 0
    pace: Any = lambda rows: 0.1 + 0.01 * rows
    configuration: dict[str, Any] = field(default_factory=lambda: {"model": "fake"})
    runs: list[tuple[int, int]] = field(default_factory=list)  # (rows, width) of the first batch of each

    def lay_out(self, samples, batch_size):
        return pad(samples, batch_size)

    def peak(self, batch):
        positions = batch.inputs["input_ids"].numel()
        return self.static + self.per_position * positions + self.beyond(positions)

    def run(self, batches, budget):
        self.runs.append(tuple(batches[0].inputs["input_ids"].shape))
        peak = max(map(self.peak, batches))
        if peak > budget:
            raise torch.OutOfMemoryError("the device is out of memory. It has no more")
        return Reading(peak, sum(self.pace(len(b.inputs["input_ids"])) for b in batches))

    def truly_largest(self, budget):
        sizes = range(1, len(self.samples) + 1)
        return max(n for n in sizes if max(map(self.peak, self.lay_out(self.samples, n))) <= budget)


# -- the fit ----------------------------------------------------------------------------------------------------------

BYTES = st.integers(1, 1 << 36)


@settings(deadline=None)  # the first call imports scipy
@given(
    static=BYTES,
    slope=st.integers(0, 1 << 24),
    positions=st.lists(st.integers(1, 1 << 16), min_size=3, max_size=3, unique=True),
)
def test_a_linear_memory_is_found_and_predicted(static, slope, positions):
    truth = Fit(static, slope)
    found = fit([(Load(p, p * 64), int(truth(Load(p, 0)))) for p in sorted(positions)])
    beyond = Load(10 * max(positions), 640 * max(positions))
    assert found(beyond) == pytest.approx(truth(beyond), rel=1e-6)


def test_the_squares_of_long_rows_are_found_where_no_line_is():
    truth = Fit(1e9, 1e5, 40.0)
    measured = [(load, int(truth(load))) for load in (Load(n, n * n) for n in (500, 2000, 8000))]
    assert not on_a_line(measured)
    assert fit(measured)(Load(32000, 32000**2)) == pytest.approx(truth(Load(32000, 32000**2)), rel=1e-3)


COEFFICIENT = st.floats(0, 1e9, allow_nan=False)


@given(
    model=st.builds(Fit, COEFFICIENT, COEFFICIENT), lengths=st.lists(st.integers(1, 99), min_size=1, max_size=40),
    budgets=st.tuples(st.floats(0, 1e14), st.floats(0, 1e14)),
)  # fmt: skip
def test_more_memory_never_gives_a_smaller_batch(model, lengths, budgets):
    def size(budget):
        """The heaviest of the batches in order goes up and down with their size: the answer must not for all that."""
        heaviest = lambda n: max(n * max(lengths[i : i + n]) for i in range(0, len(lengths), n))  # noqa: E731
        return largest(lambda n: model(Load(heaviest(n), 0)) <= budget, len(lengths))

    assert size(min(budgets)) <= size(max(budgets))


@given(limit=st.integers(0, 50), most=st.integers(1, 40))
def test_bisection_finds_the_last_that_fits(limit, most):
    assert largest(lambda n: n <= limit, most) == max(1, min(limit, most))


# -- auto_batch_size --------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(gib=st.floats(1.2, 5.0), static=st.integers(0, GIB), per_position=st.integers(MIB // 8, 2 * MIB))
def test_the_search_finds_what_fits_a_linear_device(tmp_path_factory, gib, static, per_position):
    device = FakeRehearsal(tmp_path_factory.mktemp("a"), static=static, per_position=per_position)
    found = AutoBatchSize(budget_gib=gib).size(device)
    best = device.truly_largest(0.95 * int(gib * GIB))
    assert best - 1 <= found.batch_size <= best  # one less where rounding decides
    assert abs(found.found["error"]) < 0.001
    assert len(device.runs) <= 4  # three steps and the one that confirms
    assert "stepped_back" not in found.found


def test_all_samples_of_the_step_are_the_most_it_takes(tmp_path):
    device = FakeRehearsal(tmp_path)
    assert AutoBatchSize().size(device).batch_size == len(device.samples)


def test_one_sample_is_a_batch_of_one(tmp_path):
    found = AutoBatchSize().size(FakeRehearsal(tmp_path, samples=random_samples([30])))
    assert (found.batch_size, "predicted_gib" in found.found) == (1, False)


def test_a_step_that_runs_out_of_memory_all_the_same_is_stepped_back_from(tmp_path):
    """Beyond 1000 positions the device takes what no small step has shown."""
    device = FakeRehearsal(tmp_path, beyond=lambda positions: 4 * GIB if positions > 1000 else 0)
    found = AutoBatchSize(budget_gib=3.0).size(device)
    asked = found.batch_size + found.found["stepped_back"]
    assert found.batch_size < asked and found.batch_size * 60 <= 1000
    tenths = [asked]
    while tenths[-1] > found.batch_size:
        tenths.append(int(0.9 * tenths[-1]))
    assert [rows for rows, _ in device.runs[-len(tenths) :]] == tenths


def test_where_one_sample_is_too_much_the_cell_is_out_of_memory(tmp_path):
    few = FindExecutableBatchSize(budget_gib=0.5, starting_batch_size=3)
    for search in (AutoBatchSize(budget_gib=0.5), few, DoublingBatchSize(budget_gib=0.5)):
        with pytest.raises(torch.OutOfMemoryError):
            search.size(FakeRehearsal(tmp_path))


def test_two_samples_that_do_not_fit_together_leave_one(tmp_path):
    found = AutoBatchSize(budget_gib=1.09).size(FakeRehearsal(tmp_path))
    assert found.batch_size == 1
    assert found.found["found_by"].startswith("a step of one sample")


def test_a_small_step_that_takes_more_than_its_line_asks_for_a_fourth(tmp_path):
    curved = FakeRehearsal(tmp_path, beyond=lambda positions: 2000 * positions**2)
    found = AutoBatchSize(budget_gib=8.0).size(curved)
    assert found.found["found_by"] == "a fit to 4 steps"
    assert len(curved.runs) >= 5


def test_a_fit_is_kept_for_its_configuration_alone(tmp_path):
    first, again = FakeRehearsal(tmp_path), FakeRehearsal(tmp_path)
    found = [AutoBatchSize(budget_gib=3.0).size(d) for d in (first, again)]
    assert found[0].batch_size == found[1].batch_size
    assert len(again.runs) == 1 < len(first.runs)
    assert found[1].found["found_by"] == "the fit of an earlier cell"
    other = FakeRehearsal(tmp_path, configuration={"model": "another"})
    AutoBatchSize(budget_gib=3.0).size(other)
    assert len(other.runs) == len(first.runs)


def test_by_tokens_every_sample_may_have_full_length(tmp_path):
    by_samples, by_tokens = (
        AutoBatchSize(budget_gib=2.51, by=by, head_room=0.0).size(FakeRehearsal(tmp_path / by))
        for by in ("samples", "tokens")
        if not (tmp_path / by).mkdir()
    )
    assert by_tokens.batch_size == int(1.51 * 1024 / 64) < by_samples.batch_size


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 0.9), st.floats(0, 0.9))
def test_head_room_is_kept_free(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("h")
    less, more = sorted((one, other))
    sizes = [
        AutoBatchSize(budget_gib=4.0, head_room=room).size(FakeRehearsal(folder)).batch_size for room in (less, more)
    ]
    assert sizes[0] >= sizes[1]


# -- the others -------------------------------------------------------------------------------------------------------


def test_accelerate_goes_down_by_a_tenth_until_a_step_runs(tmp_path):
    device = FakeRehearsal(tmp_path, samples=random_samples([32] * 200))
    found = FindExecutableBatchSize(budget_gib=4.0).size(device)
    assert found.found["tried"] == [128, 115, 103, 92]
    assert found.batch_size == 92


def test_accelerate_s_first_size_may_be_more_than_there_are(tmp_path):
    assert FindExecutableBatchSize().size(FakeRehearsal(tmp_path)).batch_size == len(LENGTHS) * 4


def test_doubling_takes_five_steps_of_full_length_each(tmp_path):
    device = FakeRehearsal(tmp_path)
    found = DoublingBatchSize(budget_gib=2.1).size(device)
    assert device.runs[:15] == [(1, 64)] * 5 + [(2, 64)] * 5 + [(4, 64)] * 5
    assert found.batch_size == 16  # 32 x 64 MiB are more than 1.1 GiB
    assert list(found.found["samples_per_s"]) == ["1", "2", "4", "8", "16"]


def test_doubling_ends_where_throughput_falls(tmp_path):
    device = FakeRehearsal(tmp_path, pace=lambda rows: 0.1 if rows < 8 else rows)
    assert DoublingBatchSize().size(device).batch_size == 4


def test_on_a_cpu_nothing_is_tried_until_it_crashes_unless_a_budget_says_where(tmp_path):
    for search in (FindExecutableBatchSize(starting_batch_size=8), DoublingBatchSize()):
        with pytest.raises(Unsupported, match="give it a budget_gib"):
            search.size(FakeRehearsal(tmp_path, on_cpu=True))
        assert replace(search, budget_gib=2.0).size(FakeRehearsal(tmp_path, on_cpu=True)).batch_size > 1


@pytest.mark.parametrize(
    ("toggle", "given", "words"),
    [
        ("auto_batch_size", {"by": "token"}, "by: should be 'samples' or 'tokens', not 'token'"),
        ("auto_batch_size", {"head_room": 1.0}, "head_room: should be less than 1, not 1.0"),
        ("doubling_batch_size", {"steps": 0}, "steps: should be greater than 0, not 0"),
        ("find_executable_batch_size", {"starting_batch_size": 0}, "should be greater than 0, not 0"),
        ("doubling_batch_size", {"budget_gib": 0}, "budget_gib: should be greater than 0, not 0"),
        ("auto_batch_size", {"budget_gib": "abc"}, "budget_gib: should be a valid number, not 'abc'"),
    ],
)
def test_wrong_values_cost_one_line(toggle, given, words):
    with pytest.raises(Exception, match=words):
        registry.ablation({toggle: given})


@pytest.mark.parametrize("other", ["torch_compile", "ddp", "frozen_limit"])
def test_what_cannot_go_with_a_search_is_a_conflict(other):
    assert "auto_batch_size" in (conflict([registry.ablation("auto_batch_size"), registry.ablation(other)]) or "")


def test_settings_name_what_the_trainers_have():
    assert "per_device_train_batch_size" in AutoBatchSize().settings().note
    assert FindExecutableBatchSize().settings().trainer["auto_find_batch_size"] is True


# -- real steps -------------------------------------------------------------------------------------------------------

ONE_BY_ONE = Workload(name="t", kind="lengths", distribution="gsm8k", batch_size=1, seq_len=64, samples=6)


def sized(tmp_path, name="auto_batch_size", *, layers=None, batching="padding", **parameters):
    toggle = {name: parameters} if parameters else name
    return arm("sdpa", "adamw_foreach", batching, toggle, workload=ONE_BY_ONE, scratch=tmp_path, layers=layers)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An arm whose size was found. For looking at: its step is not to be run."""
    return sized(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("batching", ["padding", "packing"])
def test_real_steps_find_a_size_and_leave_no_trace(tmp_path, batching):
    torch.manual_seed(7)
    plain = arm(*SETUP, workload=ONE_BY_ONE)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    found = sized(tmp_path, batching=batching)
    assert torch.equal(torch.rand(3), drawn)
    assert len(found.step.batches) == 1 < len(plain.step.batches)
    assert found.sizings[0].batch_size == 6
    assert not found.step.optimizer.state
    for (name, ours), (_, theirs) in zip(found.adapters(), plain.adapters(), strict=True):
        assert ours.grad is None and torch.equal(ours, theirs), name


def test_the_gradient_is_that_of_the_workload_s_own_batches(tmp_path):
    found, plain = one_step(sized(tmp_path)), one_step(arm(*SETUP, workload=ONE_BY_ONE))
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[name], rtol=1e-3, atol=1e-6)


def test_fresh_tokens_come_into_the_batches_that_were_found(tmp_path):
    found, plain = sized(tmp_path), arm(*SETUP, workload=ONE_BY_ONE)
    for made in (found, plain):
        made.feeds[0](3)

    def tokens(made):
        return sorted(t for b in made.step.batches for row in b.inputs["labels"].tolist() for t in row if t >= 0)

    assert tokens(found) == tokens(plain)
    assert one_step(found).loss == pytest.approx(one_step(plain).loss, rel=1e-5)


def test_a_real_prediction_is_near_what_the_step_takes(made):
    told = made.sizings[0].found
    assert abs(told["error"]) < 0.1  # of some MiB, where every small tensor counts; on real shapes it is under 0.03
    assert told["search_s"] > 0


def test_the_gate_s_shallow_models_try_nothing(tmp_path):
    shallow = sized(tmp_path, layers=2)
    assert shallow.sizings == [None]
    assert len(shallow.step.batches) == 6


def test_a_size_that_the_workload_has_already_is_not_applied(made):
    toggle = AutoBatchSize()
    assert toggle.audit(Evidence(made, None, None)) == 1
    with pytest.raises(NotApplied, match="which the workload has already"):
        toggle.audit(Evidence(replace(made, sizings=[Sizing(1)]), None, None))
    with pytest.raises(NotApplied, match="another toggle says"):
        toggle.audit(Evidence(replace(made, sizings=[None]), None, None))


def test_notes_say_what_was_found_and_how(made):
    (told,) = AutoBatchSize().notes(Evidence(made, None, None)).values()
    assert {"batch_size", "micro_batches", "most_tokens", "predicted_gib", "measured_gib", "error", "search_s"} <= set(
        told
    )
    assert (told["batch_size"], told["micro_batches"]) == (6, 1)
    assert made.step.job.workload.batch_size == 1  # the job is what it was


def test_each_of_several_jobs_has_a_size_of_its_own(tmp_path):
    jobs = [{"name": "long"}, {"name": "short", "workload": {"samples": 3}}]
    feed = Workload(name="t", kind="fixed", batch_size=1, seq_len=16, samples=5, jobs=jobs)
    made = arm(*SETUP, "auto_batch_size", workload=feed, scratch=tmp_path)
    assert [len(step.batches) for step in made.steps] == [1, 1]
    (told,) = AutoBatchSize().notes(Evidence(made, None, None)).values()
    assert {name: note["batch_size"] for name, note in told.items()} == {"long": 5, "short": 3}


def test_an_emulated_device_is_full_where_its_budget_ends(tmp_path, made):
    whole = made.sizings[0].found["measured_gib"]
    small = sized(tmp_path, budget_gib=0.6 * whole).sizings[0]
    assert 1 <= small.batch_size < 6
    assert small.found["measured_gib"] <= 0.6 * whole
    stepped = sized(tmp_path, "find_executable_batch_size", budget_gib=0.6 * whole, starting_batch_size=6).sizings[0]
    assert stepped.found["tried"][0] == 6 and 1 <= stepped.batch_size < 6


@pytest.mark.exhaustive
def test_a_whole_cell_passes_its_gate_and_its_certificate(tmp_path):
    feed = "{gsm8k: {batch_size: 1, samples: 6, seq_len: 32}}"
    _, cell = cells("ablations=[auto_batch_size]", f"workload={feed}")
    seat, _ = seat_of(cell, tmp_path)
    reference, own = (seat.prepare(stack.name, stack) for stack in seat.family.stacks)
    assert own.applied["auto_batch_size"] == 1
    assert own.notes["auto_batch_size"]["batch_size"] == 6
    verdict = kind(cell.kind).agree(cell, own.numerics[""], reference.evidence[""], own.evidence[""], torch.float32)
    assert own.numerics[""].passed and verdict.passed and verdict.checks


def test_an_answer_that_is_no_sizing_names_the_toggle():
    class Wrong(AutoBatchSize):
        def size(self, rehearsal):
            return 4

    with pytest.raises(HookError, match="auto_batch_size's size returned 4; expected a Sizing"):
        asked(Wrong(), Ablation.size, None)
    with pytest.raises(ValueError, match="expected 1 or more"):
        Sizing(0)
