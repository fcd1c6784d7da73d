"""Whole models: every family against plain PEFT, toggles, and everything that has to be left to PEFT."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import exhaustive
from lorakernels import tune
from lorakernels.nodes import mlp_node
from lorakernels.nodes.projection import Projection
from lorakernels.ops.dropout import dropped
from lorakernels.runtime import INTERPRET
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, LINEARS, batch, build, share_masks, step, worst


def reference(model, data, **kwargs):
    return step(deepcopy(model).to(torch.float32), data, **kwargs)


@pytest.mark.parametrize(
    ("padded", "family"),  # in turns over the families; in Triton's interpreter without padding
    [
        (padded, family) if padded == number % 2 or INTERPRET else exhaustive(padded, family)
        for padded in (False, True)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_same_as_peft_in_float32(family, padded):
    layers = 1 if INTERPRET else 2  # in the interpreter each takes seconds
    model, data = build(family, sizes={"num_hidden_layers": layers}), batch(padded=padded)
    loss, grads = step(deepcopy(model), data)
    report = lorakernels.apply(model)
    parts = {"qkv", "o", "rms_norm", "rope", "linear_cross_entropy"} | ({"mlp"} if family != "mixtral" else set())
    assert set(report.counts) == parts
    assert report.counts["qkv"] == report.counts["o"] == layers and report.counts["rms_norm"] == layers + 1
    got, got_grads = step(model, data)
    assert abs(got - loss) < 2e-5 * abs(loss)
    assert worst(got_grads, grads) < 1e-4
    lorakernels.remove(model)


LOW = [("bfloat16", "same"), ("float16", "float32"), ("bfloat16", "float32"), ("float16", "same")]


@pytest.mark.parametrize(
    ("name", "adapters", "family"),  # the first two in turns over the families
    [
        pytest.param(*how, family, marks=[] if place == number % 2 else [pytest.mark.exhaustive])
        for place, how in enumerate(LOW)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_not_less_exact_than_peft(family, name, adapters):
    """In low precision: no gradient further from float32 than twice PEFT's own."""
    model, data = build(family, getattr(torch, name), autocast_adapter_dtype=adapters == "float32"), batch(4, 16)
    loss, grads = reference(model, data)
    plain_loss, plain = step(deepcopy(model), data)
    lorakernels.apply(model)
    got_loss, got = step(model, data)
    assert all(g.dtype == plain[n].dtype for n, g in got.items())
    eps = torch.finfo(getattr(torch, name)).eps
    assert worst(got, grads) <= 2 * worst(plain, grads) + eps
    assert abs(got_loss - loss) <= 2 * abs(plain_loss - loss) + eps * abs(loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_remove_is_bitwise(family):
    model, data = build(family), batch()
    model.eval()
    before = model(**data)
    forwards = {n: m.forward.__func__ for n, m in model.named_modules()}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    lorakernels.apply(model)
    model.train()
    step(model, data)
    model.eval()
    lorakernels.remove(model)
    after = model(**data)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert all(m.forward.__func__ is forwards[n] and "_lorakernels" not in m.__dict__ for n, m in model.named_modules())
    assert all(torch.equal(t, state[n]) and t.is_contiguous() for n, t in model.state_dict().items())
    with pytest.raises(RuntimeError, match="not called"):
        lorakernels.remove(model)


SWITCHES = ["mlp", "qkv", "o", "rms_norm", "rope", "linear_cross_entropy"]


@pytest.mark.parametrize("family", ["llama", *(exhaustive(f) for f in ("qwen3", "gemma2", "phi3", "mixtral"))])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("switch", SWITCHES)
def test_each_part_is_a_toggle(family, switch, alone):
    model, data = build(family), batch()
    loss, grads = step(deepcopy(model), data)
    report = lorakernels.apply(model, **{s: (s == switch) == alone for s in SWITCHES})
    if family == "mixtral" and switch == "mlp" and alone:
        assert report.total == 0 and {e.part for e in report.left} == {"mlp"}
    elif alone:
        assert set(report.counts) == {switch}
    else:
        assert switch not in report.counts and report.total > 0
    got, got_grads = step(model, data)
    assert abs(got - loss) < 2e-5 * abs(loss)
    assert worst(got_grads, grads) < 1e-4


@pytest.mark.parametrize("form", ["one", "addmm", "plain", "fused"])
@pytest.mark.parametrize(
    ("merge", "one_gemm"), [(True, True), (False, False), exhaustive(True, False), exhaustive(False, True)]
)
def test_every_form_of_the_projections(form, merge, one_gemm):
    model, data = build("qwen2"), batch()
    _, grads = step(deepcopy(model), data)
    lorakernels.apply(model, one_gemm=one_gemm, merge_projections=merge)
    with tune.forced(form):
        assert worst(step(model, data)[1], grads) < 1e-4


def test_eight_bit_is_left_to_peft():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
    base = build("llama").unload()
    for layer in base.model.layers:
        old = layer.self_attn.q_proj
        new = bitsandbytes.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
        new.weight = bitsandbytes.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        layer.self_attn.q_proj = new.to("cpu")  # which quantizes it
    base.is_loaded_in_8bit = True
    model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)).train()
    loss, grads = step(model, batch())
    report = lorakernels.apply(model)
    assert {left.reason for left in report.left} >= {
        "q_proj: 8-bit weights are left to PEFT: their product needs bitsandbytes' own kernel"
    }
    got_loss, got = step(model, batch())
    assert float(got_loss) == pytest.approx(float(loss), rel=1e-5) and worst(got, grads) < 1e-4


