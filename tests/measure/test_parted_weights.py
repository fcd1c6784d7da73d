"""Which weights the ranks of a divided model read tensor by tensor, and what is said of a file that does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorabench.measure.parted_weights import files_of, read_parts
from lorabench.plan.compose import load_config, model
from lorabench.plan.weights import WeightsError

NORM = "model.norm.weight"


def spec(weights):
    return model("tiny-llama", load_config([f"weights={weights}"]))


@pytest.fixture
def folder(tmp_path):
    made = AutoModelForCausalLM.from_config(spec("random").hf_config(), dtype=torch.float32)
    made.save_pretrained(tmp_path)
    return tmp_path


def test_only_a_folder_of_plain_safetensors_is_read_tensor_by_tensor(folder):
    assert files_of(spec("random")) is None
    assert files_of(spec(folder))[NORM] == folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert files_of(spec(folder)) is None


def test_a_broken_file_is_left_to_transformers_which_says_what_is_wrong(folder):
    (folder / "model.safetensors").write_bytes(b"no tensors")
    assert files_of(spec(folder)) is None


def test_a_tensor_of_another_shape_is_one_line(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {NORM: tensors[NORM][:1].clone()}, folder / "model.safetensors")
    made = AutoModelForCausalLM.from_config(spec("random").hf_config())
    with pytest.raises(WeightsError, match=rf"have {NORM} of \[1\], the model has \[64\]"):
        read_parts(made, spec(folder), files_of(spec(folder)))
