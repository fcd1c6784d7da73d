"""The model: an architecture from its published configuration, its weights, and the PEFT adapter on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lorabench.contract.names import nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Fields of a model that came after the first published records: unset, they leave the keys as they were.
LATER = ("location", "fingerprint")
LATER_OF_LORA = ("use_dora",)  # likewise of its adapter
# In the names of the numbers by which a base model is random in training.
RANDOM_IN_TRAINING = ("drop", "jitter", "noise")


class Lora(BaseModel):
    """PEFT's LoraConfig, by its own names."""

    model_config = ConfigDict(extra="forbid")

    r: int = Field(default=16, ge=1, le=1 << 20)
    lora_alpha: float = Field(default=32, allow_inf_nan=False)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: list[str] | str = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip


class ModelSpec(BaseModel):
    """One model of a sweep.

    `config` is the published configuration (transformers' names). `weights` is "random", a hub name, a local folder
    or "smollm2-135m-instruct" (from the Python package index); `measure/build.py` builds it. What an operation out of a
    model is (`linear-4096x14336`), its kind says: measure/kinds/operations.

    `location`: the folder or hub name of a user's own model, which has its tokenizer too. `fingerprint`: of the files
    in a local folder of weights, so that other weights under the same name are another measurement.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    source: str  # where the configuration was published
    config: dict[str, Any]
    dtype: str = "auto"  # auto: bfloat16 where the device computes in it natively, else float32
    weights: str = "random"
    lora: Lora = Lora()
    location: str | None = None
    fingerprint: str | None = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"{nearest('dtype', value, DTYPES)} expected one of {', '.join(DTYPES)}")
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

    def adapter(self) -> dict[str, Any]:
        """Keyword arguments of PEFT's LoraConfig."""
        return self.lora.model_dump() | {"task_type": "CAUSAL_LM"}

    def without_dropout(self) -> ModelSpec:
        return self.with_lora(self.lora.model_copy(update={"lora_dropout": 0.0}))

    def hf_config(self, layers: int | None = None) -> Any:
        """transformers' configuration object; `layers` overrides the depth (the gate's shallow model).

        What a base model draws at random in training (its own dropout, a router's jitter) is off: two arms, and the
        gate's gold, could not be compared.
        """
        from transformers import AutoConfig

        config = AutoConfig.for_model(**self.config, use_cache=False)
        for key, value in vars(config).items():
            if isinstance(value, float) and any(word in key for word in RANDOM_IN_TRAINING):
                setattr(config, key, 0.0)
        if layers is not None:
            _cut(config, layers)
        return config

    def content(self) -> dict[str, Any]:
        """What makes it this model and no other."""
        dumped = self.model_dump(mode="json")
        dumped["lora"] = {k: v for k, v in dumped["lora"].items() if k not in LATER_OF_LORA or v}
        return {k: v for k, v in dumped.items() if k not in LATER or v}

    def with_lora(self, lora: Lora) -> ModelSpec:
        return self.model_copy(update={"lora": lora})


def _cut(config: Any, layers: int) -> None:
    """So many layers, under whatever name the family has the number; and what is listed layer by layer (which attention
    each has, which are dense) as long as that."""
    depth = config.num_hidden_layers
    if layers >= depth:
        return
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
