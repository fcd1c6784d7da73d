"""Whatever is done to a model after `apply`, it computes what PEFT computes, or says in one line that it cannot.

Each case does the same to a model on our kernels and to its unpatched copy, then compares loss and every gradient.
"""

import functools
import tempfile
from copy import deepcopy

import lorakernels
import pytest
import torch
import transformers
from lorakernels.model import attention, decoder_layer
from lorakernels.model.lazy_logits import LazyLogits
from pairs import assert_like_peft, layer, pair, step, strided
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.utils.hotswap import hotswap_adapter
from tiny_models import COMMON, LINEARS, batch, build, gradients
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP


def adapter(model, name, **config):
    torch.manual_seed(2)
    config = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "init_lora_weights": False, **config}
    model.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **config))
    model.set_adapter(name)
    model.train()


def hook_attention(model):
    layer(model).self_attn.register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:]))


def hook_mlp(model):
    layer(model).mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_activation(model):
    layer(model).mlp.act_fn.register_forward_hook(lambda module, args, out: out * 2)


def replace_weight(model):
    base = layer(model).self_attn.q_proj.base_layer
    base.weight = nn.Parameter(base.weight.detach() * 1.5, requires_grad=False)


def train_weight(model):
    layer(model).self_attn.q_proj.base_layer.weight.requires_grad_()


