"""What a model is before it is built: its family, its sizes and its modules, from a model on the meta device.

A model there has names and shapes and no memory. What cannot be built, or has no such module, is known before a start.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lorabench.contract.hooks import message_of, printable
from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.names import nearest, one_line

ALL_LINEAR = "all-linear"  # PEFT's word; importing it from there would import what asks for the GPU
ALIKE = 0.9  # one letter of ten; published configurations have keys that are nobody's, and none so near to another
MOST = 2048  # of anything that a configuration counts (layers, heads, experts): each is built as a module
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


class ModelError(ValueError):
    """A model that cannot be built from its configuration; the message says what was expected."""


def check(spec: ModelSpec, adapters: Sequence[Lora]) -> None:
    """Raises ModelError for a configuration that is no decoder of transformers', and NameUnknown with the nearest right
    name for a target module that the model has not."""
    _check_counts(spec)
    _check_keys(spec)
    model = skeleton(spec, layers=1)
    for size in SIZES:
        value = getattr(model.config, size, None)  # a family may have none, or one for each layer
        if isinstance(value, int | float | str) and (not isinstance(value, int) or value < 1):
            raise ModelError(f"the model {spec.name} has {size} {value!r}; expected a number above zero")
    for adapter in adapters:
        check_targets(spec.name, model, adapter.target_modules)


def _check_counts(spec: ModelSpec) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    family = spec.family
    if not isinstance(family, str):
        raise ModelError(f"the model {spec.name} has model_type {family!r}; expected a name such as llama")
    if family not in DECODERS:
        raise nearest("model_type", family, DECODERS, where=" among transformers' causal language models")
    if family in ENCODERS:
        raise ModelError(f"the model {spec.name} is a {family}, which is no decoder, such as llama")
    if not isinstance(layers := spec.config.get("num_hidden_layers", 1), int):
        raise ModelError(f"the model {spec.name} has num_hidden_layers {layers!r}; expected a number above zero")
    for key, value in spec.config.items():
        if key.startswith(("num_", "n_layer", "n_head")) and isinstance(value, int) and not 0 <= value <= MOST:
            raise ModelError(f"the model {spec.name} has {key} {value}; expected at most {MOST}")


def _check_keys(spec: ModelSpec) -> None:
    """transformers keeps a key that it does not know, and takes its own default for the one that was meant."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(spec.family)
    known = {*vars(default), *default.attribute_map} - spec.config.keys()
    for key in spec.config.keys() - known:
        if not hasattr(default, key) and difflib.get_close_matches(key, known, cutoff=ALIKE):
            raise nearest("key", key, known, where=f" in the config of the model {spec.name}")


def skeleton(spec: ModelSpec, layers: int | None = None) -> Any:
    """transformers' model on the meta device. Raises ModelError."""
    try:
        return _skeleton(json.dumps(spec.config), spec.name, layers)
    except TypeError as error:
        raise ModelError(f"the model {spec.name} has a configuration that JSON cannot hold: {error}") from None


@lru_cache(maxsize=32)
def _skeleton(config: str, name: str, layers: int | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    spec = ModelSpec(name=name, source="", config=json.loads(config))
    try:
        with torch.device("meta"), quiet():
            made: Any = AutoModelForCausalLM.from_config(spec.hf_config(layers))
    except Exception as error:  # transformers checks little, so a wrong size may raise anything anywhere
        said = one_line(printable(message_of(error))[:500])  # of what it does check, the second line says what is wrong
        raise ModelError(f"the model {name} cannot be built by transformers: {said}") from None
    if getattr(made.config, "is_encoder_decoder", False) or decoder_layers(made) is None:
        raise ModelError(f"the model {name} is a {spec.family}, which is no decoder of listed layers, such as llama")
    return made


def decoder_layers(model: Any) -> Any:
    """The list of a decoder's layers, under whatever name its family has it; None where there is none."""
    import torch

    depth = model.config.num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((module for module in lists if len(module) == depth), None)


def check_targets(name: str, model: Any, targets: Sequence[str] | str) -> None:
    """Whether PEFT would find every target module, by its own rule: the end of a module's name, or a pattern for all of
    it. Raises NameUnknown, or ModelError where a module is there on which no adapter goes."""
    if targets == ALL_LINEAR:
        return
    modules = dict(model.named_modules())
    given = [targets] if isinstance(targets, str) else targets
    if not given:
        raise ModelError("lora.target_modules is empty; expected names of modules, such as [q_proj,v_proj]")
    for target, pattern in zip(given, _patterns(targets), strict=True):
        try:
            found = [module for full, module in modules.items() if re.fullmatch(pattern, full)]
        except re.error as error:
            raise ModelError(f"lora.target_modules is {target!r}, which is no regular expression: {error}") from None
        if not found:
            known = {full.rpartition(".")[2] for full, module in modules.items() if _takes_adapters(module)}
            raise nearest("module", target, known, where=f" in the model {name} for lora.target_modules")
        if wrong := next((module for module in found if not _takes_adapters(module)), None):
            what = f"{target!r}, which is a {type(wrong).__name__}"
            raise ModelError(f"lora.target_modules has {what}; expected a linear")


def _patterns(targets: Sequence[str] | str) -> list[str]:
    return [targets] if isinstance(targets, str) else [rf"(.*\.)?{re.escape(t)}" for t in targets]


def adapted(model: Any, targets: Sequence[str] | str) -> list[Any]:
    """The modules on which PEFT would put adapters; of all linears not the head."""
    if targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        return [module for module in model.modules() if _is_linear(module) and module is not head]
    patterns = _patterns(targets)
    return [m for full, m in model.named_modules() if any(re.fullmatch(p, full) for p in patterns)]


def _is_linear(module: Any) -> bool:
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear, whose weight is (in, out)

    return isinstance(module, nn.Linear | Conv1D)


def _takes_adapters(module: Any) -> bool:
    from torch import nn

    return _is_linear(module) or isinstance(module, nn.Embedding)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own reports: what it finds is said in one line of ours."""
    from transformers.utils import logging as own

    logger = logging.getLogger("transformers")
    level, bars = logger.level, own.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    own.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            own.enable_progress_bar()