def test_fp8_stays_within_its_error():
    model, data = build("llama"), batch()
    loss, grads = step(deepcopy(model), data)
    lorakernels.apply(model, fp8=True)
    got, got_grads = step(model, data)
    assert 0 < abs(got - loss) < 0.05 * loss
    norms = [(torch.cat([g.flatten() for g in t.values()])) for t in (got_grads, grads)]
    assert (norms[0] - norms[1]).norm() / norms[1].norm() < 0.3


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj"], ["down_proj"], ["gate_proj", "k_proj"]])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_partial_targets(targets, family):
    model, data = build(family, targets=targets), batch()
    _, grads = step(deepcopy(model), data)
    lorakernels.apply(model)
    assert worst(step(model, data)[1], grads) < 1e-4


LORA = [
    {"rank_pattern": {"q_proj": 7, "up_proj": 1, "layers.0.self_attn.v_proj": 20}, "alpha_pattern": {"k_proj": 3}},
    {"r": 9, "use_rslora": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"modules_to_save": ["lm_head"]},
    {"r": 256},
]


@pytest.mark.parametrize("lora", LORA, ids=lambda d: "-".join(d))
def test_lora_configurations(lora):
    family = "qwen2" if "bias" in lora else "llama"
    if lora.get("lora_bias"):
        lora = {**lora, "targets": ["q_proj", "v_proj"]}
        family = "qwen2"
    model, data = build(family, **lora), batch()
    _, grads = step(deepcopy(model), data)
    report = lorakernels.apply(model)
    assert report.counts["qkv"] == 2
    assert worst(step(model, data)[1], grads) < 1e-4


def test_dropout_with_the_masks_of_peft(monkeypatch):
    """PEFT's dropouts and ours are given the same seeds: q, k, v each their own, as PEFT draws them."""
    model, data = build("llama", lora_dropout=0.3), batch()
    plain = deepcopy(model)
    lorakernels.apply(model)
    with monkeypatch.context() as m:
        share_masks(plain, m)
        _, grads = step(plain, data)
        assert worst(step(model, data)[1], grads) < 1e-4
    assert not torch.equal(step(model, data)[0], step(model, data)[0]), "masks must change from step to step"
    model.eval(), plain.eval()
    assert torch.allclose(model(**data).logits, plain(**data).logits, atol=1e-5)


def test_every_linear_draws_a_mask_of_its_own(monkeypatch):
    """PEFT draws one for each: what a whole model draws by itself in one forward."""
    drawn, original = [], Projection.seeds

    def remember(self, device):
        drawn.append((self, original(self, device)))
        return drawn[-1][1]

    monkeypatch.setattr(Projection, "seeds", remember)
    model = build("llama", lora_dropout=0.3)
    lorakernels.apply(model)
    step(model, batch())
    ones, masks = torch.ones(18, 32), {}
    for group, seeds in drawn:
        assert len(seeds) == len(group.members)
        masks |= {m.name: dropped(ones, s, m.dropout) for m, s in zip(group.members, seeds, strict=True)}
    names = list(masks)
    assert len(names) == 14 and sum(name.endswith(("q_proj", "k_proj", "v_proj")) for name in names) == 6
    assert not [(a, b) for i, a in enumerate(names) for b in names[:i] if torch.equal(masks[a], masks[b])]


