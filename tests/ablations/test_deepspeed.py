"""DeepSpeed's ZeRO is a row that says how it is had, and then why it is not measured."""

from __future__ import annotations

import pytest
from helpers import MACHINE, cells

from lorabench.contract import ablation as contract
from lorabench.plan.design import refusal
from lorabench.plan.registry import ablation


@pytest.mark.parametrize(("there", "reason"), [(False, "pip install deepspeed"), (True, "the gate cannot look")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_is_unsupported_before_a_start(monkeypatch, stage, there, reason):
    monkeypatch.setattr(contract, "_importable", lambda name: there or name != "deepspeed")
    cell = cells(f"ablations=[{{deepspeed_zero: {{stage: {stage}}}}}]", "world_size=2", "dtype=float32")[1]
    status, words = refusal(cell, MACHINE) or ("", "")
    assert status == "unsupported" and reason in words


def test_there_are_three_stages():
    with pytest.raises(ValueError, match="stage=4; expected 1, 2 or 3"):
        ablation({"deepspeed_zero": {"stage": 4}})
