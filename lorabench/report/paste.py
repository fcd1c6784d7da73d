"""The code to paste: what a cell's candidate was, as PEFT with TRL or transformers' Trainer, and as Axolotl's YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from lorabench.contract.ablation import Ablation
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked, described
from lorabench.contract.settings import Code, Settings

MODEL = "YOUR-MODEL"  # a hub name or a folder, where the cell's weights were random
WIDTH = 100


class Pieces(NamedTuple):
    """The settings of all toggles that say theirs, and what is left to the user, a line each."""

    settings: list[Settings]
    by_hand: list[str]
    no_key: list[str]  # labels of those that Axolotl has no key for


def pieces(ablations: Sequence[Ablation]) -> Pieces:
    found, by_hand, no_key = [], [], []
    for ablation in sorted(ablations, key=lambda a: a.name):
        answer = _settings(ablation)
        found.append(answer)
        by_hand += [f"{ablation.label}: {answer.note}"] if answer.note else []
        no_key += [ablation.label] if answer.axolotl is None else []
    return Pieces(found, by_hand, no_key)


def _settings(ablation: Ablation) -> Settings:
    try:
        answer = asked(ablation, Ablation.settings)
    except Exception as error:  # a third party's
        answer = Settings(note=described(error))
    return answer or Settings(note="it does not say how it is switched on, its documentation may")


def apart(ablations: Sequence[Ablation]) -> str | None:
    """Why no trainer can have these together, though a step can be measured with them, or None: what changes the
    trainer itself goes with no other trainer, and with no model that this one compiles. What finds the samples of a
    micro-batch is there as the number that it found."""
    own = {a: _settings(a) for a in sorted(ablations, key=lambda a: a.name) if not sizes(a)}
    for changing in (a for a, s in own.items() if code([s], of_trainer=True)):
        for other, said in own.items():
            if said.trainer.get("torch_compile"):
                return f"{changing.label} has no effect on a trainer that compiles its model, as {other.label} does"
            if said.note and said in (Settings(note=said.note), Settings(note=said.note, axolotl=said.axolotl)):
                return f"{changing.label} needs a trainer of transformers or TRL, which {other.label} does not speak of"
    return None


def sizes(toggle: Ablation) -> bool:
    """Whether it says how many samples go into a micro-batch."""
    return type(toggle).size is not Ablation.size


def found_size(toggles: Iterable[Ablation], notes: Mapping[str, Any]) -> int | None:
    """How many samples one of these toggles put into a micro-batch, by the notes of its arm; None where none looked."""
    found = (notes.get(toggle.name) for toggle in toggles if sizes(toggle))
    return next((int(note["batch_size"]) for note in found if note and "batch_size" in note), None)


def joined(settings: Sequence[Settings], piece: str) -> dict[str, Any]:
    return {key: value for s in settings for key, value in (getattr(s, piece) or {}).items()}


def code(settings: Sequence[Settings], *, of_trainer: bool) -> list[str]:
    """The lines of all toggles that speak of `trainer`, which come after it is built, or those that do not. A call that
    two toggles make is made once, with the arguments of the one that has some."""
    lines: list[str] = []
    for own in settings:
        lines += [line for line in own.code if line not in lines]
    said = [line for line in lines if not any(o.startswith(f"{line.removesuffix(')')}, ") for o in lines)]
    return [line for line in said if bool(re.search(r"\btrainer\b", line)) == of_trainer]


def blocks(cell: Cell, dtype: str) -> list[tuple[str, str, str]]:
    """(title, language, text) of each block. dtype: the compute dtype, by torch's name."""
    own = pieces(cell.candidate)
    model = _model(cell, dtype, own)
    return [
        ("PEFT with TRL", "python", f"{model}\n{_trl(cell, own.settings)}"),
        ("PEFT with transformers' Trainer", "python", f"{model}\n{_trainer(cell, own.settings)}"),
        ("Axolotl", "yaml", _axolotl(cell, dtype, own)),
    ]


def switches(ablations: Sequence[Ablation]) -> list[tuple[str, str, str]]:
    """The same without a cell: what each call takes beside the user's own arguments, which stand as `**yours`."""
    own = pieces(ablations)
    lora = _call("LoraConfig", joined(own.settings, "lora"), "**your_lora")
    load = {"dtype": Code("dtype")} | joined(own.settings, "model")
    arguments = joined(own.settings, "trainer") | joined(own.settings, "sft")
    lines = [
        *map(_comment, own.by_hand),
        *dict.fromkeys(line for s in own.settings for line in s.imports),
        f"model = {_call('AutoModelForCausalLM.from_pretrained', load, repr(MODEL))}",
        f"model = {_call('get_peft_model', joined(own.settings, 'peft'), 'model', lora)}",
        *code(own.settings, of_trainer=False),
        f"arguments = {_call('SFTConfig', arguments, '**your_arguments')}  # or transformers' TrainingArguments",
        *code(own.settings, of_trainer=True),
    ]
    found = [("PEFT with TRL or transformers", "python", "\n".join(lines))]
    if keys := joined(own.settings, "axolotl"):
        said = [_comment(f"Axolotl has no key for {label}") for label in own.no_key]
        found.append(("Axolotl", "yaml", "\n".join([*said, yaml.safe_dump(keys, sort_keys=False).rstrip()])))
    return found


