"""Finds the ablations: every entry point in the group `lorabench.ablations`, ours and a third party's alike."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from lorabench.contract.ablation import Ablation
from lorabench.contract.hooks import Faulty, described
from lorabench.contract.names import NameUnknown, nearest

GROUP = "lorabench.ablations"


@cache
def registered() -> Mapping[str, Any]:
    """Entry points by name. Raises NameUnknown where two packages register one name: neither may win silently."""
    found: dict[str, Any] = {}
    for point in entry_points(group=GROUP):
        if point.name in found and found[point.name].value != point.value:
            raise NameUnknown(
                f"two packages register an ablation named {point.name}: {found[point.name].value} and {point.value}; "
                f"rename or uninstall one"
            )
        found[point.name] = point
    return found


def ablation_class(name: str) -> type[Ablation]:
    """The class behind a name. Raises NameUnknown for a wrong name or an entry point that does not load."""
    points = registered()
    if name not in points:
        raise nearest("ablation", name, points)
    try:
        cls = points[name].load()
    except Exception as error:  # a third party's import may fail in any way
        raise NameUnknown(f"the ablation {name} ({points[name].value}) does not load: {error}") from error
    if getattr(cls, "name", None) != name:
        raise NameUnknown(f"the entry point {name} holds a class named {getattr(cls, 'name', cls)!r}; they must agree")
    for word, type_ in (("slot", str), ("kinds", tuple)):
        if not isinstance(said := getattr(cls, word, None), type_):
            raise NameUnknown(
                f"the ablation {name} ({points[name].value}) has the {word} {said!r}; expected a {type_.__name__}"
            )
    return cls


def ablation(item: str | Mapping[str, Any]) -> Ablation:
    """One item of the list `ablations=`: a name, or {name: {parameter: value}}.

    Raises NameUnknown for a wrong name or parameter, and for a value that the toggle refuses (TypeError, ValueError).
    Whatever else goes wrong in the toggle's own code makes a Faulty, whose cells say so.
    """
    if isinstance(item, str):
        name, params = item, {}
    elif isinstance(item, Mapping) and len(item) == 1:
        name, params = next(iter(item.items()))
        if not isinstance(name, str) or not isinstance(params, Mapping | None):
            raise NameUnknown(f"an ablation is a name or {{name: {{parameter: value}}}}, not {item!r}")
        params = dict(params or {})
    else:
        raise NameUnknown(f"an ablation is a name or {{name: {{parameter: value}}}}, not {item!r}")
    cls = ablation_class(name)
    known = [f.name for f in fields(cls)]
    for param in params:
        if param not in known:
            if not known:
                raise NameUnknown(f"{name} has no parameters, so {param!r} means nothing to it")
            raise nearest("parameter", str(param), known, where=f" of {name}")
    try:
        made = cls(**params)
    except (TypeError, ValueError) as error:
        raise NameUnknown(f"{name}: {error}") from None
    except Exception as error:
        return Faulty.of(cls, params, f"the toggle {name}'s constructor raised {described(error)}")
    fault = next(_faults(made), None)
    return made if fault is None else Faulty.of(cls, params, fault)


def _faults(made: Ablation) -> Iterator[str]:
    """What a toggle says of itself wrongly: planning asks for these everywhere, so it asks here whether it can."""
    for word, expected, right in (
        ("label", "words", lambda said: isinstance(said, str) and said.encode()),
        ("excludes", "words by name or slot", lambda said: all(isinstance(w, str) for kv in said.items() for w in kv)),
    ):
        try:
            said = getattr(made, word)
            if not right(said):
                yield f"the toggle {made.name}'s {word} is {reprlib.repr(said)}; expected {expected}"
        except Exception as error:
            yield f"the toggle {made.name}'s {word} raised {described(error)}"
