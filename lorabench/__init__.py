"""lorabench from Python: what a user imports.

    import lorabench

    result = lorabench.measure(reference=step_a, candidate=step_b)   # two variants of a training step of your own
    frame = lorabench.load_results("results/h200/first_sweep")       # a sweep's records as a tidy pandas frame

Importing this costs nothing: torch, transformers and pandas come when a name that needs them is first used.
`lorabench.measure` is a package and a function at once; lorabench/measure/__init__.py says how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # the one place: pyproject.toml reads it here

__all__ = [
    "Ablation", "Measured", "Phases", "Tolerance", "WrongNumerics", "__version__", "load_results", "measure",
]  # fmt: skip

if TYPE_CHECKING:  # for checkers and editors; below is how the same names come about when they are used
    from lorabench.contract.ablation import Ablation, Tolerance
    from lorabench.measure import measure
    from lorabench.measure.user_gate import WrongNumerics
    from lorabench.measure.user_pair import Measured
    from lorabench.measure.user_step import Phases
    from lorabench.report import load_results
else:
    _WHERE = {
        "Ablation": "lorabench.contract.ablation",
        "Tolerance": "lorabench.contract.ablation",
        "WrongNumerics": "lorabench.measure.user_gate",
        "Measured": "lorabench.measure.user_pair",
        "Phases": "lorabench.measure.user_step",
        "load_results": "lorabench.report",
    }

    def __getattr__(name: str) -> object:
        """A public name on its first use. Raises AttributeError for any other."""
        if name == "measure":
            return import_module("lorabench.measure")
        if name in _WHERE:
            return getattr(import_module(_WHERE[name]), name)
        raise AttributeError(f"module 'lorabench' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
