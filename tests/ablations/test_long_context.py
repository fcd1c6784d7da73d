"""Our long context as a toggle: PEFT's gradients, what it keeps and runs again, and what cannot be beside it."""

import pytest
import torch
from helpers import PEFT, cells
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, combine, conflict
from lorabench.measure import flops
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.kinds.train import Train
from lorabench.plan import registry
from lorabench.report.paste import code
from lorabench_ablations.long_context import LongContext

LAYERS = 3
TILES = {"long_context": {"mlp_rows": 7}}
AGAIN = {"long_context": {"keep_attention": False}}
WAYS = {
    "alone": (TILES,),
    "again": (AGAIN,),
    "all_kernels": ("lora_kernels", TILES),
    "low": ("adapters_in_compute_dtype", "lora_kernels", TILES),
    "tiled_loss": ({"tiled_loss": {"rows": 8}}, TILES),
}


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_peft_s(way):
    plain, made = one_step(arm(*PEFT)), arm(*PEFT, *WAYS[way])
    ours = one_step(made)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=2e-4, atol=1e-7)
    toggle = next(a for a in made.ablations if a.name == "long_context")
    found = Evidence(made, made.patched["long_context"], None)
    assert toggle.audit(found) == LAYERS
    kept = LAYERS if toggle.keep_attention else 0
    assert toggle.notes(found) == {"long_context": {"layers_run_again": LAYERS, "attention_kept": kept}}


@pytest.mark.parametrize(
    "order", [("lora_kernels", TILES), (TILES, "lora_kernels"), (TILES, "fused_linear_cross_entropy")]
)
def test_it_is_one_patch_with_the_other_kernels(order):
    made = arm(*PEFT, *order)
    counts = made.model._lorabench_lorakernels["report"].counts
    assert counts["long_context"] == LAYERS and counts["linear_cross_entropy"] == 1
    assert "linear_cross_entropy" not in arm(*PEFT, TILES).model._lorabench_lorakernels["report"].counts


def test_attention_of_several_operators_cannot_be_kept():
    made = arm("eager", *PEFT[1:], TILES)
    one_step(made)
    toggle = next(a for a in made.ablations if a.name == "long_context")
    with pytest.raises(NotApplied, match="no one operator"):
        toggle.audit(Evidence(made, LAYERS, None))


def test_a_forward_alone_proves_nothing():
    made = arm(*PEFT, TILES)
    made.step.forward(made.step.batches[0])
    toggle = next(a for a in made.ablations if a.name == "long_context")
    with pytest.raises(NotApplied, match="no layer was made again"):
        toggle.audit(Evidence(made, LAYERS, None))


def test_what_is_computed_again_is_counted_apart():
    cell = cells("ablations=[long_context]")[-1]
    shape, samples = flops.decoder(cell.model, cell.jobs[0].lora), Train().samples(cell)
    lengths = [len(s.tokens) for s in samples[0]]
    linears = 2e-12 * sum(lengths) * (shape.frozen + shape.adapter)
    for name, attention in (("long_context", 0), (AGAIN, 1)):
        (work,) = Train().work(cell, samples, [registry.ablation(name)])
        again = 0.73 * linears + attention * 1e-12 * flops._attention(shape, lengths)
        assert work.recompute_tflop["backward"] == pytest.approx(again)


def test_weights_that_wait_in_host_memory_are_counted(monkeypatch):
    """On a CPU they go from there to there."""
    monkeypatch.setattr(LongContext, "_moves", property(lambda self: []))
    made = arm(*PEFT, "lora_kernels", {"long_context": {"offload_weights": True}})
    toggle = next(a for a in made.ablations if a.name == "long_context")
    one_step(made)
    found = Evidence(made, LAYERS, None)
    assert toggle.audit(found) == LAYERS
    assert toggle.notes(found)["long_context"]["weights_brought"] == 2 * LAYERS - 1
    made.model._lorabench_lorakernels["report"].forwards.fused["weights brought"] = 0
    with pytest.raises(NotApplied, match="no layer's weights waited"):
        toggle.audit(found)


def test_down_is_what_is_spared():
    """The share that is declared is that of Llama-3.1-8B."""
    hidden, kv, wide = 4096, 1024, 14336
    linears = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide
    assert registry.ablation("long_context").recomputes.linears == pytest.approx(1 - hidden * wide / linears, abs=5e-3)


def test_it_takes_the_place_of_the_reference_s_checkpointing():
    reference = [registry.ablation(n) for n in (*PEFT, "gradient_checkpointing")]
    made = combine(reference, [registry.ablation("long_context")])
    assert [a.name for a in made] == [*PEFT, "long_context"]


@pytest.mark.parametrize(
    "other", ["gradient_checkpointing", "tiled_mlp", "liger", "unsloth", "lora_addmm", "batched", "layer_offloading"]
)
def test_what_cannot_be_beside_it(other):
    assert conflict([registry.ablation("long_context"), registry.ablation(other)])


def test_bad_input_is_one_line():
    for rows in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"mlp_rows: should be (a valid integer|greater than 0)"):
            registry.ablation({"long_context": {"mlp_rows": rows}})
    for option in ("offload", "offload_weights"):
        moving = {"long_context": {option: True}}
        with pytest.raises(Unsupported, match=rf"\({option}=True\) needs a CUDA device: on a CPU nothing would move"):
            arm(*PEFT, moving)
        assert conflict([registry.ablation(moving), registry.ablation("cuda_graph")])
    assert conflict([registry.ablation(moving), registry.ablation("ddp")])


def test_settings_say_what_a_user_calls():
    assert registry.ablation("long_context").settings().code == ("lorakernels.apply(model, long_context=True)",)
    (line,) = registry.ablation(TILES).settings().code
    assert line == "lorakernels.apply(model, long_context=lorakernels.LongContext(mlp_rows=7))"
    both = [registry.ablation(name).settings() for name in ("lora_kernels", TILES)]
    assert code(both, of_trainer=False) == [line], "one call for both"
