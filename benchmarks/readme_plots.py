"""The README's plots: the race of a large model and of a small one, each the figure of its own results folder's report.

python benchmarks/readme_plots.py            # writes docs/assets/race-*.png
"""

from __future__ import annotations

from pathlib import Path

from lorabench.record.store import write_atomically
from lorabench.report.analysis import Analysis
from lorabench.report.figure import png
from lorabench.report.panels import panels_of
from lorabench.report.race import race

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
# File → (results folder, title of the group).
SHOWN = {
    "race-8b.png": ("h200/peers_rounds_8b", "llama-3.1-8b @ 4x2048"),
    "race-135m.png": ("h200/peers_rounds", "smollm2-135m @ 1x512"),
}


def drawn(folder: str, title: str) -> bytes:
    panels = [panel for panel in panels_of(Analysis.read(ROOT / "results" / folder)) if panel.title == title]
    found = race(panels)
    assert found, f"results/{folder} has no times of {title}"
    return png(found[0])


def main() -> None:
    for name, (folder, title) in SHOWN.items():
        print(write_atomically(ASSETS / name, drawn(folder, title)).relative_to(ROOT))


if __name__ == "__main__":
    main()
