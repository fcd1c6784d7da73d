"""Pipelines on two and four processes of a CPU: the loss and every adapter's gradient are those of one process."""

from __future__ import annotations

import functools
import gc
import json
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import PEFT, arm, config, random_samples, request
from peft import PeftModel
from safetensors.torch import load_file, save_file
from several_jobs import jobs_arm, multi_adapter
from several_ranks import compare, on_ranks

from lorabench.contract.ablation import Unsupported
from lorabench.contract.family import Family
from lorabench.contract.ranks import ONE, Ranks
from lorabench.contract.workload import Workload
from lorabench.measure import build, parted_weights, trial
from lorabench.measure.base import Base
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.kind import kind
from lorabench.measure.seat import Seat, Seating
from lorabench.plan import registry
from lorabench.plan.compose import load_config, model, plan
from lorabench_ablations import pipeline_stages
from lorabench_ablations.pipeline_step import save_adapter

FEED = Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
LENGTHS = [16, 9, 12, 16, 3, 14, 7, 11]


DEEP = "tiny-llama-8-layers"  # cut to as many as a test needs


def plain_arm(layers, *base):
    return arm(*PEFT, *base, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers)


@functools.cache
def plain(layers, *base):
    return one_step(plain_arm(layers, *base))


def stepped(ranks, toggles, layers):
    made = arm(
        *PEFT[:2], *toggles, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers, ranks=ranks
    )
    outcome = one_step(made)
    counts = [batch.real for batch in made.step.batches]
    names = [name for name, _ in made.adapters(made.step)]
    gradients = {name: x.numpy() for name, x in outcome.gradients.items()}
    machinery = made.step.innermost.machinery
    trained = sum(p.nbytes for _, p in made.adapters(made.step))
    added_up = machinery.said().get("added_up_bytes_by_rank")
    of_own = None if added_up is None else (added_up[machinery.line.rank], trained)
    return outcome.loss, gradients, outcome.update_error, of_own, counts, names, machinery.split


