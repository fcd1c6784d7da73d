"""Loading: prequantized weights are those that quantizing at every load makes, bit for bit, whoever reads them."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers import InProcess, cells, config

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.contract.hooks import asked_requires
from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown
from lorabench.measure.build import causal_lm
from lorabench.measure.kind import request_of
from lorabench.measure.kinds.load import differences, elsewhere, parts_of
from lorabench.measure.machine import describe
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.compose import plan
from lorabench.plan.design import refusal
from lorabench.run.runner import Runner
from lorabench_ablations import readers, weight_forms
from lorabench_ablations.reading import Fastsafetensors, PrequantizedLoading, QuantizeAtLoad

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")

CPU = torch.device("cpu")
LINEARS = 3 * 7  # tiny-llama: three layers, seven linears
WEIGHTS = 30
PARTS = WEIGHTS + 5 * LINEARS  # of a packed weight: two scales, two tables, and what is no tensor
BASELINE = "reference=[quantize_at_load]"


def has_fastsafetensors():
    return asked_requires(Fastsafetensors, describe()) is None


def loading(tmp_path, *names, reference=BASELINE, dtype=torch.bfloat16, model="tiny-llama"):
    """An arm of kind load that has these toggles, after one trial; of a cell with that reference."""
    (cell,) = cells("kind=load", "workload=warm_cache", reference, f"models=[{model}]")[:1]
    request = request_of(cell, "reference", dtype, CPU, tmp_path)
    toggles = tuple(registry.ablation(name) for name in names)
    made = kind("load").build(SimpleNamespace(**{**vars(request), "ablations": toggles, "ordered": list(toggles)}))
    run_trial(made)
    return made


def records(tmp_path, *overrides):
    common = ("kind=load", "models=[tiny-llama]", "trials=2", "warmup=1", BASELINE)
    planned = plan(config(*common, *overrides), describe().device).cells[1:]  # without the reference against itself
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        return [runner.measure(cell) for cell in planned]


def unequal(arm):
    return list(differences(arm.expected, parts_of(arm)))


@pytest.mark.parametrize("double", [True, False])
def test_every_part_of_every_weight_is_what_quantizing_the_dense_one_gives(tmp_path, double):
    own = {"bnb_4bit_use_double_quant": double}
    reference = f"reference=[{{quantize_at_load:{{bnb_4bit_use_double_quant:{str(double).lower()}}}}}]"
    dense = loading(tmp_path, reference="reference=[]").loaded
    for toggle in ("quantize_at_load", "prequantized_loading"):
        arm = loading(tmp_path, {toggle: own}, reference=reference)
        assert not unequal(arm)
        packed = {n: w for n, w in arm.loaded.items() if weight_forms.in_4_bits(w)}
        assert len(arm.loaded) == WEIGHTS and len(packed) == LINEARS
        for name, weight in arm.loaded.items():
            if name not in packed:
                assert torch.equal(weight, dense[name]), name
                continue
            wanted, state = bitsandbytes.functional.quantize_4bit(
                dense[name], quant_type="nf4", compress_statistics=double
            )
            found = weight.quant_state
            assert torch.equal(weight.data, wanted) and torch.equal(found.absmax, state.absmax), name
            assert torch.equal(found.code, state.code) and found.dtype == state.dtype == torch.bfloat16
            assert found.shape == dense[name].shape and found.nested == double
            if double:
                assert torch.equal(found.offset, state.offset)
                assert torch.equal(found.state2.absmax, state.state2.absmax)
                assert torch.equal(found.state2.code, state.state2.code)


def test_transformers_reads_the_folder_and_computes_with_it(tmp_path):
    from transformers import AutoModelForCausalLM

    arm = loading(tmp_path, "prequantized_loading")
    model = AutoModelForCausalLM.from_pretrained(arm.source.folder, device_map={"": "cpu"})
    theirs = dict(model.named_parameters())
    assert set(theirs) == set(arm.loaded)
    for name, ours in arm.loaded.items():
        assert torch.equal(theirs[name].data, ours.data), name
        if weight_forms.in_4_bits(ours):
            found, state = ours.quant_state.as_dict(), theirs[name].quant_state.as_dict()
            assert all(torch.equal(v, state[k]) if isinstance(v, torch.Tensor) else v == state[k]
                       for k, v in found.items())  # fmt: skip
    assert model(torch.arange(8)[None]).logits.isfinite().all()


FIRST = "prequantized_loading"
CANDIDATES = [
    (FIRST, {FIRST: LINEARS}),
    pytest.param(f"{{{FIRST}:{{threads:1,pinned:false}}}}", {FIRST: LINEARS}, marks=pytest.mark.exhaustive),
    pytest.param(
        f"[{FIRST},transformers_loading]",
        {FIRST: LINEARS, "transformers_loading": WEIGHTS},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("transformers_loading", {"transformers_loading": WEIGHTS}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("wanted", "applied"), CANDIDATES)
def test_a_record_has_equal_bits_bytes_and_ceilings(tmp_path, wanted, applied):
    (record,) = records(tmp_path, f"ablations=[{wanted}]", "workload=warm_cache", "dtype=bfloat16")
    assert record.status == "ok", record.reason
    assert (record.numerics.unequal, record.numerics.tensors) == (0, PARTS)
    assert applied.items() <= record.applied.items()
    for arm in ("reference", "candidate"):
        read, place = (record.roofline[arm][phase] for phase in ("read", "place"))
        assert read.gbytes == place.gbytes and read.ceiling_gbs > 0 and place.ceiling_gbs > 0
    assert (record.roofline["candidate"]["read"].gbytes < record.roofline["reference"]["read"].gbytes) == (
        "prequantized" in wanted
    )
    if notes := record.notes.get("prequantized_loading"):
        assert record.roofline["candidate"]["read"].gbytes == pytest.approx(notes["bytes_read"] / 1e9, rel=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [c.values[0] if hasattr(c, "values") else c[0] for c in CANDIDATES])
def test_on_a_gpu_every_reader_brings_every_tensor(tmp_path, wanted):
    (record,) = records(tmp_path, f"ablations=[{wanted}]", "workload=warm_cache", "dtype=bfloat16")
    assert record.status == "ok", record.reason
    assert (record.numerics.unequal, record.numerics.tensors) == (0, PARTS)


def test_what_is_no_tensor_of_a_state_is_where_its_weight_is_and_a_tensor_where_it_lies():
    """bitsandbytes makes the text of a state on the host whenever it is asked for the state's parts."""

    def parts(scales):
        state = {"absmax": torch.zeros(2, device=scales), "quant_state.bitsandbytes__nf4": torch.zeros(9)}
        weight = torch.zeros(4, 1, device="meta")
        weight.quant_state = SimpleNamespace(as_dict=lambda packed: state)
        return weight_forms.Nf4Form(double=False).parts("w", weight)

    meta = torch.device("meta")
    assert list(elsewhere(parts("meta"), meta)) == []
    assert list(elsewhere(parts("cpu"), meta)) == ["w.absmax, which is on the device cpu"]


