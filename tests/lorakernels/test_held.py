"""Operands that are parameters of the model: FSDP2 shards and gathers each in one piece, and linears stay merged."""

import gc
import itertools
from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels.model import decoder_layer
from lorakernels.model.held import HeldLinear
from pairs import assert_like_peft, bound, layer, step
from tiny_models import batch, build
from torch.distributed.fsdp import fully_shard


@pytest.fixture
def world_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def layers(model):
    return model.base_model.model.model.layers


def sharded(model, reshard=True, **switches):
    """The same model, laid out layer by layer and sharded."""
    lay_out = lorakernels.before_fully_shard(model, **switches)
    adapters = {p for n, p in model.named_parameters() if "lora_" in n}
    for part in layers(model):
        lay_out(part)
        fully_shard(part, ignored_params=adapters, reshard_after_forward=reshard)
    fully_shard(model, ignored_params=adapters)
    return model


def pair(family="llama", reshard=True, **switches):
    """(ours, plain, report of apply)"""
    plain = build(family)
    ours = sharded(deepcopy(plain), reshard, **switches)
    return ours, plain, lorakernels.apply(ours, **switches)


def of_groups(model):
    """Of each projection of the first layer how many linears it has, and whether their operand is held."""
    return [(len(g.members), g.holder is not None) for g in layer(model)._lorakernels.groups]


def checkpoint(model):
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(
    ("family", "reshard", "checkpointed"),  # the second family with biases; each two of the three together once
    [
        pytest.param(
            *case, marks=[pytest.mark.exhaustive] if sum(map(bool, (case[0] == "qwen2", *case[1:]))) % 2 else []
        )
        for case in itertools.product(("llama", "qwen2"), (False, True), (False, True))
    ],
)
def test_three_updates_are_plain_peft_s(world_of_one, monkeypatch, family, reshard, checkpointed):
    made = []
    fused = decoder_layer._fused_layer
    monkeypatch.setattr(decoder_layer, "_fused_layer", lambda *args, **kw: made.append(args) or fused(*args, **kw))
    ours, plain, report = pair(family, reshard)
    assert not report.left and report.counts == lorakernels.apply(deepcopy(plain)).counts
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.02) for m in (ours, plain)]
    losses = []
    for model in (ours, plain) if checkpointed else ():
        checkpoint(model)
    for _ in range(3):
        assert_like_peft(ours, plain)
        losses.append(step(ours)[0])
        for optimizer in optimizers:
            optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    assert not lorakernels.status(ours).left
    assert len(made) == 2 * 6 * (1 + checkpointed)  # layers, forwards, and each once more in backward


@pytest.mark.parametrize(
    ("lora", "switches"),
    [
        ({"dtype": torch.bfloat16}, {}),
        ({"dtype": torch.bfloat16, "autocast_adapter_dtype": True}, {}),
        ({"lora_dropout": 0.3}, {}),
        ({"targets": ["q_proj", "v_proj", "down_proj"]}, {}),
        ({}, {"long_context": lorakernels.LongContext(mlp_rows=4)}),
        ({}, {"one_gemm": False}),
    ],
    ids=["bfloat16", "float32 adapters", "dropout", "some linears", "long_context", "no one_gemm"],
)  # fmt: skip
def test_a_step_is_bit_for_bit_the_one_without_fsdp2(world_of_one, lora, switches):
    alone = build("llama", **lora)
    ours = sharded(deepcopy(alone))
    found = []
    for model in (ours, alone):
        assert not lorakernels.apply(model, **switches).left
        torch.manual_seed(7)  # the masks of a dropout
        found.append(step(model))
    assert found[0][0] == found[1][0] and found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[1][1].items():
        assert torch.equal(found[0][1][name], gradient), name


def test_q_k_v_and_gate_up_are_one_operand_each(world_of_one):
    ours, _, _ = pair()
    assert of_groups(ours) == [(3, True), (1, True), (2, True), (1, True)]
    q, k, v = (getattr(layer(ours).self_attn, n).base_layer for n in ("q_proj", "k_proj", "v_proj"))
    assert q.operand is k.operand is v.operand
    assert tuple(q.operand.shape) == (32 + 16 + 16 + 16, 32 + 16)  # three adapters of rank 4 have room of 16


