"""What parameters may be, of a toggle or of a command: what their annotations say, as pydantic reads them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from lorabench.contract.names import complaint


def _named(folder: Any) -> Any:
    if not folder or not isinstance(folder, str | Path) or folder == "null":
        raise ValueError(f"expected a folder, not {reprlib.repr(folder)}")
    return folder


Folder = Annotated[Path, BeforeValidator(_named)]


def misfit(cls: type, values: Mapping[str, Any]) -> str | None:
    """The first of these values that its parameter's annotation does not allow, as JSON has it (no number for a yes or
    no), in words. None where all are right, and where an annotation or a value is none that pydantic and JSON know."""
    for name, value in values.items():
        try:
            allowed, said = _allowed(cls, name), json.dumps(value)
        except Exception:  # a third party's annotation may be anything
            continue
        try:
            allowed.validate_json(said, strict=True)
        except ValidationError as error:
            findings = error.errors(include_url=False)  # several, where one of several types would do
            place = ".".join([name, *(str(part) for part in findings[0]["loc"] if isinstance(part, int))])
            *others, last = map(complaint, findings)
            return f"{place}: {' or '.join([*(one.partition(', not ')[0] for one in others), last])}"
    return None


@cache
def _allowed(cls: type, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(cls, include_extras=True)[name])
