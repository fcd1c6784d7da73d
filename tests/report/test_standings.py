"""How every published number stands: each in one class, the same in README.md, docs/claims.md and the notebook."""

import json
import re
from pathlib import Path

import pytest

from lorabench.report import standings
from lorabench.report.claims import Claim, load_claims

ROOT = Path(__file__).resolve().parents[2]


(NINTH,) = [c for s in load_claims() for c in s.claims if c.id == "step-9-kernels"]


@pytest.fixture
def stands(record, session, folder, tmp_path):
    """How the ninth step stands beside one row over this reference."""

    def made(speedup, sd, reference):
        rows = [record(["unsloth"], speedup=speedup, sd=sd, reference=tuple(reference))]
        folder(tmp_path / "h200/ninth", rows, [session()])
        return standings.standing(NINTH, standings.Results(tmp_path)).how

    return made


def test_a_number_is_answered_where_a_row_has_a_figure_over_whatever_baseline(stands):
    own = NINTH.reference
    assert stands(1.3, 0.01, own) == standings.ANSWERED
    assert stands(0.7, 0.01, own) == standings.ANSWERED, "also where it does not agree"
    assert stands(1.3, 0.01, [*own, "a_toggle"]) == standings.ELSEWHERE
    assert stands(1.0, 0.3, own) == standings.UNCLEAR


def test_a_number_that_no_row_can_answer_has_a_class_as_well(tmp_path):
    results = standings.Results(tmp_path)
    assert standings.standing(NINTH, results).how == standings.OPEN
    assert standings.standing(NINTH.model_copy(update={"same_as": "another"}), results).how == standings.REPEATED
    assert standings.standing(NINTH.model_copy(update={"is_one": True}), results).how == standings.ONE


def test_folders_without_sessions_are_no_hindrance(record, folder, tmp_path):
    folder(tmp_path / "h200/bare", [record(["unsloth"])], [])
    assert len(standings.totals(standings.Results(tmp_path))) == 1 + len({s.id for s in load_claims() if s.claims})


def test_readme_page_and_notebook_count_every_number_once_and_alike():
    results = standings.Results(ROOT / "results")
    counted = standings.totals(results)
    numbers = {s.name: sum(len(c.printed) for c in s.claims) for s in load_claims() if s.claims}
    assert dict(zip(counted["text"], counted["numbers"], strict=True)) == numbers | {"in all": sum(numbers.values())}
    assert (counted[list(standings.STANDINGS)].sum(axis=1) == counted["numbers"]).all()
    said = standings.in_all(counted)
    notebook = json.loads((ROOT / "notebooks/2_published_numbers.ipynb").read_text())
    assert said in (ROOT / "README.md").read_text() and said in json.dumps(notebook["cells"][-1]["outputs"])
    rows = [r"\| " + r" \| ".join(map(str, row)) + r" \|" for row in counted.itertuples(index=False)]
    assert all(re.search(row, (ROOT / "docs/claims.md").read_text()) for row in rows)


def test_a_claim_over_another_arm_than_the_sweeps_reference_is_answered():
    results = standings.Results(ROOT / "results")
    claim: Claim = next(c for s in load_claims() for c in s.claims if c.id == "faster-than-side-by-side")
    assert standings.standing(claim, results).how == standings.ELSEWHERE
    assert standings.standing(claim, results).found[0].folders == ["h200/mlora_ways"]