def _model(cell: Cell, dtype: str, own: Pieces) -> str:
    settings = own.settings
    lora = cell.model.adapter() | joined(settings, "lora")
    load = {"dtype": Code("dtype")} | joined(settings, "model")
    imports = [
        "import torch",
        "from peft import LoraConfig, get_peft_model",
        "from transformers import AutoModelForCausalLM",
        *(line for s in settings for line in s.imports),
    ]
    built = _call("get_peft_model", joined(settings, "peft"), "model", _call("LoraConfig", lora).rstrip())
    return "\n".join(
        [
            *map(_comment, own.by_hand),
            *dict.fromkeys(imports),
            "",
            f"dtype = torch.{dtype}",
            f"model = {_call('AutoModelForCausalLM.from_pretrained', load, repr(_weights(cell)))}",
            f"model = {built}",
            *code(settings, of_trainer=False),
            "",
        ]
    )


def _arguments(cell: Cell, settings: Sequence[Settings]) -> dict[str, Any]:
    """Of either trainer, each default that differs from what was measured written out."""
    load = cell.workload
    steps = -(-load.count // load.batch_size)
    return {
        "output_dir": "output/adapter",
        "per_device_train_batch_size": min(load.batch_size, load.count),
        **({"gradient_accumulation_steps": steps} if steps > 1 else {}),
        "bf16": False,  # the model is in its dtype already: autocast would cast every time
        "gradient_checkpointing": False,
        **joined(settings, "trainer"),
    }


def _trl(cell: Cell, settings: Sequence[Settings]) -> str:
    arguments = _arguments(cell, settings) | {"max_length": cell.workload.seq_len} | joined(settings, "sft")
    lines = [
        "from trl import SFTConfig, SFTTrainer",
        "",
        f"arguments = {_call('SFTConfig', arguments)}",
        "trainer = SFTTrainer(model=model, args=arguments, train_dataset=train_dataset)",
        *code(settings, of_trainer=True),
        "trainer.train()",
    ]
    return "\n".join([*lines, ""])


def _trainer(cell: Cell, settings: Sequence[Settings]) -> str:
    collator = next((s.collator for s in settings if s.collator), Code("data_collator"))
    given = {"model": Code("model"), "args": Code("arguments"), "train_dataset": Code("train_dataset")}
    lines = [
        "from transformers import Trainer, TrainingArguments",
        "",
        f"arguments = {_call('TrainingArguments', _arguments(cell, settings))}",
        f"trainer = {_call('Trainer', given | {'data_collator': collator})}",
        *code(settings, of_trainer=True),
        "trainer.train()",
    ]
    return "\n".join([*lines, ""])


def _axolotl(cell: Cell, dtype: str, own: Pieces) -> str:
    lora, load = cell.model.lora, cell.workload
    keys = {
        "base_model": _weights(cell),
        "adapter": "lora",
        "lora_r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "lora_target_modules": lora.target_modules,
        "sequence_len": load.seq_len,
        "micro_batch_size": min(load.batch_size, load.count),
        "gradient_accumulation_steps": -(-load.count // load.batch_size),
        "bf16": False,  # autocast
        **({dtype: True} if dtype != "float32" else {}),
        "gradient_checkpointing": False,
    }
    said = [_comment(f"Axolotl has no key for {label}") for label in own.no_key]
    return "\n".join([*said, yaml.safe_dump(keys | joined(own.settings, "axolotl"), sort_keys=False)])


def _comment(text: str) -> str:
    return f"# {' '.join(text.split())}"  # a toggle's own words must stay a comment


def _weights(cell: Cell) -> str:
    named = cell.model.weights
    return named if "/" in named else MODEL


def _call(function: str, arguments: Mapping[str, Any], *first: str) -> str:
    """On one line where that is short enough."""
    given = [*first, *(f"{name}={value!r}" for name, value in arguments.items())]
    line = f"{function}({', '.join(given)})"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    inner = "".join(f"    {text},\n" for text in (g.replace("\n", "\n    ") for g in given))
    return f"{function}(\n{inner})"
