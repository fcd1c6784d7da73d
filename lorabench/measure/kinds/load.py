"""Kind `load`: a model's weights from the disk to the device.

    python -m lorabench.sweep kind=load 'models=[smollm2-135m]' 'ablations=[parallel_reading]' workload=cold_cache
    python -m lorabench.sweep suite=prequantized_loading

Random weights are saved once a sweep as sharded safetensors. A trial reads them (phase read: disk to memory) and brings
them to the device (phase place). The page cache holds the files (workload warm_cache) or is told before each trial to
forget them (cold_cache). The gate: what arrives is, bit for bit, what the reference's toggles say that has to arrive.
Where it is plain weights, some bytes of every tensor in the files are others in each trial: none can be kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm, bytes_of
from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.contract.reading import Checkpoint, WeightsForm, WeightsReader
from lorabench.contract.work import Work
from lorabench.measure.build import causal_lm, fill_weights
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import TURN, Begin, Kind, Request
from lorabench.measure.page_cache import forget, hold
from lorabench.measure.plain_reader import PlainReader
from lorabench.measure.rates import copy_gbs, read_gbs
from lorabench.measure.safetensors_file import entries
from lorabench.measure.saved import saved_once
from lorabench.plan.architecture import skeleton
from lorabench.record.schema import Numerics

READ, PLACE = "read", "place"
SHARDS = 8  # files that a checkpoint is split into, as those of large models are
SAMPLED = 16
FRESH = 8  # bytes of every tensor that are others in each trial


@dataclass
class Arrived:
    """What a trial brought, held against the files; as evidence, of the trial that was furthest from them."""

    unequal: int
    tensors: int
    worst: str

    def add(self, number: int, observed: Arrived) -> None:
        if observed.unequal > self.unequal:
            self.unequal, self.tensors, self.worst = observed.unequal, observed.tensors, observed.worst

    def finish(self, last: Arrived) -> None:
        self.add(0, last)


@dataclass
class LoadArm(Arm):
    """An arm that reads `source`. `loaded`: what the last trial brought to the device."""

    source: Checkpoint = field(default_factory=lambda: Checkpoint(Path(), torch.device("cpu")))
    expected: list[Path] = field(default_factory=list)  # the files that hold what has to arrive
    reader: WeightsReader = field(default_factory=WeightsReader)
    form: WeightsForm = field(default_factory=WeightsForm)
    parts: Callable[[str, Tensor], dict[str, Tensor]] = WeightsForm().parts  # of a weight, as the reference has it
    cold: bool = False
    seed: int | None = None  # of each trial's fresh bytes; None: the files stay as they are
    loaded: dict[str, Tensor] = field(default_factory=dict)


class Load(Kind):
    name: ClassVar[str] = "load"
    summary: ClassVar[str] = "weights from disk to device: read, place"
    phases: ClassVar[tuple[str, ...]] = (READ, PLACE)
    total: ClassVar[str] = "read + place"
    carries: ClassVar[tuple[str, ...]] = ("numerics",)

    def default_workload(self, device: str) -> str:
        return "warm_cache"

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        if cell.workload.page_cache is None:
            return f"the workload {cell.workload.name} is one of samples; loading takes warm_cache or cold_cache"
        if cell.model.weights != "random":
            return "loading measures random weights that it saves itself; weights= is for the other kinds"
        theirs, own = (form_of(toggles).holds for toggles in (cell.reference, cell.candidate))
        if theirs != own:
            return f"the reference brings {theirs} to the device and the candidate {own}; compare like with like"
        return None

    def work(self, cell: Cell, samples: Sequence[Any], ablations: Sequence[Any] = ()) -> list[Work]:
        """In the model's dtype; where that is left to the machine, which planning has not asked, two bytes a weight."""
        dtype = torch.bfloat16 if cell.model.dtype == "auto" else getattr(torch, cell.model.dtype)
        model = causal_lm(cell.model, {"dtype": dtype}, torch.device("meta"), None)
        gbytes = 1e-9 * form_of(ablations).nbytes(model)
        return [Work(gbytes={READ: gbytes, PLACE: gbytes})]

    def imports(self, request: Request) -> None:
        super().imports(request)
        skeleton(request.model, layers=1)

    def build(self, request: Request) -> Arm:
        plain = checkpoint(request)
        form, wanted = form_of(request.ablations), form_of(request.cell.reference)
        source = form.checkpoint(plain)
        reader = Hooks(request.ablations).first(Ablation.read) or form.reader() or PlainReader()
        cold = request.cell.workload.page_cache == "cold"
        if not cold:
            hold(source.files)
        return LoadArm(
            request.name, request.ablations, nn.Module(), [], request.dtype, request.device, self,
            {a.name: None for a in request.ablations}, ranks=request.ranks, source=source, reader=reader, form=form,
            expected=list(wanted.expected(plain)), parts=wanted.parts, cold=cold,
            seed=request.seed if is_plain(request.cell) else None,
        )  # fmt: skip

    def feed(self, arm: Any, number: int) -> None:
        if arm.seed is not None:
            refresh(arm.expected, [arm.seed, number])

    def trial(self, arm: Any, begin: Begin) -> None:
        if arm.cold:
            forget_all(arm.source)
        begin(READ)
        held = arm.reader.read(arm.source)
        begin(PLACE)
        arm.loaded = arm.form.finish(arm.reader.place(held, arm.device))

    def clear(self, arm: Any) -> None:
        arm.loaded = {}

    def held(self, arm: Any) -> dict[str, int]:
        return {"weights": sum(file.stat().st_size for file in arm.expected)}

    def measures_host(self, arm: Arm) -> bool:
        return True

    def rates(self, arm: Any) -> dict[str, float]:
        """Of these very files, in the page cache's state of the workload; and of a copy to the device."""
        read = read_gbs(arm.source.files, arm.device, lambda: forget_all(arm.source) if arm.cold else None)
        return {**({READ: read} if read else {}), PLACE: copy_gbs(arm.device)}

    def first_trial(self, arm: Any, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        run()
        return {"": _arrived(arm)}

    def observe(self, arm: Any, number: int, losses: dict[str, float]) -> dict[str, Any]:
        """One tensor in SAMPLED, others in each trial: to read all of a large checkpoint again takes as long as the
        trial. After the last one all are compared."""
        return {"": _arrived(arm, sum(divmod(number, TURN)) % SAMPLED, SAMPLED)}

    def last_trial(self, arm: Any, run: Callable[[], Any]) -> dict[str, Any]:
        run()
        return {"": _arrived(arm)}

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        wrong = max(reference, candidate, key=lambda found: found.unequal)
        return Numerics(passed=not wrong.unequal, unequal=wrong.unequal, tensors=wrong.tensors, worst=wrong.worst)

    def explain(self, numerics: Numerics) -> str:
        return f"{numerics.unequal} of {numerics.tensors} tensors are not those of the files, first {numerics.worst}"


def _arrived(arm: Any, begin: int = 0, every: int = 1) -> Arrived:
    """What the last trial loaded, held against the files."""
    loaded = parts_of(arm)
    differing = list(elsewhere(loaded, arm.device)) or list(differences(arm.expected, loaded, begin, every))
    return Arrived(len(differing), len(loaded), next(iter(differing), ""))


def form_of(ablations: Sequence[Ablation]) -> WeightsForm:
    """In what form an arm with these toggles has its weights."""
    return Hooks(ablations).first(Ablation.form) or WeightsForm()


def is_plain(cell: Cell) -> bool:
    """Whether what has to arrive is what just now is in the plain files, and nothing that was made of them."""
    return type(form_of(cell.reference)).expected is WeightsForm.expected


def refresh(files: Sequence[Path], seed: Sequence[int]) -> None:
    """Other bytes somewhere in every tensor of the files, on the disk: only then can the page cache forget them."""
    rng = np.random.default_rng(seed)
    for file in files:
        with open(file, "rb+", buffering=0) as opened:
            for entry in entries(file):
                some = min(FRESH, entry.size)
                os.pwrite(opened.fileno(), rng.bytes(some), entry.offset + int(rng.integers(entry.size - some + 1)))
            os.fsync(opened.fileno())


def checkpoint(request: Request) -> Checkpoint:
    """The model's random weights, in the compute dtype; saved where the sweep has not done so yet. What is made of them
    in another form has to stay equal to them, so files that change are apart."""
    content = [request.model.model_dump(mode="json"), str(request.dtype), request.seed]
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def save(folder: Path) -> None:
        model: Any = causal_lm(request.model, {"dtype": request.dtype}, request.device, None)
        fill_weights(model, request.dtype, request.seed)
        size = bytes_of(list(model.parameters()))
        model.save_pretrained(folder, max_shard_size=max(1, size // SHARDS))

    changing = "-changing" if is_plain(request.cell) else ""
    folder = saved_once(request.scratch / f"checkpoint-{name}{changing}", save)
    return Checkpoint(folder, request.device, {"dtype": request.dtype})


def forget_all(source: Checkpoint) -> None:
    for file in source.files:
        forget(file)


def parts_of(arm: Any) -> dict[str, Tensor]:
    """What the last trial loaded, as files hold it."""
    return {name: part for n, weight in arm.loaded.items() for name, part in arm.parts(n, weight).items()}


def elsewhere(loaded: dict[str, Tensor], device: torch.device) -> Iterator[str]:
    """What is no tensor on the device: left on the host, or one that may read only when it is looked at."""
    for name, tensor in loaded.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            yield f"{name}, a {type(tensor).__name__}"
        elif tensor.device.type != device.type:
            yield f"{name}, which is on the device {tensor.device.type}"


def differences(files: Sequence[Path], loaded: dict[str, Tensor], begin: int = 0, every: int = 1) -> Iterator[str]:
    """Names of the tensors that are not, bit for bit, those of the files: missing, added or changed. Of tensor number
    `begin`, and of each `every`-th after it, the bits are compared."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                looked_at = len(names) % every == begin
                names.add(name)
                here = loaded.get(name)
                if here is None or (looked_at and not same_bits(opened.get_tensor(name), here)):
                    yield name
    yield from sorted(set(loaded) - names)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_bytes = lambda t: t.contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return torch.equal(as_bytes(a.to(b.device)), as_bytes(b))
