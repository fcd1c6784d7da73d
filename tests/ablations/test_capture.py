"""The captured step's attention gets the mask that the uncaptured one gets, and its losses, gradients and updates are
those of the uncaptured one. On a CPU capturing is pretended: transformers asks `is_cuda_stream_capturing`, and what
SDPA is then given is what counts; the graphs are `fake_graphs.py`'s."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps

import pytest
import torch
from attend import varlen_attn
from fake_graphs import FakeGraphs
from helpers import PEFT, arm, random_samples, request
from lorakernels.capturing.graph import CudaGraphs
from torch.nn.attention import varlen

from lorabench.contract.ablation import Evidence, Unsupported
from lorabench.contract.batch import Batch, pad
from lorabench.contract.kind import kind
from lorabench.contract.workload import Workload
from lorabench.measure.judging import numerics
from lorabench.measure.judging.numerics import one_pass
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations.batching import micro_batch
from lorabench_ablations.capture import CudaGraph
from lorabench_ablations.captured_step import CapturedStep, Layout, SameMasks

FAMILIES = ["llama", "mistral", "qwen2", "gemma"]


@pytest.fixture
def given(monkeypatch):
    """given(forward, capturing=…) -> (attn_mask, is_causal) of each call of SDPA."""
    plain, calls = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask, is_causal))
        return plain(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)

    def run(forward, *, capturing):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: capturing)
            forward()
        return list(calls)

    return run


def made(family, lengths=(16, 16), config=()):
    tiny = arm(*PEFT, model=f"tiny-{family}", samples=random_samples(list(lengths)), depth=3)
    for key, value in config:
        setattr(tiny.model.config, key, value)
    return tiny


def three_ways(given, tiny):
    """What SDPA is given uncaptured, captured as transformers does it, and captured as `cuda_graph` does it."""
    masks, batch = SameMasks(), tiny.step.batches[0]

    def forward(around=nullcontext):
        with around():
            tiny.step.forward(batch)

    uncaptured = given(lambda: forward(masks.noted), capturing=False)
    return uncaptured, given(forward, capturing=True), given(lambda: forward(masks.repeated), capturing=True)


def same(one, two):
    return len(one) == len(two) > 0 and all(
        causal_a == causal_b and ((a is None) == (b is None)) and (a is None or torch.equal(a, b.expand_as(a)))
        for (a, causal_a), (b, causal_b) in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_batch_is_captured_without_a_mask(given, family):
    uncaptured, left_alone, ours = three_ways(given, made(family))
    assert all(mask is None and causal for mask, causal in uncaptured)
    assert all(mask is not None and not causal for mask, causal in left_alone), "nothing to mend in this transformers"
    assert same(ours, uncaptured)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_keeps_its_mask(given, family):
    uncaptured, _, ours = three_ways(given, made(family, lengths=(16, 9)))
    assert all(mask is not None for mask, _ in uncaptured)
    assert same(ours, uncaptured)


def test_sliding_windows_keep_theirs(given):
    """All layers of mistral, and qwen2's last one while its first ones see everything."""
    uncaptured, _, ours = three_ways(given, made("mistral", config=[("sliding_window", 8)]))
    assert all(mask is not None for mask, _ in uncaptured) and same(ours, uncaptured)
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    tiny = made("qwen2", config=[("layer_types", kinds), ("sliding_window", 8)])
    tiny.model.get_base_model().model.has_sliding_layers = True
    uncaptured, _, ours = three_ways(given, tiny)
    assert [mask is None for mask, _ in uncaptured] == [True, True, False] and same(ours, uncaptured)


def test_transformers_table_is_as_before():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    masks = SameMasks()
    for around in (masks.noted, masks.repeated):
        with pytest.raises(KeyError), around():
            assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
            raise KeyError
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


# -- the step itself ------------------------------------------------------------------------------------------------

SHAPES = {  # lengths of a step's samples, two a micro-batch -> how many shapes are captured
    "one": ((16, 16), 1),
    "alike": ((16, 16, 16, 16, 16, 16), 1),
    "several": ((16, 16, 12, 12, 16, 16), 2),
    "padded": ((16, 9, 16, 16, 16, 5), 2),  # the first and the last have masks of one shape
}


