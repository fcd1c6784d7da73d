"""benchmarks/toggle_table.py: docs/toggles.md has every toggle of the registry, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
from helpers import benchmark

from lorabench.contract.ablation import Requires
from lorabench.plan.registry import registered

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def script():
    with benchmark("toggle_table") as module:
        yield module


def test_the_page_has_the_table_of_todays_registry(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.markers.all_filled(text, script.tables()) == text, "run: python benchmarks/toggle_table.py"


def test_every_toggle_of_ours_has_a_row(script):
    rows = re.findall(r"^\| `(\w+)` \|", script.table(), re.MULTILINE)
    own = [name for name, point in registered().items() if point.value.startswith("lorabench_ablations.")]
    assert len(own) > 50 and sorted(rows) == sorted(own)


@pytest.mark.parametrize("page", ["toggles.md", "optimizers.md"])
def test_every_link_leads_to_a_heading(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = DOCS / (file or page)
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link


def test_every_pitfall_of_the_page_has_a_test_that_is_there():
    text = (DOCS / "toggles.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) == 15
    for file, test in named:
        assert f"def {test}(" in (DOCS.parent / file).read_text(encoding="utf-8"), test


def test_needs_names_the_device_and_each_command_once(script):
    both = {"one": "pip install x", "other": "pip install x"}
    assert script.needs(Requires(device="cuda", capability=(9, 0), packages=both)) == (
        "a GPU of capability 9.0 or newer; pip install x"
    )
    assert script.needs(Requires()) == "nothing"


def test_a_page_without_its_markers_is_said(script):
    with pytest.raises(ValueError, match="found them 0 times"):
        script.markers.all_filled("no table", script.tables())
