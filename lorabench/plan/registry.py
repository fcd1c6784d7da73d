"""Finds the ablations: every entry point in the group `lorabench.ablations`, ours and a third party's alike."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from lorabench.contract.ablation import Ablation
from lorabench.contract.hooks import Faulty, contained, described, first_line
from lorabench.contract.names import NameUnknown, nearest
from lorabench.contract.parameters import misfit

GROUP = "lorabench.ablations"
# What the contract declares of a class itself, by how it is written there: planning asks the class for these.
DECLARED = {
    "ClassVar[bool]": (bool,), "ClassVar[int]": (int,), "ClassVar[str]": (str,),
    "ClassVar[str | None]": (str, type(None)), "ClassVar[tuple[str, ...]]": (tuple,),
}  # fmt: skip


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
    where = f"the ablation {name} ({points[name].value})"
    try:
        with contained("its import"):
            cls = points[name].load()
    except Exception as error:  # a third party's import may fail in any way
        raise NameUnknown(f"{where} does not load: {described(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, Ablation)):
        raise NameUnknown(f"{where} is {reprlib.repr(cls)}; expected a subclass of lorabench.Ablation")
    if getattr(cls, "name", None) != name:
        raise NameUnknown(f"the entry point {name} holds a class named {getattr(cls, 'name', cls)!r}; they must agree")
    for word, declared in Ablation.__annotations__.items():
        types = DECLARED.get(declared)
        if types and not isinstance(found := getattr(cls, word, None), types):
            expected = " or ".join("None" if one is type(None) else f"a {one.__name__}" for one in types)
            raise NameUnknown(f"{where} has the {word} {reprlib.repr(found)}; expected {expected}")
    return cls


def ablation(item: str | Mapping[str, Any]) -> Ablation:
    """One item of the list `ablations=`: a name, or {name: {parameter: value}}.

    Raises NameUnknown for a wrong name or parameter, and for a value that the toggle refuses (TypeError, ValueError).
    Whatever else goes wrong in the toggle's own code makes a Faulty, whose cells say so.
    """
    named = {item: None} if isinstance(item, str) else item
    name, params = next(iter(named.items())) if isinstance(named, Mapping) and len(named) == 1 else (None, None)
    if not isinstance(name, str) or not isinstance(params, Mapping | None):
        raise NameUnknown(f"an ablation is a name or {{name: {{parameter: value}}}}, not {item!r}")
    params = dict(params or {})
    cls = ablation_class(name)
    known = [f.name for f in fields(cls)]
    for param in params:
        if param not in known:
            if not known:
                raise NameUnknown(f"{name} has no parameters, so {param!r} means nothing to it")
            raise nearest("parameter", str(param), known, where=f" of {name}")
    try:
        with contained(f"the toggle {name}'s constructor"):
            made, again = cls(**params), cls(**params)
    except ValueError as error:
        raise NameUnknown(f"{name}: {first_line(error)}") from None
    except TypeError as error:
        raise NameUnknown(f"{name}: {misfit(cls, params) or first_line(error)}") from None
    except Exception as error:
        return Faulty.of(cls, params, described(error))
    if wrong := misfit(cls, params):  # which its own code has let pass
        raise NameUnknown(f"{name}: {wrong}")
    fault = _fault(made, again)
    return made if fault is None else Faulty.of(cls, params, fault)


# What a toggle says of itself and planning asks for everywhere: how it is called, what it has to be, and whether that
# is right. Where a record has its place goes by the label and the content, so these are the same each time.
SAID = (
    ("label", "words, the same each time", lambda said: isinstance(said, str) and said.encode()),
    ("content", "what JSON can hold, the same each time", lambda said: _as_json(said)),
    ("excludes", "words by name or slot", lambda said: all(isinstance(w, str) for kv in said.items() for w in kv)),
)


def _as_json(content: Any) -> str | None:
    try:
        return json.dumps(content, sort_keys=True)
    except (TypeError, ValueError):
        return None


def _fault(made: Ablation, again: Ablation) -> str | None:
    """What a toggle says of itself wrongly, of which planning could only fail; None where all is right. `again`: the
    same toggle made anew, as it is for every plan of a sweep."""
    for word, expected, right in SAID:
        whose = f"the toggle {made.name}'s {word}"
        try:
            with contained(whose):
                said, anew = getattr(made, word), getattr(again, word)
                if not right(said) or right(said) != right(anew):
                    return f"{whose} is {reprlib.repr(said)}; expected {expected}"
        except Exception as error:
            return described(error)
    return None
