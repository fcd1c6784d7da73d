"""The weights of a base model that is divided among ranks, read from safetensors: each rank reads what it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import put
from lorabench.plan.weights import WeightsError, check_sizes, local

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"


def files_of(spec: ModelSpec) -> dict[str, Path] | None:
    """The file of each tensor by its name. None where the weights are not a folder of this machine with plain
    safetensors: transformers reads those whole."""
    from safetensors import SafetensorError, safe_open

    if (folder := local(spec.weights)) is None:
        return None
    try:
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            return None
        if (folder / INDEX).is_file():
            found = json.loads((folder / INDEX).read_text())["weight_map"]
            return {name: folder / file for name, file in found.items()}
        with safe_open(folder / ONE, "pt") as opened:
            return dict.fromkeys(opened.keys(), folder / ONE)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return None


def read_parts(model: nn.Module, spec: ModelSpec, files: Mapping[str, Path]) -> None:
    """Put into each parameter of a model what its file has under its name, one tensor on the host at a time. Raises
    WeightsError where the folder is of another model, or cannot be read."""
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    check_sizes(spec, AutoConfig.from_pretrained(next(iter(files.values())).parent, trust_remote_code=False))
    by_file: dict[Path, list[tuple[str, nn.Parameter]]] = {}
    for name, tensor in model.named_parameters():
        by_file.setdefault(files[name], []).append((name, tensor))
    try:
        for file, tensors in by_file.items():
            with safe_open(file, "pt") as opened, torch.no_grad():
                for name, tensor in tensors:
                    value = opened.get_tensor(name)
                    if value.shape != tensor.shape:
                        have, want = list(value.shape), list(tensor.shape)
                        raise WeightsError(f"weights {spec.weights!r} have {name} of {have}, the model has {want}")
                    put(tensor, value.to(tensor.device, tensor.dtype))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights {spec.weights!r} cannot be read: {error}") from None
