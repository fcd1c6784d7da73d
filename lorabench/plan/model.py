"""The model: an architecture from its published configuration, its weights, and the PEFT adapter on it.

Or, for the cells that measure one operation, a single linear: `linear-4096x14336` (see measure/op.py).
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lorabench.plan.registry import NameUnknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
LINEAR = "linear"  # the family of a single linear, and the name of its module


class Lora(BaseModel):
    """PEFT's LoraConfig, by its own names."""

    model_config = ConfigDict(extra="forbid")

    r: int = Field(default=16, ge=1)
    lora_alpha: float = 32
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    target_modules: list[str] | str = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip


class ModelSpec(BaseModel):
    """One model of a sweep.

    `config` is the published configuration (transformers' names). `weights` is "random", a hub name, a local folder
    or "smollm2-135m-instruct" (from the Python package index); `measure/arm.py` builds it.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    source: str  # where the configuration was published
    config: dict[str, Any]
    dtype: str = "auto"  # auto: bfloat16 where the device computes in it natively, else float32
    weights: str = "random"
    lora: Lora = Lora()

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"dtype {value!r}: expected one of {', '.join(DTYPES)}")
        return value

    @field_validator("config")
    @classmethod
    def _names_its_family(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "model_type" not in value:
            raise ValueError("config needs model_type (transformers' name of the family, such as llama)")
        return value

    @property
    def family(self) -> str:
        return self.config["model_type"]

    @property
    def op(self) -> bool:
        """Whether this is one operation out of a model: fed hidden states instead of tokens, no loss, no optimizer."""
        return self.family == LINEAR

    def adapter(self) -> dict[str, Any]:
        """Keyword arguments of PEFT's LoraConfig."""
        if self.op:
            return self.lora.model_dump() | {"target_modules": [LINEAR]}
        return self.lora.model_dump() | {"task_type": "CAUSAL_LM"}

    def without_dropout(self) -> ModelSpec:
        return self.model_copy(update={"lora": self.lora.model_copy(update={"lora_dropout": 0.0})})

    def hf_config(self, layers: int | None = None) -> Any:
        """transformers' configuration object; `layers` overrides the depth (the gate's shallow twin). Of a single
        linear its own sizes; the vocabulary is of no matter there, as only the number of tokens counts."""
        if self.op:
            return SimpleNamespace(**self.config, vocab_size=2)
        from transformers import AutoConfig

        config = dict(self.config)
        if layers is not None:
            config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
            if config.get("layer_types"):
                config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        return AutoConfig.for_model(**config, use_cache=False)

    def shape(self) -> Shape:
        return Shape.of(self.hf_config(), self.lora)


def linear(name: str) -> dict[str, Any] | None:
    """`linear-4096x14336` -> the fields of a ModelSpec: one frozen linear of 4096 inputs and 14336 outputs under LoRA;
    `norm-linear-4096x14336`: the same behind an RMSNorm, as a model has it. None where the name is another's. Raises
    NameUnknown where it only begins like this."""
    if not name.startswith((f"{LINEAR}-", f"norm-{LINEAR}-")) or name.endswith((".yaml", ".yml")):
        return None
    match = re.fullmatch(rf"(norm-)?{LINEAR}-([1-9]\d*)x([1-9]\d*)", name)
    if not match:
        raise NameUnknown(f"no model named {name!r}; a single linear is {LINEAR}-INxOUT, such as {LINEAR}-4096x14336")
    config = {"model_type": LINEAR, "in_features": int(match[2]), "out_features": int(match[3])}
    if match[1]:
        config["rms_norm_eps"] = 1e-6
    return {"source": "a single linear, no published model", "config": config, "weights": "random"}


class Shape(BaseModel):
    """The sizes that FLOPs and bytes are counted from. Parameter counts, not bytes."""

    layers: int
    hidden: int
    attention_width: int  # heads x head_dim
    frozen_per_layer: int  # weights of the linear layers of one decoder layer
    head: int  # vocabulary x hidden
    adapter_per_layer: int  # r x (in + out) over the adapted linears of one layer

    @classmethod
    def of(cls, config: Any, lora: Lora) -> Shape:
        if config.model_type == LINEAR:
            k, n = config.in_features, config.out_features
            own = {"frozen_per_layer": k * n, "adapter_per_layer": lora.r * (k + n)}
            return cls(layers=1, hidden=k, attention_width=0, head=0, **own)
        hidden, inner = config.hidden_size, config.intermediate_size
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        linears = {
            "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
            "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
        }  # fmt: skip
        adapted = linears if isinstance(lora.target_modules, str) else set(lora.target_modules) & set(linears)
        return cls(
            layers=config.num_hidden_layers,
            hidden=hidden,
            attention_width=q,
            frozen_per_layer=sum(i * o for i, o in linears.values()),
            head=config.vocab_size * hidden,
            adapter_per_layer=sum(lora.r * (linears[name][0] + linears[name][1]) for name in adapted),
        )
