"""Forms in which weights lie in a checkpoint's files and arrive: NF4, made at every load or once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.reading import Checkpoint, WeightsForm, WeightsReader
from lorabench.measure.safetensors_file import entries
from lorabench.measure.saved import saved_once
from lorabench.plan.architecture import quiet
from lorabench_ablations.loading import as_nf4, linears
from lorabench_ablations.readers import by_threads, from_pretrained

STATE = ".quant_state.bitsandbytes__nf4"  # how bitsandbytes names the part of a weight's state that is no tensor
BLOCK, NESTED = 64, 256  # weights of one scale, and scales of one nested scale: bitsandbytes' defaults
CODES = 4 * (16 + 256)  # bytes of a weight's two tables, of 16 and of 256 numbers in float32


def in_4_bits(weight: Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def is_packed(file: Path) -> bool:
    """Whether a file holds weights in 4 bits."""
    return any(entry.name.endswith(STATE) for entry in entries(file))


class Nf4Form(WeightsForm):
    """Every linear but the head in 4 bits. The files that hold what has to arrive are those that transformers saves."""

    def __init__(self, double: bool) -> None:
        self.double = double
        self.holds = f"NF4 weights with scales in {'8 bits' if double else 'float32'}"

    def expected(self, plain: Checkpoint) -> Sequence[Path]:
        return self.quantized(plain).files

    def quantized(self, plain: Checkpoint) -> Checkpoint:
        """The same weights in 4 bits, as transformers quantizes and saves them: in as many files."""

        def save(folder: Path) -> None:
            with quiet():
                model = from_pretrained(replace(plain, load=self.arguments(plain)))
                size = sum(p.nbytes for p in model.parameters())
                model.save_pretrained(folder, max_shard_size=math.ceil(size / max(1, len(plain.files) - 1)))

        name = f"{plain.folder.name}-nf4{'' if self.double else '-single'}"
        return replace(plain, folder=saved_once(plain.folder.with_name(name), save))

    def arguments(self, plain: Checkpoint) -> dict[str, Any]:
        """Of `from_pretrained`, that make such weights of plain ones."""
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=plain.load["dtype"],
        )  # fmt: skip
        return {**plain.load, "quantization_config": config}

    def parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        if not in_4_bits(weight):
            return {name: weight}
        state: Any = weight.quant_state  # type: ignore[attr-defined]
        parts = {f"{name}.{part}": t for part, t in state.as_dict(packed=True).items()}
        # bitsandbytes writes the text of what is no tensor when it is asked, on the host: it is where its weight is.
        text = {part: t.to(weight.device) for part, t in parts.items() if part.endswith(STATE)}
        return {name: weight.data, **parts, **text}


class QuantizedAtLoad(Nf4Form):
    """Dense weights in the files."""

    def checkpoint(self, plain: Checkpoint) -> Checkpoint:
        self.linears = linears_of(plain.folder)
        return replace(plain, load=self.arguments(plain))

    def finish(self, placed: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Each dense weight is given back as soon as it is quantized."""
        found = {}
        for name, weight in placed:
            found[name] = as_nf4(weight, self.double) if name in self.linears and not in_4_bits(weight) else weight
        return found


class Prequantized(Nf4Form):
    """Weights in 4 bits in the files, with their state."""

    def __init__(self, double: bool, threads: int, pinned: bool) -> None:
        super().__init__(double)
        self.threads, self.pinned = threads, pinned

    def checkpoint(self, plain: Checkpoint) -> Checkpoint:
        return self.quantized(plain)

    def reader(self) -> WeightsReader | None:
        return by_threads(self.threads, self.pinned)

    def finish(self, placed: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        from bitsandbytes.nn import Params4bit

        found = dict(placed)
        said = to_host([(name, found.pop(name)) for name in list(found) if name.endswith(STATE)])
        for name, state in said.items():
            weight = name.removesuffix(STATE)
            parts = {p: found.pop(f"{weight}.{p}") for p in ("absmax", "quant_map")}
            if self.double:
                parts |= {p: found.pop(f"{weight}.{p}") for p in ("nested_absmax", "nested_quant_map")}
            stats = {**parts, STATE.removeprefix("."): state}
            found[weight] = Params4bit.from_prequantized(found[weight], stats, device=str(found[weight].device))
        return found

    def nbytes(self, model: nn.Module) -> int:
        return super().nbytes(model) - sum(
            linear.weight.nbytes - packed_bytes(linear.weight.numel(), self.double)
            for linear in linears(model).values()
        )


def to_host(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of bytes, in one copy and not one each: each copy from a GPU waits for it."""
    if not tensors:
        return {}
    sizes = [tensor.numel() for _, tensor in tensors]
    parts = torch.cat([tensor for _, tensor in tensors]).cpu().split(sizes)
    return {name: part for (name, _), part in zip(tensors, parts, strict=True)}


def packed_bytes(weights: int, double: bool) -> int:
    """Bytes of so many weights in 4 bits, with their state but for the few of it that are no tensors."""
    scales = math.ceil(weights / BLOCK)
    if not double:
        return weights // 2 + 4 * scales + 4 * 16
    return weights // 2 + scales + 4 * math.ceil(scales / NESTED) + CODES


def linears_of(folder: Path) -> set[str]:
    """Names of the weights that are quantized of the model in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {f"{name}.weight" for name in linears(model)}
