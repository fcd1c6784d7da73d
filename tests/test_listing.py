"""What is shown instead of measuring: what is recorded, refused, or to be measured, and how long that takes."""

from __future__ import annotations

import io

import pytest
from helpers import MACHINE, cells, config, refused
from rich.console import Console

from lorabench import listing
from lorabench.plan.estimate import Seen
from lorabench.record.store import Store


@pytest.fixture
def shown(monkeypatch):
    """What a dry run with these overrides shows, where `cells_here` were measured on this machine before."""

    def show(folder, *overrides, cells_here=(), width=300):
        monkeypatch.setattr(listing, "seen_on", lambda machine, folders: cells_here)
        out = Console(file=io.StringIO(), width=width)
        chosen = config("models=[tiny-llama]", "trials=3", "workload=2x16", f"output={folder}", *overrides)
        listing.show_plan(out, chosen, MACHINE)
        return out.file.getvalue()

    return show


def seen(wall_s):
    names = (frozenset(("sdpa", "adamw_foreach", "padding")), frozenset(("eager", "adamw_foreach", "padding")))
    return [Seen("train", "tiny-llama", "2x16", candidate, False, wall_s, wall_s / 2, 3) for candidate in names]


def test_what_is_recorded_takes_no_time_and_the_rest_as_long_as_before(tmp_path, shown):
    own, *_ = cells("ablations=[eager]")
    with Store(tmp_path) as store:
        store.append(refused(own, "s", "crash", "why"))
    text = shown(tmp_path, "ablations=[eager,adamw_8bit]", cells_here=seen(120.0))
    row = {name: next(line for line in text.splitlines() if name in line) for name in ("itself", "eager", "8bit")}
    assert "recorded already" in row["itself"]
    assert "about 2.0 minutes (as it took here before)" in row["eager"]
    assert "unsupported: adamw_8bit needs a CUDA device" in row["8bit"]
    assert text.splitlines()[-1] == "about 2.0 minutes (cells: 1 of 1 as it took here before)"
    again = shown(tmp_path, "ablations=[eager]", "resume=failed", "repeat=2", cells_here=seen(120.0))
    assert again.splitlines()[-1] == "about 8.0 minutes in 2 sessions (cells: 4 of 4 as it took here before)"


def test_a_cell_that_cannot_end_in_time_says_so_and_costs_no_more_than_that(tmp_path, shown):
    text = shown(tmp_path, "ablations=[eager]", "timeout_s=60", cells_here=seen(864_000.0))
    assert text.count("about 10 days (as it took here before); ends at timeout_s=60 with the status timeout") == 2
    assert text.splitlines()[-1].startswith("about 4.0 minutes")


def test_what_several_toggles_lack_is_one_line_and_every_name_is_whole(tmp_path, shown):
    lacking, own = ("adamw_8bit", "cuda_graph", "sdpa_flash"), "torch_compile(mode=max-autotune-no-cudagraphs)"
    text = shown(
        tmp_path, f"ablations=[{','.join(lacking)},{{torch_compile:{{mode:max-autotune-no-cudagraphs}}}}]",
        cells_here=seen(120.0), width=60,
    )  # fmt: skip
    assert " ".join(text.split()).count("needs a CUDA device") == 1
    assert "this machine measures on its CPU: adamw_8bit, cuda_graph, sdpa_flash" in " ".join(text.split())
    assert f" {own} " in text


def test_without_records_it_is_computed_and_says_so(tmp_path, shown):
    text = shown(tmp_path, "ablations=[]")
    assert "(computed, rough)" in text and text.splitlines()[-1].endswith("(cells: 1 of 1 computed, rough)")