def assign_weights(model):
    state = {n: t.clone() * (1.5 if "q_proj.base" in n else 1) for n, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for n, p in model.named_parameters():
        p.requires_grad_("lora_" in n)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized_weight(model):
    nn.utils.parametrize.register_parametrization(layer(model).self_attn.q_proj.base_layer, "weight", Doubled())


def parametrized_adapter(model):
    nn.utils.parametrize.register_parametrization(layer(model).self_attn.q_proj.lora_B["default"], "weight", Doubled())


def adapter_on_the_head(model):
    adapter(model, "b", target_modules=["lm_head", "q_proj"])


def another_kind_of_adapter(model):
    model.delete_adapter("default")
    adapter(model, "default", use_dora=True)


def another_rank(model):
    model.delete_adapter("default")
    adapter(model, "default", r=7)


def another_activation(model):
    layer(model).mlp.act_fn = nn.ReLU()


def another_epsilon(model):
    layer(model).input_layernorm.variance_epsilon = 0.5


def another_loss(model):
    @functools.wraps(ForCausalLMLoss)
    def twice(*args, **kwargs):
        return 2 * ForCausalLMLoss(*args, **kwargs)

    model.base_model.model.loss_function = twice


CHANGES = (
    hook_attention, hook_mlp, hook_activation, replace_weight, train_weight, assign_weights, parametrized_weight,
    parametrized_adapter, adapter_on_the_head,
    another_kind_of_adapter, another_rank, another_activation, another_epsilon, another_loss,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_after_apply(change):
    ours, plain = pair()
    before = step(plain)[0]
    for model in (ours, plain):
        change(model)
    assert_like_peft(ours, plain)
    if change not in (train_weight, adapter_on_the_head):
        assert step(plain)[0] != before, "the change has to show"


def another_base_layer(model):
    q = layer(model).self_attn.q_proj
    new = nn.Linear(q.in_features, q.out_features, bias=False).requires_grad_(False)
    new.weight.data.copy_(q.base_layer.weight * 3)
    q.base_layer = new


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def another_class_of_base_layer(model):
    layer(model).self_attn.q_proj.base_layer.__class__ = DoubledLinear


def another_class_of_mlp(model):
    layer(model).mlp.__class__ = DoubledMLP


def parametrized_norm(model):
    nn.utils.parametrize.register_parametrization(layer(model).input_layernorm, "weight", Doubled())


def parametrized_last_norm(model):
    nn.utils.parametrize.register_parametrization(model.base_model.model.model.norm, "weight", Doubled())


def hot_swapped(model):
    """An adapter of another rank under the same name; PEFT swaps the data and leaves the modules' sizes."""
    with tempfile.TemporaryDirectory() as folder:
        build("llama", seed=9, r=7).save_pretrained(folder)
        hotswap_adapter(model, folder, "default")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def hook_in_place(model):
    layer(model).register_forward_hook(lambda module, args, out: out.add_(1.0))


LATE = (
    another_base_layer, another_class_of_base_layer, another_class_of_mlp, parametrized_norm, parametrized_last_norm,
    hot_swapped, hook_in_place,
)  # fmt: skip


@pytest.mark.parametrize("change", LATE, ids=lambda f: f.__name__)
def test_another_module_in_its_place(change):
    ours, plain = pair()
    before, _ = step(plain)
    for model in (ours, plain):
        change(model)
    assert_like_peft(ours, plain)
    assert step(plain)[0] != before


def test_a_parametrized_bias():
    ours, plain = pair("qwen2")
    for model in (ours, plain):
        nn.utils.parametrize.register_parametrization(layer(model).self_attn.q_proj.base_layer, "bias", Doubled())
    assert_like_peft(ours, plain)


@pytest.mark.parametrize("late", [True, False])
def test_dropouts_of_phi3s_residual(late):
    def hook(model):
        layer(model).resid_attn_dropout.register_forward_hook(lambda module, args, out: out * 2)

    plain = build("phi3")
    ours = deepcopy(plain)
    before, _ = step(plain)
    for act in (lorakernels.apply, hook) if late else (hook, lorakernels.apply):
        act(ours)
    hook(plain)
    assert_like_peft(ours, plain)
    assert step(plain)[0] != before


def test_hooks_on_every_module_there_is():
    ours, plain = pair()
    before, _ = step(plain)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if type(module).__name__ == "LlamaMLP" else None
    )
    try:
        assert_like_peft(ours, plain)
        assert step(plain)[0] != before
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "name", ["LlamaAttention", "LlamaMLP", "LlamaRMSNorm", "LlamaDecoderLayer", "LlamaForCausalLM"]
)
def test_a_class_whose_forward_somebody_replaced(name, monkeypatch):
    kind = getattr(modeling_llama, name)
    own = kind.forward

    def doubled(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        if name == "LlamaForCausalLM":
            out.loss = out.loss * 2
            return out
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    monkeypatch.setattr(kind, "forward", doubled)
    plain = build("llama")
    ours = deepcopy(plain)
    assert any("was replaced" in left.reason for left in lorakernels.apply(ours).left)
    assert_like_peft(ours, plain)


def test_another_rope(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *args, **kwargs: (q, k))
    plain = build("llama")
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    assert "rope" not in report.counts and any(left.part == "rope" for left in report.left)
    assert_like_peft(ours, plain)


class ScaledLayer(modeling_llama.LlamaDecoderLayer):
    def forward(self, x, *args, **kwargs):
        return x + 0.3 * (super().forward(x, *args, **kwargs) - x)


class LlamaAttention(modeling_llama.LlamaAttention):  # of the same name
    pass


@pytest.mark.parametrize(
    "where, kind",
    [(lambda m: m, ScaledLayer), (lambda m: m.mlp, DoubledMLP), (lambda m: m.self_attn, LlamaAttention)],
    ids=["layer", "mlp", "attention"],
)
def test_a_class_of_somebody_s_own(where, kind):
    plain = build("llama")
    where(layer(plain)).__class__ = kind
    ours = deepcopy(plain)
    assert lorakernels.apply(ours).left
    assert_like_peft(ours, plain)


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.parametrize("function", [Swish(), transformers.activations.ACT2FN["gelu_10"]], ids=["swish", "gelu_10"])
def test_activations_that_are_nearly_known(function):
    plain = build("llama")
    layer(plain).mlp.act_fn = function
    layer(plain).mlp.gate_proj.base_layer.weight.data.mul_(10)
    ours = deepcopy(plain)
    assert any("activation" in left.reason for left in lorakernels.apply(ours).left)
    assert_like_peft(ours, plain)


def test_labels_that_are_shifted_and_flat():
    assert_like_peft(*pair(), lambda model: model(**batch(), shift_labels=batch()["labels"].flatten()).loss)


def test_logits_of_a_head_that_was_trained_on():
    ours, _ = pair()
    head = ours.base_model.model.lm_head
    head.weight.requires_grad_()
    out = ours(**batch())
    out.loss.backward()
    torch.optim.SGD([head.weight], lr=1.0).step()
    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        out.logits.sum()


def test_logits_compare_by_element_and_have_no_gradient_to_retain():
    ours, plain = pair()
    logits, wanted = (m(**batch()).logits for m in (ours, plain))
    assert (logits == logits).all() and not (logits != logits).any() and (logits == wanted).shape == wanted.shape
    assert len({logits, logits}) == 1
    with pytest.raises(RuntimeError, match="linear_cross_entropy=False"):
        logits.retain_grad()


def test_hidden_states_are_asked_for_once(monkeypatch):
    """transformers leaves its hooks behind; neither the states nor the kernels may be gone after that."""
    ours, plain = pair()
    calls = []
    own = attention.project
    for module in (attention, decoder_layer):
        monkeypatch.setattr(module, "project", lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))[1])
    for _ in range(2):
        states, wanted = (m(**batch(), output_hidden_states=True).hidden_states for m in (ours, plain))
        assert len(states) == len(wanted)
        for got, state in zip(states, wanted, strict=True):
            torch.testing.assert_close(got, state, rtol=1e-4, atol=1e-5)
    calls.clear()
    assert_like_peft(ours, plain)
    assert len(calls) == 4, "two layers, of which q, k, v and o"