def test_disabled_merged_and_switched_adapters():
    model, data = build("llama"), batch()
    model.add_adapter("other", model.peft_config["default"])
    lorakernels.apply(model)
    model.eval()
    plain = deepcopy(model)
    lorakernels.remove(plain)
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.allclose(model(**data).logits, plain(**data).logits, atol=1e-6)
    for safe in (False, True):
        before = model(**data).logits
        model.merge_adapter(safe_merge=safe), plain.merge_adapter(safe_merge=safe)
        assert torch.allclose(model(**data).logits, plain(**data).logits, atol=1e-6)
        model.unmerge_adapter(), plain.unmerge_adapter()
        assert torch.allclose(model(**data).logits, before, atol=1e-4), "after unmerging our path runs again"
    model.set_adapter("other"), plain.set_adapter("other")
    assert torch.allclose(model(**data).logits, plain(**data).logits, atol=1e-6)
    model.set_adapter("default"), plain.set_adapter("default")
    model.train(), plain.train()
    assert worst(step(model, data)[1], step(plain, data)[1]) < 1e-4


@pytest.mark.parametrize("lora, reason", [({"use_dora": True}, "Dora"), ({"targets": ["lm_head"]}, "head")])
def test_what_is_left_says_why(lora, reason):
    model, data = build("llama", **lora), batch()
    wanted = step(deepcopy(model), data)
    report = lorakernels.apply(model)
    assert any(reason.lower() in e.reason.lower() for e in report.left), str(report)
    assert reason.lower() in str(report).lower()
    assert worst(step(model, data)[1], wanted[1]) < 1e-4


