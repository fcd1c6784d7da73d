"""Op cells of attention: right token by token however samples are fed; what leaks between samples is noticed."""

import pytest
import torch
from helpers import MACHINE, InProcess, arm, cells, config

from lorabench.contract.batch import Sample
from lorabench.contract.kind import kind
from lorabench.contract.workload import Workload
from lorabench.measure import trial
from lorabench.measure.feed import marked
from lorabench.measure.judging import numerics
from lorabench.measure.kinds.operations.attention import COMPARED, exact
from lorabench.measure.machine import describe
from lorabench.plan.compose import ConfigError, plan
from lorabench.plan.design import refusal
from lorabench.run.runner import Runner

HEADS, OTHERS, DIM = 4, 2, 8
NAME = f"attention-{HEADS}x{OTHERS}x{DIM}"
LENGTHS = [5, 12, 9, 12, 3]
SAMPLES = marked([Sample([0] * n, [0] * n) for n in LENGTHS])
IN_TWOS = Workload(name="in twos", kind="lengths", distribution="glue", batch_size=2, seq_len=12, samples=5)


def alone(*names, **kwargs):
    return arm(*names, model=NAME, samples=SAMPLES, workload=IN_TWOS, **kwargs)


def differentiated(q, k, v, do):
    """The same by torch's own differentiation of the formula, sample by sample."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    rows = []
    for q_, k_, v_ in zip(*(x.split(LENGTHS) for x in leaves), strict=True):
        q_, k_, v_ = (x.unflatten(-1, (-1, DIM)).transpose(0, 1) for x in (q_, k_, v_))
        k_, v_ = (x.repeat_interleave(HEADS // OTHERS, 0) for x in (k_, v_))
        later = torch.ones(q_.shape[1], q_.shape[1], dtype=torch.bool).triu(1)
        p = (q_ @ k_.mT / DIM**0.5).masked_fill(later, float("-inf")).softmax(-1)
        rows.append((p @ v_).transpose(0, 1).flatten(1))
    out = torch.cat(rows)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def test_the_gold_is_the_formula_and_its_derivatives():
    step = alone(upcast=True).step
    data = step.data(0)
    assert {n: x.shape for n, x in data.items()} == {"q": (41, 32), "k": (41, 16), "v": (41, 16), "do": (41, 32)}
    for found, wanted in zip(exact(**data, lengths=LENGTHS, dim=DIM), differentiated(**data), strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("others", [(), ("packing",)], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa_math"])
def test_output_and_gradients_are_the_gold_s_token_by_token(name, others):
    gold, found = numerics.one_step(alone(upcast=True)), numerics.one_step(made := alone(name, *others))
    assert tuple(found.gradients) == tuple(gold.gradients) == COMPARED
    for tensor, wanted in gold.gradients.items():
        torch.testing.assert_close(found.gradients[tensor], wanted, rtol=1e-4, atol=1e-5, msg=tensor)
    assert found.loss == pytest.approx(gold.loss, rel=1e-5)
    assert numerics.judge(gold, gold, found, torch.float32, ()).passed
    assert len(made.step.batches) == (2 if others else 3) and made.padded == (0 if others else 10)


def test_an_attention_that_sees_a_row_s_other_samples_does_not_pass():
    gold, made = numerics.one_step(alone(upcast=True)), alone("sdpa", "packing")
    for batch in made.step.batches:
        batch.inputs["mask"] = None  # causal over the whole row
    verdict = numerics.judge(gold, gold, numerics.one_step(made), torch.float32, ())
    assert not verdict.passed and verdict.grad_error > 0.1


def test_heads_are_views_of_what_projections_give_and_padding_gets_no_gradient(monkeypatch):
    made, seen = alone("sdpa"), []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (seen.append(a), plain(*a, **k))[1]
    )
    trial.run_trial(made)
    q = seen[0][0]
    assert q.shape == (2, HEADS, 12, DIM) and q.stride() == (12 * HEADS * DIM, DIM, HEADS * DIM, 1)
    first = made.step.batches[0].inputs
    assert (first["token"] < 0).sum() == 7 and not first["do"][first["token"] < 0].any()
    assert first["q"][first["token"] >= 0].std().item() == pytest.approx(1, rel=0.1)


def test_every_trial_has_numbers_of_its_own_the_same_in_every_layout():
    padded, packed = alone("sdpa"), alone("sdpa", "packing")
    losses = []
    for number in (0, 1, 2):
        for made in (padded, packed):
            made.kind.feed(made, number)
        losses.append([trial.run_trial(made).loss for made in (padded, packed)])
        assert losses[-1][0] == pytest.approx(losses[-1][1], rel=1e-5)
    assert len({round(first, 6) for first, _ in losses}) == 3


def test_what_counts_is_the_pairs_of_each_sample():
    cell = plan(config(f"models=[{NAME}@gsm8k]"), "cpu").cells[0]
    (work,) = kind("op").work(cell, [SAMPLES])
    pairs = sum(n * n for n in LENGTHS) / 2
    assert work.tflop["forward"] == pytest.approx(4 * pairs * HEADS * DIM / 1e12)  # 2 each for QKᵀ and PV
    assert work.tflop["backward"] == pytest.approx(2.5 * work.tflop["forward"])


def test_a_cell_takes_of_a_reference_and_of_the_toggles_what_attention_has():
    made = plan(config(f"models=[{NAME}@2x8,linear-8x8@1x8]", "reference=peft", "trials=3"), "cpu").cells
    attention, linear = ([c for c in made if c.model.family == family] for family in ("attention", "linear"))
    assert [a.name for a in attention[0].reference] == ["sdpa", "padding"] and linear[0].reference == ()
    assert {a.name for c in attention for a in c.toggles} >= {"eager", "sdpa_math", "flash_attention_2", "varlen"}
    assert {a.name for c in linear for a in c.toggles} == {"lora_addmm", "lora_kernels", "bare_linear"}
    (wrong,) = cells(f"models=[{NAME}]", "reference=peft", "ablations=[lora_addmm]")[1:]
    assert refusal(wrong, MACHINE) == ("unsupported", "a single attention has nothing that lora_addmm could change")


@pytest.mark.parametrize(
    "name", ["attention-4x3x8", "attention-4x2", "attention-4x2x0", "attention-x", "norm-attention-4x2x8"]
)
def test_a_wrong_name_says_what_it_would_have_to_be(name):
    with pytest.raises(
        ConfigError, match=r"a single attention is attention-HEADSxKVHEADSxDIM .* such as attention-32x8x128"
    ):
        plan(config(f"models=[{name}]"), "cpu")


def test_cells_become_records_on_a_cpu(tmp_path):
    wanted = ("models=[attention-4x2x8@2x16,attention-4x2x8@short_samples]", "trials=3", "warmup=1", "dtype=bfloat16")
    made = plan(config("suite=attention", "ablations=[[eager,packing]]", *wanted), "cpu").cells
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        dense, packed = [runner.measure(cell) for cell in made if cell.toggles]
    assert dense.status == "not_applied" and "no padding to save" in dense.reason
    assert (packed.status, packed.reason, packed.numerics.tensors) == ("ok", None, 4)
    assert packed.notes["attention_mask"] == "causal and other samples of a row"
    assert packed.padding("candidate") == 0 < packed.padding("reference")
    assert set(packed.phases) == {"forward", "backward", "total"}