def stepping(lengths, **kwargs):
    workload = Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
    return arm(*PEFT, samples=random_samples(list(lengths)), workload=workload, **kwargs)


def captured_here(lengths):
    """An arm whose step is captured by a recorder that keeps a CUDA graph's promises on a CPU."""
    made = stepping(lengths)
    made.steps[0] = CapturedStep(made.step, FakeGraphs([p for _, p in made.adapters()]))  # type: ignore[arg-type]
    made.turns = made.steps
    return made


def fresh(made, trial):
    """Other tokens in the same places, as the harness feeds them before every trial."""
    own = made.step.batches
    turned = [{n: (x + trial) % 64 if n == "input_ids" else x for n, x in b.inputs.items()} for b in own]
    own[:] = [replace(b, inputs=inputs) for b, inputs in zip(own, turned, strict=True)]


def trials(made, count=4):
    """(loss, gradients and parameters afterwards) of as many steps on fresh tokens."""
    found = []
    for trial in range(count):
        fresh(made, trial)
        loss, gradients = one_pass(made, made.step)
        made.step.update()
        found.append((loss, gradients, {n: p.detach().clone() for n, p in made.adapters()}))
    return found


def assert_same_trials(ours, plain, rtol=1e-5):
    """Tensors by their norms: Adam moves a parameter whose gradient is nearly nothing by the sign of its rounding."""
    assert len({loss for loss, *_ in ours}) == len(ours), "every trial has tokens of its own"
    for (loss, *found), (wanted, *other) in zip(ours, plain, strict=True):
        assert loss == pytest.approx(wanted, rel=rtol)
        for tensors, expected in zip(found, other, strict=True):
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert (tensor - expected[name]).norm() <= rtol * expected[name].norm(), name


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_step_of_several_micro_batches_is_the_uncaptured_one(shapes):
    lengths, layouts = SHAPES[shapes]
    made = captured_here(lengths)
    assert_same_trials(trials(made), trials(stepping(lengths)))
    assert len(made.step.layouts) == layouts and len(made.step.graphs) == 2 * layouts + 1
    assert made.step.keeps_gradients == (len(made.step.batches) == 1)
    notes = registry.ablation("cuda_graph").notes(Evidence(made, None, Counter()))["cuda_graph"]
    assert notes == {
        "captured": ["backward", "forward", "step"],
        "shapes": layouts,
        "masks_left_out": notes["masks_left_out"],
    }


# -- packed rows ----------------------------------------------------------------------------------------------------

ROWS = ((14, 14), (12, 9, 7))  # lengths of two rows' samples: 28 positions in each, which a bucket of 64 holds


def attended_by_segments(monkeypatch):
    """`varlen` on a CPU, whose kernel has to be told of a segment that is long enough for every one."""

    @wraps(varlen_attn)  # what it takes is looked up in its signature
    def kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **asked):
        assert min(max_q, max_k) >= int(cu_seq_q.diff().max())
        return varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **asked)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)


def packed(attention, rows, captured):
    workload = Workload(name="test", kind="fixed", batch_size=1, seq_len=28)
    samples = random_samples([length for lengths in rows for length in lengths])
    toggles = [attention, "adamw_foreach", "packing", *["cuda_graph"] * captured]
    wanted = request(*toggles, samples=samples, workload=workload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraph, "step", lambda self, step: CapturedStep(step, FakeGraphs([*step.model.parameters()])))
        return kind("train").build(wanted)


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_a_graph_takes_any_packed_row_of_its_bucket(attention, monkeypatch):
    """Each trial lays the samples out anew, as training does: the graph of the first row reads where those of the
    others begin."""
    attended_by_segments(monkeypatch)
    made, plain = (packed(attention, ROWS, captured) for captured in (True, False))
    for batch, own in zip(made.step.batches, plain.step.batches, strict=True):
        assert batch.inputs["input_ids"].shape == (1, 64) and (batch.real, batch.padded) == (28, 36)
        assert micro_batch(batch).lengths == micro_batch(own).lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: attention == "sdpa")
        assert_same_trials(trials(made), trials(plain))
    assert len(made.step.layouts) == 1
    others = packed(attention, ((20, 4, 4), (20, 8)), False).step.batches
    padded = [registry.ablation("cuda_graph").collate(batch) for batch in others]
    wanted = packed(attention, ROWS, False)
    for mine, batch in ((made, padded), (wanted, others)):
        mine.step.batches[:] = batch
        for (_, ours), (_, theirs) in zip(made.adapters(), wanted.adapters(), strict=True):
            theirs.data.copy_(ours.data)
    (loss, gradients), (expected, right) = one_pass(made, made.step), one_pass(wanted, wanted.step)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - right[name]).norm() <= 1e-4 * right[name].norm(), name


