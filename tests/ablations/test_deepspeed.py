"""DeepSpeed's ZeRO: what it says before a start. Its steps are held to one process's in test_parallel.py, and how the
harness reads and sets what an engine keeps in tests/measure/test_parts.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import MACHINE, arm, cells

from lorabench.contract import ablation as contract
from lorabench.contract.ablation import Unsupported, conflict
from lorabench.plan.design import refusal
from lorabench.plan.registry import ablation
from lorabench_ablations import deepspeed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_the_package_it_says_how_it_is_had(monkeypatch, stage):
    cell = cells(f"ablations=[{{deepspeed_zero: {{stage: {stage}}}}}]", "world_size=2", "dtype=float32")[1]
    monkeypatch.setattr(contract, "_importable", lambda name: name != "deepspeed")
    status, words = refusal(cell, MACHINE) or ("", "")
    assert status == "unsupported" and "pip install 'lorabench[deepspeed]' (DS_BUILD_OPS=0" in words
    monkeypatch.setattr(contract, "_importable", lambda name: True)
    assert refusal(cell, MACHINE) is None


def test_there_are_three_stages():
    with pytest.raises(ValueError, match="stage=4; expected 1, 2 or 3"):
        ablation({"deepspeed_zero": {"stage": 4}})


def test_what_cannot_be_beside_it_is_said():
    zero = ablation("deepspeed_zero")
    assert "replayed by all ranks" in (conflict([zero, ablation("cuda_graph")]) or "")
    assert "splits the graph" in (conflict([zero, ablation("torch_compile")]) or "")
    assert "every rank would find a size of its own" in (conflict([zero, ablation("auto_batch_size")]) or "")


def test_other_optimizers_and_adapters_in_16_bits_are_refused_before_an_engine_is_made(monkeypatch):
    monkeypatch.setattr(deepspeed, "alike", lambda name, step: None)
    zero, step = ablation("deepspeed_zero"), arm("sdpa", "adamw_foreach", "padding").step
    params = [p for group in step.optimizer.param_groups for p in group["params"]]
    step.optimizer = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(Unsupported, match="measured with torch's AdamW; this is SGD"):
        zero.step(step)
    step.optimizer, step.loss_scale = torch.optim.AdamW(params), 512.0
    with pytest.raises(Unsupported, match="without a loss scale"):
        zero.step(step)
    step.loss_scale = 1.0
    step.optimizer = torch.optim.AdamW([p.detach().bfloat16() for p in params])
    with pytest.raises(Unsupported, match="of adapters in 16 bits it is another optimizer"):
        zero.step(step)


def test_stage_3_refuses_packed_weights():
    model = torch.nn.Module()
    model.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.lora = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(Unsupported, match=r"stage 3 divides plain weights; this model has a Parameter of torch\.uint8"):
        ablation({"deepspeed_zero": {"stage": 3}}).patch(model)
    assert ablation("deepspeed_zero").patch(model) is None


def test_the_least_that_a_rank_sends_is_a_gradient_and_an_adapter_and_in_stage_3_each_weight():
    adapter = torch.nn.Parameter(torch.zeros(100))
    frozen: Any = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    frozen.ds_tensor = torch.zeros(500)
    made: Any = SimpleNamespace(
        adapters=lambda: [("a", adapter)],
        model=SimpleNamespace(parameters=lambda: [adapter, frozen]),
        step=SimpleNamespace(batches=[0, 0]),
    )
    assert deepspeed.DeepspeedZero(stage=1).least(made, 2) == 400  # 2 (n-1)/n of 400 bytes
    assert deepspeed.DeepspeedZero(stage=3).least(made, 2) == 400 + 2 * 2000
