"""The settings that switch a toggle on in a training of the user's own, as typed pieces: `lorabench recommend` joins
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Arguments = Mapping[str, Any]
Worth = Literal["time", "memory"]  # what a toggle may be worth trying for


class Code(str):
    """A Python expression, pasted as it stands; other values as their `repr`. `dtype` in it is the compute dtype."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Keyword arguments by the call that takes them. Two toggles that are on together fill two slots, and so set two
    things."""

    model: Arguments = field(default_factory=dict)  # AutoModelForCausalLM.from_pretrained
    lora: Arguments = field(default_factory=dict)  # peft.LoraConfig
    peft: Arguments = field(default_factory=dict)  # peft.get_peft_model
    trainer: Arguments = field(default_factory=dict)  # transformers.TrainingArguments, and so trl.SFTConfig
    sft: Arguments = field(default_factory=dict)  # trl.SFTConfig alone
    collator: Code | None = None  # `data_collator` of transformers.Trainer, in place of the user's own
    imports: tuple[str, ...] = ()  # the lines that the pieces need
    code: tuple[str, ...] = ()  # lines after the PEFT model is built
    axolotl: Arguments | None = None  # keys of Axolotl's YAML file; None: it has none for this
    note: str = ""  # what the user has to do besides, in one sentence
