"""Arms over one base: the numbers of an arm that was built alone, one copy of the weights, and nobody changes it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import pytest
import torch
from helpers import PEFT, request
from peft import LoraConfig, get_peft_model
from torch import nn

from lorabench.contract.ablation import Ablation
from lorabench.contract.kind import kind
from lorabench.contract.model import Lora
from lorabench.contract.ranks import Ranks
from lorabench.measure.base import WORDS, Base, recipe
from lorabench.measure.build import causal_lm
from lorabench.measure.judging import numerics
from lorabench.measure.memory import growth
from lorabench.measure.trial import run_trial
from lorabench.plan.compose import load_config, model

TIED, UNTIED = "tiny-gemma", "tiny-llama"
OPERATIONS = ("linear-24x40", "norm-linear-24x40", "attention-4x2x8")
TOGGLES = ("lora_kernels", "gradient_checkpointing", "adapters_in_compute_dtype", "packing", "adamw_fused")


def build(base, *toggles, added=(), change=None, kind_name=None, **kwargs):
    """An arm over `base`, or alone (None). `added`: toggles that are no entry points; `change`: of the request."""
    wanted = request(*toggles, **kwargs)
    wanted = replace(wanted, base=base, ablations=(*wanted.ablations, *added), **(change or {}))
    return kind(kind_name or wanted.cell.kind).build(wanted)


@pytest.fixture
def base(tmp_path):
    made = Base(tmp_path)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    """Real weights, with a generation_config of their own."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_config(model(TIED, load_config([])).hf_config(), dtype=torch.bfloat16)
    saved.generation_config.eos_token_id = 7
    saved.save_pretrained(tmp_path / "real")
    return tmp_path / "real"


def outcome(arm):
    """What the model computes of the first batch, and every gradient."""
    step = arm.step
    out = step.forward(step.batches[0])
    step.backward(out)
    found = {"out": out.detach(), **{n: p.grad for n, p in arm.adapters()}}
    if "input_ids" in step.batches[0].inputs:
        with torch.no_grad():
            found["logits"] = arm.model(input_ids=step.batches[0].inputs["input_ids"]).logits
    return found


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[n], other[n]) for n in one)


def storages(module):
    return {p.untyped_storage().data_ptr() for p in module.parameters() if not p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "toggles"),
    [(TIED, PEFT), (UNTIED, PEFT), (UNTIED, ("eager", *TOGGLES)), *[(operation, ()) for operation in OPERATIONS]],
    ids=str,
)
def test_a_shared_arm_computes_what_one_alone_does(base, name, toggles, dtype):
    alone = build(None, *toggles, model=name, dtype=dtype)
    first = build(base, *toggles, model=name, dtype=dtype)
    shared = build(base, *toggles, model=name, dtype=dtype)
    if name != OPERATIONS[-1]:  # which has no weights
        assert base.nbytes and base.checksum() != Base(base.folder).checksum()
    wanted = outcome(alone)
    assert equal(outcome(first), wanted) and equal(outcome(shared), wanted)
    assert run_trial(alone).loss == run_trial(shared).loss


def test_the_arms_of_several_families_and_of_a_checkpoint_compute_the_same(base):
    """With sliding windows, capped scores and biases; in an evaluation."""
    for name in ("tiny-gemma2", "tiny-qwen2", "tiny-mistral"):
        own = Base(base.folder)
        build(own, "eager", model=name)
        assert equal(outcome(build(own, "eager", model=name)), outcome(build(None, "eager", model=name)))
    build(base, *PEFT)
    arms = [build(b, *PEFT, kind_name="evaluate") for b in (None, base)]
    assert storages(arms[1].model) == base._storages()
    losses = {run_trial(arm).loss for arm in arms}
    assert len(losses) == 1


