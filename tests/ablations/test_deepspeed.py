"""DeepSpeed's ZeRO: what it says before a start. Its steps are held to one process's in test_parallel.py, and how the
harness reads and sets what an engine keeps in tests/measure/test_parts.py."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import MACHINE, cells
from helpers import deep_arm as arm
from several_ranks import on_ranks

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
    with pytest.raises(ValueError, match="stage: should be less than or equal to 3, not 4"):
        ablation({"deepspeed_zero": {"stage": 4}})
    with pytest.raises(ValueError, match="by_layer is of stage 3, which gathers weights; this is stage=2"):
        ablation({"deepspeed_zero": {"by_layer": True}})


def test_what_cannot_be_beside_it_is_said():
    zero = ablation("deepspeed_zero")
    assert "replayed by all ranks" in (conflict([zero, ablation("cuda_graph")]) or "")
    assert "splits the graph" in (conflict([zero, ablation("torch_compile")]) or "")
    assert "every rank would find a size of its own" in (conflict([zero, ablation("auto_batch_size")]) or "")
    selective = ablation("selective_checkpointing")
    gathers = ablation({"deepspeed_zero": {"stage": 3}})
    assert "not the same ones when it runs a second time" in (conflict([gathers, selective]) or "")
    assert conflict([zero, selective]) is None


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


def long_gradients(ranks, stage):
    """How far parameters are from where torch's AdamW moves them, after three steps over gradients longer than 1."""
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(2)]
    zero, model = deepspeed.DeepspeedZero(stage=stage), deepspeed._module(params[:1])
    model.forward = lambda gradient: (model.params[0] * gradient).sum()
    mine, plain = (torch.optim.AdamW([p], lr=1e-2) for p in params)
    engine, *_ = deepspeed._library().initialize(
        model=model, model_parameters=params[:1], optimizer=mine, config=zero._config(1000, 1, 1000)
    )
    for size in (1.0, 10.0, 0.1):
        gradient = size * torch.randn(1000, generator=torch.Generator().manual_seed(int(size)))
        engine.backward(engine(gradient))
        engine.step()
        params[1].grad = gradient
        plain.step()
    return float((params[0].detach() - params[1].detach()).norm() / (params[1].detach() - 1).norm())


@pytest.mark.exhaustive  # for make test-all alone installs it
@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_gradient_is_cut(tmp_path, stage):
    """DeepSpeed cuts those longer than 1 unless it is told not to: of the 8B some trials' are, and so its updates were
    refused on GPUs."""
    (error,) = on_ranks(1, tmp_path, long_gradients, stage)
    assert error < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_is_told_to_cut_no_gradient(stage):
    assert deepspeed.DeepspeedZero(stage=stage)._config(1, 1)["gradient_clipping"] == 0.0


def test_stage_3_refuses_packed_weights():
    model = torch.nn.Module()
    model.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.lora = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(Unsupported, match=r"stage 3 divides plain weights; this model has a Parameter of torch\.uint8"):
        ablation({"deepspeed_zero": {"stage": 3}}).patch(model)
    assert ablation("deepspeed_zero").patch(model) is None


@pytest.mark.parametrize(("live", "times"), [(10**9, 1), (0, 2), (500, 1.5)])
def test_the_least_that_a_rank_sends_is_a_gradient_and_an_adapter_and_in_stage_3_each_weight(live, times, monkeypatch):
    """Of 1000 weights as many stay for backward as may; the others are gathered again."""
    monkeypatch.setattr(deepspeed, "LIVE", live)
    adapter = torch.nn.Parameter(torch.zeros(100))
    frozen: Any = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    frozen.ds_tensor = torch.zeros(500)
    made: Any = SimpleNamespace(
        adapters=lambda step: [("a", adapter)],
        model=SimpleNamespace(parameters=lambda: [adapter, frozen]),
        step=SimpleNamespace(batches=[0, 0]),
        steps=[None],
        dtype=torch.float32,
    )
    assert deepspeed.DeepspeedZero(stage=1).least(made, 2) == 400  # 2 (n-1)/n of 400 bytes
    assert deepspeed.DeepspeedZero(stage=3).least(made, 2) == 400 + 2 * times * 2000
