"""The limit: it runs the frozen GEMMs and the attention, each as often as a step needs them, and nothing else."""

import pytest
import torch
from helpers import deep_arm as arm
from torch.nn import functional as F

from lorabench.contract.ablation import Evidence, Unsupported, conflict
from lorabench.contract.workload import Workload
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations.limit import FrozenLimit

LAYERS = 3  # of tiny-llama


@pytest.fixture
def limit():
    made = arm("sdpa", "adamw_foreach", "frozen_limit")
    run_trial(made)  # the first picks the attention
    return made


def test_one_product_a_group_each_way_and_no_more(limit):
    trial, ops = traced(lambda: run_trial(limit))
    forward, backward = 4 * LAYERS + 1, 4 * LAYERS  # nothing below the first layer is trained
    assert ops["aten::mm"] == forward + backward
    assert ops["aten::scaled_dot_product_attention"] == LAYERS
    assert not any(ops[f"aten::{name}"] for name in ("silu", "addmm", "embedding", "rsqrt", "_foreach_add_"))
    assert set(trial.device_ms) == {"forward", "backward"}
    assert FrozenLimit().audit(Evidence(limit, limit.patched["frozen_limit"], ops)) == forward


def test_the_products_are_those_of_the_model_s_own_weights(limit):
    (shape,) = limit.step.shapes.values()
    plain = dict(arm("sdpa", "adamw_foreach").model.named_parameters())
    shape.forward()
    for i, layer in enumerate(shape.layers):
        stem = f"base_model.model.model.layers.{i}"
        q, k, v = (plain[f"{stem}.self_attn.{n}_proj.base_layer.weight"] for n in "qkv")
        torch.testing.assert_close(layer["qkv"], torch.cat([q, k, v]))
    torch.testing.assert_close(shape.y["qkv"], F.linear(shape.x["qkv"], shape.layers[-1]["qkv"]))
    shape.backward()
    torch.testing.assert_close(shape.dx["down"], shape.y["down"] @ shape.layers[0]["down"])
    assert all(x.abs().mean() > 0.1 for x in shape.x.values())  # zeros would make a GEMM look faster than it is


def test_a_backend_that_refuses_grouped_heads_gets_them_repeated(monkeypatch):
    plain = F.scaled_dot_product_attention

    def picky(q, k, v, **kwargs):
        if kwargs["enable_gqa"]:
            raise RuntimeError("No available kernel. Aborting execution.")
        return plain(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", picky)
    made = arm("frozen_limit")
    run_trial(made)
    (shape,) = made.step.shapes.values()
    assert shape.notes["attention"].endswith("heads repeated")
    q, k, v = shape.qkv
    torch.testing.assert_close(shape._attention(), plain(q, k, v, is_causal=True, enable_gqa=True))


def test_the_merged_weights_are_not_held_twice(limit):
    attention = limit.model.get_base_model().model.layers[1].self_attn
    storages = {getattr(attention, f"{n}_proj").base_layer.weight.untyped_storage().data_ptr() for n in "qkv"}
    assert len(storages) == 1


def test_a_window_shorter_than_the_samples_is_refused():
    made = arm(
        "frozen_limit", model="tiny-mistral", workload=Workload(name="long", kind="fixed", seq_len=64, batch_size=1)
    )
    made.model.config.sliding_window = 32
    with pytest.raises(Unsupported, match="32 tokens"):
        run_trial(made)


def test_it_stands_alone():
    limit = registry.ablation("frozen_limit")
    for name in ("lora_kernels", "cuda_graph", "packing", "gradient_checkpointing", "fused_rope"):
        assert "frozen_limit" in conflict([limit, registry.ablation(name)])
    assert conflict([limit, registry.ablation("sdpa"), registry.ablation("adamw_foreach")]) is None
