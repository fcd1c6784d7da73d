"""Measuring one cell over built arms: gate, trials, memory, telemetry, roofline.

This package can also be called: `lorabench.measure(reference=…, candidate=…)` measures two training steps of a user's
own (see user_pair.py). The function and the package want the same name, and `import lorabench.measure.trial` sets the
attribute `measure` of lorabench to the package, whatever stood there before. So the package itself is what is called,
in whichever order things are imported.

Belongs here: what runs in the process that measures. May import: contract, plan, record.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that is called as the function `measure` of its user_pair.py."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from lorabench.measure.user_pair import measure

        return measure(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """What inspect.signature and editors show."""
        from inspect import signature

        from lorabench.measure.user_pair import measure

        return signature(measure)


sys.modules[__name__].__class__ = _Callable
