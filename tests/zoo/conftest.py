"""The zoo, installed once, and its records: each sweep is made when the first of its toggles is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lorabench.record.schema import Record
from zoo.menagerie import animals, groups, measured, settled


@pytest.fixture(scope="module")
def record_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """The record of a toggle of the zoo, by its name."""
    env = settled(tmp_path_factory.mktemp("plugin"))
    place = {name: group for group in groups(animals()) for name in group}
    known: dict[str, Record] = {}

    def look_up(name: str) -> Record:
        if name not in known:
            known.update(measured(place[name], tmp_path_factory.mktemp("zoo") / "sweep", env))
        return known[name]

    return look_up
