"""A third party's package of toggles, really installed: a wheel, pip, an entry point. And what rounds draw."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import installed

NAMES = {
    "polite": "Polite", "compiles": "Compiles", "leaky": "Leaky", "grumpy": "Grumpy", "greedy": "Greedy",
    "lengthy": "Lengthy",
    "hang": "Hang", "killed": "Killed", "raises": "Raises", "wrong": "Wrong", "deep_wrong": "DeepWrong",
    "nothing": "Nothing", "refuses": "Refuses", "absent": "Absent", "broken": "DoesNotExist",
    "rank_raises": "RankRaises", "rank_hangs": "RankHangs", "rank_killed": "RankKilled", "rank_greedy": "RankGreedy",
    "rank_hangs_early": "RankHangsEarly", "unsummed": "Unsummed", "not_a_number": "NotANumber",
    "killed_later": "KilledLater", "odd_notes": "OddNotes", "rank_fails": "RankFails",
    "rank_slow": "RankSlow", "rank_wrong": "RankWrong",
}  # fmt: skip


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed."""
    folder = Path(__file__).parent
    odd = (folder.parent / name for name in ("odd_toggles.py", "exits_at_import.py"))
    ours = (folder / name for name in ("plugin_toggles.py", "plugin_pipelines.py"))
    files = {path.name: path for path in (*ours, *odd)}
    points = {name: f"plugin_toggles:{cls}" for name, cls in NAMES.items()}
    points |= {"stage_fails": "plugin_pipelines:StageFails"}
    points |= {"odd": "odd_toggles:Odd", "exits": "exits_at_import:Exits"}
    return installed(tmp_path_factory.mktemp("plugin"), "plugin_toggles", files, points)


@pytest.fixture(autouse=True)
def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of this process draw the same orders in every run of a test: one that counts them would fail in one run of
    a hundred where each is drawn anew."""
    monkeypatch.setattr("lorabench.run.seats.random", SimpleNamespace(SystemRandom=lambda: random.Random(25)))
