"""The weights of a base model that is divided among ranks, read from safetensors: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn

from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import put
from lorabench.plan.weights import WeightsError, check_sizes, config_of, fingerprint, local, stored


def files_of(spec: ModelSpec) -> Mapping[str, Path] | None:
    """The file of each tensor by its name. None where the weights are not a folder of this machine with plain
    safetensors: transformers reads those whole."""
    return _files(spec.weights, fingerprint(spec.weights))


@cache
def _files(weights: str, fingerprint: str | None) -> Mapping[str, Path] | None:
    """`fingerprint`: by which a folder that has changed is looked at again; None: it is none."""
    if fingerprint is None or (folder := local(weights)) is None:
        return None
    try:
        quantized = getattr(config_of(weights, folder), "quantization_config", None)
        return None if quantized else {name: file for name, (file, _) in stored(weights, folder).items()}
    except WeightsError:  # transformers says what is wrong
        return None


def read_parts(model: nn.Module, spec: ModelSpec, files: Mapping[str, Path]) -> None:
    """Put into each parameter of a model what its file has under its name, one tensor on the host at a time. Raises
    WeightsError where the folder is of another model, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    check_sizes(spec, config_of(spec.weights, next(iter(files.values())).parent))
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
