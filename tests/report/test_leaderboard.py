"""The leaderboard, and two machines in one folder: each has rows of its own, and links lead to their family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from record.arms import Simulated, written

from lorabench import gather
from lorabench.record.store import read_arms
from lorabench.report import leaderboard
from lorabench.report.analysis import Analysis
from lorabench.report.page_data import families

ROOT = Path(__file__).resolve().parents[2]


def measured(folder, session, device, speedup, seed=0):
    """A family of a machine's own, in the folder of somebody who measured it there."""
    made = Simulated(session=session, seed=seed)
    arms = [made.arm(), made.twin(), made.arm(["a"], speedup), made.arm(["b"], 1.1)]
    entry = {"id": session, "commit": "0123456789", "started": f"2026-11-2{seed}T01:00:00", "machine": {"name": device}}
    return written(folder, arms, entry)


@pytest.fixture
def both(tmp_path):
    """Two machines' folders, and what `lorabench gather` makes of them."""
    mine, theirs = measured(tmp_path / "mine", "s1", "GPU One", 1.5), measured(tmp_path / "x", "s2", "GPU Two", 2.0, 1)
    assert gather.main([str(tmp_path / "all"), str(mine), str(theirs)]) == 0
    return tmp_path / "all"


def test_a_gathered_machine_is_a_group_of_its_own_and_nothing_is_averaged(both):
    assert len(read_arms(both)) == 8
    analysis = Analysis.read(both)
    assert [group.title for group in analysis.groups] == [
        "smollm2-135m @ alpaca, on GPU One", "smollm2-135m @ alpaca, on GPU Two",
    ]  # fmt: skip
    ratios = {(row["device"], row["toggles"]): row["total_speedup"] for row in analysis.table.to_dict("records")}
    assert ratios["GPU One", "a"] == pytest.approx(1.5, rel=0.02)
    assert ratios["GPU Two", "a"] == pytest.approx(2.0, rel=0.02)
    assert (analysis.table["sessions"] == 1).all()


def test_the_page_has_what_its_column_of_another_machine_needs(both):
    one, two = families(Analysis.read(both))
    assert one["asked"] == two["asked"] and (one["device"], two["device"]) == ("GPU One", "GPU Two")
    assert [arm["toggles"] for arm in one["arms"]] != [] and {tuple(arm["toggles"]) for arm in one["arms"]} == {
        tuple(arm["toggles"]) for arm in two["arms"]
    }
    assert "On this GPU Two the fastest way" in two["opening"]["sentence"]


def test_each_machine_is_a_column_of_the_leaderboard(both):
    made = leaderboard.entries({"all": Analysis.read(both)})
    assert [(e.device, e.stack, e.commit, e.sessions) for e in made] == [
        ("GPU One", "a", "0123456", 1), ("GPU Two", "a", "0123456", 1),
    ]  # fmt: skip
    text = leaderboard.markdown(made)
    assert "| model @ workload | GPU One | GPU Two |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| smollm2-135m @ alpaca |") and "ms, [" in line]
    assert row.count("report.html#of=") == 2 and "#of=1" in row
    assert re.search(r"\| 2026-11-21 \| 0123456 \| 1 \|", text)


def test_the_fastest_of_the_published_folders_stand_first_and_their_links_lead_to_their_family():
    found = {"h200/peers": Analysis.read(ROOT / "results/h200/peers")}
    made = leaderboard.entries(found)
    text = leaderboard.markdown(made)
    (analysis,) = found.values()
    for entry in made:
        place = int(entry.page.rpartition("=")[2])
        assert analysis.groups[place].title == entry.asked
        took = [analysis.row(r)["total_candidate_ms"] for r in analysis.groups[place].records if r.is_candidate]
        assert entry.ms == pytest.approx(min(took))
    assert text.count("(results/h200/peers/report.html#of=") == len(made) == 7


def test_hostile_names_are_text(tmp_path):
    made = Simulated()
    evil = "[x](javascript:alert(1))|<b>"
    arms = [made.arm(), made.twin(), made.arm([evil], 1.5)]
    run = written(tmp_path / "f", arms)
    (run / "environment.json").write_text(
        json.dumps({"schema": 1, "sessions": [{"id": "s1", "machine": {"name": evil}}]})
    )
    text = leaderboard.markdown(leaderboard.entries({"f": Analysis.read(run)}))
    assert "[x](javascript" not in text and "<b>" not in text


def test_the_plots_of_the_readme_are_the_figures_of_its_folders():
    from benchmarks import readme_plots

    readme = (ROOT / "README.md").read_text()
    for name, (folder, title) in readme_plots.SHOWN.items():
        assert f"](docs/assets/{name})" in readme
        assert readme_plots.drawn(folder, title) == (readme_plots.ASSETS / name).read_bytes(), name
