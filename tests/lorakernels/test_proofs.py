"""The proofs at `apply`: what differs from our operation in any way is left alone with the reason, what does not is
taken whatever it is called, each kind is tried once, and nothing of the model or of torch's state changes.

The classes here say that they are transformers' own, as those of a new family would be.
"""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType

import lorakernels
import pytest
import torch
from lorakernels.model import attention_form, norms
from lorakernels.model.attention_form import attention_form as form_of
from lorakernels.model.head import head_plan
from lorakernels.model.mlp import looks_like_mlp, mlp_plan
from lorakernels.model.module_checks import NotFused
from lorakernels.model.norms import looks_like_norm, norm_module
from lorakernels.model.plans import Switches
from lorakernels.model.proofs import Proofs
from lorakernels.model.rotary import rotary_plan
from tiny_models import batch, build, step, worst
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM

K, WIDTH = 24, 40


def as_transformers_has_it(kind):
    kind.__module__ = inspect.unwrap(kind.forward).__module__ = "transformers.models.made_up"
    return kind


# ---- norms -----------------------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    """x · rstd · w, under names of its own, and whatever `change` makes of that."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.gain_eps, self.weight = eps, nn.Parameter(torch.rand(K) + 0.5)

    def forward(self, vectors):
        return self.change(vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + self.gain_eps))

    def change(self, y):
        return y * self.weight


def scaled(change):
    return as_transformers_has_it(
        type("Made", (Scaled,), {"change": change, "forward": lambda s, v: Scaled.forward(s, v)})
    )()


def test_a_norm_of_any_name_is_found_and_its_offset_read():
    as_transformers_has_it(Scaled)
    found = norm_module(Scaled(0.25), Proofs())
    assert (found.norm.eps, found.norm.offset, found.eps_name, found.promotes) == (0.25, 0.0, "gain_eps", True)
    assert norm_module(scaled(lambda self, y: y * (1 + self.weight)), Proofs()).norm.offset == 1.0
    low = scaled(lambda self, y: (y * self.weight).to(torch.bfloat16) if y.dtype is torch.bfloat16 else y * self.weight)
    assert not norm_module(low, Proofs()).promotes


@pytest.mark.parametrize(
    "change",
    [
        lambda self, y: y * self.weight * 1.01,
        lambda self, y: y * self.weight + 0.01,
        lambda self, y: y * self.weight.abs(),
        lambda self, y: y * self.weight.detach(),
        lambda self, y: (y - 0.01 * y.mean(-1, keepdim=True)) * self.weight,
        lambda self, y: (y * self.weight).detach() + 0 * y,
        lambda self, y: 1 / 0,
    ],
    ids=["scale", "shift", "abs", "frozen", "mean", "no gradient", "raises"],
)
def test_a_norm_that_differs_is_left(change):
    module = scaled(change)
    assert looks_like_norm(module)
    with pytest.raises(NotFused, match=r"computes something else|could not be tried: ZeroDivisionError"):
        norm_module(module, Proofs())


def test_a_norm_of_another_epsilon_than_its_attribute_is_left():
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2e-5) * self.weight

    with pytest.raises(NotFused, match="computes something else"):
        norm_module(as_transformers_has_it(type("Made", (Scaled,), {"forward": forward}))(), Proofs())


# ---- MLPs ------------------------------------------------------------------------------------------------------------
class Gated(nn.Module):
    """A gated MLP whose linears are called as no family calls them, with up before gate."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.w3, self.w2, self.w1 = (
            nn.Linear(K, width), nn.Linear(width, K, bias=False), nn.Linear(K, width, bias=False)
        )  # fmt: skip
        self.requires_grad_(False)

    def forward(self, tokens):
        return self.w2(self.mixed(self.w1(tokens), self.w3(tokens)))

    def mixed(self, gate, up):
        return F.silu(gate) * up


def gated(mixed, width=WIDTH):
    return as_transformers_has_it(
        type("Made", (Gated,), {"mixed": mixed, "forward": lambda s, tokens: Gated.forward(s, tokens)})
    )(width)


def planned(module):
    return mlp_plan(module, "mlp", Switches(), Proofs())


@pytest.mark.parametrize("width", [WIDTH, K], ids=["wide", "square"])
@pytest.mark.parametrize(
    "act, mixed",
    [
        ("silu", lambda self, gate, up: F.silu(gate) * up),
        ("gelu", lambda self, gate, up: up * F.gelu(gate)),
        ("gelu_tanh", lambda self, gate, up: F.gelu(gate, approximate="tanh") * up),
    ],
)
def test_a_gated_mlp_of_any_names_is_found(act, mixed, width):
    plan = planned(gated(mixed, width))
    names = [m.leaf for m in (*plan.gate_up.modules, *plan.down.modules)]
    assert (plan.act, names) == (act, ["w1", "w3", "w2"])


@pytest.mark.parametrize(
    "mixed",
    [
        lambda self, gate, up: F.relu(gate) * up,
        lambda self, gate, up: F.silu(gate) * (up + 1),
        lambda self, gate, up: F.silu(gate.clamp(max=2)) * up,
        lambda self, gate, up: F.silu(gate * 1.1) * up,
        lambda self, gate, up: F.silu(gate) * up.detach(),
        lambda self, gate, up: F.dropout(F.silu(gate) * up, 0.1, self.training),
    ],
    ids=["relu", "up plus 1", "clamped", "scaled", "no gradient", "dropout"],
)
def test_an_mlp_that_differs_is_left(mixed):
    module = gated(mixed)
    assert looks_like_mlp(module)
    with pytest.raises(NotFused, match=r"computes something else|drops out in training"):
        planned(module)


# ---- attention -------------------------------------------------------------------------------------------------------
def attention():
    return build("llama").unload().model.layers[0].self_attn


def test_llama_s_attention_has_the_form_of_two_halves_and_no_window():
    form = form_of(attention(), Proofs(), frozenset({8}))
    assert (form.rotation, form.wide_norms, form.arguments) == (attention_form.KERNEL, False, ())


def with_own(replaced):
    """The forward of Llama's attention with some lines of its source replaced."""
    text = textwrap.dedent(inspect.getsource(LlamaAttention.forward))
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    names = dict(vars(modeling_llama))
    FunctionType(compile(text, "made", "exec", dont_inherit=True), names)()
    return names["forward"]


