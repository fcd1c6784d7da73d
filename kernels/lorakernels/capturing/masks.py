"""The attention masks of a captured forward.

transformers makes no causal mask where the attention kernel can be told that it is causal and no token is masked, which
lets torch pick its fastest kernel. To know, it looks at values, and a captured forward cannot: it makes the mask, and
SDPA with one is slower. Of a batch that is padded on the right, causality alone keeps every real token from the
padding. So its forwards are made without the padding mask, and a capture leaves out those masks that an uncaptured
forward of the same shape went without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Make = Callable[..., Any]


class CausalMasks:
    """Of one graph: around its uncaptured forwards `noted`, around the captured one `repeated`."""

    def __init__(self) -> None:
        self._left_out: list[bool] = []  # of one forward, in the order in which the model asks for its masks

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        self._left_out.clear()

        def note(make: Make, arguments: dict[str, Any]) -> Any:
            mask = make(**_without_padding(arguments))
            self._left_out.append(mask is None)
            return mask

        with _through(note):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        left_out = iter(self._left_out)

        def repeat(make: Make, arguments: dict[str, Any]) -> Any:
            return None if next(left_out, False) else make(**_without_padding(arguments))

        with _through(repeat):
            yield


def _without_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    bidirectional = arguments.get("allow_is_bidirectional_skip", False)
    return arguments if bidirectional else {**arguments, "attention_mask": None}


@contextlib.contextmanager
def _through(make_mask: Callable[[Make, dict[str, Any]], Any]) -> Iterator[None]:
    """Sends every request for a mask through `make_mask`, by transformers' own table of functions that make them."""
    home = sys.modules.get("transformers.masking_utils")
    table: Any = getattr(home, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    makers = {name: table[name] for name in table}
    for name, make in makers.items():
        table[name] = lambda make=make, **arguments: make_mask(make, arguments)
    try:
        yield
    finally:
        for name, make in makers.items():
            table[name] = make