def test_the_bytes_that_are_counted_are_those_of_the_tensors_in_the_files(tmp_path):
    """The files' headers are apart: of a tiny model's they are a fifth of the files."""
    for double in (True, False):
        form = weight_forms.Prequantized(double, threads=1, pinned=False)
        arm = loading(tmp_path, {"prequantized_loading": {"bnb_4bit_use_double_quant": double}})
        stored = sum(
            e.size for file in arm.source.files for e in readers.entries(file) if weight_forms.STATE not in e.name
        )
        (cell,) = cells("kind=load", "workload=warm_cache")[:1]
        assert form.nbytes(causal_lm(cell.model, {"dtype": torch.bfloat16}, torch.device("meta"), None)) == stored


@pytest.mark.skipif(not has_fastsafetensors(), reason="needs the package fastsafetensors")
@pytest.mark.parametrize("others", [(), ("prequantized_loading",)])
def test_fastsafetensors_brings_the_same_and_its_tensors_outlive_its_buffers(tmp_path, others):
    arm = loading(tmp_path, "fastsafetensors", *(others or ("quantize_at_load",)))
    assert not unequal(arm)
    assert Fastsafetensors().audit(Evidence(arm, None, None)) == len(arm.source.files)


def test_without_its_package_fastsafetensors_is_unsupported_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cell = cells("kind=load", "workload=warm_cache", "reference=[]", "ablations=[fastsafetensors]")[-1]
    status, reason = refusal(cell, describe())
    assert status == "unsupported" and "pip install 'lorabench[loading]'" in reason


@pytest.mark.parametrize(
    ("toggle", "name"),  # each part of one of the two, which are compared in the same way
    [
        pytest.param(toggle, name, marks=[pytest.mark.exhaustive] if (place + number) % 2 else [])
        for place, toggle in enumerate(("quantize_at_load", "prequantized_loading"))
        for number, name in enumerate(("weight", "weight.absmax", "weight.nested_absmax", "weight.quant_map"))
    ],
)
def test_one_bit_of_any_part_is_seen(tmp_path, toggle, name):
    arm = loading(tmp_path, toggle)
    linear = "model.layers.1.mlp.down_proj"
    weight = arm.loaded[f"{linear}.weight"]
    state = weight.quant_state
    part = {"weight": weight.data, "weight.absmax": state.absmax, "weight.nested_absmax": state.state2.absmax,
            "weight.quant_map": state.code}[name]  # fmt: skip
    part.view(torch.uint8).view(-1)[0].bitwise_xor_(1)
    assert unequal(arm) == [f"{linear}.{name}"]


def test_dense_weights_where_quantized_ones_have_to_arrive_are_seen(tmp_path):
    dense = loading(tmp_path)  # the cell's reference quantizes, this arm does not
    assert len(unequal(dense)) == LINEARS + 5 * LINEARS


def test_arms_that_hold_different_weights_are_refused_before_a_start():
    machine = describe()
    for reference, toggle in (("reference=[]", "prequantized_loading"), (BASELINE, "{prequantized_loading:"
                              "{bnb_4bit_use_double_quant:false}}")):  # fmt: skip
        cell = cells("kind=load", "workload=warm_cache", reference, f"ablations=[{toggle}]")[-1]
        status, reason = refusal(cell, machine)
        assert status == "unsupported" and "compare like with like" in reason


