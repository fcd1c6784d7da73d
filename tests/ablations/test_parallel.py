"""Slot `parallel` on two and four processes: each strategy's loss, gradients and adapters are one process's."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers import request
from ranks_of import loss_of_saved, steps_of, together

from lorabench.contract.ablation import Unsupported, conflict
from lorabench.contract.batch import Sample
from lorabench.contract.ranks import Ranks
from lorabench.plan.registry import ablation
from lorabench_ablations import tensor_parallel
from lorabench_ablations.parallel import sent

LAYERS, LINEARS = 3, 3 * 7
KERNELS = "fsdp2_replicas"  # of FOUR, the one with lora_kernels
OPERANDS = ((128, 64, 48), (64, 64, 16), (256, 64, 32), (64, 128, 16))  # (N, K, p) of q+k+v, o, gate+up, down
TWO = {
    "ddp": ("ddp",),
    "ddp with lora_kernels": ("ddp", "lora_kernels"),
    "fsdp2": ("fsdp2",),
    "fsdp2 with lora_kernels": ("fsdp2", "lora_kernels"),
    "fsdp2 kept": ({"fsdp2": {"reshard": False}},),
    "ulysses": ("ulysses",),
    "tensor_parallel": ("tensor_parallel",),
}
ONE = {
    "fsdp2 with lora_kernels": TWO["fsdp2 with lora_kernels"],
    "fsdp2 apart with lora_kernels": ({"fsdp2": {"operands": False}}, "lora_kernels"),
}
BESIDE = ("ddp", "ddp with lora_kernels", "ulysses", "tensor_parallel")  # of TWO, what others are held against
TWO_MORE = {
    **{name: TWO[name] for name in BESIDE},
    "fsdp2 sharded": ({"fsdp2": {"adapters": "sharded"}},),
    "ulysses with lora_kernels": ("ulysses", "lora_kernels"),
    "fsdp2 kept with lora_kernels": ({"fsdp2": {"reshard": False}}, "lora_kernels"),
    "fsdp2 apart with lora_kernels": ONE["fsdp2 apart with lora_kernels"],
    "fsdp2 checkpointed": ("fsdp2", "gradient_checkpointing"),
    "fsdp2 checkpointed with lora_kernels": ("fsdp2", "lora_kernels", "gradient_checkpointing"),
    "fsdp2 sharded with lora_kernels": ({"fsdp2": {"adapters": "sharded"}}, "lora_kernels"),
    "fsdp2 kept checkpointed with lora_kernels": (
        {"fsdp2": {"reshard": False}},
        "lora_kernels",
        "gradient_checkpointing",
    ),
    "ddp checkpointed": ("ddp", "gradient_checkpointing"),
    "ddp checkpointed, reentrant": ("ddp", {"gradient_checkpointing": {"use_reentrant": True}}),
    "ulysses checkpointed": ("ulysses", "gradient_checkpointing"),
    "tensor_parallel checkpointed": ("tensor_parallel", "gradient_checkpointing"),
    "ddp on nf4_base": ("ddp", "nf4_base"),
    "ddp on nf4_base with lora_kernels": ("ddp", "nf4_base", "lora_kernels"),
    "ulysses on nf4_base": ("ulysses", "nf4_base"),
}
AGAIN = {  # ways to keep less for backward, with what the toggle finds at work on tiny-llama
    "selective": ("selective_checkpointing", LAYERS),
    "selective of products": ({"selective_checkpointing": {"save": "mm"}}, LAYERS),
    "every second layer": ({"gradient_checkpointing": {"every_n_layers": 2}}, 2),
    "on disk": ("disk_offloading", LAYERS),
}
TWO_MORE |= {
    f"{name}, {how}": (*TWO[name], toggle)
    for name in ("ddp", "fsdp2", "fsdp2 kept", "ulysses", "tensor_parallel")
    for how, (toggle, _) in AGAIN.items()
}
ONE_MORE = {
    name: case
    for name, case in TWO_MORE.items()
    if name.startswith("fsdp2") and name.endswith("with lora_kernels") and name not in ONE
}
ZERO = {
    **{f"zero {stage}": ({"deepspeed_zero": {"stage": stage}},) for stage in (1, 2, 3)},
    "zero 2 with lora_kernels": ("deepspeed_zero", "lora_kernels"),
    "zero 3 with lora_kernels": ({"deepspeed_zero": {"stage": 3}}, "lora_kernels"),
    "zero 3 checkpointed": ({"deepspeed_zero": {"stage": 3}}, "gradient_checkpointing"),
    "zero 2 checkpointed": ("deepspeed_zero", "gradient_checkpointing"),
    "zero 1 on nf4_base": ({"deepspeed_zero": {"stage": 1}}, "nf4_base"),
    "zero 2 on nf4_base": ("deepspeed_zero", "nf4_base"),
    "zero 3 by layer": ({"deepspeed_zero": {"stage": 3, "by_layer": True}},),
    "zero 3 by layer checkpointed": ({"deepspeed_zero": {"stage": 3, "by_layer": True}}, "gradient_checkpointing"),
}
ZERO |= {f"{name}, {how}": (*ZERO[name], AGAIN[how][0])
         for name in ("zero 2", "zero 3 by layer") for how in AGAIN}  # fmt: skip
ZERO |= {f"zero 3, {how}": (*ZERO["zero 3"], AGAIN[how][0]) for how in AGAIN if "selective" not in how}
# Of make test-all's environment alone, so what needs it is exhaustive.
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
FOUR = {
    "ddp": ("ddp",),
    "fsdp2": ("fsdp2",),
    "fsdp2 sharded": TWO_MORE["fsdp2 sharded"],
    "fsdp2 with lora_kernels": ("fsdp2", "lora_kernels"),
    "fsdp2 kept with lora_kernels": TWO_MORE["fsdp2 kept with lora_kernels"],
    "fsdp2_replicas": ({"fsdp2": {"replicas": 2}}, "lora_kernels"),
    "fsdp2_replicas_sharded": ({"fsdp2": {"replicas": 2, "adapters": "sharded"}},),
    "ulysses": ({"ulysses": {"ranks": 2}},),
    "tensor_parallel": ({"tensor_parallel": {"ranks": 2}},),
    **{name: ZERO[name] for name in ("zero 1", "zero 2", "zero 3")},
    "too many heads": ("ulysses",),
}
FOUR_HEADS = {name: TWO[name] for name in ("ulysses", "tensor_parallel")}  # one group of four ranks


@functools.cache
def in_one(base, model="tiny-llama"):
    """What one process finds on dense weights, or on those of this toggle."""
    return steps_of(base, model=model)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return together(1, ONE, folder), folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return together(2, TWO, folder), folder


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """Of one process and of two: the remainder of both grids."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one-more", "two-more")]
    return [(together(n, cases, at), at) for n, cases, at in zip((1, 2), (ONE_MORE, TWO_MORE), folders, strict=True)]


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    return together(2, ZERO, folder), folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return together(4, FOUR, folder), folder


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory):
    """(what four ranks find on a model with as many heads of keys, the adapters' folder, the model)"""
    folder = tmp_path_factory.mktemp("four-heads")
    described = request(depth=LAYERS).cell.model.config | {"num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(described))
    name = str(folder / "config.json")
    return together(4, FOUR_HEADS, folder, model=name), folder, name


def is_one_process_s(of, case):
    found, saved = of[0][case], of[1] / case
    assert isinstance(found, dict), found
    base = tuple(name for name in ("nf4_base",) if name in case)
    on = of[2:] or ("tiny-llama",)
    plain = in_one(base, *on)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert found["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
    assert found["update_error"] < 1e-4
    assert found["differs"] == 0  # after all steps, of all adapters, on all ranks
    assert found["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-5) and found["last_loss"] < found["loss"]
    assert loss_of_saved(str(saved), *base, model=on[0]) == pytest.approx(found["last_loss"], rel=1e-5)
    if "checkpointed" in case:
        assert found["audits"]["gradient_checkpointing"] == LAYERS
    if how := AGAIN.get(case.partition(", ")[2]):
        assert found["audits"][ablation(how[0]).name] == how[1]


@pytest.mark.parametrize("case", TWO)
def test_on_two_processes_all_is_as_in_one(two, case):
    is_one_process_s(two, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ONE)
def test_lora_kernels_over_fsdp2_on_one_process_too(one, case):
    is_one_process_s(one, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "case"),
    [*((1, case) for case in ONE_MORE), *((2, case) for case in TWO_MORE if case not in TWO)],
)
def test_more_of_both_is_as_one_process_too(more, number, case):
    is_one_process_s(more[number - 1], case)


@needs_deepspeed
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ZERO)
def test_zero_s_stages_are_as_one_process_too(zero, case):
    is_one_process_s(zero, case)


@needs_deepspeed
@pytest.mark.exhaustive
def test_each_stage_of_zero_says_what_it_divides(zero):
    held = [zero[0][f"zero {stage}"]["notes"]["deepspeed_zero"]["held_bytes"] for stage in (1, 2, 3)]
    assert all(one["float32 copies"] == one["adapters"] / 2 for one in held)
    assert held[0] == held[1] and held[2]["weights"] < 0.6 * held[1]["weights"]  # norms stay whole
    audits = [zero[0][f"zero {stage}"]["audits"]["deepspeed_zero"] for stage in (1, 2, 3)]
    assert audits[0] == audits[1] and LINEARS <= audits[0] < 2 * LINEARS  # of 42 adapters about half
    assert 0 < audits[2] <= LINEARS + 2


@needs_deepspeed
@pytest.mark.exhaustive
def test_lora_kernels_leaves_the_weights_that_zero_3_divides(zero):
    with_2, with_3 = (zero[0][f"zero {n} with lora_kernels"]["notes"]["lorakernels"]["left"] for n in (2, 3))
    assert with_2 == [] and "qkv: q_proj: its weight is partitioned (DeepSpeed ZeRO-3)" in with_3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=needs_deepspeed if "zero" in name else ()) for name in FOUR if name != "too many heads"],
)
def test_on_four_processes_too_also_beside_divided_samples(four, case):
    is_one_process_s(four, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FOUR_HEADS)
def test_four_ranks_divide_four_heads_of_keys(four_heads, case):
    is_one_process_s(four_heads, case)
    notes = four_heads[0][case]["notes"][case]
    assert notes["world_size"] == 4 and notes["sent_bytes"] >= notes["least_bytes"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["fsdp2_replicas", "fsdp2_replicas_sharded"])
def test_replicas_of_two_ranks_hold_half_each_and_gather_among_two(four, case):
    found, whole = (four[0][name]["notes"] for name in (case, f"fsdp2{' with lora_kernels' * (case == KERNELS)}"))
    notes, whole = found["fsdp2"], whole["fsdp2"]
    assert notes["held_bytes"]["weights"] == pytest.approx(2 * whole["held_bytes"]["weights"], rel=0.1)
    assert notes["handed_bytes"]["all_gather"] >= 2 * whole["handed_bytes"]["all_gather"]  # a half, not a quarter
    assert whole["least_bytes"] > notes["least_bytes"] > 0
    if "sharded" in case:  # where this test's own look at the adapters is traced, too
        assert notes["sent_bytes"] > notes["least_bytes"]
    else:
        assert notes["sent_bytes"] == pytest.approx(notes["least_bytes"], rel=0.01)


@pytest.mark.exhaustive
def test_where_two_ranks_share_samples_what_is_sent_is_that_of_both_kinds_of_groups(four, more):
    both = [cases[0]["ulysses"]["notes"]["ulysses"] for cases in (four, more[1])]
    for notes in both:
        assert notes["sent_bytes"] == pytest.approx(notes["least_bytes"], rel=0.01)
    handed, whole = (notes["handed_bytes"] for notes in both)
    assert handed["all_to_all"] < whole["all_to_all"]  # of half of the samples
    assert handed["all_reduce"] == whole["all_reduce"]
    split, whole = (cases[0]["tensor_parallel"]["notes"]["tensor_parallel"] for cases in (four, more[1]))
    for notes in (split, whole):
        assert notes["sent_bytes"] > notes["least_bytes"] > 0  # transformers has more than four all-reduces a layer
    assert split["sent_bytes"] < whole["sent_bytes"]
    assert split["held_bytes"] == whole["held_bytes"]


