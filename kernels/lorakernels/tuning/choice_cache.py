"""What `tune` has chosen, kept on disk, so that a second process neither compiles nor times the forms that lost.

    <Triton's cache>/lorakernels/choices-<16 hex digits>.json

One file for one GPU model, one set of versions and one state of this package's source; whatever differs has a file of
its own, so nothing is ever out of date. It lies in Triton's cache (TRITON_CACHE_DIR, by default ~/.triton/cache)
because the compiled kernels lie there: who keeps, mounts or deletes one keeps, mounts or deletes both. The variable
LORAKERNELS_CACHE_DIR names another folder, and LORAKERNELS_CACHE=0 keeps everything in the process.

The file is JSON, is replaced whole by a rename, and is read again before it is written: several processes may write,
and the worst that can happen is that a choice is measured twice. A file that cannot be used is ignored with a warning.
Run: python -m pytest tests/lorakernels/test_choice_cache.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..runtime import triton

FORMAT = 1
SWITCH, FOLDER = "LORAKERNELS_CACHE", "LORAKERNELS_CACHE_DIR"


class ChoiceCache:
    """The choices of one environment (GPU, versions, source: any names and words), in a file of a folder.

    folder: None keeps nothing. A file that is there and cannot be read, or a folder that cannot be written, is told
    once in a warning; neither is an error.
    """

    def __init__(self, folder: Path | None, environment: dict[str, str]):
        self.environment = environment
        digest = hashlib.sha256(json.dumps([FORMAT, environment], sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"choices-{digest}.json"
        self._known: dict[str, str] | None = None
        self._warned = False

    def get(self, key: tuple[Any, ...]) -> str | None:
        """The form that was chosen for this key by this process or by one before it, else None."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(_written(key))

    def put(self, key: tuple[Any, ...], form: str) -> None:
        """Keeps a choice, with those that other processes have written since."""
        self._known = {**self._read(), **(self._known or {}), _written(key): form}
        if self.path is None:
            return
        content = {"format": FORMAT, "environment": self.environment, "choices": self._known}
        try:
            _replace(self.path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            self._warn(f"cannot be written ({error.strerror or error}), so later processes measure again")

    def _read(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read ({type(error).__name__}), so the forms are measured again")
            return {}
        if not self._is_ours(content):
            self._warn("holds something else than this package's choices, so the forms are measured again")
            return {}
        return content["choices"]

    def _is_ours(self, content: Any) -> bool:
        if not isinstance(content, dict) or not isinstance(choices := content.get("choices"), dict):
            return False
        same = content.get("format") == FORMAT and content.get("environment") == self.environment
        return same and all(isinstance(form, str) for form in choices.values())

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"lorakernels: {self.path} {what}", stacklevel=2)


def _written(key: tuple[Any, ...]) -> str:
    """A key as it stands in the file: numbers, truth values and words as they are, dtypes by name."""
    return json.dumps([x if isinstance(x, (bool, int, str)) else str(x) for x in key])


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@cache
def source_hash() -> str:
    """Of all Python files of this package: another kernel, or another way to call one, is another environment."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def folder() -> Path | None:
    """Where choices are kept, as the environment variables say; None where that is switched off."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return None
    if own := os.environ.get(FOLDER):
        return Path(own).expanduser()
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")) / "lorakernels"


@cache
def of_device(device: torch.device) -> ChoiceCache:
    """The cache of this GPU's model. GPUs of one model share a file."""
    gpu = torch.cuda.get_device_properties(device)
    environment = {
        "gpu": f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": "none" if triton is None else triton.__version__,
        "lorakernels": source_hash(),
    }
    return ChoiceCache(folder(), environment)
