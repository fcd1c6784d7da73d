"""Shared by all tests: small models and workloads, and the marker for a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two cores, and tests beside one another

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # The longest of all, minutes in one process: beside the others from the beginning, not alone at the end.
    items.sort(key=lambda item: "test_interpreter" not in item.nodeid)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skipif(True, reason="needs a CUDA device; none here"))
