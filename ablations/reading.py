"""Slots `quantizing` and `reading` of cells of the kind `load`: what is read, and who reads it.

    pip install 'lorabench[gpu,loading]'
    python -m lorabench.sweep suite=prequantized_loading output=results/h200/prequantized_loading

A toggle of the first slot says in what form the weights lie in the files and arrive, one of the second how they are
read. So the two go together: prequantized files can be read by several threads, by fastsafetensors or by transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires
from lorabench.contract.reading import WeightsForm, WeightsReader
from lorabench.contract.settings import Settings

BITSANDBYTES = {"bitsandbytes": "pip install 'lorabench[gpu]'"}


@dataclass(frozen=True, kw_only=True)
class _Nf4(Ablation):
    """Weights that arrive as `nf4_base` has them: every linear but the head in 4 bits, its state beside it."""

    slot: ClassVar[str] = "quantizing"
    kinds: ClassVar[tuple[str, ...]] = ("load",)
    requires: ClassVar[Requires] = Requires(packages=BITSANDBYTES)

    bnb_4bit_use_double_quant: bool = True  # the blocks' scales in 8 bits: 0.37 bits a weight less

    def audit(self, evidence: Evidence) -> int:
        from lorabench_ablations.weight_forms import in_4_bits

        arm: Any = evidence.arm
        return sum(map(in_4_bits, arm.loaded.values()))

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        arm: Any = evidence.arm
        nbytes = sum(file.stat().st_size for file in arm.source.files)
        reading = arm.reader.notes() if hasattr(arm.reader, "notes") else {}
        return {self.name: {"bitsandbytes": version("bitsandbytes"), "bytes_read": nbytes, **reading}}


@dataclass(frozen=True, kw_only=True)
class QuantizeAtLoad(_Nf4):
    """Reads the dense weights, brings them to the device, and quantizes each linear there as soon as it has come."""

    name: ClassVar[str] = "quantize_at_load"
    summary: ClassVar[str] = "dense weights read and quantized to NF4 on the device, at every load"

    def form(self) -> WeightsForm:
        from lorabench_ablations.weight_forms import QuantizedAtLoad

        return QuantizedAtLoad(self.bnb_4bit_use_double_quant)


@dataclass(frozen=True, kw_only=True)
class PrequantizedLoading(_Nf4):
    """NF4 weights with their state, saved once in transformers' own format, read as they are.

    Its own reader is the one of `parallel_reading`; `threads` and `pinned` are of that one. A toggle of the slot
    `reading` beside it reads instead.
    """

    name: ClassVar[str] = "prequantized_loading"
    summary: ClassVar[str] = "NF4 weights with their state, quantized once and loaded as they are"

    threads: PositiveInt = 8  # 1: file after file, as without any toggle
    pinned: bool = True  # through page-locked memory, copied to the device while the next bytes are read

    def form(self) -> WeightsForm:
        from lorabench_ablations.weight_forms import Prequantized

        return Prequantized(self.bnb_4bit_use_double_quant, self.threads, self.pinned)

    def audit(self, evidence: Evidence) -> int:
        from lorabench_ablations.weight_forms import is_packed

        arm: Any = evidence.arm
        if not any(map(is_packed, arm.source.files)):
            raise NotApplied("no file that was read holds a weight in 4 bits")
        return super().audit(evidence)

    def settings(self) -> Settings:
        return Settings(note="Load the model with its quantization_config once, save it, and train from that folder.")


@dataclass(frozen=True, kw_only=True)
class ParallelReading(Ablation):
    """Several threads at a time: reading waits for the disk or copies, both without Python's lock. `pinned`: in blocks
    of all files, each into page-locked memory, from where it is copied to the device while the next one is read; else
    a file a thread, and all are copied when all are read."""

    name: ClassVar[str] = "parallel_reading"
    slot: ClassVar[str] = "reading"
    kinds: ClassVar[tuple[str, ...]] = ("load",)
    summary: ClassVar[str] = "a checkpoint's files read by several threads at once"

    threads: Annotated[int, Field(ge=2)] = 4
    pinned: bool = False

    def read(self) -> WeightsReader | None:
        from lorabench_ablations.readers import by_threads

        return by_threads(self.threads, self.pinned)

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        if not self.pinned and len(arm.source.files) < 2:
            raise NotApplied("the checkpoint is one file, so there is nothing to read at once")
        return len(arm.reader.readers)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        arm: Any = evidence.arm
        return {self.name: arm.reader.notes()}


@dataclass(frozen=True, kw_only=True)
class Fastsafetensors(Ablation):
    """fastsafetensors' loader, without GPUDirect: its own threads read each file in blocks through page-locked memory
    into one piece of device memory, and the tensors are views of that."""

    name: ClassVar[str] = "fastsafetensors"
    slot: ClassVar[str] = "reading"
    kinds: ClassVar[tuple[str, ...]] = ("load",)
    summary: ClassVar[str] = "a checkpoint's files read by the package fastsafetensors"
    requires: ClassVar[Requires] = Requires(packages={"fastsafetensors": "pip install 'lorabench[loading]'"})

    threads: PositiveInt = 16  # the package's own default

    def read(self) -> WeightsReader:
        from lorabench_ablations.readers import ByFastsafetensors

        return ByFastsafetensors(self.threads)

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        return len(arm.reader.read_files)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {"fastsafetensors": version("fastsafetensors"), "gds": False}}


@dataclass(frozen=True, kw_only=True)
class TransformersLoading(Ablation):
    """transformers' `AutoModelForCausalLM.from_pretrained`, as a user calls it: it builds the model, too. It reads with
    a pool of threads, and with one where it has to quantize. Reading and placing are one phase, read."""

    name: ClassVar[str] = "transformers_loading"
    slot: ClassVar[str] = "reading"
    kinds: ClassVar[tuple[str, ...]] = ("load",)
    summary: ClassVar[str] = "the model built and loaded by transformers' from_pretrained"

    def read(self) -> WeightsReader:
        from lorabench_ablations.readers import ByTransformers

        return ByTransformers()

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        return arm.reader.modules

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {"transformers": version("transformers")}}
