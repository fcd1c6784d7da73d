"""Arms of several jobs on one base, and each job alone, for the tests of what trains them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PEFT, cells, config, only

from lorabench.contract.ablation import Evidence
from lorabench.contract.kind import kind
from lorabench.contract.ranks import ONE
from lorabench.measure.judging.numerics import Outcome, one_step, share_masks
from lorabench.measure.kind import request_of
from lorabench.plan.compose import plan
from lorabench.plan.registry import ablation

CPU = torch.device("cpu")
LAYERS = 2
# Ranks, alphas and lengths of their own, padding inside a job, and a job that has fewer micro-batches than another.
UNEQUAL = (
    "workload={glue: {samples: 4, batch_size: 2, jobs: ["
    "{name: few, lora: {r: 3, lora_alpha: 8}, workload: {samples: 2, seq_len: 24}, seed: 4, learning_rate: 3.0e-4}, "
    "{name: many, lora: {r: 8}, seed: 7}, {name: thin, lora: {r: 1}, workload: {seq_len: 40}}]}}"
)
ONE_LENGTH = (
    "workload={2x16: {jobs: [{name: first, lora: {r: 4}}, {name: second, workload: {batch_size: 1}, seed: 3}]}}"
)


def request(*toggles, workload=UNEQUAL, dropout=0.0):
    names = ",".join(toggles)
    made = cells(workload, "dtype=float32", f"lora.lora_dropout={dropout}", f"ablations=[[{names}]]")
    # Two of the model's three layers have all that three have, in two thirds of the time.
    spec = made[-1].model
    spec = spec.model_copy(update={"config": spec.config | {"num_hidden_layers": LAYERS}})
    return request_of(replace(made[-1], model=spec), "candidate", torch.float32, CPU)


def build(wanted):
    return kind("train").build(wanted)


def outcomes(wanted, shared=True):
    arm = build(wanted)
    if shared:
        share_masks(arm.model)
    return [one_step(arm, step) for step in arm.steps]


ALONE: dict[str, list[Outcome]] = {}  # by what a job alone is built from: tests of many toggles ask for the same


def alone(wanted):
    """Each job by plain PEFT, as the only one on its base."""
    assert wanted.ranks is ONE and wanted.base is None and wanted.mine is None
    cell = replace(wanted.cell, candidate=(), reference=(), toggles=())
    key = repr((cell, replace(plain(wanted), name="", cell=None, ranks=None)))
    if key not in ALONE:
        found = []
        for index in range(len(wanted.jobs)):
            arm = build(plain(only(wanted, index)))
            share_masks(arm.model)
            found.append(one_step(arm))
        ALONE[key] = found
    return [*ALONE[key]]


def plain(wanted):
    return replace(wanted, ablations=tuple(ablation(name) for name in ("sdpa", "adamw_foreach", "padding")))


def same(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-3, atol=1e-6)
        assert ours.update_error is not None and ours.update_error < 1e-3


def audited(name, wanted):
    arm = build(wanted)
    toggle = ablation(name)
    return toggle.audit(Evidence(arm, arm.patched[name], {})), toggle.notes(Evidence(arm, arm.patched[name], {}))


TWO_JOBS = ("workload=two_jobs", "reference=[sdpa,adamw_foreach,padding]")


def jobs_arm(ranks, *toggles, layers=3, overrides=()):
    """Two jobs in a pipeline's model, of which a test needs so many layers (None: all eight)."""
    cell = plan(config("models=[tiny-llama-8-layers]", *TWO_JOBS, "trials=3", *overrides), "cpu").cells[0]
    names = [*PEFT[:2], *toggles]
    made = request_of(cell, "reference", torch.float32, CPU, Path())
    made = replace(made, ablations=tuple(map(ablation, names)), layers=layers, ranks=ranks)
    return kind("train").build(made)


def multi_adapter(**settings):
    return {"pipeline_multi_adapter": settings}
