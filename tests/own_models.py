"""A user's own models, tiny: a folder of any family as transformers saves it, with a tokenizer trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = {"vocab_size": 320, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
LLAMA = {
    **SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 8},
    "qwen3": LLAMA | {"head_dim": 8},
    "gemma": LLAMA | {"head_dim": 8},
    "phi3": LLAMA,
    "gpt_neox": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "gpt2": {**SMALL, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": LLAMA | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": LLAMA | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHATS = [
    [("user", "How many eggs are in a dozen?"), ("assistant", "Twelve.")],
    [
        ("system", "You are brief."), ("user", "Name a river in France."), ("assistant", "The Seine."),
        ("user", "And one in Egypt?"), ("assistant", "The Nile."),
    ],
    [("user", "What is 3 * 4?"), ("assistant", "3 * 4 = 12."), ("user", "Thanks!"), ("assistant", "You are welcome.")],
    [("user", "Say hello in Spanish."), ("assistant", "Hola.")],
]  # fmt: skip


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(path: Path) -> Path:
    """The chats as a JSONL file."""
    return jsonl(path, [{"messages": messages(chat)} for chat in CHATS])


def tokenizer(template: str | None = CHATML) -> Any:
    """Byte-level BPE of 320 tokens, with the special tokens of ChatML."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    text = [content for chat in CHATS for _, content in chat]
    trained.train_from_iterator(text, vocab_size=320, special_tokens=SPECIAL, show_progress=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[3]
    )
    made.chat_template = template
    return made


def saved(folder: Path, family: str = "llama", template: str | None = CHATML, **changes: Any) -> Path:
    """A model folder: configuration, random weights in float32, tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder
