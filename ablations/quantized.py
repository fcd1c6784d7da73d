"""Slot `loading`, other packages' forms of it: torchao's weight-only ones, HQQ, GPTQ and AWQ.

    pip install 'lorabench[torchao,hqq]'
    python -m lorabench.sweep 'models=[tiny-llama]' 'ablations=[torchao_int8,torchao_fp8,hqq]'

torchao's int8 *dynamic* form is left out: its backward gives no dX, so every layer below learns from nothing while the
loss looks right (tests/ablations/test_quantized.py keeps that seen).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from lorabench.contract.ablation import Evidence, Excluded, Requires, Tolerance
from lorabench.contract.settings import Code, Settings
from lorabench_ablations.loading import QuantizedLinears

if TYPE_CHECKING:
    import torch

TORCHAO = "pip install 'lorabench[torchao]'"
HQQ = "pip install 'lorabench[hqq]'"


@dataclass(frozen=True, kw_only=True)
class Torchao(QuantizedLinears):
    """Base: `torchao.quantization.quantize_` with one of its configurations, each weight dequantized for its GEMM."""

    requires: ClassVar[Requires] = Requires(packages={"torchao": TORCHAO})
    config: ClassVar[str]

    def quantized(self, linear: Any) -> Any:
        from torchao import quantization

        made = alike(linear)
        quantization.quantize_(made, getattr(quantization, self.config)())
        return made

    def dense(self, quantized: Any) -> torch.Tensor:
        return quantized.weight.dequantize()

    def audit(self, evidence: Evidence) -> int:
        return sum(is_torchao(p) for p in evidence.arm.model.parameters())

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        kinds = {type(p.data).__name__ for p in evidence.arm.model.parameters() if is_torchao(p)}
        return {self.name: {"torchao": version("torchao"), "tensors": sorted(kinds)}}

    def settings(self) -> Settings:
        return Settings(
            model={"quantization_config": Code(f"TorchAoConfig({self.config}())")},
            imports=(
                "from transformers import TorchAoConfig", f"from torchao.quantization import {self.config}",
            ),
        )  # fmt: skip


def alike(linear: Any) -> Any:
    """A frozen linear of its own over the same weight, which a package may take apart."""
    import torch

    made = torch.nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight, made.bias = torch.nn.Parameter(linear.weight.data, requires_grad=False), linear.bias
    return made


def is_torchao(tensor: Any) -> bool:
    return hasattr(tensor, "qdata") and type(tensor).__module__.startswith("torchao")


@dataclass(frozen=True, kw_only=True)
class TorchaoInt8(Torchao):
    name: ClassVar[str] = "torchao_int8"
    summary: ClassVar[str] = "frozen linears in int8, a scale a row (torchao, weight-only)"
    config: ClassVar[str] = "Int8WeightOnlyConfig"
    # Against dense weights a gradient of tiny models is off by at most 0.03.
    tolerance: ClassVar[Tolerance] = Tolerance(words="frozen weights in int8", grad=0.2, loss=0.02)


@dataclass(frozen=True, kw_only=True)
class TorchaoFp8(Torchao):
    name: ClassVar[str] = "torchao_fp8"
    summary: ClassVar[str] = "frozen linears in e4m3, a scale a row (torchao, weight-only)"
    config: ClassVar[str] = "Float8WeightOnlyConfig"
    # Against dense weights a gradient of tiny models is off by at most 0.1.
    tolerance: ClassVar[Tolerance] = Tolerance(words="frozen weights in e4m3", grad=0.3, loss=0.02)


@dataclass(frozen=True, kw_only=True)
class Hqq(QuantizedLinears):
    """`HQQLinear`: scales and zeros by groups, found without data; each weight is dequantized for its GEMM."""

    name: ClassVar[str] = "hqq"
    summary: ClassVar[str] = "frozen linears in 4 bits by half-quadratic quantization (HQQ)"
    requires: ClassVar[Requires] = Requires(packages={"hqq": HQQ, "termcolor": HQQ})
    # Against dense weights a gradient of tiny models is off by at most 0.25.
    tolerance: ClassVar[Tolerance] = Tolerance(words="frozen weights in a few bits", grad=0.5, loss=0.05)

    nbits: int = 4
    group_size: Annotated[int, Field(ge=8, multiple_of=8)] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbits not in (8, 4, 3, 2, 1):
            raise ValueError(f"nbits={self.nbits!r}: expected 8, 4, 3, 2 or 1")

    def quantized(self, linear: Any) -> Any:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        config = BaseQuantizeConfig(nbits=self.nbits, group_size=self.group_size)
        weight = linear.weight
        return HQQLinear(alike(linear), config, compute_dtype=weight.dtype, device=str(weight.device))

    def dense(self, quantized: Any) -> torch.Tensor:
        return quantized.dequantize()

    def audit(self, evidence: Evidence) -> int:
        from hqq.core.quantize import HQQLinear

        return sum(isinstance(module, HQQLinear) for module in evidence.arm.model.modules())

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {"hqq": version("hqq"), "linears": self.audit(evidence)}}

    def settings(self) -> Settings:
        return Settings(
            model={"quantization_config": Code(f"HqqConfig(nbits={self.nbits}, group_size={self.group_size})")},
            imports=("from transformers import HqqConfig",),
        )


@dataclass(frozen=True, kw_only=True)
class Gptq(QuantizedLinears):
    """GPTQModel pins a version of NumPy, compiles C++ where it is installed, and sets variables of the CUDA allocator
    when it is imported, which every arm of its process would get. So there is a row, and no measurement."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = "LoRA on a GPTQ checkpoint: a row with the reason why it is not measured"
    requires: ClassVar[Requires] = Excluded(
        reason="is not measured: GPTQModel pins its own NumPy and sets the CUDA allocator when it is imported, which "
        "excludes the other toggles; train on a GPTQ base in an environment of its own: pip install gptqmodel"
    )


@dataclass(frozen=True, kw_only=True)
class Awq(QuantizedLinears):
    name: ClassVar[str] = "awq"
    summary: ClassVar[str] = "LoRA on an AWQ checkpoint: a row with the reason why it is not measured"
    requires: ClassVar[Requires] = Excluded(
        reason="is not measured: AutoAWQ is no longer kept, and AWQ checkpoints load through GPTQModel, which excludes "
        "the other toggles (see gptq)"
    )