def test_real_weights_are_read_once(base, folder, monkeypatch):
    weights = {"overrides": (f"weights={folder}",), "model": TIED, "dtype": torch.float32, "depth": 3}
    alone, _ = build(None, "sdpa", **weights), build(base, "sdpa", **weights)
    monkeypatch.setattr("lorabench.measure.build._read", None)
    shared = build(base, "eager", **weights)
    assert shared.model.get_base_model().generation_config.to_dict() == (
        alone.model.get_base_model().generation_config.to_dict()
    )
    assert shared.model.get_base_model().generation_config.eos_token_id == 7
    shared = build(base, "sdpa", **weights)
    assert equal(outcome(alone), outcome(shared))
    assert {p.dtype for p in shared.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_arms_have_parameters_of_their_own_over_one_copy(base, name):
    one, two, alone = (build(b, *PEFT, model=name) for b in (base, base, None))
    assert storages(one.model) == storages(two.model) == base._storages()
    mine, others = (dict(arm.model.named_parameters()) for arm in (one, two))
    assert mine.keys() == others.keys() and all(mine[n] is not others[n] for n in mine)
    assert {n: p.requires_grad for n, p in others.items()} == {
        n: p.requires_grad for n, p in alone.model.named_parameters()
    }
    inner = two.model.get_base_model()
    assert (inner.get_input_embeddings().weight is inner.get_output_embeddings().weight) == (name == TIED)
    third = build(base, *PEFT, model=name)
    buffers = [[b.data_ptr() for b in arm.model.buffers()] for arm in (one, two, third)]
    assert buffers[0] and len({*buffers[0], *buffers[1], *buffers[2]}) == 3 * len(buffers[0])
    assert not {t.device for t in (*two.model.parameters(), *two.model.buffers())} - {torch.device("cpu")}
    adapters = {n for n in mine if "lora_" in n}
    assert adapters and all(mine[n].data_ptr() != others[n].data_ptr() for n in adapters)


def test_a_later_arm_allocates_no_weights_and_is_built_at_once(base):
    spec, load, cpu = model("smollm2-135m", load_config([])), {"dtype": torch.bfloat16}, torch.device("cpu")
    make = lambda device: causal_lm(spec, load, device, None)  # noqa: E731
    base.keep("a recipe", make(cpu))
    assert growth(cpu, lambda: make(cpu)) > 0.9 * base.nbytes > 1e8  # so the growth is seen
    assert growth(cpu, lambda: base.lent("a recipe", make, cpu)) < 1e5
    began = perf_counter()
    assert base.lent("a recipe", make, cpu) is not None
    assert perf_counter() - began < 1


@dataclass(frozen=True, kw_only=True)
class Own(Ablation):
    name: ClassVar[str] = "own"
    slot: ClassVar[str] = "own"


class Prepares(Own):
    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        """Nothing, but who knows."""


class Builds(Own):
    def build(self, blueprint: Any) -> nn.Module | None:
        return None


class Keeps(Own):
    """As Unsloth does: its loader is given our model."""

    keeps_weights: ClassVar[bool] = True

    def build(self, blueprint: Any) -> nn.Module | None:
        return get_peft_model(blueprint.base(), LoraConfig(**blueprint.adapter["config"]))


class Changes(Own):
    changes_weights: ClassVar[bool] = True


class Loads(Own):
    def load(self, kwargs: dict[str, Any]) -> None:
        kwargs["use_safetensors"] = True


class LoadsHigh(Own):
    def load(self, kwargs: dict[str, Any]) -> None:
        kwargs["dtype"] = torch.float64


OTHERS = {
    **{own.__name__: {"added": [own()]} for own in (Prepares, Builds, Changes, LoadsHigh)},
    "layers": {"layers": 1},
    "upcast": {"upcast": True, "dtype": torch.bfloat16},
    "dtype": {"dtype": torch.bfloat16},
    "seed": {"change": {"seed": 1}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_arm_of_other_weights_has_its_own(base, other):
    build(base, *PEFT)
    before = base.checksum()
    made = build(base, *PEFT, **OTHERS[other])
    assert not storages(made.model) & base._storages() and base.bytes_of(made.model) == 0
    assert base.checksum() == before


def test_a_loader_of_its_own_that_keeps_the_weights_shares_them(base):
    build(base, *PEFT)
    made = build(base, *PEFT, added=[Keeps()])
    assert storages(made.model) & base._storages() == base._storages()


def test_a_rank_of_several_shares_what_its_own_device_holds(base):
    made = [build(base, *PEFT, change={"ranks": ranks}) for ranks in (Ranks(0, 2), Ranks(), Ranks(0, 2))]
    assert all(storages(one.model) & base._storages() == base._storages() for one in made)


def test_a_recipe_is_of_what_decides_the_numbers():
    spec, high = model(UNTIED, load_config([])), torch.float32
    plain = recipe(spec, 0, high, {"dtype": high})
    adapted = spec.with_lora(Lora(r=3, lora_dropout=0.5))
    assert recipe(adapted, 0, high, {"dtype": high, "attn_implementation": "eager"}) == plain is not None
    others = {
        recipe(spec, 1, high, {"dtype": high}),
        recipe(spec, 0, torch.bfloat16, {"dtype": high}),
        recipe(spec, 0, high, {"dtype": torch.bfloat16}),
        recipe(spec.model_copy(update={"weights": "a/folder"}), 0, high, {"dtype": high}),
        recipe(spec.model_copy(update={"fingerprint": "1"}), 0, high, {"dtype": high}),
        recipe(spec.model_copy(update={"config": spec.config | {"rope_theta": 5.0}}), 0, high, {"dtype": high}),
    }
    assert len(others - {plain, None}) == 6
    for load in ({"dtype": "auto"}, {"dtype": high, "quantization_config": None}, {"dtype": high, "device_map": "cpu"}):
        assert recipe(spec, 0, high, load) is None


@pytest.mark.parametrize("other", ["Prepares", "Builds", "Changes", "layers", "upcast"])
def test_an_arm_that_may_not_read_the_base_does_not_fill_it(base, other):
    build(base, *PEFT, **OTHERS[other])
    assert base.recipe is None and base.nbytes == 0
    build(base, *PEFT)
    assert base.nbytes > 0


def test_arguments_that_the_loader_of_plain_weights_has_not_are_never_shared(base, folder):
    build(base, *PEFT, added=[Loads()], overrides=(f"weights={folder}",), model=TIED, depth=3)
    assert base.recipe is None


def test_what_is_more_than_its_configuration_and_names_is_not_kept(base):
    def refused(change):
        made = nn.Sequential(nn.Linear(4, 4))
        change(made)
        base.keep("any", made)
        return base.recipe is None

    assert refused(lambda m: setattr(m, "hidden", torch.zeros(1)))
    assert refused(lambda m: setattr(m, "hf_quantizer", object()))
    assert refused(lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(4, 8).t())))
    assert refused(lambda m: setattr(m[0], "weight", type("Packed", (nn.Parameter,), {})(torch.zeros(4, 4))))
    assert not refused(lambda m: None)


def test_a_model_that_does_not_fit_gets_weights_of_its_own(base):
    base.keep("any", nn.Linear(4, 4))
    cpu = torch.device("cpu")
    assert base.lent("any", lambda device: nn.Linear(4, 5, device=device), cpu) is None
    assert base.lent("another", lambda device: nn.Linear(4, 4, device=device), cpu) is None
    assert base.lent("any", lambda device: nn.Linear(4, 4, device=device), torch.device("meta")) is None
    assert base.lent("any", lambda device: nn.Linear(4, 4, device=device), cpu) is not None


def test_a_model_that_leaves_modules_out_gets_the_others_and_never_the_reverse(base, tmp_path):
    def make(places, device="meta"):
        made = nn.Sequential(*(nn.BatchNorm1d(4, device=device) if n in places else nn.Identity() for n in range(3)))
        made[0].register_parameter("tied", made[0].weight)
        return made

    cpu, part = torch.device("cpu"), Base(tmp_path)
    base.keep("any", make({0, 1, 2}, cpu))
    lent = base.lent("any", lambda device: make({0, 2}), cpu)
    assert lent is not None and lent[0].tied is lent[0].weight
    assert {p.data_ptr() for p in lent.parameters()} == {
        base.weights[n].data_ptr() for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    assert base.bytes_of(lent) == 4 * 4 * 4 and {n for n, _ in lent.named_buffers()} < base.buffers.keys()
    part.keep("any", make({0, 2}, cpu))
    assert part.lent("any", lambda device: make({0, 1, 2}), cpu) is None
    assert part.lent("any", lambda device: make({0, 2}), cpu) is not None


@pytest.mark.parametrize(
    "first",  # ours has weights of its own making; all of them follow in either case
    [name if name in ("lora_kernels", "packing") else pytest.param(name, marks=pytest.mark.exhaustive)
     for name in TOGGLES],
)  # fmt: skip
def test_no_toggle_changes_the_base_by_its_steps(base, first):
    """Each as the first arm, too, whose weights are those that are kept."""
    names = [first, *(t for t in TOGGLES if t != first), "sdpa"]
    arms = [build(base, names[0], dtype=torch.bfloat16)]
    before = base.checksum()
    arms += [build(base, name, dtype=torch.bfloat16) for name in names[1:]]
    for arm in arms * 2:
        run_trial(arm)
    assert base.checksum() == before
    fresh = build(base, "sdpa", dtype=torch.bfloat16)
    assert equal(outcome(fresh), outcome(build(None, "sdpa", dtype=torch.bfloat16)))


def test_trained_biases_are_the_arm_s_own(base):
    overrides = ("lora.bias=all",)
    arms = [build(base, *PEFT, model="tiny-qwen2", overrides=overrides) for _ in range(2)]
    before = base.checksum()
    biases = [n for n, p in arms[0].model.named_parameters() if n.endswith(".bias") and p.requires_grad]
    assert biases
    for arm in arms:
        numerics.one_step(arm)
        moved = arm.model.get_parameter(biases[0])
        assert not torch.equal(
            moved, base.weights[biases[0].removeprefix("base_model.model.").replace(".base_layer", "")]
        )
    assert base.checksum() == before


def test_adapters_in_float32_leave_the_base_as_it_is(base):
    build(base, "sdpa", dtype=torch.bfloat16)
    shared = build(base, "sdpa", dtype=torch.bfloat16)
    assert {p.dtype for _, p in shared.adapters()} == {torch.float32}
    assert {p.dtype for p in shared.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    shared.model.float()  # makes copies, of this arm alone
    assert base.bytes_of(shared.model) == 0 and {t.dtype for t in base.weights.values()} == {torch.bfloat16}


def test_bytes_count_what_an_arm_still_holds_of_the_base(base):
    for name in (TIED, UNTIED):
        base = Base(base.folder)
        one, two = (build(base, *PEFT, model=name) for _ in range(2))
        whole = sum(tensor.nbytes for tensor in base.weights.values())
        assert base.bytes_of(one.model) == base.bytes_of(two.model) == whole == one.parameter_bytes()["weights"]
        assert base.nbytes == whole + sum(b.nbytes for b in one.model.get_base_model().buffers())
    kept = next(n for n, p in two.model.named_parameters() if n.endswith("up_proj.base_layer.weight"))
    parameter = two.model.get_parameter(kept)
    parameter.data = parameter.data.clone()
    assert base.bytes_of(two.model) == whole - parameter.nbytes
    merged = build(base, "lora_kernels")
    run_trial(merged)
    own = {
        n
        for n, p in merged.model.named_parameters()
        if not p.requires_grad and p.untyped_storage().data_ptr() not in base._storages()
    }
    assert len(own) > 5  # q, k, v, gate and up of each layer lie in the kernels' buffers
    assert base.bytes_of(merged.model) == whole - sum(merged.model.get_parameter(n).nbytes for n in own)


# -- the checksum ------------------------------------------------------------------------------------------------------


def of(tensor):
    made = Base(Path())
    made.weights = {"w": tensor}
    return made.checksum()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SEVERAL_PASSES = (2, WORDS + 5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*itertools.product([(7,), (33, 31)], DTYPES), (SEVERAL_PASSES, torch.int8),
     *(pytest.param(SEVERAL_PASSES, dtype, marks=pytest.mark.exhaustive) for dtype in DTYPES[:3])],
    ids=str,
)  # fmt: skip
def test_a_flipped_bit_and_swapped_elements_change_the_checksum(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(-99, 99, shape, generator=generator).to(dtype)
    before = of(tensor)
    assert of(tensor.clone()) == before
    raw, flat = tensor.view(-1).view(torch.uint8), tensor.view(-1)
    for at in {0, 3, len(raw) // 2, len(raw) - 1}:
        for bit in (0, 7):
            raw[at] ^= 1 << bit
            assert of(tensor) != before, (at, bit)
            raw[at] ^= 1 << bit
    flat[0], flat[len(flat) // 2] = 1, -1  # which differ by their signs alone
    before = of(tensor)
    for one, two in ((0, len(flat) // 2), (0, len(flat) - 1), (1, 2)):
        if flat[one] != flat[two]:
            flat[[one, two]] = flat[[two, one]]
            assert of(tensor) != before, (one, two)
            flat[[one, two]] = flat[[two, one]]
    assert of(tensor) == before


def test_the_checksum_is_of_bytes_wherever_they_lie():
    held = torch.arange(100, dtype=torch.bfloat16)
    assert of(held[1:]) == of(held[1:].clone()) != of(held[:-1])
    swapped = torch.cat([torch.ones(1 << 23), torch.zeros(1 << 23)])
    assert of(swapped) != of(swapped.flip(0)) and Base(Path()).checksum() == Base(Path()).checksum()
    zeros = Base(Path())
    zeros.weights = {"v": torch.zeros(4)}
    assert of(torch.zeros(4)) != of(torch.zeros(2, 2)) != zeros.checksum() != of(torch.zeros(4))


# -- another process ---------------------------------------------------------------------------------------------------


def told(base, device="cpu", dtype=torch.float32, **kwargs):
    """What a process says of arms over a base: all of it has to be equal in another one."""
    arm = build(base, *PEFT, device=device, dtype=dtype, **kwargs)
    weights = storages(arm.model)
    losses = [run_trial(arm).loss for _ in range(3)]
    return {"checksum": base.checksum(), "losses": losses, "shared": weights == base._storages()}


def elsewhere(content, *more):
    """`told` of another process that opens `content`; its output beside it."""
    folders = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__, *more], input=content, capture_output=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.decode().splitlines()[-1])


def forked(content, *more):
    """`elsewhere` in a fork of this process, which spares it the imports."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=tell_all, args=(content, *more, writer.send))
    process.start()
    assert reader.poll(120), "it does not answer"
    found = reader.recv()
    process.join()
    return found


@pytest.mark.parametrize(
    ("name", "another"),
    [
        (TIED, forked),
        pytest.param(TIED, elsewhere, marks=pytest.mark.exhaustive),
        pytest.param(UNTIED, elsewhere, marks=pytest.mark.exhaustive),
    ],
)
def test_another_process_opens_the_same_base(base, name, another):
    """(Sweeps, whose seats are no forks of what holds the base: tests/run/test_outcomes.py, of a global patch.)"""
    here = told(base, model=name)
    content = base.offered()
    there = another(content, "cpu", name)
    assert there == here and here["shared"]
    (file,) = base.folder.glob("*.safetensors")
    assert base.offered() == content  # of the same file
    base.close()
    assert not file.exists()


def test_the_file_is_safetensors_and_is_not_read_into_memory(base):
    from safetensors.torch import load_file

    build(base, *PEFT, model=TIED, dtype=torch.bfloat16)
    opened = Base.opened(base.offered())
    (file,) = base.folder.glob("*.safetensors")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    assert len(mapped) == 1
    read = load_file(file)
    assert opened.checksum() == base.checksum() and opened.nbytes == base.nbytes
    for name, tensor in base.weights.items():
        assert torch.equal(read[name], tensor) and torch.equal(opened.weights[name], tensor)
        assert opened.weights[name].untyped_storage().nbytes() == tensor.nbytes
    large = [t for t in opened.weights.values() if t.nbytes % 64 == 0]
    assert large and not any(t.data_ptr() % 64 for t in large)
    next(iter(opened.weights.values())).view(-1)[0] += 1  # pages of its own
    assert opened.checksum() != base.checksum() == Base.opened(base.offered()).checksum()


def test_who_writes_into_an_opened_base_is_noticed_in_the_first_process_that_looks(base):
    build(base, *PEFT, model=TIED)
    assert not base.changed()
    opened, untouched = Base.opened(base.offered()), Base.opened(base.offered())
    next(iter(opened.weights.values())).view(-1)[0] += 1
    assert opened.changed() and opened.changed() and not untouched.changed() and not base.changed()
    assert not opened.elsewhere and not base.elsewhere  # pages of its own, on a CPU


def test_an_empty_base_offers_an_empty_one(base):
    opened = Base.opened(base.offered())
    assert (opened.recipe, opened.nbytes, opened.folder) == (None, 0, base.folder)
    assert not list(base.folder.iterdir())
    assert opened.checksum() == base.checksum()
    build(opened, *PEFT)
    assert opened.nbytes > 0


@pytest.mark.gpu
def test_another_process_opens_the_same_gpu_memory(base):
    gpu = {"device": "cuda", "dtype": torch.bfloat16}
    here = told(base, model=UNTIED, **gpu)
    assert here["shared"]
    free, _ = torch.cuda.mem_get_info()
    for _ in range(2):  # what is offered is for one process: each asks anew
        assert elsewhere(base.offered(), "cuda", UNTIED) == here
    assert base.checksum() == here["checksum"] and free and base.elsewhere


@pytest.mark.gpu
def test_a_later_arm_takes_no_second_copy_of_a_gpu_s_memory(base):
    spec, load = model("llama-3.1-8b-8-layers", load_config([])), {"dtype": torch.bfloat16}
    gpu = torch.device("cuda")
    make = lambda device: causal_lm(spec, load, device, None)  # noqa: E731
    base.keep("a recipe", make(gpu))
    assert base.nbytes > 1e9
    assert growth(gpu, lambda: base.lent("a recipe", make, gpu)) < 1e6
    base.checksum()
    torch.cuda.synchronize()
    began = perf_counter()
    base.checksum()
    assert base.nbytes / (perf_counter() - began) > 1e11  # 16 GB in 0.16 s


def tell_all(content, device, name, tell):
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tell(told(Base.opened(content), device, dtype, model=name))


if __name__ == "__main__":
    tell_all(sys.stdin.buffer.read(), *sys.argv[1:], lambda found: print(json.dumps(found)))