@pytest.mark.parametrize(
    ("ranks", "layers", "toggle"),
    [
        (2, 3, "pipeline_gpipe"),
        pytest.param(2, 3, "pipeline_1f1b", marks=pytest.mark.exhaustive),  # in make test out of a folder of weights
        (2, 3, {"pipeline_1f1b": {"tokens": 32, "layers": [1, 2]}}),
        (2, 4, {"pipeline_interleaved": {"v": 2}}),
        pytest.param(4, 4, "pipeline_1f1b", marks=pytest.mark.exhaustive),
        pytest.param(4, 4, "pipeline_gpipe", marks=pytest.mark.exhaustive),
        pytest.param(2, 6, {"pipeline_interleaved": {"v": 3}}, marks=pytest.mark.exhaustive),
        pytest.param(4, 8, "pipeline_interleaved", marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(tmp_path, ranks, layers, toggle):
    answers = on_ranks(ranks, tmp_path, stepped, (toggle,), layers)
    compare(answers, plain(layers))
    assert [sum(counts) for *_, counts, _, _ in answers] == [sum(LENGTHS)] + [0] * (ranks - 1)
    names = [name for *_, own, _ in answers for name in own]
    assert len(names) == len(set(names)) == layers * 7 * 2  # each tensor is on one rank
    split = answers[0][-1]
    assert sum(split) == layers and min(split) >= 1
    assert toggle in ("pipeline_gpipe", "pipeline_1f1b") or "layers" not in str(toggle) or split == [1, 2]
    assert all(answer[-1] == split for answer in answers)


@pytest.mark.parametrize(
    "toggle",
    [
        {"pipeline_1f1b": {"ranks": 2}},
        pytest.param({"pipeline_gpipe": {"ranks": 2, "tokens": 32}}, marks=pytest.mark.exhaustive),
        pytest.param({"pipeline_interleaved": {"ranks": 2}}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_pipelines_divide_the_samples_and_add_their_gradients(tmp_path, toggle):
    answers = on_ranks(4, tmp_path, stepped, (toggle,), 4)
    compare(answers, plain(4))
    real = [sum(counts) for *_, counts, _, _ in answers]
    assert real == [sum(LENGTHS[0::2]), 0, sum(LENGTHS[1::2]), 0]
    first, second, *others = [own for *_, own, _ in answers]
    assert [first, second] == others and not set(first) & set(second)
    added_up = [of_own for *_, of_own, _, _, _ in answers]
    assert all(found == trained > 0 for found, trained in added_up)  # a ring of two sends each gradient once


def after_five(ranks, toggle):
    made = arm(*PEFT[:2], toggle, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=4, ranks=ranks)
    for _ in range(5):
        one_step(made)
    return {name: p.detach().numpy() for name, p in made.adapters(made.step)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("toggle", ["pipeline_1f1b", "pipeline_gpipe", "pipeline_interleaved"])
def test_after_five_steps_two_pipelines_hold_the_same_adapters_bit_for_bit(tmp_path, toggle):
    first, second, *others = on_ranks(4, tmp_path, after_five, {toggle: {"ranks": 2}})
    for own, other in zip((first, second), others, strict=True):
        assert own.keys() == other.keys() and all((own[name] == other[name]).all() for name in own)
    before = plain_arm(4)
    start = {name: p.detach().numpy() for name, p in before.adapters(before.step)}
    assert all((own[name] != start[name]).any() for own in (first, second) for name in own)


@pytest.mark.parametrize("name", ["pipeline_1f1b", "pipeline_multi_adapter"])
def test_a_pipeline_of_some_ranks_wants_a_multiple_of_them_and_samples_for_each(name):
    with pytest.raises(Unsupported, match=f"{name} with ranks=3 needs a multiple of that, two at least"):
        registry.ablation({name: {"ranks": 3}}).shard(random_samples(LENGTHS), Ranks(0, 4))
    line = f"^{name} divides 1 samples among 2 groups of 2 ranks: give a multiple of 2$"
    with pytest.raises(Unsupported, match=line):
        registry.ablation({name: {"ranks": 2}}).shard(random_samples([16]), Ranks(0, 4))


def test_neighbours_in_the_order_of_length_go_to_different_pipelines_in_the_samples_own_order():
    lengths = [47, 56, 41, 29, 37, 27, 49, 99]
    toggle = registry.ablation({"pipeline_multi_adapter": {"ranks": 2}})
    shares = [[len(s.tokens) for s in toggle.shard(random_samples(lengths), Ranks(r, 4))] for r in range(4)]
    assert shares[0] == shares[1] == [49, 99, 41, 29] and shares[2] == shares[3] == [47, 56, 37, 27]
    whole = registry.ablation("pipeline_multi_adapter").shard(random_samples(lengths), Ranks(0, 4))
    assert whole is None


@pytest.mark.parametrize(
    "beside",
    [
        "gradient_checkpointing",
        pytest.param("lora_kernels", marks=pytest.mark.exhaustive),  # see test_no_stage_has_a_layer_…
        pytest.param("selective_checkpointing", marks=pytest.mark.exhaustive),
        pytest.param({"gradient_checkpointing": {"every_n_layers": 2}}, marks=pytest.mark.exhaustive),
        pytest.param("disk_offloading", marks=pytest.mark.exhaustive),
        pytest.param("save_on_cpu", marks=pytest.mark.exhaustive),
        pytest.param("adamw_fused", marks=pytest.mark.exhaustive),
    ],
)
def test_beside_other_toggles(tmp_path, beside):
    answers = on_ranks(2, tmp_path, stepped, ("pipeline_1f1b", beside), 3)
    compare(answers, plain(3))


@pytest.mark.exhaustive
def test_on_weights_in_4_bits_too(tmp_path):
    pytest.importorskip("bitsandbytes")
    schedules = (("pipeline_gpipe",), ("pipeline_1f1b",), ("pipeline_1f1b", "lora_kernels"), ("pipeline_interleaved",))
    each = on_ranks(2, tmp_path, lambda ranks: [stepped(ranks, (*own, "nf4_base"), 4) for own in schedules])
    for answers in zip(*each, strict=True):
        compare(answers, plain(4, "nf4_base"))
    assert abs(plain(4, "nf4_base").loss - plain(4).loss) > 1e-6


def refused(ranks, *toggles):
    try:
        stepped(ranks, toggles, 3)
    except Unsupported as error:
        return str(error)


@pytest.mark.parametrize(
    ("toggles", "reason"),
    [
        (("pipeline_1f1b", {"gradient_checkpointing": {"use_reentrant": True}}), "use_reentrant=false"),
        (({"pipeline_1f1b": {"layers": [1, 1, 1]}},), "layers=[1, 1, 1]: expected 2 numbers, one a stage"),
        (({"pipeline_1f1b": {"tokens": 8}},), "a sample of 16 tokens does not fit a row of 8"),
    ],
)
def test_what_is_refused_on_every_rank(tmp_path, toggles, reason):
    for said in on_ranks(2, tmp_path, refused, *toggles):
        assert reason in said


def saved(ranks, toggle, folder):
    """PEFT's save by all ranks, of an adapter that has taken a step; the loss of the next forward."""
    made = arm(*PEFT[:2], toggle, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=4, ranks=ranks)
    one_step(made)
    save_adapter(made.model, folder)
    return one_step(made).loss


@pytest.mark.parametrize(
    ("ranks", "toggle"),
    [
        (2, "pipeline_1f1b"),
        pytest.param(2, "pipeline_gpipe", marks=pytest.mark.exhaustive),
        pytest.param(2, "pipeline_interleaved", marks=pytest.mark.exhaustive),
        pytest.param(4, {"pipeline_1f1b": {"ranks": 2}}, marks=pytest.mark.exhaustive),
    ],
)
def test_what_peft_saves_has_the_same_loss_in_plain_peft(tmp_path, ranks, toggle):
    losses = on_ranks(ranks, tmp_path, saved, toggle, tmp_path / "adapter")
    made = plain_arm(4)
    before = one_step(made).loss
    base = made.model.unload()
    made.step.model = made.step.call = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        loss = sum(float(made.step.forward(batch)) for batch in made.step.batches)
    assert losses == pytest.approx([loss] * ranks, rel=1e-6) and abs(loss - before) > 1e-4


# -- layers that a rank never has ------------------------------------------------------------------------------------

LAYERS = 8
HALF, MARGIN = LAYERS // 2, pipeline_stages.MARGIN  # the head of this model is less than half of a layer


def deep(*names, ranks=ONE, base=None, overrides=()):
    """An arm of the whole model: no gate's shallow one."""
    made = request(
        *PEFT[:2], *names, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, ranks=ranks, overrides=overrides
    )
    return kind("train").build(replace(made, base=base))


def layers_of(model):
    """The decoder layers of which a model has frozen weights."""
    found = (re.search(r"\.layers\.(\d+)\.", n) for n, p in model.named_parameters() if "lora_" not in n and p.numel())
    return sorted({int(one[1]) for one in found if one})


def watched():
    """A list that gets, of each base model whose weights are drawn, its layers and its parameters, these weakly."""
    drawn, fill = [], build.fill_weights

    def filling(model, dtype, seed, adapter=None):
        if adapter is None:
            drawn.append((layers_of(model), [weakref.ref(p) for p in model.parameters()]))
        fill(model, dtype, seed, adapter)

    build.fill_weights = filling
    return drawn


def held(ranks, toggle, *beside):
    """(layers that are drawn, layers when the arm is built, those after a step, bytes that outlive the cut unused)"""
    drawn = watched()
    jobs = "pipeline_multi_adapter" in toggle
    made = jobs_arm(ranks, toggle, layers=None) if jobs else deep(toggle, *beside, ranks=ranks)
    built = layers_of(made.model)
    for step in made.steps:
        one_step(made, step)
    gc.collect()
    ((first, parameters),) = drawn
    mine = {id(p) for p in made.model.parameters()}
    left = [p for one in parameters if (p := one()) is not None and id(p) not in mine]
    return first, built, layers_of(made.model), sum(p.nbytes for p in left)


MARGINS = [[*range(HALF + MARGIN)], [*range(HALF - MARGIN, LAYERS)]]


@pytest.mark.parametrize(
    ("toggles", "wanted"),
    [
        pytest.param(("pipeline_1f1b",), MARGINS, marks=pytest.mark.exhaustive),
        (("pipeline_1f1b", "lora_kernels"), MARGINS),
        pytest.param(
            ({"pipeline_gpipe": {"layers": [HALF, HALF]}},), [[0, 1, 2, 3], [4, 5, 6, 7]], marks=pytest.mark.exhaustive
        ),
        (({"pipeline_interleaved": {"layers": [1, 3, 2, 2]}},), [[0, 4, 5], [1, 2, 3, 6, 7]]),
        pytest.param((multi_adapter(flush=True),), MARGINS, marks=pytest.mark.exhaustive),
        pytest.param((multi_adapter(kernels=True),), MARGINS, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_has_its_own_layers_and_a_margin_from_the_start(tmp_path, toggles, wanted):
    answers = on_ranks(2, tmp_path, held, *toggles)
    assert [first for first, *_ in answers] == wanted
    for first, built, after, left in answers:
        assert set(after) <= set(built) <= set(first) and left == 0
        assert built == (first if "pipeline_multi_adapter" in toggles[0] else after)  # whose batches come with the step
    assert sorted(n for *_, after, _ in answers for n in after) == [*range(LAYERS)]


def stepped_beyond_the_margin(ranks, toggles):
    """As if the head took as long as 50 layers, which no number of parameters says."""
    pipeline_stages._ms = lambda parts, inputs, layers: 50.0 + len(layers)
    return stepped(ranks, toggles, None)


@pytest.mark.parametrize(
    ("toggles", "split"),
    [
        (("pipeline_1f1b", "lora_kernels"), [HALF + MARGIN, HALF - MARGIN]),
        (({"pipeline_interleaved": {"layers": [1, 3, 2, 2]}},), [1, 3, 2, 2]),
    ],
)
def test_no_stage_has_a_layer_that_its_rank_has_not(tmp_path, toggles, split):
    answers = on_ranks(2, tmp_path, stepped_beyond_the_margin, toggles)
    compare(answers, plain(None))
    assert all(answer[-1] == split for answer in answers)


def shared(ranks, folder, first):
    """Of two pipelines behind a `first` arm over one Base: whether the arms' frozen weights all lie in it, how many
    models were drawn, the Base's layers, whether the second's loss is the first's and the weights are as they were."""
    base, drawn = Base(folder), watched()
    names = [*first, "pipeline_1f1b", {"pipeline_gpipe": {"tokens": 32}}]
    arms = [deep(name, ranks=ranks, base=base) for name in names]
    before, arms = base.checksum(), arms[-2:]
    frozen = [{n: p for n, p in arm.model.named_parameters() if not p.requires_grad} for arm in arms]
    places = [{n: p.data_ptr() for n, p in own.items()} for own in frozen]
    common = places[0].keys() & places[1].keys()
    inside = all(base.bytes_of(arm.model) == arm.parameter_bytes()["weights"] for arm in arms)
    same = inside and bool(common) and all(places[0][n] == places[1][n] for n in common)
    losses = [one_step(arm).loss for arm in arms]
    kept = {int(n.split(".")[2]) for n in base.weights if ".layers." in n}
    return same, len(drawn), sorted(kept), losses, base.checksum() == before


@pytest.mark.parametrize("first", [(), ("padding",)], ids=str)
def test_pipelines_of_one_process_share_the_layers_that_they_keep(tmp_path, first):
    answers = on_ranks(2, tmp_path, shared, tmp_path, first)
    for (same, drawn, kept, losses, unchanged), own in zip(answers, MARGINS, strict=True):
        assert same and drawn == 1 and unchanged
        assert kept == ([*range(LAYERS)] if first else own)  # an arm of the whole model lends what a stage needs
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def let_go(ranks, folder):
    """Of two pipelines over one Base, the second on our kernels, which make weights of their own of it: whether the
    Base is empty behind the second where the first sits beside it, and where it does not; and the second's loss."""
    found, halves = [], {"pipeline_1f1b": {"layers": [LAYERS // 2] * 2}}  # else by what a layer takes on a busy machine
    for beside in (True, False):
        seat: Any = SimpleNamespace(base=Base(folder), arms={})
        if beside:
            seat.arms["plain"] = deep(halves, ranks=ranks, base=seat.base)
        ours = deep(halves, "lora_kernels", ranks=ranks, base=seat.base)
        found.append(Seat._let_go(seat, ours))
        assert found[-1] == (seat.base.nbytes == 0 and seat.base.sum == "")
    Seat._check_base(seat)
    deep("pipeline_gpipe", ranks=ranks, base=seat.base)  # fills it again, which is no write
    Seat._check_base(seat)
    return found, one_step(ours).loss


def test_a_part_of_a_model_that_no_arm_uses_goes(tmp_path):
    """A 70B's kept part left no room for a second arm on our kernels (2026-11-26)."""
    answers = on_ranks(2, tmp_path, let_go, tmp_path)
    assert [found for found, _ in answers] == [[False, True]] * 2
    assert [loss for _, loss in answers] == [pytest.approx(one_step(deep("padding")).loss, rel=1e-5)] * 2


def prepared(ranks, folder):
    """Bytes of each Base that is alive while an arm on our kernels is warmed up in a seat."""
    made, found, begin, warm = [], [], Base.__init__, trial.warm_up

    def counted(self, *given):
        made.append(weakref.ref(self))
        begin(self, *given)

    def warmed(*given):
        found.extend(base().nbytes for base in made if base() is not None)
        return warm(*given)

    Base.__init__, trial.warm_up = counted, warmed
    arms = "ablations=[[{pipeline_1f1b: {layers: [4, 4]}},lora_kernels]]"
    wanted = config(f"models=[{DEEP}]", "workload=2x16", "world_size=2", arms, "dtype=float32", "trials=3")
    cell = plan(wanted, "cpu").cells[-1]
    machine: Any = SimpleNamespace(device="cpu", dtype=lambda wanted: "float32")
    family = Family((cell,))
    seat = Seat(Seating(family, machine, False, None, str(folder)), lambda text: None, ranks)
    seat.open()
    seat.prepare("ours", family.stacks[-1], gate=False)
    return found


def test_nothing_of_a_part_that_went_is_held_while_its_arm_is_measured(tmp_path):
    """The request for the arm had held the 70B's, 36 GB, so that its twin found no room (2026-11-27)."""
    assert on_ranks(2, tmp_path, prepared, tmp_path) == [[0]] * 2


def read(ranks, folder, name):
    """The outcome of a step, and how often a rank has read a whole model."""
    whole, reading = [], build._read
    build._read = lambda *rest: whole.append(rest) or reading(*rest)
    made = deep(name, ranks=ranks, overrides=(f"weights={folder}",))
    outcome = one_step(made)
    gradients = {name: x.numpy() for name, x in outcome.gradients.items()}
    return outcome.loss, gradients, outcome.update_error, len(whole)


def real(folder):
    """A model with weights of its own, in several files of a folder."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_config(model(DEEP, load_config([])).hf_config(), dtype=torch.float32)
    saved.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("name", ["pipeline_1f1b", "fsdp2"])
def test_of_weights_in_a_folder_each_rank_reads_its_part(tmp_path, name):
    folder = real(tmp_path / "real")
    answers = on_ranks(2, tmp_path, read, folder, name)
    compare(answers, one_step(deep("padding", overrides=(f"weights={folder}",))))
    assert [answer[-1] for answer in answers] == [0, 0]


def whole_read(ranks, folder):
    def reading(*rest):
        raise LookupError("read whole")

    build._read = reading
    try:
        deep("pipeline_1f1b", ranks=ranks, overrides=(f"weights={folder}",))
    except LookupError as error:
        return error.args[0]


def test_weights_by_other_names_come_whole_and_are_cut_then(tmp_path):
    folder = real(tmp_path / "real")
    names = folder / "model.safetensors.index.json"
    file = folder / json.loads(names.read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    save_file({"norm.weight": tensors.pop("model.norm.weight")} | tensors, file, {"format": "pt"})
    names.write_text(names.read_text().replace("model.norm.weight", "norm.weight"))
    assert parted_weights.files_of(model(DEEP, load_config([f"weights={folder}"])))["norm.weight"].is_file()
    assert on_ranks(2, tmp_path, whole_read, folder) == ["read whole"] * 2


def test_other_libraries_patches_find_every_layer():
    """They walk over the layers of the model, and expect attention and MLP in each."""
    alone, beside = request("pipeline_1f1b"), request("pipeline_1f1b", "liger")
    assert [a.name for a in build._dividing(alone)] == ["pipeline_1f1b"] and build._dividing(beside) == []
