"""The attention implementations beside SDPA. Their kernels want a GPU: here a plain one stands in for each, which goes
from segment to segment as they do and leaves their operators' names in the trace."""

import functools
import re
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attend import attend, varlen_attn
from helpers import arm, cells

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.design import refusal
from lorabench_ablations.attention import what_is_masked
from lorabench_ablations.segments import segments

LAYERS = 3
UNEQUAL = Workload(name="unequal", kind="lengths", distribution="glue", batch_size=4, seq_len=48)
ALONE = Workload(name="alone", kind="fixed", batch_size=1, seq_len=16)
FEEDS = {
    "dense": ((), None), "one": ((), ALONE), "padded": ((), UNEQUAL), "packed": (("packing",), UNEQUAL),
    "packed, our kernels": (("packing", "lora_kernels"), UNEQUAL),
}  # fmt: skip
VARLEN, DENSE = "flash_attn::_flash_attn_varlen_forward", "flash_attn::_flash_attn_forward"


@pytest.fixture
def flash(monkeypatch):
    """Stands in for flash-attn where transformers looks for it."""
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as utils

    def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
        rows, width = q.shape[:2]
        cu = torch.arange(0, rows * width + 1, width)
        return attend(DENSE, *(x.reshape(rows * width, *x.shape[2:]) for x in (q, k, v)), cu, softmax_scale).view_as(q)

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        assert causal and cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.shape == cu_seqlens_k.shape
        return attend(VARLEN, q, k, v, cu_seqlens_q, softmax_scale)

    pads = (utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: (dense, varlen, None, *pads))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)


@pytest.fixture
def varlen(monkeypatch):
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", varlen_attn)


@pytest.fixture
def xformers(monkeypatch):
    class BlockDiagonalCausalMask:
        def __init__(self, lengths, device):
            self.lengths, self.device = lengths, device

        @classmethod
        def from_seqlens(cls, lengths, *, device):
            assert all(isinstance(n, int) for n in lengths)
            return cls(lengths, device)

        def to(self, device):
            return type(self)(self.lengths, device)

    def kernel(q, k, v, attn_bias, scale):
        assert q.shape == k.shape and q.shape[0] == 1 and attn_bias.device == q.device
        cu = torch.tensor([0, *attn_bias.lengths]).cumsum(0)
        return attend("xformers_flash::flash_fwd", q[0], k[0], v[0], cu, scale)[None]

    modules = {name: types.ModuleType(name) for name in ("xformers", "xformers.ops", "xformers.ops.fmha")}
    modules["xformers.ops.fmha.attn_bias"] = bias = types.ModuleType("attn_bias")
    modules["xformers.ops"].memory_efficient_attention = kernel
    bias.BlockDiagonalCausalMask = BlockDiagonalCausalMask
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def cudnn(monkeypatch):
    def kernel(q, k, v, bias, cu, cu_k, longest, longest_k, sums, dropout, causal, mask, *, scale):
        assert (bias, sums, dropout, causal, mask) == (None, True, 0.0, True, False) and cu is cu_k
        assert longest == longest_k == int(cu.diff().max()) and cu.dtype == torch.int32
        assert all(x.is_contiguous() for x in (q, k, v))
        return Whole.apply(attend("aten::_cudnn_attention_forward", q, k, v, cu, scale)), None

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_contiguous()
            return grad

    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_forward", kernel)
    monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")


NAMES = {"flash_attention_2": "flash", "varlen": "varlen", "varlen_cudnn": "cudnn", "xformers": "xformers"}


def evidence(name, *others, **kwargs):
    made = arm(name, *others, depth=LAYERS, **kwargs)
    _, ops = traced(lambda: run_trial(made))
    return registry.ablation(name), Evidence(made, made.patched[name], ops)


@functools.cache
def fed(name, feed):
    others, workload = FEEDS[feed]
    return one_step(arm(name, "adamw", *others, workload=workload))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("feed", FEEDS)
