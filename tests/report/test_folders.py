"""The sweeps below a folder, by name."""

import json

import pytest
from record.arms import line_of

from lorabench.contract.names import NameUnknown
from lorabench.record.store import RecordError
from lorabench.report.folders import analyses, sweeps


def write(folder, *records):
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(line_of(r)) + "\n" for r in records))


@pytest.fixture
def root(tmp_path, record):
    write(tmp_path / "h200/peers", record(), record(["a"], speedup=2.0))
    write(tmp_path / "h100/peers", record(["a"], status="crash"))
    (tmp_path / "h200/profiles").mkdir()
    return tmp_path


def test_every_folder_with_records_is_found_in_order(root):
    assert sweeps(root) == ["h100/peers", "h200/peers"]
    found = analyses(root)
    assert {name: len(run.records) for name, run in found.items()} == {"h100/peers": 1, "h200/peers": 2}


def test_only_those_named_are_read(root):
    (root / "h100/peers/records.jsonl").write_text("no record\n" * 2)
    assert list(analyses(root, ["h200/peers"])) == ["h200/peers"]
    with pytest.raises(RecordError):
        analyses(root)


def test_a_wrong_name_says_the_nearest_right_one(root):
    with pytest.raises(NameUnknown, match="did you mean h200/peers"):
        analyses(root, ["h200/peer"])
    with pytest.raises(FileNotFoundError, match="no such folder"):
        sweeps(root / "nowhere")


def test_two_sweeps_do_not_share_their_draws(root, record):
    write(root / "other", record(), record(["a"], speedup=2.0))
    found = analyses(root, ["h200/peers", "other"])
    first, second = (run.contrasts.of(run.records[1]).replicates.tolist() for run in found.values())
    assert first != second and sorted(first) == pytest.approx(sorted(second))
