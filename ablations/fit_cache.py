"""What one cell's search has found out of an arm's memory, kept for the other cells of the sweep."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from lorabench.contract.memory_fit import Fit


class FitCache:
    """Fits of a sweep by their configuration, in a JSON file; one process writes at a time, each the whole file."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        self.path = folder / "batch_size.json"
        self.key = sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def read(self) -> Fit | None:
        stored = self._all().get(self.key)
        return Fit(**stored) if stored else None

    def write(self, found: Fit) -> None:
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._all() | {self.key: asdict(found)}, indent=1))
        os.replace(partial, self.path)

    def _all(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}
