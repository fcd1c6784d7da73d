"""Frozen weights in host memory: bit for bit the step without, at most two layers' weights on the device, and whoever
reads weights otherwise finds them."""

import contextlib
import gc
import weakref
from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels import LongContext
from lorakernels.model import decoder_layer
from lorakernels.model.offloaded import Offloaded
from tiny_models import batch, build, step, worst

LAYERS = 5
OPTIONS = {
    "weights": {"mlp_rows": 3},
    "both": {"mlp_rows": 64, "offload": True},
    "again": {"mlp_rows": 64, "keep_attention": False},
}


def pair(family="llama", options="weights", **kwargs):
    """(a model whose weights wait, the same with them on the device)."""
    alone = build(family, **{"sizes": {"num_hidden_layers": LAYERS}, **kwargs})
    ours = deepcopy(alone)
    lorakernels.apply(alone, long_context=LongContext(**OPTIONS[options]))
    report = lorakernels.apply(ours, long_context=LongContext(**OPTIONS[options], offload_weights=True))
    assert "offload_weights" not in {e.part for e in report.left}
    return ours, alone


def layers(model):
    return model.get_base_model().model.layers


def here(model):
    """The numbers of the layers whose weights are on the device, by the bytes of the buffers."""
    sizes = [[g.buffer.untyped_storage().nbytes() for g in layer._lorakernels.groups] for layer in layers(model)]
    assert all(all(of) or not any(of) for of in sizes)
    return [number for number, of in enumerate(sizes) if all(of)]


def same(one, two):
    assert one[0] == two[0] and one[1].keys() == two[1].keys()
    assert all(torch.equal(gradient, two[1][name]) for name, gradient in one[1].items())


@pytest.mark.parametrize(
    ("family", "options", "lora"),
    [
        ("llama", "weights", {}),
        ("llama", "both", {"dtype": torch.bfloat16, "autocast_adapter_dtype": True}),
        ("llama", "again", {"lora_dropout": 0.3}),
        ("llama", "weights", {"targets": ["q_proj", "down_proj"]}),
        pytest.param("gemma2", "both", {}, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", "weights", {}, marks=pytest.mark.exhaustive),
        pytest.param("phi3", "weights", {}, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", "both", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_are_bit_for_bit_those_without(family, options, lora):
    ours, alone = pair(family, options, **lora)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.02) for m in (ours, alone)]
    for _ in range(3):
        made = []
        for model, optimizer in zip((ours, alone), optimizers, strict=True):
            torch.manual_seed(7)
            made.append(step(model, batch()))
            optimizer.step()
        same(*made)


def test_two_layers_weights_are_on_the_device_at_the_most(monkeypatch):
    ours, _ = pair()
    seen, own = [], decoder_layer._fused_layer

    def watched(plan, *args, **kwargs):
        seen.append((list(layers(ours)).index(plan.module), here(ours)))
        return own(plan, *args, **kwargs)

    monkeypatch.setattr(decoder_layer, "_fused_layer", watched)
    assert here(ours) == []
    for first in ([0, 1], [0, 1]):
        step(ours, batch())
        forward = [(0, first), *((n, [n, n + 1]) for n in range(1, LAYERS - 1)), (LAYERS - 1, [LAYERS - 1])]
        backward = [*((n, [n - 1, n]) for n in range(LAYERS - 1, 0, -1)), (0, [0])]
        assert seen == forward + backward
        seen.clear()
    # The last layer's weights are still there when its backward begins, as the first one's at the next step.
    assert lorakernels.status(ours).fused["weights brought"] == 2 * (2 * LAYERS - 1) - 1


def test_a_step_that_was_broken_off_leaves_nothing_behind(monkeypatch):
    ours, alone = pair()
    own = decoder_layer._fused_layer

    def fails(plan, *args, **kwargs):
        if plan.module is layers(ours)[2]:
            raise KeyboardInterrupt
        return own(plan, *args, **kwargs)

    monkeypatch.setattr(decoder_layer, "_fused_layer", fails)
    with pytest.raises(KeyboardInterrupt):
        step(ours, batch())
    assert here(ours) == [2, 3]
    monkeypatch.undo()
    same(step(ours, batch()), step(alone, batch()))
    assert here(ours) == [0]


def test_evaluation_generation_and_a_disabled_adapter():
    ours, alone = pair()
    data = batch()
    for model in (ours, alone):
        model.eval()
    with torch.no_grad():
        assert torch.equal(ours(**data).logits, alone(**data).logits)
        ids = data["input_ids"][:1, :4]
        assert torch.equal(*(m.generate(ids, max_new_tokens=3, do_sample=False) for m in (ours, alone)))
        with pytest.warns(UserWarning, match="adapters are disabled"), ours.disable_adapter(), alone.disable_adapter():
            assert torch.equal(ours(**data).logits, alone(**data).logits)
    assert len(here(ours)) <= 2


@pytest.mark.parametrize("ours_again", [True, False], ids=["in evaluation", "by PEFT"])
def test_a_backward_of_a_forward_that_is_not_made_again_finds_the_weights(ours_again):
    ours, alone = pair()
    if ours_again:
        ours.eval(), alone.eval()
    else:
        for model in (ours, alone):
            model.get_base_model().model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)
    with contextlib.nullcontext() if ours_again else pytest.warns(UserWarning, match="has hooks"):
        same(step(ours, batch()), step(alone, batch()))
    assert here(ours) == (list(range(LAYERS)) if ours_again else [0, 1])


def test_a_state_dict_has_the_weights_and_peft_saves_the_adapters_alone(tmp_path):
    plain = build("llama", sizes={"num_hidden_layers": LAYERS})
    model = deepcopy(plain)
    lorakernels.apply(model, long_context=LongContext(offload_weights=True))
    step(model, batch())
    model.save_pretrained(tmp_path)
    assert here(model) == [0]
    found, wanted = model.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())
    step(model, batch())
    assert here(model) == [0]


