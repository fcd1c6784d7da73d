"""A third party's package of toggles, really installed: a wheel, pip, an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NAMES = {
    "polite": "Polite", "leaky": "Leaky", "grumpy": "Grumpy", "greedy": "Greedy", "hang": "Hang", "killed": "Killed",
    "raises": "Raises", "wrong": "Wrong", "deep_wrong": "DeepWrong", "nothing": "Nothing", "refuses": "Refuses",
    "absent": "Absent", "broken": "DoesNotExist",
    "rank_raises": "RankRaises", "rank_hangs": "RankHangs", "rank_killed": "RankKilled", "rank_greedy": "RankGreedy",
    "rank_hangs_early": "RankHangsEarly", "unsummed": "Unsummed", "not_a_number": "NotANumber", "odd_notes": "OddNotes",
}  # fmt: skip


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    wheel = folder / "plugin_toggles-1.0-py3-none-any.whl"
    info = "plugin_toggles-1.0.dist-info"
    points = "".join(f"{name} = plugin_toggles:{cls}\n" for name, cls in NAMES.items()) + "odd = odd_toggles:Odd\n"
    with zipfile.ZipFile(wheel, "w") as file:
        for module in ("run/plugin_toggles.py", "odd_toggles.py"):
            path = Path(__file__).parents[1] / module
            file.write(path, path.name)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: plugin-toggles\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/entry_points.txt", f"[lorabench.ablations]\n{points}")
        file.writestr(f"{info}/RECORD", "")
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(command, check=True, capture_output=True)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
