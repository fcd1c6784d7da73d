"""Head to head: what a cell of two stacks is called, which noise floor, table and matrix it stands in, and what it is
never held against."""

import io

import numpy as np
import pandas as pd
import pytest
from helpers import md_rows

from lorabench.compare import compare
from lorabench.report import tables
from lorabench.report.analysis import Analysis
from lorabench.report.head_to_head import matrices
from lorabench.report.page import page
from lorabench.report.shown import in_groups, show

BASE = ["sdpa", "adamw_foreach", "padding"]
OURS, OTHER, THIRD = ["lora_kernels", "cuda_graph"], ["unsloth"], ["liger"]
TITLE = "smollm2-135m @ alpaca"


@pytest.fixture
def duel(record):
    """A record of one side (none: of the other against itself) versus another."""

    def made(own, against, **changes):
        fields = {"design": "versus", "versus": against, "candidate": [*BASE, *(own or against)]}
        key = f"{'+'.join(own)} versus {'+'.join(against)} {changes.get('model', '')}"
        return record(own, reference=[*BASE, *against], **{"key": key, **fields, **changes})

    return made


@pytest.fixture
def three(duel):
    """Ours is 1.2 times as fast as the other and 1.5 times as the third, and nobody knows of the other two."""
    return [
        duel([], OTHER), duel(OURS, OTHER, speedup=1.2), duel([], THIRD), duel(OURS, THIRD, speedup=1.5),
        duel(OTHER, THIRD, speedup=1.02, sd=0.2),
    ]  # fmt: skip


def test_a_row_says_both_sides_and_which_one_it_is_against(three):
    analysis = Analysis(three)
    rows = md_rows(tables.markdown(show(analysis)), f"{TITLE}, against unsloth")
    assert [(row["toggle"], row["reference"]) for row in rows] == [
        ("unsloth again (A/A)", "unsloth"), ("lora_kernels + cuda_graph versus unsloth", "unsloth"),
    ]  # fmt: skip
    assert rows[1]["verdict"] == "faster"
    assert float(rows[1]["total × [95 %]"].split()[0]) == pytest.approx(1.2, abs=0.02)
    made = page(analysis, show(analysis))
    assert "lora_kernels + cuda_graph versus unsloth</td><td>unsloth</td>" in made
    table = pd.read_csv(io.StringIO(tables.csv(in_groups(show(analysis), analysis))))
    assert set(table["versus"]) == {"unsloth", "liger"} and table["side"].isna().sum() == 2


def test_its_noise_floor_is_that_of_its_own_reference(record, duel):
    rows = [duel(OURS, OTHER), duel(OURS, THIRD), record(["a"], reference=BASE)]
    floors = [duel([], OTHER, sd=0.2), record([], reference=BASE, sd=0.001)]
    wide, unknown, plain = Analysis([*rows, *floors]).table["noise_floor"][:3]
    assert wide > 0.03 and plain == 0.01
    assert unknown == 0.01  # nothing was measured of that stack: the least that any floor is
    assert Analysis([rows[2], floors[0]]).table["noise_floor"][0] == 0.01


def test_it_stands_beside_no_claim_and_in_no_attribution(record, duel):
    low = ["adapters_in_compute_dtype"]
    claimed = record(["axolotl"], reference=BASE + low, speedup=1.3)
    assert {m.record.key for m in Analysis([claimed, duel(["axolotl"], low)]).matches} == {claimed.key}
    pairs = [duel(["a"], ["x"]), duel(["b"], ["x"]), duel(["a", "b"], ["x"])]
    assert show(Analysis(pairs)).groups[0].tables == []


def test_the_matrix_has_every_pair_and_its_inverse(three):
    ((caption, headings, rows),) = matrices(Analysis(three))
    names = ["lora_kernels + cuda_graph", "unsloth", "liger"]
    assert caption == f"Head to head: {TITLE}" and headings[1:] == names == [row[0] for row in rows]
    assert [row[n + 1] for n, row in enumerate(rows)] == ["", "", ""]
    assert float(rows[0][2].split()[0]) == pytest.approx(1.2, abs=0.02) and rows[0][2].endswith("faster")
    ratio, inverse = (float(text.split()[0]) for text in (rows[0][3], rows[2][1]))
    assert ratio * inverse == pytest.approx(1, abs=0.01) and rows[2][1].endswith("slower")
    assert rows[1][3].startswith("unclear [") and rows[2][2].startswith("unclear [")
    bounds = [[float(x) for x in text.split("[")[1].rstrip("]").split(", ")] for text in (rows[1][3], rows[2][2])]
    assert np.allclose(bounds[0], [1 / x for x in bounds[1][::-1]], atol=0.02)


def test_the_matrix_is_in_every_output_and_two_sides_need_none(three):
    analysis = Analysis(three)
    shown = show(analysis)
    assert md_rows(tables.markdown(shown), f"Head to head: {TITLE}")[0]["unsloth"].endswith("faster")
    assert "Head to head: smollm2-135m @ alpaca" in tables.latex(shown)
    assert "<h2>Head to head: smollm2-135m @ alpaca</h2>" in page(analysis, shown)
    assert matrices(Analysis(three[:2])) == []


def test_data_for_a_notebook(three):
    table = Analysis(three).table.dropna(subset=["side"])
    ratios = table.pivot(index="side", columns="versus", values="total_speedup")
    assert ratios.loc["lora_kernels + cuda_graph", "liger"] == pytest.approx(1.5, rel=0.02)


def test_a_pair_without_times_says_whose_doing_it_is(duel):
    pairs = [duel(OURS, OTHER), duel(OURS, THIRD), duel(OTHER, THIRD, status="oom", arm="reference")]
    ((_, _, rows),) = matrices(Analysis(pairs))
    assert rows[1][3] == rows[2][2] == "oom of liger"
    (row,) = [r for r in md_rows(tables.markdown(show(Analysis(pairs))), f"{TITLE}, against liger")
              if "unsloth" in r["toggle"]]  # fmt: skip
    assert row["verdict"].startswith("liger does not fit, unsloth does (oom)")


def test_one_name_over_two_references_is_two_stacks(duel):
    low = "adapters_in_compute_dtype"
    more = {"reference": [*BASE, low, *OTHER], "candidate": [*BASE, low, *OURS], "key": "low"}
    ((_, headings, rows),) = matrices(Analysis([duel(OURS, OTHER), duel(OURS, OTHER).model_copy(update=more)]))
    assert len(headings) == 5 and len(set(headings)) == 5 and low in headings[2]
    assert [bool(cell) for cell in rows[0][1:]] == [False, False, True, False]


def test_two_runs_are_compared_pair_by_pair(duel):
    before, after = duel(OURS, OTHER, speedup=1.2, seed=1), duel(OURS, OTHER, speedup=1.5, seed=7)
    (change,) = compare([duel([], OTHER), before], [duel([], OTHER), after])
    assert change.outcome == "better"
    assert len(compare([before], [duel(OURS, THIRD)])) == 2