def test_remove_gives_the_weights_back():
    plain = build("llama", sizes={"num_hidden_layers": LAYERS})
    model = deepcopy(plain)
    lorakernels.apply(model, long_context=LongContext(offload_weights=True))
    step(model, batch())
    lorakernels.remove(model)
    model.zero_grad()
    same(step(model, batch()), step(plain, batch()))
    for (name, weight), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert weight.is_contiguous() and torch.equal(weight, wanted), name


def test_remove_leaves_no_buffer_to_the_collector():
    model = build("llama")
    lorakernels.apply(model, long_context=LongContext(offload_weights=True))
    kept = [weakref.ref(g.buffer) for layer in layers(model) for g in layer._lorakernels.groups]
    gc.collect()
    gc.disable()
    try:
        lorakernels.remove(model)
        assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


def test_a_copy_has_weights_of_its_own():
    ours, alone = pair()
    step(ours, batch())
    copy = deepcopy(ours)
    same(step(copy, batch()), step(alone, batch()))
    lorakernels.remove(ours)
    same(step(copy, batch()), step(alone, batch()))


def test_weights_in_fp8_wait_too_and_those_in_4_bits_stay_and_are_reported():
    model = build("llama")
    assert not lorakernels.apply(model, long_context=LongContext(offload_weights=True), fp8=True).left
    assert here(model) == []
    step(model, batch())
    assert here(model) == [0]
    pytest.importorskip("bitsandbytes")
    from test_nf4 import nf4_model

    model = nf4_model()
    report = lorakernels.apply(model, long_context=LongContext(offload_weights=True))
    assert [(e.part, e.reason) for e in report.left] == [
        ("offload_weights", "quantized or sharded weights stay where they are")
    ]
    step(model, batch())
    assert not lorakernels.status(model).fused["weights brought"]


def test_the_weights_follow_a_model_that_moves(monkeypatch):
    """There is one device here, so a stand-in says that it is another."""
    ours, alone = pair()
    step(ours, batch())
    first = layers(ours)[0]._lorakernels.weights
    before = [g.buffer for g in first._groups]
    monkeypatch.setattr(Offloaded, "_device_of_model", lambda self: torch.device("cpu", 0))
    same(step(ours, batch()), step(alone, batch()))
    assert here(ours) == [0]
    assert all(g.buffer is not b for g, b in zip(first._groups, before, strict=True))
    monkeypatch.undo()
    for model in (ours, alone):
        lorakernels.remove(model)
    same(step(ours, batch()), step(alone, batch()))


@pytest.mark.gpu
def test_on_a_gpu():
    """Real streams: the steps without, and the device's memory between two of them."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "max_position_embeddings": 2048}
    alone = build("llama", torch.bfloat16, sizes={**sizes, "num_hidden_layers": 12}).cuda()
    ours = deepcopy(alone)
    ids = torch.randint(3, 101, (1, 1500), device="cuda")
    data = {"input_ids": ids, "labels": ids}
    frozen = sum(p.nbytes for p in layers(ours)[0].parameters() if not p.requires_grad)
    lorakernels.apply(alone, long_context=LongContext(offload=True))
    before = torch.cuda.memory_allocated()
    lorakernels.apply(ours, long_context=LongContext(offload=True, offload_weights=True))
    assert before - torch.cuda.memory_allocated() > 11.5 * frozen
    for _ in range(5):
        (loss, grads), (got, got_grads) = step(alone, data), step(ours, data)
        assert abs(got - loss) < 1e-3 * abs(loss) and worst(got_grads, grads) < 3e-2
    assert len(here(ours)) == 1


@pytest.mark.gpu
def test_a_model_that_was_never_whole_on_the_gpu():
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "num_hidden_layers": 12}
    alone = build("llama", torch.bfloat16, sizes=sizes)
    ours = deepcopy(alone)
    frozen = sum(p.nbytes for p in layers(ours)[0].parameters() if not p.requires_grad)
    data = {name: t.cuda() for name, t in batch().items()}
    held = torch.cuda.memory_allocated()
    lorakernels.apply(ours, long_context=LongContext(offload_weights=True))
    torch.cuda.reset_peak_memory_stats()
    ours.cuda()
    assert torch.cuda.max_memory_allocated() - held < 3 * frozen
    alone.cuda()
    lorakernels.apply(alone, long_context=True)
    for _ in range(2):
        (loss, grads), (got, got_grads) = step(alone, data), step(ours, data)
        assert abs(got - loss) < 1e-3 * abs(loss) and worst(got_grads, grads) < 3e-2
