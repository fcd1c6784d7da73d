"""A head to head, from the command to its record: both sides were judged, and held against each other."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import InProcess, cells

from lorabench.record.schema import Record
from lorabench.run.runner import Runner

MACHINE = SimpleNamespace(device="cpu", capability=None, gpus=0, ranks=1, dtype=lambda wanted: "float32")


@pytest.fixture
def measured(tmp_path: Path):
    def run(*overrides: str) -> list[Record]:
        with Runner(InProcess(), MACHINE, None, "session", 60.0, tmp_path) as runner:  # type: ignore[arg-type]
            return [runner.measure(cell) for cell in cells(*overrides)]

    return run


def test_a_row_carries_both_sides_and_is_certified_between_them(measured):
    floor, row = measured("workload=short_samples", "versus=[packing,eager]")
    assert (floor.status, row.status) == ("ok", "ok"), (floor.reason, row.reason)
    assert (floor.ablations, floor.versus, floor.is_noise_floor) == ([], ["eager"], True)
    assert (row.ablations, row.versus, row.design) == (["packing"], ["eager"], "versus")
    assert row.applied is not None and {"packing", "eager"} <= row.applied.keys()
    assert row.numerics is not None and row.numerics.passed
    checked = {check.name for check in row.numerics.checks}
    assert {"each gradient before the trials", "each gradient after the trials"} <= checked
    again = Record.model_validate_json(row.model_dump_json(by_alias=True, exclude_none=True))
    assert again.versus == ["eager"]


def test_a_side_that_does_not_engage_gives_no_row(measured):
    (row,) = measured("workload=2x16", "versus=[eager,packing]")[1:]
    assert (row.status, row.arm) == ("not_applied", "reference"), row.reason
