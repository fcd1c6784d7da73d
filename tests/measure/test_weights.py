"""Real weights: SmolLM2-135M-Instruct out of the package index, on real English; and folders, right and wrong."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from helpers import deep_arm as arm
from safetensors.torch import save_file

from lorabench.measure.judging.numerics import one_step
from lorabench.measure.trial import run_trial
from lorabench.plan.compose import ConfigError, load_config, model, workload
from lorabench.plan.samples import draw
from lorabench.plan.weights import WeightsError, gguf_file, load_tokenizer

REAL = "smollm2-135m-instruct"
# Facts in the words of this test, so that nothing is quoted.
TEXT = [
    ("A train travels 60 miles in one hour. How far does it go in three hours?", "It goes 60 * 3 = 180 miles."),
    ("What is the capital of France, and on which river does it lie?", "The capital is Paris, on the Seine."),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> str:
    """A folder with the real model and its tokenizer, taken out of the GGUF file once: reading that takes ten times as
    long as reading the folder."""
    try:
        gguf_file(REAL)
    except WeightsError as error:
        pytest.skip(f"the weights cannot be had here: {error}")
    import gguf

    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:  # a reader parses 49152 words of the vocabulary, which takes seconds
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        # transformers makes the table of names anew for each of the model's modules, which takes as long again.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        load_tokenizer(REAL).save_pretrained(folder)
        base = arm("sdpa", model="smollm2-135m", overrides=(f"weights={REAL}",)).model.unload()
    assert not getattr(base, "is_quantized", False)  # a mark of transformers', for which its Trainer refuses a model
    model("smollm2-135m", load_config([])).hf_config().save_pretrained(folder)
    state = {n: t for n, t in base.state_dict().items() if n != "lm_head.weight"}  # tied to the embedding
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def feed(real, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in TEXT))
    changes = {"dataset": None, "subset": None, "path": str(path), "tokenizer": real, "samples": 2, "batch_size": 2}
    return workload({"gsm8k_text": {**changes, "seq_len": 64}})


@pytest.mark.exhaustive
def test_real_weights_know_english_and_random_ones_do_not(real, feed):
    samples = draw(feed, 49152, 0)
    assert "Paris" in load_tokenizer(real).decode([t for s in samples for t in s.tokens])
    with torch.no_grad():
        losses = {}
        for weights, layers in (("random", 2), (real, None)):
            made = arm(
                "sdpa", "adamw_foreach", "padding", model="smollm2-135m", samples=samples, workload=feed, layers=layers,
                overrides=(f"weights={weights}",),
            )  # fmt: skip
            for name, p in made.adapters():  # adapters as training starts them, so that this is the model itself
                if "lora_B" in name:
                    p.zero_()
            losses[weights] = float(made.step.forward(made.step.batches[0]))
    assert losses[real] < 3.0 < 9.0 < losses["random"]


@pytest.mark.exhaustive  # the weights take seconds to read; on random ones tests/test_ladder_loss.py has such curves
def test_loss_curves_with_and_without_a_toggle_stay_together(real, feed):
    """A few optimizer steps on real text with real weights: packing and the fused optimizer against padding."""
    samples = draw(feed, 49152, 0)
    curves = {}
    for names in (("sdpa", "adamw_foreach", "padding"), ("sdpa", "adamw_fused", "packing")):
        made = arm(
            *names, model="smollm2-135m", samples=samples, workload=feed, layers=2, overrides=(f"weights={real}",)
        )
        for group in made.step.optimizer.param_groups:
            group["lr"] = 1e-3
        curves[names[-1]] = [run_trial(made).loss for _ in range(8)]
    assert curves["packing"] == pytest.approx(curves["padding"], rel=2e-3)
    assert curves["padding"][-1] < 0.8 * curves["padding"][0]


def test_a_local_folder_is_read_and_a_wrong_one_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    spec = model("tiny-llama", load_config([]))
    saved = AutoModelForCausalLM.from_config(spec.hf_config())
    saved.save_pretrained(tmp_path)
    made = arm("sdpa", "adamw", "padding", overrides=(f"weights={tmp_path}",))
    name = "model.layers.1.mlp.up_proj"
    ours = made.model.get_base_model().get_submodule(name).base_layer.weight
    assert torch.equal(ours, saved.get_submodule(name).weight)
    one_step(made)
    with pytest.raises(ConfigError, match="model_type llama, the model tiny-qwen2 has qwen2"):
        arm("sdpa", model="tiny-qwen2", overrides=(f"weights={tmp_path}",))
    with pytest.raises(ConfigError, match="no such folder"):
        arm("sdpa", overrides=("weights=./nowhere",))


def test_nothing_is_unpickled(tmp_path):
    spec = model("tiny-llama", load_config([]))
    spec.hf_config().save_pretrained(tmp_path)
    torch.save({"model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="nothing else is read"):
        arm("sdpa", overrides=(f"weights={tmp_path}",))