def test_loss_and_gradients_are_sdpa_s_however_the_samples_are_fed(name, feed, request):
    request.getfixturevalue(NAMES[name])
    plain, ours = fed("sdpa", feed), fed(name, feed)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    for tensor, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[tensor], gradient, rtol=1e-3, atol=1e-7, msg=tensor)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("others", [("packing",), ("packing", "gradient_checkpointing"), ()], ids="+".join)
def test_it_is_seen_in_every_layer_and_missed_where_it_did_not_run(name, others, request):
    request.getfixturevalue(NAMES[name])
    toggle, found = evidence(name, *others, workload=UNEQUAL)
    assert toggle.audit(found) == LAYERS
    ((operator, count),) = toggle.notes(found)["attention_backend"].items()
    assert operator in toggle.operators and count == LAYERS * (2 if "gradient_checkpointing" in others else 1)
    found.ops[operator] = LAYERS - 1
    with pytest.raises(NotApplied, match=f"ran {LAYERS - 1} times; attention runs {LAYERS} times"):
        toggle.audit(found)
    found.ops.update({operator: LAYERS, "aten::_scaled_dot_product_efficient_attention": 1})
    with pytest.raises(NotApplied, match="still ran in SDPA's efficient"):
        toggle.audit(found)


@pytest.mark.parametrize("feed", ["one", "packed"])
def test_a_row_comes_with_its_samples_so_that_no_layer_waits_for_the_device(feed, flash, monkeypatch):
    others, workload = FEEDS[feed]
    monkeypatch.setattr(sys.modules[__name__], "attend", lambda name, q, *rest: q * 1.0)  # a kernel, which never waits

    def waits():
        made = arm("flash_attention_2", *others, workload=workload, depth=LAYERS)
        _, ops = traced(lambda: made.step.forward(made.step.batches[0]))
        return ops["aten::_local_scalar_dense"] + ops["aten::nonzero"]

    given = waits()
    monkeypatch.setattr("lorabench_ablations.flash_attention.FlashAttention.collate", lambda self, batch: batch)
    assert waits() >= given + LAYERS and given <= 2


