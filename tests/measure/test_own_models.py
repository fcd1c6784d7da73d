"""A user's own models and chats, built, judged and measured: every family's arms start alike and step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers import MACHINE, InProcess, cells, request, sweep
from own_models import FAMILIES, LLAMA, chats, saved

from lorabench.contract.kind import kind
from lorabench.measure.judging.numerics import one_step
from lorabench.plan.compose import load_config, plan
from lorabench.record.store import Store
from lorabench.run.runner import Runner


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return chats(tmp_path_factory.mktemp("text") / "chats.jsonl")


def planned(folder, text, *overrides: str):
    wanted = [f"models=[{folder}]", f"workload={{{text}: {{samples: 4, batch_size: 2}}}}", "trials=3", *overrides]
    return plan(load_config(wanted), "cpu").cells


def built(cell, attention: str = "sdpa", **changes):
    wanted = request(attention, "adamw_foreach", "padding")
    drawn = kind(cell.kind).samples(cell)
    wanted = replace(wanted, cell=cell, model=cell.model, jobs=cell.jobs, samples=drawn, **changes)
    return kind(cell.kind).build(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_built_with_its_own_weights_and_steps_on_chats(family, text, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / family, family)
    own, *_ = planned(folder, text, "weights=auto", "ablations=[eager]")
    made = built(own)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    ours = {n.replace(".base_layer", ""): t for n, t in made.model.get_base_model().state_dict().items()}
    assert theirs and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    out = one_step(made)
    assert 4 < out.loss < 8  # of 320 tokens, about ln(320)
    assert out.gradients and all(bool(g.isfinite().all()) and bool(g.any()) for g in out.gradients.values())
    shallow = built(own, layers=2).model.get_base_model().state_dict()
    assert 0 < len(shallow) < len(made.model.get_base_model().state_dict())


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.exhaustive] if n % 2 else []) for n, f in enumerate(FAMILIES)]
)
def test_random_weights_are_drawn_whole_and_the_same_twice(family, text, tmp_path):
    """Memory that nothing was written into would differ, or not be finite."""
    own, *_ = planned(saved(tmp_path / family, family), text, "ablations=[eager]")
    one, other = (dict(built(own).model.named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) and bool(one[name].isfinite().all()) for name in one)


def test_vectors_that_are_neither_norms_nor_biases_get_their_start(tmp_path):
    """GPT-OSS' attention sinks are empty memory until transformers starts them."""
    (tmp_path / "config.json").write_text(json.dumps({
        **LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    }))  # fmt: skip
    cell = cells(f"models=[{tmp_path}]")[0]
    sinks = [p for name, p in built(cell, "eager").model.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 3 and all(0 < float(p.abs().max()) < 1 for p in sinks)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.exhaustive] if f != "gpt2" else []) for f in FAMILIES]
)
def test_a_cell_of_any_family_is_judged_and_timed(family, text, tmp_path):
    folder = saved(tmp_path / family, family)
    _, cell = planned(folder, text, "weights=auto", "ablations=[gradient_checkpointing]")
    with Runner(InProcess(), MACHINE, None, "test", 60, tmp_path) as runner:
        record = runner.measure(cell)
    assert record.status == "ok", record.reason
    assert record.applied["gradient_checkpointing"] == 3


@pytest.mark.exhaustive
def test_a_sweep_over_a_folder_and_a_jsonl_and_its_resume(text, tmp_path):
    folder = saved(tmp_path / "mine", "qwen3")
    arguments = [
        f"models=[{folder}]", f"workload={text}", "weights=auto", "ablations=[packing]", "trials=3", "report=false",
        "output=out",
    ]  # fmt: skip
    done = sweep(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with Store(tmp_path / "out") as store:
        records = list(store.records())
    assert [r.status for r in records] == ["ok", "ok"]
    assert {(r.model, r.workload) for r in records} == {("mine", "chats.jsonl")}
    assert "2 already recorded" in sweep(*arguments, cwd=tmp_path).stdout
    text.write_text(text.read_text() * 2)
    assert "0 already recorded" in sweep(*arguments, cwd=tmp_path).stdout, "other chats are another measurement"