@pytest.mark.exhaustive
def test_two_heads_of_keys_cannot_be_divided_among_four_ranks(four):
    assert four[0]["too many heads"] == (
        "Unsupported: ulysses divides 4 heads and 2 of keys among 4 ranks: no multiples"
    )


@pytest.mark.parametrize(
    ("case", "name", "sites"),
    [("ddp", "ddp", 2), ("fsdp2", "fsdp2", LAYERS), ("ulysses", "ulysses", LAYERS),
     ("tensor_parallel", "tensor_parallel", LINEARS)],
)  # fmt: skip
def test_each_says_where_it_is_at_work_and_what_it_sent(two, case, name, sites):
    says_where(two[0][case], name, sites)


@pytest.mark.exhaustive
def test_fsdp2_of_sharded_adapters_says_so_too(more):
    found = more[1][0]["fsdp2 sharded"]
    says_where(found, "fsdp2", LAYERS)
    whole = more[1][0]["ddp"]["notes"]["ddp"]["held_bytes"]["adapters"]
    assert found["notes"]["fsdp2"]["held_bytes"]["adapters"] < whole


def says_where(found, name, sites):
    assert found["audits"][name] == sites
    notes = found["notes"][name]
    assert notes["world_size"] == 2 and notes["backend"] == "gloo"
    assert notes["sent_bytes"] >= notes["least_bytes"] > 0