@pytest.mark.parametrize("name", ["varlen", "varlen_cudnn", "xformers"])
def test_padding_is_not_attended_to_even_by_whom_nobody_collated_for(name, request):
    request.getfixturevalue(NAMES[name])
    model, plain = (arm(n, workload=UNEQUAL).model for n in (name, "sdpa"))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0  # on the left: a causal kernel would attend to it
    ids = torch.randint(1, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    real = mask.bool()
    logits = [m(input_ids=ids, attention_mask=mask, position_ids=positions).logits[real] for m in (model, plain)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    other = torch.where(real, ids, 7)
    again = model(input_ids=other, attention_mask=mask, position_ids=positions).logits[real]
    assert torch.equal(again, logits[0])


def test_a_row_s_samples_do_not_see_each_other(varlen):
    made = arm("varlen", "packing", workload=UNEQUAL)
    (batch,) = made.step.batches
    inputs = {n: x for n, x in batch.inputs.items() if n != "labels"}
    first = int(inputs["cu_seq_lens_q"][1])
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, :first] = 3
    before, after = (made.model(**given).logits[0, first:] for given in (inputs, changed))
    assert torch.equal(before, after)


def test_a_packed_batch_carries_where_its_samples_begin_and_the_longest():
    (batch,) = arm("varlen", "packing", workload=UNEQUAL).step.batches
    lengths = batch.inputs["cu_seq_lens_q"].diff().tolist()
    assert sorted(lengths) == sorted(len(s.tokens) for s in arm("sdpa", workload=UNEQUAL).samples)
    assert batch.inputs["max_length_q"] == batch.inputs["max_length_k"] == max(lengths)
    assert torch.equal(batch.inputs["cu_seq_lens_q"], batch.inputs["cu_seq_lens_k"])
    dense = arm("varlen").step.batches[0].inputs
    assert dense["cu_seq_lens_q"].tolist() == [0, 16, 32] and dense["max_length_q"] == 16


def test_segments_end_with_rows_with_samples_and_where_padding_begins():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    assert segments(2, 4, None, None).tolist() == [0, 4, 8]
    assert segments(2, 4, mask, None).tolist() == [0, 3, 4, 5, 8]
    assert segments(1, 5, None, torch.tensor([[0, 1, 0, 1, 2]])).tolist() == [0, 2, 5]
    assert segments(2, 3, None, torch.arange(3)[None]).tolist() == [0, 3, 6]


@pytest.mark.parametrize("more", [{"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.zeros(4)}], ids=str)
def test_what_a_kernel_over_segments_cannot_do_is_refused(more):
    from lorabench_ablations.segments import through

    q = torch.zeros(1, 4, 8, 16)
    with pytest.raises(Unsupported, match="without dropout, cap or sink"):
        through(lambda *args, **kwargs: args[0])(SimpleNamespace(), q, q, q, None, **more)
    with pytest.raises(Unsupported, match="a cache of keys"):
        through(lambda *args, **kwargs: args[0])(SimpleNamespace(), q[:, :, :1], q, q, None)


class Hopper:
    device, gpus, capability = "cuda", 1, (9, 0)

    def __init__(self, dtype="bfloat16"):
        self.dtype = lambda wanted: dtype


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flash_attention_2", "needs the package flash_attn, which is not installed: pip install flash-attn"),
        ("flash_attention_3", "no wheel of the Python package index has its backward pass"),
        ("flash_attention_4", "needs the package flash_attn.cute, which is not installed: pip install --pre"),
        ("xformers", "needs the package xformers, which is not installed: pip install"),
        ("flex_attention", None),
        ("varlen", None),
        ("varlen_cudnn", None),
    ],
)
def test_what_is_missing_is_said_before_a_start(name, says, monkeypatch):
    cell = cells(f"ablations=[{name}]")[-1]
    status, reason = refusal(cell, Hopper()) or ("", None)
    assert (reason is None) if says is None else (status == "unsupported" and says in reason)
    monkeypatch.setattr("lorabench.contract.ablation._importable", lambda package: True)
    assert refusal(cell, Hopper()) is None
    assert "needs bfloat16 or float16; tiny-llama is measured in float32" in refusal(cell, Hopper("float32"))[1]
    older = Hopper()
    older.capability = (7, 5)
    assert "needs CUDA capability" in refusal(cell, older)[1]
    older.device = "cpu"
    assert "needs a CUDA device" in refusal(cell, older)[1]


@pytest.mark.parametrize("name", ["flash_attention_2", "varlen", "varlen_cudnn", "xformers", "sdpa"])
def test_a_family_that_caps_its_scores_is_told_apart(name):
    model = cells("models=[tiny-gemma2]", "reference=[eager]")[0].model
    reason = registry.ablation_class(name).requires.unmet_by(model)
    assert (reason is None) == (name == "flash_attention_2")  # which has a cap
    assert reason is None or "for the family gemma2; eager is there" in reason


def test_an_older_varlen_attn_gets_repeated_heads_and_no_window(monkeypatch):
    import torch.nn.attention.varlen as module

    from lorabench_ablations.segments import torch_varlen

    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, *, scale=None):
        assert is_causal and q.shape == k.shape == v.shape
        return attend("older", q, k, v, cu_seq_q, scale)

    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    cu = torch.tensor([0, 3, 7])
    monkeypatch.setattr(module, "varlen_attn", older)
    torch.testing.assert_close(torch_varlen(q, k, v, cu, 4, None, -1), attend("plain", q, k, v, cu, None))
    with pytest.raises(Unsupported, match="no sliding window"):
        torch_varlen(q, k, v, cu, 4, None, 3)


def test_cudnn_s_attention_over_segments_gets_rows_that_follow_one_another(cudnn):
    from lorabench_ablations.segments import cudnn_varlen

    wide, cu = torch.randn(7, 12, 8, requires_grad=True), torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = wide.split([4, 4, 4], 1)
    out = cudnn_varlen(q, k, v, cu, 4, None, -1)
    out.backward(torch.randn(7, 9, 8)[:, :4])
    torch.testing.assert_close(out, attend("plain", q, k, v, cu, None))


def test_cudnn_s_attention_over_segments_says_what_it_has_not(monkeypatch):
    from lorabench_ablations.segments import cudnn_varlen

    q, cu = torch.randn(7, 4, 8), torch.tensor([0, 3, 7])
    with pytest.raises(Unsupported, match="no sliding window; take varlen"):
        cudnn_varlen(q, q, q, cu, 4, None, 2)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    with pytest.raises(Unsupported, match=r"torch before 2.14 has wrong gradients .* take varlen"):
        cudnn_varlen(q, q, q, cu, 9, None, -1)

    def refuses(*given, scale):
        raise RuntimeError(words)

    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_forward", refuses)
    for words in ("cuDNN Frontend error: no plan\nand more", "Expected mha_graph.execute(…).is_good() to be true"):
        with pytest.raises(Unsupported, match=f"over segments refuses this: {re.escape(words.splitlines()[0])}$"):
            cudnn_varlen(q, q, q, cu, 4, None, 3)
    words = "an illegal memory access"
    with pytest.raises(RuntimeError, match="illegal"):
        cudnn_varlen(q, q, q, cu, 4, None, 3)


def test_xformers_without_a_kernel_for_this_torch_is_unsupported(xformers, monkeypatch):
    from lorabench_ablations.segments import xformers_varlen

    def refuses(*given, **asked):
        raise NotImplementedError("No operator found\n`fa2F` is not supported because:\n    no CUDA support")

    monkeypatch.setattr(sys.modules["xformers.ops"], "memory_efficient_attention", refuses)
    q, cu = torch.zeros(4, 2, 8), torch.tensor([0, 4])
    with pytest.raises(Unsupported, match=r"xformers has no operator for this here: no CUDA support$"):
        xformers_varlen(q, q, q, cu, 4, None, -1)


def test_flex_is_known_by_the_kernels_that_inductor_makes_of_it():
    toggle, (_, found) = registry.ablation("flex_attention"), evidence("eager")
    assert toggle.global_patch
    forward, backward = "triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_1"
    found.ops.update({forward: LAYERS, backward: LAYERS})
    assert toggle.audit(found) == LAYERS
    assert toggle.notes(found)["attention_backend"] == {forward: LAYERS}
    del found.ops[forward]
    with pytest.raises(NotApplied, match="ran 0 times"):
        toggle.audit(found)


def test_flash_attention_4_is_not_taken_for_2():
    toggle, (_, found) = registry.ablation("flash_attention_4"), evidence("eager")
    found.ops["FlashAttnVarlenFunc"] = LAYERS
    assert toggle.audit(found) == LAYERS
    found.ops[VARLEN] = LAYERS
    with pytest.raises(NotApplied):
        toggle.audit(found)


@pytest.mark.parametrize(("feed", "masked"), [
    ("dense", "causal"), ("padded", "causal and padding"), ("packed", "causal and other samples of a row"),
])  # fmt: skip
def test_the_record_says_what_the_backend_had_to_leave_out(feed, masked):
    others, workload = FEEDS[feed]
    toggle, found = evidence("sdpa", *others, workload=workload)
    assert toggle.notes(found) == {"attention_backend": {"flash": LAYERS}, "attention_mask": masked}


def test_a_pinned_backend_that_refuses_names_the_mask(monkeypatch):
    made = arm("sdpa_math", workload=UNEQUAL)

    def refuse(batch):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(made.step.inner, "forward", refuse)
    (batch,) = made.step.batches
    with pytest.raises(Unsupported, match=r"which has grouped-query.* a mask that is causal and padding$"):
        made.step.forward(batch)
    without = replace(batch, inputs={n: x for n, x in batch.inputs.items() if n != "attention_mask"})
    assert what_is_masked(without) == "causal"
    pieces = torch.tensor([[0, 1, 2, 9, 10, 11]])  # of a row that ranks share
    assert what_is_masked(replace(without, inputs={**without.inputs, "position_ids": pieces})) == "causal"


def test_xformers_is_switched_on_by_axolotls_key_alone():
    said = registry.ablation("xformers").settings()
    assert said.axolotl == {"xformers_attention": True} and not said.model and "Axolotl" in said.note
