"""Kind `load`: a model's weights from the disk to the device.

    python -m lorabench.sweep kind=load 'models=[smollm2-135m]' 'ablations=[parallel_reading]' workload=cold_cache

Random weights are saved once a sweep as sharded safetensors. A trial reads them (phase read: disk to memory) and brings
them to the device (phase place). The page cache holds the files (workload warm_cache) or is told before each trial to
forget them (cold_cache). The gate: what arrives is, bit for bit, what stands in the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Ablation, Unsupported, WeightsReader
from lorabench.contract.arm import Arm, bytes_of
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked
from lorabench.contract.machine import Machine
from lorabench.contract.work import Work
from lorabench.measure.build import causal_lm, fill_base
from lorabench.measure.kind import Begin, Kind, Request
from lorabench.measure.plain_reader import PlainReader
from lorabench.record.schema import Numerics

READ, PLACE = "read", "place"
SHARDS = 8  # files that a checkpoint is split into, as those of large models are
PAGE = 4096
SAMPLED = 16
TRIES, STILL_THERE = 20, 0.1  # how often, and which share of a file may stay
PROBES = 32  # pages of a file that are looked at to see whether the page cache forgot it


@dataclass
class LoadArm(Arm):
    """An arm that reads `files`. `loaded`: what the last trial brought to the device."""

    files: list[Path] = field(default_factory=list)
    reader: WeightsReader = field(default_factory=WeightsReader)
    cold: bool = False
    evidence: dict[str, Any] = field(default_factory=dict)  # of the trial that was furthest from the files
    compared: int = 0  # how many timed trials
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
        return None

    def work(self, cell: Cell, samples: Sequence[Any], ablations: Sequence[Any] = ()) -> list[Work]:
        """In the model's dtype; where that is left to the machine, which planning has not asked, two bytes a weight."""
        dtype = torch.bfloat16 if cell.model.dtype == "auto" else getattr(torch, cell.model.dtype)
        model = causal_lm(cell.model, {"dtype": dtype}, torch.device("meta"), None)
        gbytes = 1e-9 * sum(p.nbytes for p in model.parameters())
        return [Work(gbytes={READ: gbytes, PLACE: gbytes})]

    def build(self, request: Request) -> Arm:
        files = checkpoint(request)
        readers = (asked(a, Ablation.read) for a in request.ordered)
        reader = next((r for r in readers if r is not None), None) or PlainReader()
        cold = request.cell.workload.page_cache == "cold"
        if not cold:
            for file in files:
                file.read_bytes()
        return LoadArm(
            request.name, request.ablations, nn.Module(), [], request.dtype, request.device, self,
            {a.name: None for a in request.ablations}, ranks=request.ranks, files=files, reader=reader, cold=cold,
        )  # fmt: skip

    def trial(self, arm: Any, begin: Begin) -> None:
        if arm.cold:
            for file in arm.files:
                forget(file)
        begin(READ)
        held = arm.reader.read(arm.files)
        begin(PLACE)
        arm.loaded = arm.reader.place(held, arm.device)

    def clear(self, arm: Any) -> None:
        arm.loaded = {}

    def held(self, arm: Any) -> dict[str, int]:
        return {"weights": sum(file.stat().st_size for file in arm.files)}

    def measures_host(self, arm: Arm) -> bool:
        return True

    def first(self, arm: Any, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        run()
        arm.evidence = {"unequal": 0, "tensors": len(arm.loaded), "worst": ""}
        self._compare(arm)
        return {"": arm.evidence}

    def seen(self, arm: Any, losses: dict[str, float]) -> None:
        """One tensor in SAMPLED, others in each trial: to read all of a large checkpoint again takes as long as the
        trial. After the last one all are compared."""
        arm.compared += 1
        self._compare(arm, arm.compared % SAMPLED, SAMPLED)

    def last(self, arm: Any, run: Callable[[], Any]) -> None:
        run()
        self._compare(arm)

    def _compare(self, arm: Any, begin: int = 0, every: int = 1) -> None:
        """What a trial loaded with the files; of all trials the worst is kept."""
        differing = list(differences(arm.files, arm.loaded, begin, every))
        if len(differing) > arm.evidence["unequal"]:
            arm.evidence |= {"unequal": len(differing), "tensors": len(arm.loaded), "worst": differing[0]}

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        wrong = max(reference, candidate, key=lambda found: found["unequal"])
        return Numerics(passed=not wrong["unequal"], **wrong)

    def explain(self, numerics: Numerics) -> str:
        return f"{numerics.unequal} of {numerics.tensors} tensors are not those of the files, first {numerics.worst}"


def checkpoint(request: Request) -> list[Path]:
    """The files of the model's random weights, in the compute dtype; saved where the sweep has not done so yet."""
    content = [request.model.model_dump(mode="json"), str(request.dtype), request.seed]
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    folder = request.scratch / f"checkpoint-{name}"
    if not folder.exists():
        model: Any = causal_lm(request.model, {"dtype": request.dtype}, request.device, None)
        fill_base(model, request.dtype, request.seed)
        size = bytes_of(list(model.parameters()))
        partial = request.scratch / f"checkpoint-{name}.{os.getpid()}"
        model.save_pretrained(partial, max_shard_size=max(1, size // SHARDS))
        for file in partial.iterdir():
            _to_disk(file)
        with contextlib.suppress(FileExistsError, OSError):
            partial.rename(folder)
        del model
    return sorted(folder.glob("*.safetensors"))


def _to_disk(file: Path) -> None:
    """Only what lies on the disk can be forgotten by the page cache."""
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())


def forget(file: Path) -> None:
    """Tell the page cache to drop a file. Raises Unsupported where it still holds it (tmpfs has nowhere else)."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        for _ in range(TRIES):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if resident(opened.fileno(), size) <= STILL_THERE:
                return
            time.sleep(0.05)  # pages that somebody still writes, reads or maps stay for a moment
    raise Unsupported(f"the page cache does not forget {file.parent}: a cold cache needs a disk behind it")


def resident(descriptor: int, size: int) -> float:
    """Share of the file's probed pages that can be read without waiting for the disk. Probing one page at a time, from
    the end: a read that had to wait would start the kernel's read-ahead."""
    pages = max(1, size // PAGE)
    offsets = sorted({pages * i // PROBES for i in range(PROBES)}, reverse=True)
    found = 0
    for page in offsets:
        try:
            found += bool(os.preadv(descriptor, [bytearray(1)], page * PAGE, os.RWF_NOWAIT))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    return found / len(offsets)


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
