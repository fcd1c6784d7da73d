"""A model that FSDP2 has sharded: every part runs on our kernels, with the weights that were gathered just before."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from pairs import bound, layer, step
from tiny_models import build
from torch.distributed.fsdp import fully_shard


@pytest.fixture
def world_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(model, adapters):
    ignored = None if adapters else {p for p in model.parameters() if p.requires_grad}
    for part in (*model.base_model.model.model.layers, model):
        fully_shard(part, ignored_params=ignored)
    return model


def parts(model):
    return [p for p in model.parameters() if hasattr(p, "to_local") and p.dim() == 2]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second with biases
def test_all_parts_are_ours_and_follow_the_parts_that_are_stored(world_of_one, family, adapters):
    plain = build(family)
    ours, one = sharded(deepcopy(plain), adapters), deepcopy(plain)
    report = lorakernels.apply(ours)
    assert not report.left and report.counts["qkv"] == report.counts["mlp"] == 2, report
    whole = lorakernels.apply(one)
    assert report.counts == whole.counts
    before = like_peft(ours, plain)
    with torch.no_grad():  # as a load of other weights does: whatever was packed before would be old
        for part in parts(ours):
            part.to_local().mul_(0.5)
        for p in plain.parameters():
            if p.dim() == 2 and (adapters or not p.requires_grad):
                p.mul_(0.5)
    assert like_peft(ours, plain) != pytest.approx(before, rel=1e-3)
    assert not lorakernels.status(ours).left and lorakernels.status(ours).fused["layer"] == 4
    lorakernels.remove(ours)
    assert not bound(ours)
    like_peft(ours, plain)


def like_peft(ours, plain):
    """The loss of both, whose gradients are alike."""
    (loss, got), (wanted_loss, wanted) = step(ours), step(plain)
    assert loss == pytest.approx(wanted_loss, rel=1e-5) and set(got) == set(wanted)
    for name, gradient in wanted.items():
        mine = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item() + 1e-9, msg=name)
    return loss


def test_a_weight_that_is_not_gathered_is_left_to_peft(world_of_one):
    """Outside of a layer's call, which gathers."""
    ours = sharded(build("llama"), False)
    lorakernels.apply(ours)
    assert layer(ours)._lorakernels.what_changed() == "a sharded base weight is not gathered (FSDP)"
    step(ours)
    assert layer(ours)._lorakernels.what_changed() == "a sharded base weight is not gathered (FSDP)"