CACHE = attention_form.cache_name(attention())
DIFFERENT = {
    "another scaling": {"scaling=self.scaling": "scaling=2 * self.scaling"},
    "no mask": {"        attention_mask,\n        dropout": "        None,\n        dropout"},
    "a dropout of its own": {"self.attention_dropout": "0.25"},
    "an argument of its own": {"scaling=self.scaling": "scaling=self.scaling, sinks=3"},
    "a scaled output": {"self.o_proj(attn_output)": "self.o_proj(attn_output * 1.01)"},
    "a scaled query": {"cos, sin = position_embeddings": "query_states *= 1.01; cos, sin = position_embeddings"},
    "positions kept": {f"    {CACHE}: Cache": f"    position_ids=None,\n    {CACHE}: Cache"},
    "arguments kept": {"        **kwargs,\n    )": "    )"},
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_an_attention_that_differs_is_left(name):
    module = attention()
    forward = with_own(DIFFERENT[name])
    module.__class__ = as_transformers_has_it(type("Made", (LlamaAttention,), {"forward": forward}))
    with pytest.raises(NotFused):
        form_of(module, Proofs(), frozenset({8}))


def test_the_same_source_under_another_name_is_taken():
    module = attention()
    module.__class__ = as_transformers_has_it(type("Made", (LlamaAttention,), {"forward": with_own({})}))
    assert form_of(module, Proofs(), frozenset({8})).rotation == attention_form.KERNEL


def test_rotary_functions_are_told_apart():
    halves, half, pairs = (m.apply_rotary_pos_emb for m in (modeling_llama, modeling_gpt_oss, modeling_cohere))
    from lorakernels.model.rotary import _halved

    assert (_halved(halves), _halved(half)) == (False, True)
    with pytest.raises(NotFused, match="two halves"):
        _halved(pairs)


# ---- layers and heads ------------------------------------------------------------------------------------------------
def applied(replace, where):
    """The report of a tiny Llama of which one module has another class, and whether it still is what it was."""
    model, plain = build("llama"), build("llama")
    for m in (model, plain):
        replace(m)
    report = lorakernels.apply(model)
    (loss, grads), (wanted, wanted_grads) = step(model, batch()), step(plain, batch())
    assert torch.allclose(loss, wanted, rtol=1e-5) and worst(grads, wanted_grads) < 1e-4
    return [entry.reason for entry in report.left if entry.part == where]


class Crossed(LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, position_ids=None, use_cache=False, **kwargs):
        out, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
        added = hidden_states + self.input_layernorm(out)
        return hidden_states + self.post_attention_layernorm(self.mlp(added))


class Multiplied(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **kwargs)
        out.loss = None if out.loss is None else 2 * out.loss
        return out


def test_a_layer_of_another_order_is_left():
    def replace(model):
        model.base_model.model.model.layers[0].__class__ = as_transformers_has_it(Crossed)

    assert applied(replace, "layer") == ["Crossed adds or orders its parts otherwise than a known layer"]


def test_a_loss_that_is_no_cross_entropy_is_left():
    def replace(model):
        model.base_model.model.__class__ = as_transformers_has_it(Multiplied)

    (reason,) = applied(replace, "linear_cross_entropy")
    assert "is not the cross-entropy" in reason or "could not be tried" in reason


def a_head(handed, logits="outputs.last_hidden_state", loss=""):
    """A causal language model that calls its base model so, and makes logits and loss of these."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, weights=None, **kwargs):
        outputs = HANDED[handed](self, input_ids, attention_mask, kwargs)
        made = self.lm_head(LOGITS[logits](self, outputs))
        of_loss = LOSSES[loss](labels, attention_mask, weights)
        found = None if labels is None else self.loss_function(made, of_loss, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=found, logits=made)

    return as_transformers_has_it(type("Made", (LlamaForCausalLM,), {"forward": forward}))


HANDED = {
    "all": lambda s, ids, mask, kwargs: s.model(input_ids=ids, attention_mask=mask, **kwargs),
    "named": lambda s, ids, mask, kwargs: s.model(ids, attention_mask=mask),
    "no mask": lambda s, ids, mask, kwargs: s.model(ids),
    "another": lambda s, ids, mask, kwargs: s.model(ids, attention_mask=None if mask is None else 1 - mask),
    "more": lambda s, ids, mask, kwargs: s.model(ids, attention_mask=mask, is_causal=False),
    "some": lambda s, ids, mask, kwargs: s.model(ids, position_ids=kwargs.get("position_ids")),
    "twice": lambda s, ids, mask, kwargs: (s.model(ids), s.model(ids))[1],
}
LOGITS = {
    "outputs.last_hidden_state": lambda s, out: out.last_hidden_state,
    "a second output": lambda s, out: out[1],
    "embeddings": lambda s, out: out[0] + s.model.embed_tokens.weight[0],
    "a method": lambda s, out: out[0] + s.model.get_input_embeddings().weight[0],
}
LOSSES = {
    "": lambda labels, mask, weights: labels,
    "unmasked": lambda labels, mask, weights: labels if mask is None else labels.masked_fill(mask == 0, -100),
    "weighted": lambda labels, mask, weights: labels if weights is None else labels.roll(1) * weights,
}
NOT_KNOWN = "calls its base model with arguments that it was not given"
MORE = "made of more than the base model's hidden states"


@pytest.mark.parametrize(
    ("handed", "logits", "loss", "reason"),
    [
        ("another", "outputs.last_hidden_state", "", NOT_KNOWN),
        ("more", "outputs.last_hidden_state", "", NOT_KNOWN),
        ("some", "outputs.last_hidden_state", "", "some of its arguments"),
        ("twice", "outputs.last_hidden_state", "", "one call of its base model"),
        ("all", "a second output", "", MORE),
        ("all", "embeddings", "", MORE),
        ("all", "a method", "", MORE),
        ("named", "outputs.last_hidden_state", "unmasked", "not the cross-entropy of its logits and the next tokens"),
        ("named", "outputs.last_hidden_state", "weighted", "not the cross-entropy of its logits and the next tokens"),
    ],
)
def test_a_head_that_does_more_is_left_with_a_plain_reason(handed, logits, loss, reason):
    model = build("llama").base_model.model
    model.__class__ = a_head(handed, logits, loss)
    with pytest.raises(NotFused, match=reason) as found:
        head_plan(model, Proofs())
    assert not any(word in str(found.value) for word in ("_Base", "_Outputs", "Error"))


@pytest.mark.parametrize(
    ("handed", "names"), [("all", {"attention_mask"}), ("named", {"attention_mask"}), ("no mask", set())]
)
def test_what_a_head_hands_on_is_found(handed, names):
    model = build("llama").base_model.model
    model.__class__ = a_head(handed)
    plan = head_plan(model, Proofs())
    assert plan.handed == {"input_ids"} | names and plan.others == (handed == "all")


# ---- cost and state --------------------------------------------------------------------------------------------------
def test_modules_that_are_alike_are_tried_once(monkeypatch):
    calls = []
    own = norms._proved
    monkeypatch.setattr(norms, "_proved", lambda *args: (calls.append(1), own(*args))[1])
    report = lorakernels.apply(build("llama", sizes={"num_hidden_layers": 6}))
    assert report.counts["mlp"] == 6 and len(calls) == 1


def test_apply_leaves_the_model_and_torch_s_state_alone():
    model = build("gemma2")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        lorakernels.apply(model)
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("inside", ["inference", "autocast", "device"])
def test_apply_proves_the_same_wherever_it_is_called(inside):
    wanted = lorakernels.apply(build("llama")).counts
    model = build("llama")
    contexts = {
        "inference": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16),
        "device": torch.device("meta"),
    }  # fmt: skip
    with contexts[inside]:
        proofs = Proofs()
        layer = model.base_model.model.model.layers[0]
        assert norm_module(layer.input_layernorm, proofs).norm.eps == 1e-6
        assert form_of(layer.self_attn, proofs, frozenset({8})).rotation == attention_form.KERNEL
        assert rotary_plan(layer.self_attn, proofs).what_changed() is None
    assert wanted == lorakernels.apply(model).counts
