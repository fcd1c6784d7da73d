"""What is published in results/: every record is read, and the tables made from it say what they have always said."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from helpers import md_rows
from PIL import Image

from lorabench.contract.kind import kind
from lorabench.record.pairs import AGAINST
from lorabench.record.schema import ARMS
from lorabench.record.store import RecordError, read_arms, read_records
from lorabench.report import tables
from lorabench.report.analysis import Analysis
from lorabench.report.page import page
from lorabench.report.shown import in_groups, show

RESULTS = Path(__file__).resolve().parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("records.jsonl"))


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def published(request):
    return request.param, Analysis.read(request.param)


def test_pictures_are_of_few_colours_and_small():
    """A third of the bytes, of which a checkout would be most otherwise."""
    files = [*RESULTS.rglob("*.png"), *(RESULTS.parent / "docs").rglob("*.png")]
    assert files and not [file for file in files if Image.open(file).mode != "P"]


def test_there_are_published_results():
    assert len(FOLDERS) >= 6


def test_every_record_is_read_and_loses_nothing(published):
    """Converted or not: every field of a line is in the record, but for a limit's total, which held a step too many."""
    folder, analysis = published
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    if any(line["schema"] == 3 for line in lines):
        arms = [json.loads(arm.model_dump_json(by_alias=True, exclude_none=True)) for arm in read_arms(folder)]
        for arm, line in zip(arms, lines, strict=True):
            assert {name: value for name, value in arm.items() if name in line} == line
        # The noise floor between processes, and a reference alone, are no contrasts that the plan had asked for.
        asked = [
            r for r in analysis.records if not (r.is_noise_floor and (r.pairing == "turns" or r.design == AGAINST))
        ]
        stacks = [set(line["toggles"]) for line in lines]  # what waits for another arm's turn has its record later
        shown = [shown for line in lines for shown in line["shown"] if set(shown["against"]) in stacks]
        assert {r.key for r in asked} == {one["key"] for one in shown}
        return
    records = read_records(folder)  # a cell of several sessions has a record in each
    assert {r.key for r in analysis.records} == {line["key"] for line in lines} and len(records) == len(lines)
    for line, made in zip(lines, records, strict=True):
        assert (made.key, made.session) == (line["key"], line.get("session", made.session))
        for name in ("model", "workload", "design", "status", "reason", "reference", "candidate", "applied", "notes"):
            assert line.get(name) == (getattr(made, name) or line.get(name))
        assert bool(line.get("limit")) == (not made.is_candidate)
        for name, phase in (line.get("phases") or {}).items():
            if name in made.own_phases or made.is_candidate:
                times = {arm: ms for arm in ARMS if (ms := phase.get(f"{arm}_ms"))}  # ratios are computed anew
                assert made.phases[name] == times
        for arm, held in (line.get("memory") or {}).items():
            assert flat(made.memory[arm].model_dump(exclude_none=True)) == flat(held)


def flat(memory):
    """Bytes by name, with the peaks of the phases among them as older lines have them."""
    return {k: v for k, v in {**memory, **memory.get("peaks", {})}.items() if k != "peaks" and v is not None}


def test_the_published_tables_are_those_that_the_code_makes(published):
    folder, analysis = published
    shown = show(analysis)
    made = pd.read_csv(io.StringIO(tables.csv(in_groups(shown, analysis))))
    pd.testing.assert_frame_equal(made, pd.read_csv(folder / "summary.csv"), check_dtype=False, rtol=1e-9)
    assert tables.markdown(shown) == (folder / "summary.md").read_text()


def test_every_output_says_the_same_of_the_limit(cells_of):
    """It was 69.83 in one and 72.71 in the others: the total of a limit has no optimizer step."""
    analysis = Analysis.read(RESULTS / "h200" / "peers")
    (least,) = [
        r for r in analysis.records if not r.is_candidate and (r.model, r.workload) == ("smollm2-135m", "1x512")
    ]
    said = "69.83"
    assert f"{analysis.row(least)['total_speedup']:.2f}" == said
    shown = show(analysis)
    (row,) = [r for r in md_rows(tables.markdown(shown), "smollm2-135m @ 1x512") if r["toggle"] == "frozen_limit"]
    assert row["total × [95 %]"].startswith(said)
    (family,) = [f for f in cells_of(page(analysis, shown)) if f["title"] == "smollm2-135m @ 1x512"]
    (arm,) = [arm for arm in family["arms"] if arm["name"] == "frozen_limit"]
    assert f"× {said} " in arm["facts"]["total"]
    ratio = family["ratios"]["total"][0][family["arms"].index(arm) - 1][0]
    assert f"{ratio:.2f}" == said
    assert f"{said} [" in tables.latex(shown).replace("{[}", "[")


def read_again(folder, line):
    (folder / "records.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = read_records(folder)
    return found


def test_a_record_of_schema_1_is_read_as_todays(record, older, tmp_path):
    for made in (record(["a"]), record(["a"], model="linear-8x8", kind="op"), record(["a"], status="crash")):
        found = read_again(tmp_path, older(made))
        assert found.model_copy(update={"arm": made.arm}) == made
    least = record(["frozen_limit"], speedup=2.0, kind="limit")
    read = read_again(tmp_path, older(least))
    assert list(read.phases) == [*kind("limit").phases, "total"]
    assert read.ms("reference") == pytest.approx(least.ms("reference"))
    found = Analysis([read]).speedup(read)
    assert found.centre == pytest.approx(2, rel=0.01)  # computed from these times, and not what stood there


@pytest.mark.parametrize("missing", [None, [1.0]], ids=["none", "too few"])
def test_an_older_line_whose_arms_do_not_go_together_is_named(record, older, tmp_path, missing):
    line = older(record(["a"]))
    line["phases"]["backward"]["candidate_ms"] = missing
    with pytest.raises(RecordError, match="line 1 is not a record: backward: paired trials need lists of one length"):
        read_again(tmp_path, line)
