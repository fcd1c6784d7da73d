"""The peers without the peers: packages of the same names stand in, so that our side of it is tested anywhere."""

import json
import re
import sys
import tomllib
import types
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import arm
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.cell import Cell
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.kind import Kind
from lorabench.plan import registry
from lorabench_ablations import peers
from lorabench_ablations.liger import apply_liger

NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
NAMES = ("axolotl", "axolotl_liger", "unsloth")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def stand_in(monkeypatch):
    """Put modules of these names, with these attributes, in place of what may be installed."""

    def put(**modules):
        for name, attributes in modules.items():
            module = types.ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


class FastLanguageModel:
    """Does what Unsloth's loader does as far as we are concerned, and keeps what it was told."""

    told: dict = {}

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        config = json.loads(Path(folder, "config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        cls.told = {**kwargs, "folder": folder, "layers": config["num_hidden_layers"], "pad": tokenizer.pad_token}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kwargs["dtype"]), tokenizer

    @classmethod
    def get_peft_model(cls, model, use_gradient_checkpointing, **config):
        cls.told["gradient_checkpointing"] = use_gradient_checkpointing
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))


@pytest.mark.parametrize("loading", [(), pytest.param(("nf4_base",), marks=NEEDS_BITSANDBYTES)])
def test_unsloth_s_loader_gets_our_model_and_its_gradients_are_comparable(stand_in, monkeypatch, tmp_path, loading):
    stand_in(unsloth={"FastLanguageModel": FastLanguageModel})
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", str(tmp_path))
    monkeypatch.setenv("UNSLOTH_DISABLE_STATISTICS", "1")
    original = AutoModelForCausalLM.from_pretrained
    ours, plain = (one_step(arm("sdpa", "adamw", *loading, *more, layers=2)) for more in (["unsloth"], []))
    assert ours.loss == plain.loss
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient)
    told = FastLanguageModel.told
    assert (told["layers"], told["pad"], told["max_seq_length"], told["dtype"]) == (2, "<pad>", 512, torch.float32)
    assert told["gradient_checkpointing"] is False and told["load_in_4bit"] is False
    assert not Path(told["folder"]).exists()
    assert AutoModelForCausalLM.from_pretrained == original


def test_a_loader_that_fails_leaves_nothing_replaced(stand_in):
    def fail(*args, **kwargs):
        raise RuntimeError("no")

    stand_in(unsloth={"FastLanguageModel": types.SimpleNamespace(from_pretrained=fail)})
    original = AutoModelForCausalLM.from_pretrained
    with pytest.raises(RuntimeError, match="no"):
        arm("unsloth")
    assert AutoModelForCausalLM.from_pretrained == original


def apply_lora_qkv(self, x):
    return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def axolotl(apply):
    """Modules in place of those of Axolotl that we import."""
    kernels = types.SimpleNamespace(patch_self_attn_lora=apply[0], apply_lora_kernel_patches=apply[1])
    return {
        "axolotl": {"__path__": []}, "axolotl__monkeypatch": {"lora_kernels": kernels},
        "axolotl__utils": {"__path__": []}, "axolotl__utils__callbacks": {},
        "axolotl__utils__dict": {"DictDefault": dict},
    }  # fmt: skip


def test_axolotl_gets_the_architecture_and_all_three_switches(stand_in):
    seen = []

    def patch_class(cfg):
        seen.append(json.loads(Path(cfg["base_model"], "config.json").read_text())["model_type"])

    def patch_model(model, cfg):
        seen.append([k for k, on in cfg.items() if on is True])
        for layer in model.get_base_model().model.layers:
            layer.self_attn.apply_qkv = types.MethodType(apply_lora_qkv, layer.self_attn)

    stand_in(**axolotl((patch_class, patch_model)))
    made = arm("axolotl", depth=3)
    assert seen == ["llama", ["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"]]
    assert made.patched["axolotl"] == 3  # one site a layer here


def liger_s_norm(self, hidden_states):
    return hidden_states


liger_s_norm.__module__ = "liger_kernel.ops"


def test_liger_s_sites_count_in_a_second_model_too(stand_in):
    seen = {}

    def apply(model, rms_norm=True, swiglu=True):
        seen["swiglu"] = swiglu
        for layer in model.model.layers:
            layer.input_layernorm.forward = types.MethodType(liger_s_norm, layer.input_layernorm)

    monkey_patch = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply})
    stand_in(liger_kernel={"__path__": []}, liger_kernel__transformers={"monkey_patch": monkey_patch})
    made = arm("liger", depth=3)
    assert (made.patched["liger"], seen["swiglu"]) == (3, True)
    assert apply_liger(made.model, activation=False) == 3  # nothing changed, but all three run Liger's
    assert seen["swiglu"] is False


