"""What a toggle's parameters may be: what their annotations say, as pydantic reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from lorabench.contract.names import complaint

Count = Annotated[int, Field(ge=1)]


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