def another_head_norm(model):
    old = layer(model).self_attn.k_norm
    layer(model).self_attn.k_norm = nn.RMSNorm(old.weight.numel(), eps=0.5).requires_grad_(False)


def hook_head_norm(model):
    layer(model).self_attn.q_norm.register_forward_hook(lambda module, args, out: out * 2)


def train_head_norm(model):
    layer(model).self_attn.q_norm.weight.requires_grad_()


@pytest.mark.parametrize("change", [another_head_norm, hook_head_norm, train_head_norm], ids=lambda f: f.__name__)
def test_a_change_to_head_norms_after_apply(change):
    ours, plain = pair("qwen3")
    before, _ = step(plain)
    for model in (ours, plain):
        change(model)
    assert_like_peft(ours, plain)
    assert change is train_head_norm or step(plain)[0] != before


def test_hooks_that_were_there_before_apply():
    plain = build("llama")
    ours = deepcopy(plain)
    for model in (ours, plain):
        hook_mlp(model)
    report = lorakernels.apply(ours)
    assert any("hooks" in left.reason for left in report.left)
    assert_like_peft(ours, plain)


def test_a_gradient_through_the_logits():
    def distilled(model):
        out = model(**batch())
        wanted = torch.full(out.logits.shape, 1 / out.logits.shape[-1])
        return out.loss + nn.functional.kl_div(torch.log_softmax(out.logits, -1), wanted, reduction="batchmean")

    assert_like_peft(*pair(), distilled)
    assert_like_peft(*pair(), lambda model: (model(**batch()).logits * 2 - 1).square().mean())


def test_logits_say_what_they_are_before_they_are_made(monkeypatch):
    ours, plain = pair()
    logits, wanted = (m(**batch()).logits for m in (ours, plain))
    with monkeypatch.context() as patch:
        patch.setattr(LazyLogits, "materialize", lambda self: pytest.fail("made"))
        assert (logits.shape, logits.dtype, logits.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert logits.float().dtype == torch.float32
    with torch.no_grad():
        assert not (logits > 0).requires_grad
        torch.testing.assert_close(1 - logits, 1 - wanted)
    assert (logits - logits).abs().max() == 0
    assert len(logits) == len(wanted) and (logits[:, -1] + 1).requires_grad


def test_mixed_precision_makes_no_logits(monkeypatch, tmp_path):
    """accelerate turns every half-precision output into float32."""
    made = []
    materialize = LazyLogits.materialize
    monkeypatch.setattr(LazyLogits, "materialize", lambda self: (made.append(1), materialize(self))[1])
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, bf16=True, use_cpu=True, report_to=[], save_strategy="no"
    )
    data = [{"input_ids": i, "labels": i} for i in batch()["input_ids"]]
    transformers.Trainer(pair()[0], arguments, train_dataset=data).train()
    assert not made


def test_the_bias_of_a_head_is_in_the_logits():
    ours, plain = pair()
    for model in (ours, plain):
        torch.manual_seed(4)
        old = model.base_model.model.lm_head
        model.base_model.model.lm_head = nn.Linear(old.in_features, old.out_features).requires_grad_(False)
    torch.testing.assert_close(ours(**batch()).logits + 0, plain(**batch()).logits)