@pytest.mark.parametrize("toggle", ["quantize_at_load", "prequantized_loading"])
@pytest.mark.parametrize("others", [(), ("transformers_loading",)])
def test_a_head_that_is_the_embedding_stays_dense_and_is_there_once(tmp_path, toggle, others):
    arm = loading(tmp_path, toggle, *others, model="tiny-gemma")
    assert not unequal(arm)
    assert "lm_head.weight" not in arm.loaded and not weight_forms.in_4_bits(arm.loaded["model.embed_tokens.weight"])


@pytest.mark.parametrize("toggle", ["prequantized_loading", "parallel_reading", "fastsafetensors"])
def test_a_number_of_threads_that_makes_no_sense_is_refused(toggle):
    with pytest.raises(NameUnknown, match="threads: should be greater than"):
        registry.ablation({toggle: {"threads": 0}})


@pytest.mark.parametrize("others", [(), ("prequantized_loading",)])
def test_what_transformers_loaded_is_gone_when_it_is_cleared(tmp_path, others):
    """Without Python's garbage collector, which does not run between trials: else a GPU would hold model after model,
    and a page cache could not forget the mapped files."""
    arm = loading(tmp_path, "transformers_loading", *(others or ("quantize_at_load",)))
    kept = [weakref.ref(weight) for weight in arm.loaded.values()]
    kept += [weakref.ref(w.quant_state.absmax) for w in arm.loaded.values() if weight_forms.in_4_bits(w)]
    assert len(kept) == WEIGHTS + LINEARS
    gc.disable()
    try:
        arm.kind.clear(arm)
        assert not [one for one in kept if one() is not None]
    finally:
        gc.enable()


def test_an_arm_that_reads_dense_files_is_not_prequantized(tmp_path):
    arm = loading(tmp_path, "quantize_at_load")
    assert QuantizeAtLoad().audit(Evidence(arm, None, None)) == LINEARS
    with pytest.raises(NotApplied, match="no file that was read holds a weight in 4 bits"):
        PrequantizedLoading().audit(Evidence(arm, None, None))


def test_parallel_reading_of_one_file_did_nothing(tmp_path):
    arm = loading(tmp_path, "parallel_reading")
    arm.source = SimpleNamespace(files=arm.source.files[:1])
    with pytest.raises(NotApplied, match="one file"):
        registry.ablation("parallel_reading").audit(Evidence(arm, None, None))


@pytest.mark.parametrize("chunk", [64, 100, 1 << 12, 1 << 23])
def test_whatever_the_size_of_a_chunk_every_byte_of_a_file_is_in_one(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    arm = loading(tmp_path, "prequantized_loading")
    assert not unequal(arm)
    for file in arm.source.files:
        found = readers.entries(file)
        begins, size = readers.aligned(found, readers.ALIGNED)
        made = list(readers.chunks(file, found, begins, torch.empty(size, dtype=torch.uint8)))
        assert all(c.end - c.begin <= chunk for c in made)
        spans = sorted((c.offset, c.offset + sum(s for _, s in c.pieces)) for c in made)
        assert spans[0][0] == found[0].offset and spans[-1][1] == file.stat().st_size
        assert all(a == b for (_, a), (b, _) in pairwise(spans))


class FakeGpu:
    """Streams and events of which a copy is only done when somebody has waited for it, so that a buffer which is filled
    too early is seen."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("main"))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(readers, "host_bytes", lambda size, device: torch.empty(size, dtype=torch.uint8))

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append((name, f"waits for {other.name}")))

    def event(self):
        number = len([e for e in self.log if e[0] == "made"])
        self.log.append(("made", number))
        return SimpleNamespace(
            record=lambda: self.log.append(("copied", number)), synchronize=lambda: self.log.append(("waited", number))
        )


def test_to_a_gpu_two_buffers_take_turns_and_none_is_filled_before_its_copy_is_over(tmp_path, monkeypatch):
    source = loading(tmp_path, "prequantized_loading").source
    monkeypatch.setattr(readers, "CHUNK", 512)
    gpu = FakeGpu(monkeypatch)
    lane = readers.Lane(torch.device("cuda"))
    file = source.files[-1]
    found = readers.entries(file)
    begins, size = readers.aligned(found, readers.ALIGNED)
    into = torch.zeros(size, dtype=torch.uint8)
    todo = deque(readers.chunks(file, found, begins, into))
    many = len(todo)
    lane.begin()
    lane.carry(todo)
    lane.arrive()
    assert lane.chunks == many > 4
    turns = [number for what, number in gpu.log if what == "copied"]
    assert turns == [i % 2 for i in range(1, many + 1)]
    assert gpu.log == [
        *[("made", 0), ("made", 1), ("side", "waits for main")],
        *[(what, turn) for turn in turns for what in ("waited", "copied")],
        ("main", "waits for side"),
    ]
    plain = readers.read_file(file)
    assert all(torch.equal(e.of(into, begin), plain[e.name]) for e, begin in zip(found, begins, strict=True) if e.size)
