"""The base with an adapter for each job, as PEFT puts them on: A drawn from the job's seed, B zero."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation, Unsupported
from lorabench.contract.model import ModelSpec
from lorabench.measure.build import causal_lm, fill_weights
from lorabench.measure.hooks import Hooks
from lorabench.plan.weights import RANDOM
from lorabench.record.store import StoreError

# What PEFT adds to the path of a tensor.
PEFT_PARTS = {"base_model", "model", "base_layer", "lora_A", "lora_B", "lora_magnitude_vector", "weight"}


def with_adapters(
    spec: ModelSpec, adapters: Mapping[str, ModelSpec], seeds: Mapping[str, int], hooks: Hooks, dtype: torch.dtype,
    device: torch.device, seed: int,
) -> Any:  # fmt: skip
    """The PEFT model, in training, with one adapter for each name; the toggles have loaded, adapted and patched it.

    `seed`: of a base of random weights. Raises WeightsError, Unsupported, and out-of-memory errors."""
    from peft import LoraConfig, get_peft_model

    load: dict[str, Any] = {"dtype": dtype}
    hooks.each(Ablation.load, load)
    base: Any = causal_lm(spec, load, device, None)
    if spec.weights == RANDOM:
        fill_weights(base, dtype, seed)
    hooks.each(Ablation.prepare, base, upcast=False)
    # PEFT writes it into each adapter's configuration.
    base.name_or_path = spec.weights if spec.weights != RANDOM else spec.location or spec.source
    model: Any = None
    for name, own in adapters.items():
        kwargs: dict[str, Any] = {"config": own.adapter()}
        hooks.each(Ablation.adapt, kwargs)
        config = LoraConfig(**kwargs.pop("config"))
        torch.manual_seed(seeds[name])
        with warnings.catch_warnings():
            # Of a name that is a part of "lora_", as `a` is: PEFT takes names off and puts them on part by part, so
            # that such an adapter is saved and loaded like any other.
            warnings.filterwarnings("ignore", "Adapter name .* should not be contained in the prefix")
            if model is None:
                model = get_peft_model(base, config, adapter_name=name, **kwargs)
            else:
                model.add_adapter(name, config, **kwargs)
    assert model is not None  # a file has at least one job
    model.train()
    hooks.each(Ablation.patch, model)
    return model


def check_names(names: Iterable[str], skeleton: Any) -> None:
    """Raises ValueError for a job that is named as a part of the model is. PEFT, which writes one adapter of several,
    leaves out every tensor with another adapter's name in its path: here that would be weights of its own."""
    parts = {part for path, _ in skeleton.named_modules() for part in path.split(".")}
    if taken := next((name for name in names if name in parts | PEFT_PARTS), None):
        raise ValueError(
            f"job {taken}: a part of the model has this name, and PEFT would leave that part out of every other job's "
            "adapter; expected another name"
        )


def parameters(model: Any, name: str) -> dict[str, torch.nn.Parameter]:
    """A job's trained tensors by name. Raises Unsupported where PEFT put its adapter on nothing."""
    mine = re.compile(rf"\.lora_[AB]\.{name}\.")
    found = {n: p for n, p in model.named_parameters() if mine.search(n)}
    if not found:
        raise Unsupported(f"job {name}: its adapter has no parameters; expected target_modules that the model has")
    for parameter in found.values():
        parameter.requires_grad_(True)
    return found


def save_adapter(model: Any, name: str, folder: Path) -> None:
    """FOLDER/NAME, as PEFT's save_pretrained writes it: whole, or what was there before. Raises StoreError."""
    partial = folder / f".{name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(str(partial), selected_adapters=[name], save_embedding_layers=False)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(partial / name, folder / name)
        shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"{folder / name} cannot be written: {error.strerror or error}") from None
