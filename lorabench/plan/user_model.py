"""A user's own model, as it is: a folder, a config.json or a hub name, for any decoder that transformers knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lorabench.contract.hooks import first_line
from lorabench.plan import hub
from lorabench.plan.architecture import ModelError
from lorabench.plan.weights import CONFIG, local

ADAPTER = "adapter_config.json"
EXPECTED = "expected a model as transformers saves it (config.json, safetensors, tokenizer)"
# Of a config.json: what says nothing about the model, and what the sweep decides.
LEFT_OUT = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
LARGEST = 1 << 22  # bytes; the longest published config.json has some hundred thousand


def read(name: str) -> tuple[dict[str, Any], str] | None:
    """(fields of a ModelSpec, label) of a folder, a JSON file or a hub name; None for anything else.

    Raises ModelError and HubError.
    """
    if folder := local(name):
        location, file, label = str(folder.resolve()), _in_folder(folder), folder.resolve().name
    elif name.endswith(".json"):
        file = Path(name).expanduser().resolve()
        if not file.is_file():
            raise ModelError(f"{name}: no such file; expected a config.json as transformers saves it")
        location, label = str(file.parent), file.parent.name
    elif name.startswith((".", "/", "~")):
        raise ModelError(f"{name}: no such folder; {EXPECTED}")
    elif hub.is_name(name):
        location, file, label = name, hub.fetch(name, CONFIG), name
    else:
        return None
    return {"source": location, "location": location, "config": _decoder(file)}, label


def _in_folder(folder: Path) -> Path:
    if (folder / CONFIG).is_file():
        return folder / CONFIG
    if (folder / ADAPTER).is_file():
        base = _json(folder / ADAPTER).get("base_model_name_or_path")
        raise ModelError(f"{folder} holds a PEFT adapter and no model; expected the model that it is for: {base}")
    raise ModelError(f"{folder}: no {CONFIG} in the folder; {EXPECTED}")


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}; expected JSON") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: expected one JSON object with model_type")
    return values


def _decoder(file: Path) -> dict[str, Any]:
    """The configuration of the decoder: of a model of several parts (images and text) the one that reads text."""
    whole = _json(file)
    family = whole.get("model_type")
    if "auto_map" in whole and isinstance(family, str):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # imports torch

        if family not in CONFIG_MAPPING_NAMES:
            raise ModelError(f"{file}: the family {family} comes with code of its own, which is not run; {EXPECTED}")
    text = whole.get("text_config")
    if isinstance(text, dict) and "model_type" in text:
        inherited = {k: whole[k] for k in ("tie_word_embeddings", "quantization_config") if k in whole}
        whole = {**inherited, **text}
    return {k: v for k, v in whole.items() if k not in LEFT_OUT}
