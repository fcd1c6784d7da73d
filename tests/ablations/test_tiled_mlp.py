"""The MLP by tiles: equal to the whole one, and under dropout backward uses the masks of its own forward."""

import importlib.util

import pytest
import torch
from helpers import PEFT
from helpers import deep_arm as arm
from torch import nn

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.plan import registry
from lorabench_ablations.tiling import tile

LAYERS = 3
THREE = {"tiled_mlp": {"shards": 3}}
DROPOUT = {"overrides": ("lora.lora_dropout=0.3",)}


def gradients(made, seed=1):
    """Of one forward and backward that begins at this state of the random numbers."""
    torch.manual_seed(seed)
    made.step.backward(made.step.forward(made.step.batches[0]))
    return made.gradients()


OTHERS = [(), ("gradient_checkpointing",), ("selective_checkpointing",), ("packing",)]
FAST = [(2, OTHERS[0]), *((3, others) for others in OTHERS), (32, OTHERS[0]), (32, OTHERS[3])]  # 3 tiles are uneven


@pytest.mark.parametrize(
    ("shards", "others"),
    [
        pytest.param(shards, others, marks=[] if (shards, others) in FAST else [pytest.mark.exhaustive])
        for shards in (2, 3, 32)
        for others in OTHERS
    ],
)
def test_loss_and_gradients_are_peft_s_for_several_samples_too(shards, others):
    """Axolotl's tiles split a batch of several the wrong way."""
    names = [n for n in PEFT if n != "padding" or "packing" not in others]
    plain, made = one_step(arm(*names, *others)), arm(*names, *others, {"tiled_mlp": {"shards": shards}})
    ours = one_step(made)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=2e-4, atol=1e-7)
    found = Evidence(made, made.patched["tiled_mlp"], None)
    toggle = next(a for a in made.ablations if a.name == "tiled_mlp")
    assert toggle.audit(found) == LAYERS
    assert toggle.notes(found)["tiled_mlp"] == {"mlps": LAYERS, "tiles": shards}


@pytest.mark.parametrize("others", [(), ("gradient_checkpointing",)])
def test_under_dropout_backward_has_the_masks_of_forward(others):
    """Held to the same tiles computed once and kept: bit for bit, from the same random numbers."""
    kept = arm(*PEFT, *others, **DROPOUT)
    for name, mlp in kept.model.named_modules():
        if name.endswith(".mlp"):
            own = mlp.forward
            mlp.forward = lambda x, own=own: torch.cat(
                [own(part) for part in x.flatten(0, -2).split(11)]).view(x.shape)  # fmt: skip
    wanted, ours = gradients(kept), gradients(arm(*PEFT, *others, THREE, **DROPOUT))
    assert wanted.keys() == ours.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-8)
    other = gradients(arm(*PEFT, *others, THREE, **DROPOUT), seed=2)
    assert any(not torch.allclose(ours[n], other[n], rtol=0.01) for n in ours), "no mask was drawn"


def test_backward_leaves_the_random_numbers_as_they_were():
    made = arm(*PEFT, THREE, **DROPOUT)
    loss = made.step.forward(made.step.batches[0])
    state = torch.get_rng_state()
    made.step.backward(loss)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs the package liger_kernel")
def test_tiles_that_keep_no_random_numbers_would_be_seen():
    """Liger's, as DeepSpeed's and Axolotl's: right without dropout, wrong with it."""
    try:
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
    except ImportError as error:  # its kernels are Triton's
        pytest.skip(str(error))
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 8, 16), torch.randn(2, 8, 16)

    def found(p, way):
        torch.manual_seed(3)
        mlp = nn.Sequential(nn.Linear(16, 32), nn.Dropout(p), nn.Linear(32, 16))
        if way == "ours":
            tile(mlp, lambda rows: 2, {}, "mlp")
        run = (
            mlp
            if way != "liger"
            else lambda x: apply_tiled_mlp(lambda m, part: nn.Sequential.forward(m, part), mlp, x, 2)
        )
        if way == "kept":
            run = lambda x: torch.cat([nn.Sequential.forward(mlp, t) for t in x.flatten(0, 1).split(8)]).view(x.shape)  # noqa: E731
        run(x.clone().requires_grad_()).backward(upstream)
        return mlp[0].weight.grad

    for way in ("ours", "liger"):
        torch.testing.assert_close(found(0.0, way), found(0.0, "kept"), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found(0.5, "ours"), found(0.5, "kept"), rtol=1e-4, atol=1e-6)
    kept = found(0.5, "kept")
    assert (found(0.5, "liger") - kept).norm() > 0.3 * kept.norm()


def test_less_is_kept_for_backward():
    def kept(*names):
        made, sizes = arm(*PEFT, *names, workload=Workload(name="test", kind="fixed", batch_size=2, seq_len=64)), {}
        frozen = {p.untyped_storage().data_ptr() for p in made.model.parameters()}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = made.step.forward(made.step.batches[0])
        made.step.backward(loss)
        return sum(size for place, size in sizes.items() if place not in frozen)

    assert kept(THREE) < 0.75 * kept()


def test_a_tile_that_divides_nothing_is_said():
    with pytest.raises(ValueError, match=r"shards: should be greater than 0, not 0"):
        registry.ablation({"tiled_mlp": {"shards": 0}})
    with pytest.raises(Unsupported, match="33 shards divide nothing: a micro-batch has 32 rows"):
        arm(*PEFT, {"tiled_mlp": {"shards": 33}})
    made = arm(*PEFT, "tiled_mlp")  # 32 rows, 64 wide
    one_step(made)
    with pytest.raises(NotApplied, match="one tile divides nothing"):
        made.ablations[-1].audit(Evidence(made, LAYERS, None))


@pytest.mark.parametrize("other", ["lora_kernels", "lora_mlp_kernel", "liger", "cuda_graph", "torch_compile"])
def test_what_cannot_go_with_it(other):
    assert conflict([registry.ablation("tiled_mlp"), registry.ablation(other)])
