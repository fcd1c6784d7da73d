"""Two-layer models of every family that `apply` knows, with LoRA whose B is not zero."""

from zlib import crc32

import torch
import transformers
from lorakernels.nodes.projection import Projection
from lorakernels.ops.dropout import dropped
from peft import LoraConfig, get_peft_model

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    # All experts for each token: which two of four are best is decided by the last bit, and then nothing compares.
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 8, "sliding_window": 5, "attn_logit_softcapping": 5.0,
                                "final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
}  # fmt: skip


def build(family: str, dtype=torch.float32, targets=None, seed=0, sizes=None, **lora):
    """(PEFT model in training mode); its adapter is in dtype unless autocast_adapter_dtype=True is passed on. sizes:
    what differs from COMMON."""
    name, extra = FAMILIES[family]
    extra = dict(extra)
    implementation = extra.pop("attn_implementation", "sdpa")
    config = getattr(transformers, name)(**{**COMMON, **extra, **(sizes or {})})
    torch.manual_seed(seed)
    base = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for n, p in base.named_parameters():
            if n.endswith("bias") or "norm" in n:
                p.add_(torch.randn_like(p) * 0.1)
            elif "lm_head" in n or "proj" in n:
                p.mul_(8)  # 0.02 at these widths would leave every activation nearly linear
    base = base.to(dtype)
    if targets is None:
        phi = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "mixtral": LINEARS[:4]}
        targets = phi.get(family, LINEARS)
    autocast = lora.pop("autocast_adapter_dtype", False)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **lora})
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.copy_(torch.randn(p.shape) * 0.1)
    return model.train()


def seed_of(name: str) -> int:
    """A linear's seed, from its path in the model."""
    return crc32(name.split("base_model.model.")[-1].encode()) & 0x7FFFFFFF


class Seeded(torch.nn.Dropout):
    """PEFT's dropout with the mask of a node that has the same seed. It is drawn in float32 whatever x is, so that a
    reference in float64 has the mask that Triton makes."""

    def forward(self, x):
        if not self.training:
            return x
        ones = torch.ones(x.shape[:-1].numel(), x.shape[-1], device=x.device)
        mask = dropped(ones, torch.tensor([self.seed], device=x.device), self.p) != 0
        return x * mask.view(x.shape) / (1 - self.p)


def share_masks(plain, monkeypatch) -> None:
    """Every dropout of a plain PEFT model, and every node from now on, gets the seed that its linear's name makes."""
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name:
            module.__class__ = Seeded
            module.seed = seed_of(name.split(".lora_dropout")[0])

    def seeds(self, device):
        return torch.tensor([seed_of(m.name) for m in self.members], device=device) if self.dropped else None

    monkeypatch.setattr(Projection, "seeds", seeds)


def batch(rows=2, length=9, padded=False, seed=3):
    torch.manual_seed(seed)
    ids = torch.randint(3, 101, (rows, length))
    labels = ids.clone()
    labels[:, :2] = -100
    out = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        labels[0, -3:] = -100
        out["attention_mask"] = mask
    return out


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step(model, data, **kwargs):
    """(loss, gradients by name) of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**data, **kwargs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def worst(grads, wanted) -> float:
    """Largest error of a gradient tensor over that tensor's largest entry."""
    assert set(grads) == set(wanted), set(grads) ^ set(wanted)
    assert all(g.isfinite().all() for g in grads.values())
    return max(
        ((g.double() - wanted[n].double()).abs().max() / wanted[n].double().abs().max().clamp_min(1e-9)).item()
        for n, g in grads.items()
    )


def cuda(data):
    return {n: t.cuda() for n, t in data.items()}


def captured(runs):
    """(graph of the first run, what that returns, the stream), after all of them have warmed up on that stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            for _ in range(3):
                run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        static = runs[0]()
    return graph, static, side
