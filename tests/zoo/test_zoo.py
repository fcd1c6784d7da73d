"""No cheat gets a time, and nobody who is honest is refused one."""

from __future__ import annotations

import pytest

from lorabench.record.contrast import contrast
from zoo.cheat import Cheat, Honest
from zoo.menagerie import QUICK, animals, groups

ANIMALS = animals()
ORDER = [name for group in groups(ANIMALS) for name in group]  # those of one sweep after one another
CHEATS = [name for name in ORDER if issubclass(ANIMALS[name], Cheat)]
HONEST = [name for name in ORDER if issubclass(ANIMALS[name], Honest)]


def each(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


def marks(name: str) -> list[pytest.MarkDecorator]:
    if ANIMALS[name].requires.device == "cuda":
        return [pytest.mark.gpu]
    return [] if name in QUICK else [pytest.mark.exhaustive]


def test_every_toggle_says_its_trick_and_every_cheat_what_it_is_caught_by():
    assert len(CHEATS) >= 40 and len(HONEST) >= 6
    assert not [name for name in ORDER if not ANIMALS[name].summary]
    assert not [name for name in CHEATS if not ANIMALS[name].caught or "ok" in ANIMALS[name].status]


@each(CHEATS)
def test_a_cheat_gets_no_time(record_of, name):
    record, cheat = record_of(name), ANIMALS[name]
    assert record.status in cheat.status, f"{name} is {record.status}: {record.reason}"
    assert any(words in record.reason.lower() for words in cheat.caught.lower().split(" | ")), record.reason
    assert record.phases == {}


@each(HONEST)
def test_an_honest_toggle_is_measured(record_of, name):
    record, honest = record_of(name), ANIMALS[name]
    assert record.status == "ok", record.reason
    assert record.pairing == honest.pairing
    if honest.at_most:
        found = contrast(record.ms("reference"), record.ms("candidate"), paired=True)
        assert found and found.low < honest.at_most