def test_fsdp2_sends_its_least_and_holds_half_of_the_frozen_weights(two):
    """And ddp and ulysses theirs, to a few bytes."""
    for case in ("ddp", "ulysses"):
        notes = two[0][case]["notes"][case]
        assert notes["sent_bytes"] == pytest.approx(notes["least_bytes"], rel=0.01)
    ddp, kept, again = (two[0][case]["notes"] for case in ("ddp", "fsdp2 kept", "fsdp2"))
    for notes in (kept["fsdp2"], again["fsdp2"]):
        assert notes["sent_bytes"] == pytest.approx(notes["least_bytes"], rel=0.01)
        assert notes["held_bytes"]["weights"] == pytest.approx(ddp["ddp"]["held_bytes"]["weights"] / 2, rel=0.1)
        assert notes["held_bytes"]["adapters"] == ddp["ddp"]["held_bytes"]["adapters"]
    assert again["fsdp2"]["least_bytes"] > kept["fsdp2"]["least_bytes"]


def test_lora_kernels_over_fsdp2_runs_the_products_that_it_runs_over_ddp(one, two):
    """q, k, v and gate, up are one product each, and no adapter is added by one of its own."""
    found, over_ddp = one[0]["fsdp2 with lora_kernels"]["products"], products_over_ddp(two)
    assert found == [2 * n for n in over_ddp]  # batches of four samples each
    assert sum(one[0]["fsdp2 apart with lora_kernels"]["products"]) > 1.5 * sum(found)
    assert two[0]["fsdp2 with lora_kernels"]["products"] == over_ddp


@pytest.mark.exhaustive
def test_with_layers_kept_it_runs_them_too_on_one_process_and_on_two(more):
    over_ddp, found = products_over_ddp(more[1]), more[1][0]["fsdp2 kept with lora_kernels"]["products"]
    assert more[0][0]["fsdp2 kept with lora_kernels"]["products"] == [2 * n for n in over_ddp]
    assert found == over_ddp
    assert sum(more[1][0]["fsdp2 apart with lora_kernels"]["products"]) > 1.5 * sum(found)


def products_over_ddp(two):
    return two[0]["ddp with lora_kernels"]["products"]


def operands_are_said(cases):
    said = {case: found["notes"]["fsdp2"].get("operands") for case, found in cases.items() if "fsdp2" in case}
    merged = {f"fsdp2{how} with lora_kernels" for how in ("", " kept", " checkpointed", " kept checkpointed")}
    assert said == {case: LAYERS * len(OPERANDS) if case in merged else None for case in said}
    return merged & said.keys(), said.keys() - merged


def test_a_record_says_how_many_operands_are_sharded(two):
    assert all(operands_are_said(two[0]))


@pytest.mark.exhaustive
def test_a_record_of_more_says_so_too(more):
    assert any(operands_are_said(more[1][0]))


def test_a_rank_holds_its_part_of_the_operands(two):
    """The spare columns are shared out like the weights."""
    ddp, ours = (two[0][name]["notes"][name.split()[0]]["held_bytes"] for name in ("ddp", "fsdp2 with lora_kernels"))
    wider = 4 * LAYERS * sum((n + p) * (k + p) - n * k for n, k, p in OPERANDS)
    assert ours["weights"] == (ddp["weights"] + wider) / 2
    assert ours["adapters"] == ddp["adapters"]


@pytest.mark.parametrize("case", ["ddp with lora_kernels", "fsdp2 with lora_kernels"])
def test_lora_kernels_is_at_work_beside_it(two, case):
    kernels_are_at_work(two[0][case], case)


@pytest.mark.exhaustive
def test_lora_kernels_is_at_work_beside_ulysses(more):
    kernels_are_at_work(more[1][0]["ulysses with lora_kernels"], "ulysses with lora_kernels")


