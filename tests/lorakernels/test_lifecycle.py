"""`remove`, copies, what is saved, and who wraps the model: whatever comes between, nothing of ours is left behind."""

import gc
import io
import weakref
from copy import deepcopy

import lorakernels
import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from pairs import assert_like_peft, bound, layer, pair, step, strided
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import LINEARS, batch, build, gradients
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def test_a_backward_after_remove_leaves_the_model_as_it_is():
    ours, plain = pair()
    loss = ours(**batch()).loss
    assert strided(ours)
    lorakernels.remove(ours)
    loss.backward()
    assert not strided(ours)
    got, (_, wanted) = gradients(ours), step(plain)
    assert all(torch.allclose(got[n], g, rtol=1e-4, atol=1e-6) for n, g in wanted.items())


def test_remove_in_inference_mode():
    ours, plain = pair()
    with torch.inference_mode():
        lorakernels.remove(ours)
    assert_like_peft(ours, plain)


def test_remove_leaves_the_wrappers_of_others():
    def wrap(model):
        own = layer(model).forward
        layer(model).forward = lambda *args, **kwargs: own(*args, **kwargs) * 2

    ours, plain = pair()
    for model in (ours, plain):
        wrap(model)
        add_hook_to_module(layer(model).mlp, AlignDevicesHook("cpu"))
    lorakernels.remove(ours)
    assert_like_peft(ours, plain)
    remove_hook_from_module(layer(ours).mlp)
    assert_like_peft(ours, plain)
    lorakernels.apply(ours)
    lorakernels.remove(ours)
    assert not strided(ours)


def test_remove_when_the_wrapper_is_gone():
    ours, plain = pair()
    merged, wanted = (m.eval().merge_and_unload() for m in (ours, plain))
    lorakernels.remove(merged)
    assert not bound(merged) and not strided(merged)
    data = batch()
    torch.testing.assert_close(merged(**data).logits, wanted(**data).logits)


def test_layers_that_have_left_the_model_are_forgotten():
    """As a pipeline gives back those of other stages: else their weights live as long as the model."""
    ours, plain = pair()
    gone = [weakref.ref(p) for p in ours.get_base_model().model.layers[-1].parameters()]
    for model in (ours, plain):
        del model.get_base_model().model.layers[-1]
    gc.collect()
    assert all(p() is not None for p in gone)
    lorakernels.forget(ours)
    gc.collect()
    assert all(p() is None for p in gone)
    assert_like_peft(ours, plain)
    assert bound(ours) and strided(ours)
    lorakernels.remove(ours)
    assert not bound(ours) and not strided(ours)
    assert_like_peft(ours, plain)
    with pytest.raises(RuntimeError, match="apply was not called on this model"):
        lorakernels.forget(ours)


def test_apply_under_and_inside_a_wrapper():
    base = build("llama").unload().requires_grad_(False)
    lorakernels.apply(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS))
    with pytest.raises(RuntimeError, match=r"call lorakernels\.remove first"):
        lorakernels.apply(model)
    lorakernels.remove(model)
    assert not bound(model) and not strided(model)
    lorakernels.apply(model)
    with pytest.raises(RuntimeError, match=r"call lorakernels\.remove first"):
        lorakernels.apply(model.base_model.model)
    lorakernels.remove(model)
    for function in (lorakernels.apply, lorakernels.remove):
        with pytest.raises(TypeError, match="takes a model"):
            function(None)
    with pytest.raises(TypeError, match="mlp takes True or False, not 'no'"):
        lorakernels.apply(model, mlp="no")


def test_copies_that_peft_makes_of_our_modules():
    ours, plain = pair()
    for model in (ours, plain):
        torch.manual_seed(3)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEARS, modules_to_save=["norm"])
        model.add_adapter("b", config)
    assert_like_peft(ours, plain)
    lorakernels.remove(ours)
    assert not bound(ours)


def test_what_writes_state_dicts(tmp_path):
    ours, plain = pair()
    wanted = {n: t.clone() for n, t in plain.state_dict().items()}
    Accelerator(cpu=True).save_model(ours, tmp_path)
    save_file(ours.state_dict(), tmp_path / "by_hand.safetensors")
    for file in ("model.safetensors", "by_hand.safetensors"):
        got = load_file(tmp_path / file)
        assert set(got) == set(wanted) and all(torch.equal(got[n], t) for n, t in wanted.items())
    state = ours.state_dict(keep_vars=True)
    assert all(isinstance(t, nn.Parameter) for n, t in state.items() if n.endswith("weight"))
    lorakernels.remove(ours)
    assert not layer(ours).self_attn.q_proj.base_layer._state_dict_hooks


def test_save_pretrained_copies_no_frozen_weight(tmp_path, monkeypatch):
    ours, _ = pair()
    copied = []
    own = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t, **kw: (copied.append(t.shape), own(t, **kw))[1])
    ours.save_pretrained(tmp_path)
    assert tuple(layer(ours).self_attn.q_proj.base_layer.weight.shape) not in {tuple(s) for s in copied}


@pytest.mark.parametrize("original", [True, False])
def test_fsdp_cannot_flatten_what_was_moved(original, tmp_path):
    ours, plain = pair()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        kwargs = {"use_orig_params": original, "device_id": torch.device("cpu")}
        if not original:  # which wants one answer for all that it flattens
            for model in (ours, plain):
                model.requires_grad_(False)
        with pytest.raises(RuntimeError, match="FSDP has flattened"):
            FullyShardedDataParallel(ours, **kwargs)(**batch()).loss.item()
        wrapped = FullyShardedDataParallel(plain, **kwargs)
        wanted = wrapped(**batch()).loss.item()
        report = lorakernels.apply(wrapped, linear_cross_entropy=False)
        assert not {"qkv", "o", "mlp"} & set(report.counts)
        assert wrapped(**batch()).loss.item() == pytest.approx(wanted)
    finally:
        torch.distributed.destroy_process_group()


def test_a_copy_is_removed_from_itself():
    ours, plain = pair()
    other = deepcopy(ours)
    lorakernels.remove(other)
    forwards = [sum("forward" in m.__dict__ for m in model.modules()) for model in (ours, other)]
    assert forwards[0] > 0 and forwards[1] == 0
    assert_like_peft(other, plain)
    assert_like_peft(ours, plain)
    lorakernels.remove(ours)
    assert_like_peft(ours, plain)


def test_a_pickle_is_refused_in_one_line():
    ours, _ = pair()
    with pytest.raises(TypeError, match=r"lorakernels\.remove first"):
        torch.save(ours, io.BytesIO())
    lorakernels.remove(ours)
    torch.save(ours, io.BytesIO())