def test_a_layout_that_axolotl_does_not_know_is_unsupported_in_its_words(stand_in):
    def refuse(cfg):
        raise ValueError("LlamaAttention does not use a supported layout")

    stand_in(**axolotl((refuse, None)))
    with pytest.raises(Unsupported, match="axolotl: LlamaAttention does not use"):
        arm("axolotl")


def test_the_kernels_are_imported_without_axolotl_s_trainer(tmp_path, monkeypatch):
    package = tmp_path / "axolotl" / "utils" / "callbacks"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text("import a_trainer_that_is_not_installed\n")
    (package / "models.py").write_text("answer = 42\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == "axolotl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    peers._only_models_of_the_callbacks()
    try:
        from axolotl.utils.callbacks.models import answer  # pyright: ignore[reportMissingImports]
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "axolotl"]:
            del sys.modules[name]
    assert answer == 42


def test_a_peer_that_left_everything_to_peft_is_not_applied():
    made = arm("sdpa")
    assert peers.sites(made.model) == 0
    with pytest.raises(NotApplied, match="left every layer"):
        peers.Axolotl().audit(Evidence(made, 0, None))


@pytest.mark.parametrize("name", NAMES)
def test_every_peer_has_processes_and_the_slot_of_the_others(name):
    peer = registry.ablation(name)
    common = {
        "kind": "train",
        "kind_in_key": False,
        "model": None,
        "workload": None,
        "design": "solo",
        "trials": 3,
        "warmup": 1,
        "seed": 0,
    }
    assert Cell(reference=(), candidate=(peer,), toggles=(peer,), **common).separate
    for other in ("lora_kernels", "liger"):
        assert "fused_kernels" in conflict([peer, registry.ablation(other)])
    assert conflict([peer, registry.ablation("lora_qkv_kernel")])


def test_what_decides_a_slot_excludes_all_of_it_but_the_default():
    every = [registry.ablation(name) for name in registry.registered()]
    decided = [(one, slot) for one in every for slot in one.decides]
    pipelines = ("pipeline_1f1b", "pipeline_gpipe", "pipeline_interleaved", "pipeline_multi_adapter")
    batching = {(name, "batching") for name in ("batched_packed", "fused_multi_lora", *pipelines)}
    assert {(one.name, slot) for one, slot in decided} == {
        *batching, ("unsloth", "attention"), ("tensor_parallel", "optimizer"),
    }  # fmt: skip
    defaults = {"attention": {"sdpa"}, "optimizer": {"adamw_foreach", "no_optimizer"}}
    for one, slot in ((one, slot) for one, slot in decided if slot in defaults):
        allowed = {a.name for a in every if a.slot == slot and not conflict([one, a])}
        assert allowed == defaults[slot], "any other would stand in a record without having been looked for"


def test_unsloth_s_own_attention_is_no_fault_of_sdpa_s(stand_in, monkeypatch, tmp_path):
    stand_in(unsloth={"FastLanguageModel": FastLanguageModel})
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", str(tmp_path))
    monkeypatch.setattr(peers, "version", lambda name: "1")
    made = arm("sdpa", "adamw", "unsloth", layers=2)
    assert [a.name for a in Kind.audited(made.kind, made)] == ["adamw", "unsloth"]
    without = Counter({"flash_attn::_flash_attn_forward": 2})
    assert made.ablations[-1].notes(Evidence(made, 1, without))["attention_backend"] == dict(without)


def test_unsloth_keeps_its_float32_adapters():
    pair = [registry.ablation(n) for n in ("unsloth", "adapters_in_compute_dtype")]
    assert "reference=peft" in conflict(pair)


# Modules whose distribution has another name than they have.
BROUGHT_BY = {
    "unsloth_zoo": "unsloth", "flash_attn_2_cuda": "flash-attn", "flash_attn.cute": "flash-attn-4",
    "cutlass": "flash-attn-4",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(registry.registered()))
def test_an_install_command_installs_what_is_missing(name):
    """`pip install 'lorabench[extra]'` resolves an extra of what is installed: it must name the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, command in registry.ablation(name).requires.packages.items():
        if "no wheel" in command:  # then it says what else to do
            continue
        assert command.startswith("pip install ")
        asked = re.search(r"lorabench\[([^\]]+)\]", command)
        named = command.split() + [line for extra in (asked[1].split(",") if asked else ()) for line in extras[extra]]
        distribution = BROUGHT_BY.get(package, package.replace("_", "-"))
        assert any(word.strip("'").startswith(distribution) for word in named), command
