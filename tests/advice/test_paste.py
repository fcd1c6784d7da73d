"""The pasted code: every toggle of ours that says its settings, really run on a tiny model with TRL and the Trainer."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import yaml
from helpers import cells

from lorabench.contract.ablation import Ablation, combine
from lorabench.contract.settings import Settings
from lorabench.measure.machine import describe
from lorabench.plan import registry
from lorabench.report.paste import MODEL, apart, blocks
from lorabench_ablations.loading import quantized_weights

MACHINE = describe()


def settled_names():
    """Toggles that this machine has and whose settings are more than a note."""
    made = (
        registry.ablation(name)
        for name in registry.registered()
        if registry.registered()[name].value.startswith("lorabench_ablations.")
    )
    known = ((a, a.settings()) for a in made if a.requires.unmet(MACHINE) is None)
    return sorted(a.name for a, own in known if own is not None and own != Settings(note=own.note, axolotl=own.axolotl))


def cell_of(*names, workload="{short_samples:{samples:4,batch_size:2}}"):
    itself = cells("ablations=[]", f"workload={workload}")[0]
    toggles = tuple(registry.ablation(name) if not isinstance(name, Ablation) else name for name in names)
    return replace(itself, toggles=toggles, candidate=tuple(combine(itself.reference, toggles)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of whole words, as on a disk."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(cells("ablations=[]")[0].model.hf_config()).save_pretrained(made)
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *map(str, range(253))])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(made)
    return made


def run_block(cell, number, folder, tmp_path, dtype="float32"):
    """Run what a user would paste, on a model and data of a test; returns its trainer."""
    title, language, text = blocks(cell, dtype)[number]
    assert language == "python" and MODEL in text
    text = text.replace(MODEL, str(folder)).replace("output/adapter", str(tmp_path))
    few = f"output_dir='{tmp_path}', max_steps=2, use_cpu=True, report_to=[], save_strategy='no', logging_steps=1"
    text = text.replace(f"output_dir='{tmp_path}'", few)
    draw = random.Random(0)
    ids = [[draw.randrange(3, 256) for _ in range(n)] for n in (9, 5, 12, 7, 6, 11, 8, 10)]
    given = {"train_dataset": dataset(ids), "data_collator": padded}
    exec(compile(text, title, "exec"), given)
    losses = [e["loss"] for e in given["trainer"].state.log_history if "loss" in e]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    return given["trainer"]


def dataset(ids):
    from datasets import Dataset
    from datasets.table import InMemoryTable

    rows = InMemoryTable.from_pydict({"input_ids": ids, "labels": ids})
    return Dataset(rows, fingerprint="rows")  # one of its own: see tests/lorakernels/test_trainer.py


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    columns = {"input_ids": 0, "labels": -100}
    made = {n: torch.tensor([r[n] + [p] * (longest - len(r[n])) for r in rows]) for n, p in columns.items()}
    return made | {"attention_mask": (made["labels"] != -100).long()}


def engaged(name, trainer):
    """Whether the toggle is on in this trainer."""
    model, arguments = trainer.model, trainer.args
    group = getattr(trainer.optimizer, "optimizer", trainer.optimizer).param_groups[0]
    base = model.get_base_model()
    found = {
        "sdpa": lambda: base.config._attn_implementation == "sdpa",
        "eager": lambda: base.config._attn_implementation == "eager",
        "adamw_foreach": lambda: not group["fused"] and arguments.optim == "adamw_torch",
        "adamw_fused": lambda: group["fused"],
        "adapters_in_compute_dtype": lambda: all(p.dtype == torch.bfloat16 for p in model.parameters()),
        "gradient_checkpointing": lambda: base.is_gradient_checkpointing,
        "no_gradient_checkpointing": lambda: not base.is_gradient_checkpointing,
        "find_executable_batch_size": lambda: arguments.auto_find_batch_size,
        "lora_kernels": lambda: any("_lorakernels" in m.__dict__ for m in model.modules()),
        "fp8_base": lambda: any("_lorakernels" in m.__dict__ for m in model.modules()),
        "long_context": lambda: any("_lorakernels" in m.__dict__ for m in model.modules()),
        "nf4_base": lambda: len(quantized_weights(model)) == 21,
        "packing": lambda: next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1,
        "padding_free": lambda: next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1,
        "group_by_length": lambda: "LengthGrouped" in type(trainer._get_train_sampler()).__name__,
        "padding": lambda: next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 2,
        "torch_compile": lambda: arguments.torch_compile,
        "torch_compile_layers": lambda: all(layer._compiled_call_impl for layer in base.model.layers),
        "gradient_accumulation": lambda: arguments.gradient_accumulation_steps == 2,
        "load_in_8bit": lambda: sum(type(m).__module__.startswith("bitsandbytes.") for m in model.modules()) == 21,
        "neftune": lambda: arguments.neftune_noise_alpha == 5,
    }
    return found[name]()


SLOW = ("torch_compile", "torch_compile_layers", "nf4_base")


@pytest.mark.parametrize(
    ("name", "number"),  # each toggle with one of the two trainers, whose settings are one another's
    [
        pytest.param(
            name,
            number,
            id=f"{name}-{trainer}",
            marks=[pytest.mark.exhaustive] if name in SLOW or (n + number) % 2 else [],
        )
        for n, name in enumerate(settled_names())
        for number, trainer in enumerate(("trl", "trainer"))
    ],
)
def test_the_pasted_code_runs_and_engages(name, number, folder, tmp_path):
    pytest.importorskip("trl", reason="needs the package trl")
    dtype = "bfloat16" if name == "adapters_in_compute_dtype" else "float32"
    trainer = run_block(cell_of(name), number, folder, tmp_path, dtype)
    assert engaged(name, trainer)


@pytest.mark.parametrize("number", [0, 1], ids=["trl", "trainer"])
def test_trl_s_own_packing_runs_where_it_is_what_was_measured(number, folder, tmp_path):
    pytest.importorskip("trl", reason="needs the package trl")
    trainer = run_block(cell_of(registry.ablation({"packing": {"strategy": "bfd"}})), number, folder, tmp_path)
    assert engaged("packing", trainer)
    assert number or trainer.args.packing_strategy == "bfd"


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["trl", "trainer"])
def test_a_whole_stack_is_one_piece_of_code_and_trains_as_the_reference_does(number, folder, tmp_path):
    pytest.importorskip("trl", reason="needs the package trl")
    stack = ("packing", "adamw_fused", "gradient_checkpointing", "lora_kernels")
    trainers = [run_block(cell_of(*names), number, folder, tmp_path) for names in ((), stack)]
    assert all(engaged(name, trainers[1]) for name in stack)
    plain, ours = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in trainers)
    assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    ("others", "number"),
    [
        ((), 0),
        (("lora_kernels",), 1),
        pytest.param((), 1, marks=pytest.mark.exhaustive),
        pytest.param(("lora_kernels",), 0, marks=pytest.mark.exhaustive),
    ],
    ids=["alone-trl", "with_lora_kernels-trainer", "alone-trainer", "with_lora_kernels-trl"],
)
def test_a_captured_trainer_runs_and_is_captured(others, number, folder, tmp_path):
    """Its toggle needs a CUDA device, and its code none: on a CPU the captured trainer trains and says that."""
    pytest.importorskip("trl", reason="needs the package trl")
    trainer = run_block(cell_of("cuda_graph", *others), number, folder, tmp_path)
    assert type(trainer.capture).__name__ == "TrainerCapture" and engaged("lora_kernels", trainer)


@pytest.mark.parametrize("number", [0, 1], ids=["trl", "trainer"])
def test_a_captured_trainer_is_told_after_it_is_built_and_its_model_is_patched_once(number):
    ours = registry.ablation({"lora_kernels": {"one_gemm": False}})
    for toggles, patched in ((["cuda_graph"], "(model)"), (["cuda_graph", ours], "(model, one_gemm=False)")):
        lines = blocks(cell_of(*toggles), "float32")[number][2].splitlines()
        assert lines.count("import lorakernels") == 1
        assert [line for line in lines if "apply" in line] == [lines[0], f"lorakernels.apply{patched}"]
        assert lines[0].startswith("# cuda_graph: TRL's own loss waits for the host")
        assert lines[-2:] == ["lorakernels.captured(trainer)", "trainer.train()"]
        built = next(n for n, line in enumerate(lines) if line.startswith("model = get_peft_model("))
        assert (
            built
            < lines.index(f"lorakernels.apply{patched}")
            < next(n for n, x in enumerate(lines) if x.startswith("arguments"))
        )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("torch_compile", "cuda_graph has no effect on a trainer that compiles its model, as torch_compile does"),
        ("axolotl", "cuda_graph needs a trainer of transformers or TRL, which axolotl does not speak of"),
        ("unsloth", "cuda_graph needs a trainer of transformers or TRL, which unsloth does not speak of"),
        ("lora_kernels", None), ("adamw_fused", None), ("adapters_in_compute_dtype", None), ("nf4_base", None),
        ("gradient_checkpointing", None), ("auto_batch_size", None),
    ],
)  # fmt: skip
def test_what_no_trainer_can_have_together_is_told(other, says):
    two = [registry.ablation(name) for name in ("cuda_graph", other)]
    assert apart(two) == says and apart(two[1:]) is None
    assert apart([*cell_of().reference, two[0]]) is None


@dataclass(frozen=True, kw_only=True)
class Silent(Ablation):
    name: ClassVar[str] = "silent"
    slot: ClassVar[str] = "third_party"


@dataclass(frozen=True, kw_only=True)
class Sly(Silent):
    name: ClassVar[str] = "sly"

    def settings(self):
        return Settings(note="harmless\nimport os; os.abort()", axolotl={"sly": True})


@dataclass(frozen=True, kw_only=True)
class Long(Silent):
    name: ClassVar[str] = "long"

    def settings(self):
        return Settings(code=("if model:", "    pass", "if not model:", "    pass"))


def test_a_toggle_s_own_lines_stay_as_they_are():
    text = blocks(cell_of(Long()), "float32")[0][2]
    assert "\nif model:\n    pass\nif not model:\n    pass\n" in text


@dataclass(frozen=True, kw_only=True)
class Wrong(Silent):
    name: ClassVar[str] = "wrong"

    def settings(self):
        return {"optim": "adamw"}


@pytest.mark.parametrize(
    ("toggle", "line"),
    [
        (Silent(), "# silent: it does not say how it is switched on, its documentation may"),
        (Sly(), "# sly: harmless import os; os.abort()"),
        (Wrong(), "# wrong: the toggle wrong's settings returned {'optim': 'adamw'}; expected Settings, or None"),
    ],
)
def test_what_a_toggle_does_not_say_stands_as_a_comment(toggle, line):
    for _, language, text in blocks(cell_of(toggle), "float32"):
        if language == "python":
            assert text.splitlines()[0] == line


@pytest.mark.parametrize("name", settled_names())
def test_the_yaml_of_axolotl_parses_and_names_what_has_no_key(name):
    cell = cell_of(name)
    _, language, text = blocks(cell, "bfloat16")[2]
    keys = yaml.safe_load(text)
    assert language == "yaml" and keys["base_model"] == MODEL and keys["bfloat16"] is True and keys["lora_r"] == 16
    assert (keys["micro_batch_size"], keys["gradient_accumulation_steps"], keys["sequence_len"]) == (2, 2, 40)
    said = registry.ablation(name).settings().axolotl
    assert (f"# Axolotl has no key for {name}\n" in text) == (said is None)
    assert keys.items() >= (said or {}).items()


def test_real_weights_are_named(folder):
    cell = cell_of("sdpa")
    cell = replace(cell, model=cell.model.model_copy(update={"weights": str(folder)}))
    assert all(str(folder) in text and MODEL not in text for _, _, text in blocks(cell, "float32"))