def kernels_are_at_work(found, case):
    assert found["audits"]["lora_kernels"] == LAYERS * 5 + 2  # MLP, q/k/v, o, two norms; a norm and the loss
    assert found["notes"]["lorakernels"]["left"] == found["left"] == []  # at apply, and in any forward since
    if "fsdp2" in case:
        assert found["notes"]["fsdp2"]["sent_bytes"] == pytest.approx(found["notes"]["fsdp2"]["least_bytes"], rel=0.01)


@pytest.mark.parametrize(("kind", "bytes_"), [("all_reduce", 150), ("all_gather", 300), ("reduce_scatter", 75)])
def test_what_a_ring_of_four_sends(kind, bytes_):
    assert sent(kind, 100, 4) == bytes_


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ulysses", "context_parallel", "tensor_parallel"])
def test_what_cannot_be_beside_it_is_said(name):
    parallel = ablation(name)
    assert "replayed by all ranks" in (conflict([parallel, ablation("cuda_graph")]) or "")
    assert "every rank would find a size of its own" in (conflict([parallel, ablation("auto_batch_size")]) or "")
    if name in ("fsdp2", "tensor_parallel"):
        for quantized in ("nf4_base", "load_in_8bit", "torchao_int8", "fp8_base"):
            assert name in (conflict([parallel, ablation(quantized)]) or "")
    if name == "tensor_parallel":
        assert "which a split tensor refuses" in (conflict([parallel, ablation("save_on_cpu")]) or "")
    if name in ("ulysses", "context_parallel"):
        assert "a row of several samples" in (conflict([parallel, ablation("packing")]) or "")


def test_samples_that_cannot_be_divided_and_odd_numbers_of_ranks_are_refused():
    with pytest.raises(Unsupported, match="fsdp2 divides 8 samples among 3 ranks: give a multiple"):
        ablation("fsdp2").shard([Sample([1], [1])] * 8, Ranks(0, 3))
    with pytest.raises(Unsupported, match="ulysses with ranks=3 needs a multiple"):
        ablation({"ulysses": {"ranks": 3}}).shard([Sample([1], [1])] * 8, Ranks(0, 4))
    with pytest.raises(Unsupported, match="copies between ranks, and one rank holds all weights"):
        ablation({"fsdp2": {"copy_engine": True}}).shard([Sample([1], [1])] * 8, Ranks(0, 1))
    with pytest.raises(Unsupported, match="fsdp2 with replicas=2 needs a multiple of that many ranks, twice as many"):
        ablation({"fsdp2": {"replicas": 2}}).shard([Sample([1], [1])] * 8, Ranks(0, 2))
    with pytest.raises(ValueError, match="adapters: should be 'replicated' or 'sharded'"):
        ablation({"fsdp2": {"adapters": "halved"}})


PLAN = {"model.layers.*.mlp.up_proj": "colwise"}


@pytest.fixture
def base():
    """What `_split` asks of a model before transformers 5.23."""
    return SimpleNamespace(tp_plan=PLAN, config=SimpleNamespace(distributed_config="two ranks"), _device_mesh="mesh")


def test_before_5_23_transformers_reads_the_plan_of_the_model_itself(base, monkeypatch):
    calls = []
    apply = lambda model, tp_mesh: calls.append((model, tp_mesh))  # noqa: E731 - 5.17's, which takes no plan
    monkeypatch.setattr("transformers.distributed.tensor_parallel.apply_tensor_parallelism", apply)
    tensor_parallel._split(base)
    assert calls == [(base, "mesh")]


def test_since_5_23_transformers_is_given_the_plan_that_it_resolves(base, monkeypatch):
    calls, resolved = [], {"model.layers.0.mlp.up_proj": "colwise"}
    apply = lambda model, tp_mesh, tp_plan: calls.append((model, tp_mesh, tp_plan))  # noqa: E731
    monkeypatch.setattr("transformers.distributed.tensor_parallel.apply_tensor_parallelism", apply)
    base._resolve_parallel_plans = lambda config: (resolved if config == "two ranks" else {}, {}, {})
    tensor_parallel._split(base)
    assert calls == [(base, "mesh", resolved)]


@pytest.mark.parametrize("plan", [{}, None])
def test_a_model_without_a_plan_is_refused_rather_than_left_whole(base, monkeypatch, plan):
    monkeypatch.setattr("transformers.distributed.tensor_parallel.apply_tensor_parallelism", lambda *args: None)
    base.tp_plan = plan
    with pytest.raises(Unsupported, match="transformers has none for SimpleNamespace"):
        tensor_parallel._split(base)
