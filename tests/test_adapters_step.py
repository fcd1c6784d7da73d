"""The script that holds a step of n adapters against one adapter's: on a tiny model, and what it refuses."""

from __future__ import annotations

import pandas as pd
import pytest
from helpers import benchmark


@pytest.fixture(scope="module")
def script():
    with benchmark("adapters_step") as module:
        yield module


@pytest.mark.exhaustive
def test_every_number_of_adapters_is_held_against_one(script, tmp_path, capsys):
    small = ["--model", "tiny-llama", "--seq-len", "16", "--samples", "4", "--dtype", "float32", "--trials", "6"]
    script.main([str(tmp_path / "out"), *small, "--adapters", "2", "4"])
    found = pd.read_csv(tmp_path / "out" / "adapters_step.csv")
    assert list(found.adapters) == [2, 4] and (found.rounds == 6).all()
    for name in ("times_one_adapter", "same"):
        assert ((found[f"{name}_low"] <= found[name]) & (found[name] <= found[f"{name}_high"])).all()
    assert (found.times_one_adapter / (found.ms / found.one_ms)).between(0.5, 2).all()
    assert "adapters 2, " in capsys.readouterr().out


def test_adapters_that_do_not_divide_the_samples_are_one_line(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), "--adapters", "3"])
    assert "--adapters 3: expected at least 2 that divide the 16 samples of a step" in capsys.readouterr().err
