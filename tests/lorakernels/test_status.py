"""What the report and `status` say of the forwards that ran, and the one warning a reason where they were not ours."""

import warnings
from copy import deepcopy

import lorakernels
import pytest
import torch
import transformers
from pairs import assert_like_peft, layer, pair, step, strided
from peft import LoraConfig, get_peft_model
from test_never_silent import adapter
from tiny_models import COMMON, LINEARS, batch, build
from torch.utils.flop_counter import FlopCounterMode

TRAINING = {"layer": 2, "linear_cross_entropy": 1, "rms_norm": 1}


def warned(run) -> list[str]:
    """The warnings of ours that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "lorakernels" in str(w.message)]


def test_fused_forwards_are_counted_without_a_word():
    model = build("llama")
    report = lorakernels.apply(model)
    assert "forwards" not in str(report)
    assert warned(lambda: step(model)) == []
    assert report.forwards.fused == TRAINING and not report.forwards.left
    assert lorakernels.status(model) is report.forwards
    assert "fused forwards: layer 2, linear_cross_entropy 1, rms_norm 1" in str(report)


def test_an_evaluation_is_no_reason_to_warn():
    model = build("llama").eval()
    lorakernels.apply(model)
    with torch.no_grad():
        assert warned(lambda: model(**batch())) == []
    ran = lorakernels.status(model)
    assert ran.fused == {"layer": 2, "rms_norm": 1} and list(ran.left) == [
        ("linear_cross_entropy", "no forward of training with labels")
    ]


def another_adapter(model):
    adapter(model, "second")
    model(**batch())


def count_flops(model):
    with FlopCounterMode(display=False):
        model(**batch())


def disable(model):
    with model.disable_adapter():
        model(**batch())


@pytest.mark.parametrize(
    "use, reason",
    [
        (another_adapter, "the active adapter is second, at apply it was default"),
        (count_flops, "a FLOP counter"),
        (disable, "adapters are disabled"),
        (lambda model: model(**batch(), output_attentions=True), "attentions are asked for"),
    ],
    ids=["another adapter", "flops", "disabled", "attentions"],
)
def test_each_reason_is_told_once(use, reason):
    model = build("llama")
    model.set_attn_implementation("eager")
    report = lorakernels.apply(model)
    first = warned(lambda: use(model))
    assert len(first) == 1 and reason in first[0]
    if use is not another_adapter:
        assert warned(lambda: use(model)) == []
        assert warned(lambda: step(model)) == [], "and then it is ours again"
    left = {part: n for (part, why), n in report.forwards.left.items() if reason in why}
    assert left["layer"] >= 2
    assert reason in str(lorakernels.status(model))


def test_hidden_states_do_not_send_the_model_back():
    """transformers collects them at the layers' ends; its hooks inside the layers collect attentions."""
    ours, plain = pair()
    for _ in range(2):
        got, wanted = (m(**batch(), output_hidden_states=True) for m in (ours, plain))
        for a, b in zip(got.hidden_states, wanted.hidden_states, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert lorakernels.status(ours).fused["layer"] == 4 and not lorakernels.status(ours).left


def test_a_copy_counts_for_itself():
    ours, _ = pair()
    other = deepcopy(ours)
    step(other)
    assert not lorakernels.status(ours).fused and lorakernels.status(other).fused == TRAINING
    lorakernels.remove(other)
    with pytest.raises(RuntimeError, match="was not called"):
        lorakernels.status(other)


def test_a_reason_that_all_linears_share_is_printed_once():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    targets = ["c_attn", "c_proj", "c_fc"]
    model = get_peft_model(
        transformers.GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True)
    )
    report = lorakernels.apply(model)
    assert len([left for left in report.left if left.part == "linear"]) == 12
    lines = [line for line in str(report).splitlines() if "linear x" in line]
    assert len(lines) == 1 and "linear x 12: its base layer is a Conv1D, not a Linear" in lines[0]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_cast_of_one_of_them_stays(name):
    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch()).loss

    ours, plain = pair()
    step(ours)
    for model in (ours, plain):
        getattr(layer(model).self_attn, name).base_layer.to(torch.bfloat16)
    told = warned(lambda: loss(ours))
    for each in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer(ours).self_attn, each).base_layer.weight
        assert weight.dtype == (torch.bfloat16 if each == name else torch.float32), "as it was cast, and no other"
    assert len(told) == 1 and "cast to another dtype" in told[0]
    assert loss(ours).item() == pytest.approx(loss(plain).item(), rel=1e-2)
    assert lorakernels.status(ours).fused["layer"] == 4, "the other layer, and both before"


def test_replicated_layers_are_left_and_not_copied(monkeypatch):
    """PEFT's layer_replication: layers of their own with the weights of others."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    config = LoraConfig(
        r=4, target_modules=LINEARS, task_type="CAUSAL_LM", layer_replication=[(0, 2), (1, 2)], init_lora_weights=False
    )
    plain = get_peft_model(base, config).train()
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    assert report.counts["qkv"] == 1, "the layer that nobody shares"
    assert {left.name.split(".layers.")[1][0] for left in report.left} == {"1", "2"}
    assert all("layer_replication" in left.reason for left in report.left)
    assert_like_peft(ours, plain)
    adopted = []
    monkeypatch.setattr("lorakernels.nodes.operand.OperandBuffer.adopt", lambda self: adopted.append(self))
    step(ours)
    assert not adopted
    lorakernels.remove(ours)
    assert not strided(ours)


@pytest.mark.parametrize("head", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_a_compiled_model_runs_its_kernels_between_graphs(head):
    """PEFT's is one graph. Ours would be cut at every write into a buffer; instead what is fused stays in one piece."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(model):
        graphs.clear()
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend)
        loss = run(**batch(), use_cache=False).loss
        loss.backward()
        return loss.item(), len(graphs)

    graphs = []
    plain = build("llama")
    ours = deepcopy(plain)
    lorakernels.apply(ours, linear_cross_entropy=head)
    results = []
    told = warned(lambda: results.append(compiled(ours)))
    wanted, whole = compiled(plain)
    assert whole == 1 and results[0][0] == pytest.approx(wanted, rel=1e-5)
    assert results[0][1] <= (0 if head else 4)
    assert len(told) == 1 and "torch.compile" in told[0]
    assert lorakernels.status(ours).fused["layer"] == 2
    assert warned(lambda: step(ours)) == [], "uncompiled it goes on as before"
