"""Small random models of the decoder families that transformers builds, with a LoRA adapter on every linear."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# The sizes, under every name that configurations have for them; each configuration takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 101, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "hidden_size": 32, "n_embd": 32, "d_model": 32,
    "embedding_size": 32, "vocab_size_per_layer_input": 101, "num_kv_shared_layers": 0,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 1, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    # All experts for each token: which of them are best is decided by the last bit, and then nothing compares.
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 4,
    "moe_topk": 4, "moe_k": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "state_size": 8, "ssm_state_size": 8,
    "time_step_rank": 4, "expand": 2, "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
MLA = {"num_key_value_heads": 4}  # attention over a compressed cache has as many heads of k as of q
HYBRID = {"num_hidden_layers": 4}  # every fourth layer is attention
# What PEFT cannot train: a router that returns a tuple, projections that a kernel of Mamba takes the weights of.
ROUTER, MAMBA = ("router",), ("out_proj", "conv1d")
EXCLUDED = {
    **dict.fromkeys(("phimoe", "llama4_text", "llama4"), ROUTER),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"), MAMBA),
}
# What a family needs besides, or what makes it what it is: multipliers that are 1 by default, more kinds of layers.
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.3},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"partial_rotary_factor": 0.5},
    "mistral": {"sliding_window": 5},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid",
                     "qwen4_exp_text", "lfm3", "qwen3_5", "qwen3_5_moe"), HYBRID),
    "big_bird": {"attention_type": "original_full"},  # the sparse one draws its blocks
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": MLA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {"is_decoder": True},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v32", "glm_moe_dsa", "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
                     "longcat_flash", "minicpm3", "youtu"), MLA),
}  # fmt: skip
NAMED = (
    "smollm3", "ministral3", "olmo2", "olmo3", "granite", "gemma3_text", "glm4", "cohere2", "qwen3_moe", "gpt_oss",
    "qwen3_next", "seed_oss", "starcoder2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "phi3",
)  # fmt: skip
FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
LARGEST = 100_000_000  # parameters; a model that stays larger has sizes under names that are not known here


def config(family: str) -> Any:
    """The configuration of a family with SIZES and its OTHERS."""
    kind = CONFIG_MAPPING[family]
    return kind(**_known(kind, {**SIZES, **OTHERS.get(family, {})}))


def _known(kind: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of the sizes that a class of configurations knows, for those inside it, too."""
    names = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    names |= set(getattr(kind, "attribute_map", ()))
    inside = {n: _known(k, sizes) for n, k in kind.sub_configs.items() if hasattr(k, "sub_configs") and n in names}
    return {n: v for n, v in sizes.items() if n in names} | {n: v for n, v in inside.items() if "base_model" not in n}


def build(family: str) -> Any:
    """A family's PEFT model in training mode and float32, without dropout, with an adapter of random B on every linear
    that PEFT takes. Raises ValueError where it would be large."""
    torch.manual_seed(0)
    made = config(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(made).parameters())
    if size > LARGEST:
        raise ValueError(f"{family} stays at {size} parameters")
    base = transformers.AutoModelForCausalLM.from_config(made)
    lora = LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        exclude_modules=list(EXCLUDED.get(family, ())) or None,
    )
    model = get_peft_model(base, lora, autocast_adapter_dtype=False).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of a forward and backward of two rows of seven tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (2, 7))
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