def test_what_no_graph_takes_of_packed_rows_says_so():
    toggle = registry.ablation("cuda_graph")
    row = {n: torch.zeros(1, 9000).long() for n in ("input_ids", "labels", "position_ids")}
    for inputs, why in (
        (row, "a packed row of 9000 tokens is longer than the largest bucket, 8192"),
        (row | {"parts": ()}, "rows of several jobs end to end have a layout of their own at every step"),
        (row | {"block_diagonal": 1}, "it cannot pad what else a packed row has: block_diagonal"),
    ):
        with pytest.raises(Unsupported, match=why):
            toggle.collate(Batch(inputs, 9000, 0, 8999))
    plain = Batch({"input_ids": row["input_ids"]}, 9000, 0, 8999)
    assert toggle.collate(plain) is plain


def operation(captured, device="cpu"):
    made = arm(model="linear-24x40", device=device)
    if captured:
        graphs = CudaGraphs(torch.device(device)) if device == "cuda" else FakeGraphs()
        made.steps[0] = CapturedStep(made.step, graphs)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_single_operation_is_captured_over_its_own_input(device):
    """Each trial writes X and dY where they lie; and on a GPU a copy of X would be made on a stream that no capture may
    wait for (so all 112 arms of suite=lorafusion_kernels were unsupported on 2026-11-26)."""
    made, plain = operation(True, device), operation(False, device)
    for trial in range(3):
        found = []
        for own in (made, plain):
            own.kind.feed(own, trial)
            found.append(one_pass(own, own.step))
        (loss, gradients), (wanted, others) = found
        assert loss == pytest.approx(wanted, rel=1e-6) and gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_pass_without_an_update_starts_from_nothing():
    made, plain = captured_here(SHAPES["alike"][0]), stepping(SHAPES["alike"][0])
    one_pass(made, made.step)
    loss, gradients = one_pass(made, made.step)
    wanted, others = one_pass(plain, plain.step)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-5, atol=1e-7)