def test_several_active_adapters_hooks_and_unknown_models():
    model, data = build("llama"), batch()
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    report = lorakernels.apply(model)
    assert all("2 adapters" in e.reason for e in report.left if e.part in ("qkv", "o", "mlp"))
    lorakernels.remove(model)
    model = build("llama")
    seen = []
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *_: seen.append(1))
    report = lorakernels.apply(model)
    assert any("hooks" in e.reason and "layers.0" in e.name for e in report.left)
    assert report.counts["mlp"] == 1
    step(model, data)
    assert seen == [1]
    later = model.base_model.model.model.layers[1].self_attn.q_proj
    later.register_forward_hook(lambda *_: seen.append(2))
    step(model, data)
    assert 2 in seen, "a hook that comes later must be called too"
    report = lorakernels.apply(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert report.total == 0 and str(report) == "changed: nothing"


@pytest.mark.parametrize(
    ("family", "reentrant", "dropout"),  # how a layer runs again does not depend on the family
    [
        *(("llama", reentrant, dropout) for reentrant in (True, False) for dropout in (0.0, 0.2)),
        ("gemma2", False, 0.2),
        ("mixtral", True, 0.2),
        *(exhaustive("gemma2", *how) for how in ((True, 0.0), (True, 0.2), (False, 0.0))),
        *(exhaustive("mixtral", *how) for how in ((True, 0.0), (False, 0.0), (False, 0.2))),
    ],
)
def test_gradient_checkpointing(family, reentrant, dropout):
    model, data = build(family, lora_dropout=dropout), batch()
    lorakernels.apply(model)
    torch.manual_seed(7)
    loss, grads = step(model, data)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = []
    layer = model.base_model.model.model.layers[0]
    plain = layer._gradient_checkpointing_func
    layer._gradient_checkpointing_func = lambda *a, **k: calls.append(1) or plain(*a, **k)
    torch.manual_seed(7)
    got, got_grads = step(model, data, use_cache=False)
    assert calls == [1], "the layer was not checkpointed"
    assert torch.equal(got, loss) and worst(got_grads, grads) < 1e-6


@pytest.mark.parametrize(("reentrant", "times"), [(False, 2), (True, 4)])
def test_a_checkpoint_s_second_pass_runs_no_down_projection(monkeypatch, reentrant, times):
    """Two layers. Nothing that backward needs comes of it, and a reentrant checkpoint runs all of a layer again."""
    model, data, runs = build("llama"), batch(), []
    lorakernels.apply(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    run = mlp_node._down
    monkeypatch.setattr(mlp_node, "_down", lambda *a: runs.append(1) or run(*a))
    step(model, data, use_cache=False)
    assert len(runs) == times


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast(dtype):
    model, data = build("llama", getattr(torch, dtype), autocast_adapter_dtype=True), batch(4, 16)
    _, wide = reference(model, data)
    plain = deepcopy(model)
    lorakernels.apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = step(model, data)[1], step(plain, data)[1]
    assert worst(got, wide) <= 2 * worst(want, wide) + 0.01


def test_loss_arguments():
    model, data = build("llama"), batch()
    plain = deepcopy(model)
    lorakernels.apply(model)
    for extra in ({"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(9)}):
        assert torch.allclose(model(**data, **extra).loss, plain(**data, **extra).loss, atol=1e-5)
    seven = {**data, "labels": data["labels"].clamp_min(7)}
    assert torch.allclose(model(**seven, ignore_index=7).loss, plain(**seven, ignore_index=7).loss, atol=1e-5)
    shifted = torch.nn.functional.pad(data["labels"], (0, 1), value=-100)[..., 1:]
    assert torch.allclose(model(**data, shift_labels=shifted).loss, plain(**data).loss, atol=1e-5)
    out = model(**data)
    assert torch.allclose(out.logits[..., :3], plain(**data).logits[..., :3], atol=1e-4), "logits on demand"
    assert torch.argmax(out.logits, -1).shape == data["input_ids"].shape and out.logits.shape[-1] == 101
    assert isinstance(model(**data, return_dict=False), tuple)
    assert model(data["input_ids"]).loss is None
    model.eval()
    assert isinstance(model(**data).logits, torch.Tensor)


def test_attentions_hidden_states_and_generation():
    model, data = build("llama"), batch()
    plain = deepcopy(model)
    for m in (model, plain):
        m.base_model.model.set_attn_implementation("eager")
    lorakernels.apply(model)
    a, b = (m(**data, output_attentions=True, output_hidden_states=True) for m in (model, plain))
    assert len(a.attentions) == 2 and all(
        torch.allclose(x, y, atol=1e-5) for x, y in zip(a.attentions, b.attentions, strict=True)
    )
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(a.hidden_states, b.hidden_states, strict=True))
    model.eval(), plain.eval()
    ids = data["input_ids"]
    kw = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(input_ids=ids, **kw), plain.generate(input_ids=ids, **kw))


def test_save_pretrained_is_peft_s(tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file

    model, data = build("llama"), batch()
    model.save_pretrained(tmp_path / "plain")
    base = deepcopy(model).unload()
    lorakernels.apply(model)
    model.save_pretrained(tmp_path / "ours")
    a, b = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("plain", "ours"))
    assert set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)
    model.eval()
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert torch.allclose(loaded(**data).logits, model(**data).logits, atol=1e-5)
    model.base_model.model.save_pretrained(tmp_path / "base")  # weights that are views of one buffer
    state = load_file(tmp_path / "base" / "model.safetensors")
    own = model.base_model.model.state_dict()
    assert set(state) == set(own) and all(torch.equal(t, own[n]) for n, t in state.items())


@pytest.mark.parametrize("merge", [True, False])
def test_unloading_leaves_no_adapter_behind(merge):
    """PEFT puts other modules where ours were: the plan must notice."""
    model, data = build("llama").eval(), batch()
    plain = deepcopy(model)
    lorakernels.apply(model)
    model(**data)
    a, b = (m.merge_and_unload() if merge else m.unload() for m in (model, plain))
    assert torch.allclose(a(**data).logits, b(**data).logits, atol=1e-6)


def test_apply_twice_and_wrong_names():
    model = build("llama")
    lorakernels.apply(model)
    with pytest.raises(RuntimeError, match="before"):
        lorakernels.apply(model)
    with pytest.raises(ValueError, match="known are"):
        lorakernels.apply(build("llama"), sdpa_backends="fast")


def test_two_models_in_one_process():
    """Instances only: a second, plain model of the same classes does not notice."""
    model, plain, data = build("llama"), build("llama"), batch()
    wanted = step(plain, data)
    lorakernels.apply(model)
    got = step(plain, data)
    assert torch.equal(got[0], wanted[0]) and worst(got[1], wanted[1]) == 0


def test_sdpa_backends_are_pinned():
    model, data = build("llama"), batch()
    _, grads = step(deepcopy(model), data)
    lorakernels.apply(model, sdpa_backends=["cudnn", "flash", "math"])
    assert worst(step(model, data)[1], grads) < 1e-4


def test_training_follows_peft():
    """Twenty optimizer steps: the losses stay together, so B and A are read anew at each of them."""
    model, data = build("llama"), batch(4, 12)
    plain = deepcopy(model)
    lorakernels.apply(model)
    losses = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(20):
            losses[-1].append(step(m, data)[0].item())
            optimizer.step()
    assert losses[1][-1] < 0.8 * losses[1][0]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 2e-3 * losses[1][0]


@pytest.mark.parametrize("off", [[], ["rms_norm"], ["rms_norm", "qkv"], ["rms_norm", "mlp"], ["rms_norm", "qkv", "o"]])
def test_adapters_are_loaded_together(off, monkeypatch):
    """One launch a layer, or a module where not all of a layer is ours, instead of one an adapter."""
    model = build("llama")
    wanted = step(model, batch())
    lorakernels.apply(model, **dict.fromkeys(off, False))

    def load_adapter(*adapter):
        raise AssertionError("loaded by itself")

    monkeypatch.setattr("lorakernels.nodes.operand.load_adapter", load_adapter)
    loss, grads = step(model, batch())
    assert torch.allclose(loss, wanted[0], atol=1e-5) and worst(grads, wanted[1]) < 1e-3