def test_no_label_at_all():
    def nothing(model):
        data = batch()
        return model(**data | {"labels": torch.full_like(data["labels"], -100)}).loss

    ours, _ = pair()
    loss, got = step(ours, nothing)
    assert loss != loss
    assert all((g == 0).all() for g in got.values())


def test_an_evaluation_between_forward_and_backward():
    def gradients_of(between):
        ours, _ = pair(lora_dropout=0.5)
        torch.manual_seed(0)
        loss = ours(**batch()).loss
        if between:
            ours.eval()
            with torch.no_grad():
                ours(**batch())
        loss.backward()
        return gradients(ours)

    got, wanted = gradients_of(True), gradients_of(False)
    assert all(torch.equal(got[n], g) for n, g in wanted.items())


def test_two_scales_in_one_graph():
    def both(model):
        with rescale_adapter_scale(model, 0.25):
            small = model(**batch()).loss
        return small + model(**batch()).loss

    assert_like_peft(*pair(), both)


def test_a_first_forward_in_inference_mode():
    ours, plain = pair()
    for model in (ours, plain):
        model.to(torch.float64)
        with torch.inference_mode():
            model(**batch())
    assert_like_peft(ours, plain)


def test_dropout_modules_alone_in_training():
    ours, _ = pair(lora_dropout=0.5)
    ours.eval()
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    data = batch()  # which seeds torch
    assert not torch.equal(ours(**data).logits, ours(**data).logits)


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3"])
def test_parts_called_by_keyword(family):
    plain = build(family)
    ours = deepcopy(plain)
    lorakernels.apply(ours, qkv=False)  # so that MLP and norms are bound by themselves
    for name in ("mlp", "input_layernorm"):
        modules = [getattr(layer(m), name) for m in (ours, plain)]
        (argument,) = list(transformers.utils.generic.inspect.signature(type(modules[0]).forward).parameters)[1:]
        x = torch.randn(2, 3, plain.config.hidden_size)
        torch.testing.assert_close(*(m(**{argument: x}) for m in modules))


def test_adapters_outside_known_layers_are_reported():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=32)

    model = get_peft_model(
        transformers.GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    report = lorakernels.apply(model)
    assert [left.name.rpartition(".")[2] for left in report.left if left.part == "linear"] == ["c_attn"]


def test_fp8_follows_the_weights():
    plain = build("llama")
    ours = deepcopy(plain)
    lorakernels.apply(ours, fp8=True)
    step(ours)
    state = {n: t * (2 if "base_layer" in n else 1) for n, t in plain.state_dict().items()}
    for model in (ours, plain):
        model.load_state_dict(state)
    assert step(ours)[0] == pytest.approx(step(plain)[0], rel=0.02)


class Int8(torch.Tensor):
    """Keeps its elements elsewhere, as torchao's weights do."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.plain = weight

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].plain)
        raise AttributeError("'Tensor' object has no attribute 'tensor_data_names'")


def as_torchao_has_it(module):
    module.weight = nn.Parameter(Int8(module.weight.detach()), False)


def as_zero_3_has_it(module):
    weight = module.weight
    weight.ds_id, weight.ds_shape, weight.ds_tensor = 0, weight.shape, weight.data.flatten()
    weight.data = torch.empty(0)


@pytest.mark.parametrize("kind, reason", [(as_torchao_has_it, "Int8"), (as_zero_3_has_it, "ZeRO-3")])
def test_weights_that_are_not_there_are_left_with_the_reason(kind, reason):
    model = build("llama")
    for name, module in list(model.named_modules()):
        if "lora" not in name and module._parameters.get("weight") is not None and "embed" not in name:
            kind(module)
    report = lorakernels.apply(model)
    assert report.counts == {"rope": 2} and not strided(model)
    parts = {"qkv", "o", "mlp", "rms_norm", "linear_cross_entropy", "linear"}
    assert {left.part for left in report.left} == parts
    assert all(reason in left.reason for left in report.left)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_s_own_weights(kind):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    quantization.quantize_(model, getattr(quantization, kind)())
    model = get_peft_model(model, LoraConfig(r=4, target_modules=LINEARS)).train()
    wanted = model(**batch()).loss.item()
    report = lorakernels.apply(model)
    assert any("torchao" in left.reason for left in report.left) and not {"qkv", "o", "mlp"} & set(report.counts)
    assert model(**batch()).loss.item() == pytest.approx(wanted)
