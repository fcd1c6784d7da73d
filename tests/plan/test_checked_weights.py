"""Weights that a model cannot have are known before a start, by their headers: exit code 2, and the names."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorabench.measure.build import causal_lm
from lorabench.plan.compose import ConfigError, load_config, model, plan
from lorabench.plan.weights import INDEX, SINGLE, WeightsError
from lorabench.sweep import main

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A model folder of tiny-llama, as transformers saves it."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(model("tiny-llama", load_config([])).hf_config()).save_pretrained(tmp_path)
    return tmp_path


def changed(folder, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def configured(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder, name: str = "tiny-llama") -> str:
    with pytest.raises(ConfigError) as raised:
        plan(load_config([f"models=[{name}]", f"weights={folder}", "workload=2x16"]), "cpu")
    return str(raised.value)


def test_weights_that_fit_are_planned(folder):
    assert plan(load_config(["models=[tiny-llama]", f"weights={folder}", "workload=2x16"]), "cpu").cells
    sharded(folder)
    assert plan(load_config(["models=[tiny-llama]", f"weights={folder}", "workload=2x16"]), "cpu").cells


def sharded(folder) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({n: tensors[n] for n in own}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: f for f, own in halves.items() for n in own}}))


def test_missing_tensors_are_named_and_at_most_three(folder, capsys):
    changed(folder, lambda t: t.pop(UP))
    assert refused(folder).endswith(f"lack 1 tensors ({UP}) of the model tiny-llama")
    changed(folder, lambda t: [t.pop(n) for n in list(t) if "layers.0" in n])
    assert "lack 10 tensors (model.layers.0.input_layernorm.weight, " in refused(folder)
    assert refused(folder).count("model.layers") == 3
    assert main(["models=[tiny-llama]", f"weights={folder}", "dry_run=true"]) == 2
    assert "lack 10 tensors" in capsys.readouterr().err


def test_a_missing_shard_is_named(folder):
    sharded(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors cannot be read" in refused(folder)
    (folder / INDEX).write_text("{")
    assert f"{INDEX} cannot be read" in refused(folder)


def test_a_tied_head_needs_no_tensor(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("tied") / "tied.yaml"
    spec = model("tiny-llama", load_config([]))
    path.write_text(json.dumps({"source": "x", "config": spec.config | {"tie_word_embeddings": True}}))
    changed(folder, lambda t: t.pop("lm_head.weight"))
    assert "lack 1 tensors (lm_head.weight)" in refused(folder)
    configured(folder, tie_word_embeddings=True)
    assert plan(load_config([f"models=[{path}]", f"weights={folder}", "workload=2x16"]), "cpu").cells


def test_other_shapes_and_sizes_are_said(folder):
    changed(folder, lambda t: t.update({UP: torch.zeros(64, 64)}))
    assert refused(folder).endswith(f"{UP} has the shape [64, 64], the model tiny-llama has [128, 64]")
    assert "have model_type llama, the model tiny-qwen2 has qwen2" in refused(folder, "tiny-qwen2")
    configured(folder, num_attention_heads=2)
    assert "have num_attention_heads 2, the model tiny-llama has 4" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 50, b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{]"])
def test_an_unreadable_header_is_said(folder, content):
    (folder / SINGLE).write_bytes(content)
    assert f"{SINGLE} cannot be read" in refused(folder)


def test_a_folder_that_is_none(folder, tmp_path):
    (folder / SINGLE).unlink()
    torch.save({UP: torch.zeros(2)}, folder / "pytorch_model.bin")
    assert f"no {SINGLE} and no {INDEX} in the folder" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json cannot be read" in refused(folder)
    assert "no such folder" in refused(folder / "nowhere")
    (tmp_path / "a_file").write_text("")
    assert "no such folder" in refused(tmp_path / "a_file")


@pytest.mark.parametrize("method", ["gptq", "awq", "nobody_knows"])
def test_a_quantized_checkpoint_needs_its_package(folder, method, monkeypatch):
    for package in ("gptqmodel", "optimum", "auto_gptq"):
        monkeypatch.setitem(sys.modules, package, None)
    configured(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    assert f"are quantized ({method}): " in refused(folder)


def test_an_indexed_model_is_checked_without_a_download(monkeypatch, tmp_path):
    monkeypatch.setenv("LORABENCH_GGUF", str(tmp_path / "nowhere.gguf"))
    assert "nowhere.gguf: no such file" in refused("smollm2-135m-instruct", "smollm2-135m")
    monkeypatch.delenv("LORABENCH_GGUF")
    assert "hidden_size 576, the model tiny-llama has 64" in refused("smollm2-135m-instruct")


def test_what_could_not_be_looked_at_before_is_refused_when_it_is_read(folder):
    """Of a hub's weights the files come when they are read."""
    changed(folder, lambda t: t.pop(UP))
    with pytest.raises(WeightsError, match=f"lack 1 tensors .{UP}. of the model"):
        built_from(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="cannot be read"):
        built_from(folder)


def built_from(folder):
    """A model whose weights nobody has looked at before."""
    spec = model("tiny-llama", load_config([])).model_copy(update={"weights": str(folder)})
    return causal_lm(spec, {"dtype": torch.float32}, torch.device("cpu"), None)
