"""Models: the published sizes, and weights and tokenizers from where they are said to come."""

import pytest
import torch
from helpers import config

from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown
from lorabench.measure import flops
from lorabench.plan import architecture
from lorabench.plan.compose import model, names_in, plan

PUBLISHED = {"smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384, "llama-3.1-8b": 8_030_261_248}


@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_have_the_published_number_of_parameters(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model(name, config()).hf_config())
    built.tie_weights()
    assert sum(p.numel() for p in built.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", names_in("model"))
def test_shapes_count_the_linears_of_every_layer(name):
    spec = model(name, config())
    config_ = spec.hf_config()
    layer = [m for m in architecture.skeleton(spec, layers=1).model.layers.modules() if isinstance(m, torch.nn.Linear)]
    shape, layers = flops.decoder(spec, spec.lora), spec.config["num_hidden_layers"]
    assert shape.frozen == layers * sum(m.weight.numel() for m in layer)
    assert shape.adapter == layers * sum(16 * (m.in_features + m.out_features) for m in layer)
    head_dim = getattr(config_, "head_dim", None) or config_.hidden_size // config_.num_attention_heads
    assert shape.attention == layers * config_.num_attention_heads * head_dim


def test_a_single_linear_is_a_model_by_its_name_and_a_cell_of_its_kind():
    spec = model("linear-24x40", config("weights=no/such-model"), {"r": 3})
    assert (spec.name, spec.family, spec.weights) == ("linear-24x40(r=3)", "linear", "random")
    both = config("models=[{linear-24x40@1x8: {r: 3}}, tiny-llama@1x8]", "reference=[]", "ablations=[lora_addmm]")
    cells = plan(both, "cpu").cells
    assert [c.kind for c in cells] == ["op", "op", "train", "train"]
    own = kind("op")
    assert own.adapter(cells[0].model)["target_modules"] == ["linear"] and own.adapter(cells[0].model)["r"] == 3
    (work,) = own.work(cells[0], own.samples(cells[0]))
    assert work.tflop["forward"] == pytest.approx(2e-12 * 8 * (24 * 40 + 3 * (24 + 40)))
    for wrong in ("linear-24", "linear-0x40", "linear-24x40x2"):
        with pytest.raises(NameUnknown, match="linear-INxOUT"):
            model(wrong, config())


def test_a_yaml_file_is_a_model_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("source: mine\nconfig: {model_type: llama, hidden_size: 32, num_hidden_layers: 1}\n")
    assert model(str(path), config()).name == "mine"
    path.write_text("[1, 2]\n")
    with pytest.raises(NameUnknown, match="expected a YAML mapping"):
        model(str(path), config())