def test_the_next_batch_goes_where_a_graph_reads_it():
    mask = torch.ones(1, 4)
    own = Batch({"input_ids": torch.zeros(1, 4).long(), "max_length": 4, "attention_mask": mask}, 4, 0, 3)
    layout = Layout(own, SameMasks())
    place = layout.inputs["input_ids"].data_ptr()
    layout.feed(
        own, replace(own, inputs=own.inputs | {"input_ids": torch.arange(4)[None], "attention_mask": mask.clone()})
    )
    assert layout.inputs["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert layout.inputs["input_ids"].data_ptr() == place
    padded = torch.tensor([[1.0, 1, 1, 0]])
    others = [{"input_ids": torch.zeros(1, 5)}, {"max_length": 5}, {"position_ids": mask}, {"attention_mask": padded}]
    for other in others:
        with pytest.raises(ValueError, match=f"cuda_graph captured another {next(iter(other))}:"):
            layout.feed(own, replace(own, inputs=own.inputs | other))


def test_sizes_that_are_tried_before_are_not_captured():
    made = captured_here((16, 16, 16, 16))
    tried = pad(random_samples([16, 12, 9]), 3)[0]
    before = {n: p.detach().clone() for n, p in made.adapters()}
    made.step.backward(made.step.forward(tried))
    assert not made.step.graphs and all(p.grad is not None for _, p in made.adapters())
    numerics.clear(made, made.step)
    assert_same_trials(trials(made), trials(stepping((16, 16, 16, 16))))
    assert made.step.graphs and any(not torch.equal(p, before[n]) for n, p in made.adapters())
    with pytest.raises(ValueError, match="captured 2 micro-batches, and this is none of them"):
        made.step.forward(tried)


def test_too_many_shapes_and_what_cannot_be_captured_are_unsupported(monkeypatch):
    monkeypatch.setattr("lorabench_ablations.captured_step.MOST_SHAPES", 1)
    made = captured_here(SHAPES["several"][0])
    with pytest.raises(Unsupported, match="at most 1 shapes a step, and these micro-batches have 2: give the workload"):
        one_pass(made, made.step)
    made = captured_here(SHAPES["one"][0])
    made.step.recorder.fails = "it waits for the device"
    with pytest.raises(Unsupported, match=r"^cuda_graph: the step cannot be captured: it waits for the device$"):
        one_pass(made, made.step)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", SHAPES)
def test_on_a_gpu_losses_gradients_and_updates_are_the_uncaptured_step_s(shapes):
    lengths, layouts = SHAPES[shapes]
    made = {n: stepping(lengths, device="cuda") for n in ("plain", "captured")}
    device = next(made["captured"].model.parameters()).device
    step = made["captured"].steps[0] = CapturedStep(made["captured"].step, CudaGraphs(device))
    found = {n: trials(one) for n, one in made.items()}
    assert_same_trials(found["captured"], found["plain"], rtol=1e-3)
    assert len(step.layouts) == layouts and len(step.graphs) == 2 * layouts + 1


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_on_a_gpu_packed_rows_of_one_bucket_share_a_graph(attention):
    workload = Workload(name="t", kind="lengths", distribution="gsm8k", batch_size=2, seq_len=256, samples=16)
    given = {"workload": workload, "device": "cuda", "dtype": torch.bfloat16}
    made = [arm(attention, "adamw_foreach", "packing", *own, **given) for own in ((), ("cuda_graph",))]
    plain, ours = (trials(one) for one in made)
    assert len(made[1].turns[0].layouts) < len(made[1].step.batches)
    assert_same_trials(ours, plain, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["lora_kernels", "auto_batch_size", "gradient_checkpointing", "adamw_fused"])
def test_on_a_gpu_several_micro_batches_go_with_other_toggles(beside, tmp_path):
    workload = Workload(name="t", kind="lengths", distribution="gsm8k", batch_size=1, seq_len=64, samples=6)
    given = {"workload": workload, "device": "cuda", "scratch": tmp_path}
    base = [name for name in PEFT if (name, beside) != ("adamw_foreach", "adamw_fused")]
    made = [arm(*base, beside, *own, **given) for own in ((), ("cuda_graph",))]
    plain, ours = (trials(one) for one in made)
    assert_same_trials(ours, plain, rtol=1e-3)


@pytest.mark.gpu
def test_a_captured_step_reads_every_new_batch():
    made = {n: arm(*PEFT, *extra, device="cuda") for n, extra in (("plain", ()), ("captured", ("cuda_graph",)))}
    losses: dict[str, list[float]] = {n: [] for n in made}
    for n, a in made.items():
        first = a.step.batches[0]
        for shift in range(4):
            rolled = {k: x.roll(shift, -1) if k in ("input_ids", "labels") else x for k, x in first.inputs.items()}
            a.step.batches[:] = [replace(first, inputs=rolled)]
            losses[n].append(run_trial(a).loss)
    assert losses["captured"] == pytest.approx(losses["plain"], rel=1e-4)
    assert len(set(losses["captured"])) == 4


@pytest.mark.gpu
def test_a_captured_step_has_the_uncaptured_one_s_losses():
    made = {n: arm(*PEFT, *extra, device="cuda") for n, extra in (("plain", ()), ("captured", ("cuda_graph",)))}
    losses = {n: [run_trial(a).loss for _ in range(4)] for n, a in made.items()}
    assert losses["captured"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["captured"][3] != losses["captured"][0]
