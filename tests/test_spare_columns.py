"""benchmarks/spare_columns.py: both numbers of spare columns are timed for each projection, and summed up."""

import re
import sys
from pathlib import Path

import pytest
from helpers import benchmark


def test_both_numbers_of_columns_are_timed(capsys, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["spare_columns.py"])
    with benchmark("spare_columns") as script:
        script.main()
    text = capsys.readouterr().out
    assert re.findall(r"(\d+) columns [0-9.]+, (\d+) columns", text) == [("48", "64"), ("32", "64")]
    ((fewest, full),) = re.findall(r"tiny: fewest ([0-9.]+), 64 ([0-9.]+): ", text)
    assert float(fewest) > 0 and float(full) > 0