def test_the_products_of_a_step_are_those_without_fsdp2(world_of_one):
    ours, plain, _ = pair()
    lorakernels.apply(plain)
    counts = []
    for model in (ours, plain):
        step(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            step(model)
        found = {event.key: event.count for event in trace.key_averages()}
        counts.append([found.get(f"aten::{name}", 0) for name in ("mm", "addmm", "addmm_", "bmm")])
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_nothing_keeps_a_layer_s_operands_whole(world_of_one):
    model, gone = build("llama"), []
    lay_out = lorakernels.before_fully_shard(model)
    gc.disable()
    try:
        for part in layers(model):
            lay_out(part)
            storages = {m.operand.untyped_storage()._cdata for m in part.modules() if isinstance(m, HeldLinear)}
            fully_shard(part, ignored_params={p for p in part.parameters() if p.requires_grad})
            held = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
            gone.append(len(storages) == 4 and not storages & {t.untyped_storage()._cdata for t in held})
    finally:
        gc.enable()
    assert gone == [True, True]


def test_what_is_laid_out_otherwise_is_right_and_not_merged(world_of_one):
    plain = build("llama")
    ours = sharded(deepcopy(plain))
    lorakernels.apply(ours, merge_projections=False)
    assert of_groups(ours) == [(1, False)] * 3 + [(1, True)] + [(1, False)] * 2 + [(1, True)]
    assert_like_peft(ours, plain)
    lorakernels.remove(ours)
    apart, _, report = pair(merge_projections=False)
    assert of_groups(apart) == [(1, True)] * 7 and not report.left
    assert_like_peft(apart, plain)


def test_an_adapter_of_another_rank_has_no_room_and_is_right(world_of_one):
    plain = build("llama")
    ours = deepcopy(plain)
    for model in (plain, ours):
        torch.manual_seed(0)
        wide = deepcopy(model.peft_config["default"])
        wide.r, wide.init_lora_weights = 40, False
        model.add_adapter("wide", wide)
    ours = sharded(ours)
    for model in (plain, ours):
        model.set_adapter("wide")
    report = lorakernels.apply(ours)
    assert not report.left and of_groups(ours) == [(1, False)] * 7
    assert_like_peft(ours, plain)


def test_peft_itself_computes_with_the_weights_in_the_operand(world_of_one):
    ours, plain, _ = pair()
    with ours.disable_adapter(), plain.disable_adapter(), torch.no_grad(), pytest.warns(match="adapters are disabled"):
        torch.testing.assert_close(ours(**batch()).loss, plain(**batch()).loss)
    lorakernels.remove(ours)
    assert not bound(ours)
    assert_like_peft(ours, plain)
    lorakernels.apply(ours)
    assert_like_peft(ours, plain)


def test_a_weight_is_there_while_its_layer_is_gathered(world_of_one):
    ours, plain, _ = pair()
    up = layer(ours).mlp.up_proj.base_layer
    with pytest.raises(RuntimeError, match="this weight lies in an operand that FSDP2 shards"):
        _ = up.weight
    layer(ours).unshard()
    assert torch.equal(up.weight, layer(plain).mlp.up_proj.base_layer.weight)


def test_it_comes_before_apply():
    model = build("llama")
    lorakernels.apply(model)
    with pytest.raises(RuntimeError, match="apply was called on this model before"):
        lorakernels.before_fully_shard(model)


@pytest.mark.parametrize("family", ["mixtral", "phi3"])
def test_families_whose_layers_have_other_parts(world_of_one, family):
    """Experts, which are left to the model; q, k, v in one linear, and gate and up."""
    ours, plain, _ = pair(family)
    assert [held for _, held in of_groups(ours)] == [True] * (2 if family == "mixtral" else 4)
    assert_like_peft(ours, plain)
