"""LoRA variants and RoPE scaling as parts of the model: both arms have them, and so has the gold."""

import pytest
import torch
from helpers import PEFT, cells, config
from helpers import deep_arm as arm

from lorabench.measure.judging.numerics import one_step
from lorabench.plan.compose import plan

DORA = ("lora.use_dora=true",)


def test_published_records_keep_their_key_and_dora_has_one_of_its_own():
    plain, off, on = (cells(*more)[0] for more in ((), ("lora.use_dora=false",), DORA))
    assert plain.key == off.key != on.key
    assert "use_dora" not in plain.model.content()["lora"] and on.model.content()["lora"]["use_dora"] is True


def test_dora_s_magnitudes_are_trained_and_compared():
    dense, made = one_step(arm(*PEFT)), one_step(arm(*PEFT, overrides=DORA))
    more = made.gradients.keys() - dense.gradients.keys()
    assert len(more) == 3 * 7 and all("lora_magnitude_vector" in name for name in more)
    assert all(gradient.any() for gradient in made.gradients.values())


@pytest.mark.parametrize("overrides", [DORA, ("lora.use_rslora=true",), ("lora.target_modules=[q_proj,v_proj]",)])
@pytest.mark.parametrize("toggle", ["lora_kernels", "gradient_checkpointing", {"tiled_mlp": {"shards": 3}}])
def test_toggles_over_a_variant_have_its_gradients(overrides, toggle):
    plain = one_step(arm(*PEFT, overrides=overrides))
    ours = one_step(arm(*PEFT, toggle, overrides=overrides))
    assert plain.gradients.keys() == ours.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("toggle", ["lora_kernels", "fused_rope", "gradient_checkpointing"])
def test_scaled_rope_is_the_same_for_every_toggle(toggle):
    """YaRN multiplies the tables by more than 1, so a kernel that made its own would be seen."""
    plain, ours = (one_step(arm(*PEFT, *more, model="tiny-llama-yarn")) for more in ((), (toggle,)))
    unscaled = one_step(arm(*PEFT))
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-3, atol=1e-7)
    name = next(n for n in plain.gradients if "layers.0.self_attn.q_proj.lora_B" in n)
    assert (plain.gradients[name] - unscaled.gradients[name]).norm() > 0.05 * unscaled.gradients[name].norm()


def test_rope_scaling_is_in_both_arms():
    made = plan(config("models=[tiny-llama-yarn]", "ablations=[lora_kernels]", "workload=2x16"), "cpu").cells
    assert len({cell.model.name for cell in made}) == 1
    scaled = made[0].model.hf_config(layers=2).rope_parameters
    assert (scaled["rope_type"], scaled["factor"]) == ("yarn", 4.0)


def test_dynamic_rope_remembers_the_longest_row_and_yarn_does_not():
    """So two arms that are fed in another order would differ: no model of ours has it."""

    def moved(**rope):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=64,
                rope_parameters={"rope_theta": 1e4, **rope},
            )
        ).eval()
        row, longer, between = (torch.arange(n)[None] % 64 for n in (16, 200, 100))
        with torch.no_grad():
            before = model(between).logits
            model(longer)
            model(row)
            return not torch.allclose(before, (model(longer), model(between).logits)[1], atol=1e-5)

    assert moved(rope_type="dynamic", factor=2.0)
    assert not moved(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def test_the_long_context_suite_ends():
    """A step of 131,072 tokens takes a minute: the suite has trials and a time-out of its own."""
    from lorabench.plan.compose import load_config

    made = load_config(["suite=long_context"])
    assert made.trials is not None and made.trials <= 6 and made.timeout_s >= 3600
    lengths = {cell.workload.seq_len for cell in plan(made, "cuda").cells}
    assert lengths == {1 << n for n in (13, 15, 16, 17, 18, 19)}
    for cell in plan(made, "cuda").cells:
        assert cell.model.hf_config().max_position_embeddings >= cell.workload.seq_len


def test_every_entry_of_the_guide_is_one_family_a_model():
    from lorabench.contract.family import families

    made = plan(config("suite=guide"), "cuda").cells
    assert {cell.model.name for cell in made} == {"llama-3.1-8b", "smollm2-135m"}
    assert len(list(families(made))) == 2
