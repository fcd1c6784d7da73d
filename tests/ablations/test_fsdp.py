"""FSDP2 divides the layers before they have weights: no rank ever holds the whole model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import deep_arm as arm
from helpers import sweep
from ranks_of import samples
from several_ranks import on_ranks

from lorabench.contract.arm import bytes_of
from lorabench.measure import build
from lorabench.measure.judging import numerics
from lorabench.record.store import read_records

COMMON = (
    "models=[tiny-llama]", "workload=8x64", "world_size=2", "trials=3", "warmup=1", "dtype=float32", "report=false",
)  # fmt: skip


def held(ranks, names):
    """Bytes of weights: (of the layers when the first is drawn, of all else, of the finished model's layers)."""
    drawn = []
    fill = build.fill_weights

    def filling(model, *rest):
        drawn.append((layers(model), bytes_of(list(model.parameters()))))
        fill(model, *rest)

    build.fill_weights = filling
    made = arm("sdpa", "adamw_foreach", "padding", *names, samples=samples(), ranks=ranks)
    first, whole = drawn[0]
    return first, whole - first, layers(made.model)


def layers(model):
    return bytes_of([p for name, p in model.named_parameters() if ".layers." in name and "lora_" not in name])


def test_a_rank_draws_its_part_of_each_layer(tmp_path):
    plain, others, _ = held_alone()
    for drawn, rest, finished in on_ranks(2, tmp_path, held, ("fsdp2",)):
        assert drawn == finished == pytest.approx(plain / 2, rel=0.01)
        assert rest == others  # embedding, norm and head stay whole until the model is divided


def held_while_laid_out(ranks):
    """(Bytes of the layers' weights as each layer is laid out for our kernels, and at the end; of one layer as it then
    is whole)."""
    import lorakernels

    before, held, whole = lorakernels.before_fully_shard, [], []

    def watching(model, **switches):
        lay_out = before(model, **switches)

        def watched(layer):
            assert lay_out(layer) == 4  # q+k+v, o, gate+up, down
            held.append(layers(model))
            whole.append(bytes_of([p for p in layer.parameters() if not p.requires_grad]))

        return watched

    lorakernels.before_fully_shard = watching
    made = arm("sdpa", "adamw_foreach", "padding", "fsdp2", "lora_kernels", samples=samples(), ranks=ranks)
    return held, layers(made.model), whole


def test_a_rank_lays_out_one_layer_at_a_time(tmp_path):
    """Whole is at no time more than the layer that is laid out, and what a rank holds of the others is its part."""
    for held, finished, whole in on_ranks(2, tmp_path, held_while_laid_out):
        assert len(held) == len(whole) == 3 and len(set(whole)) == 1
        assert finished == 3 * whole[0] / 2
        assert all(bytes_ <= finished + whole[0] / 2 for bytes_ in held)


def held_alone():
    from lorabench.contract.ranks import ONE

    fill = build.fill_weights
    try:
        return held(ONE, ())
    finally:
        build.fill_weights = fill


def gathered_in_registered_buffers(ranks, name):
    """(Gathers of a step, of which into a buffer that was registered, how many were; the outcome of a step with
    and without), with a CPU's memory and group in the place of NCCL's."""
    from lorabench_ablations import copy_engine

    registered, gathers = [], []
    gather = copy_engine.CopyEngineGather.__call__

    def counted(self, output_tensor, *rest, **named):
        gathers.append(output_tensor.data_ptr() in registered)
        return gather(self, output_tensor, *rest, **named)

    copy_engine.symmetric_memory = SimpleNamespace(
        set_backend=lambda name: None, empty=torch.empty,
        rendezvous=lambda tensor, group: registered.append(tensor.data_ptr()),
    )  # fmt: skip
    copy_engine.options = None  # a group of gloo's
    copy_engine.CopyEngineGather.__call__ = counted
    outcomes = []
    for one in ("fsdp2", name):
        made = arm("sdpa", "adamw_foreach", "padding", one, samples=samples(), ranks=ranks)
        outcomes.append(numerics.one_step(made))
    plain, ours = [(o.loss, {n: x.numpy() for n, x in o.gradients.items()}) for o in outcomes]
    return len(gathers), sum(gathers), len(registered), plain, ours


def test_copy_engines_gather_each_layer_in_both_directions(tmp_path):
    of_each = on_ranks(2, tmp_path, gathered_in_registered_buffers, {"fsdp2": {"copy_engine": True}})
    for gathers, into_registered, registered, plain, ours in of_each:
        # Two micro-batches, in each of which three layers are gathered both ways, and the rest once.
        assert gathers == into_registered == 2 * (2 * 3 + 1)
        assert registered == 2 + 2  # that the layers take in turns, and those of the rest
        assert ours[0] == plain[0]
        for name, gradient in plain[1].items():
            assert (ours[1][name] == gradient).all(), name


@pytest.mark.exhaustive
def test_a_sweep_of_lora_kernels_over_fsdp2_passes_the_gate(tmp_path):
    done = sweep(*COMMON, "ablations=[[fsdp2,lora_kernels]]", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = next(r for r in read_records(tmp_path) if r.ablations)
    assert record.status == "ok", record.reason
    assert record.numerics.grad_error < 1e-5 and record.numerics.loss_error < 1e-6
    assert record.applied["fsdp2"] > 0 and not record.notes["lorakernels"]["left"]
    said = record.notes["fsdp2"]
    assert len(said["sent_bytes"]) == 2 and said["sent_bytes"] == pytest.approx(said["least_bytes"], rel=0.01)
