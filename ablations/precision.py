"""Slot `base_precision`: in what format the frozen linears multiply, their weights kept as they are: torchao's float8
and quantization-aware training. Slot `float32_matmul`: TF32.

    pip install 'lorabench[torchao]'
    python -m lorabench.sweep 'models=[tiny-llama]' 'ablations=[float8_training,qat]'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Tolerance, Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.settings import Settings
from lorabench_ablations.loading import round_weights
from lorabench_ablations.lora_kernels import MULTIPLY, Fp8Products
from lorabench_ablations.quantized import TORCHAO

if TYPE_CHECKING:
    import torch
    from torch import nn


def divisible(linear: nn.Linear) -> bool:
    """Whether float8's products take a linear: they want sizes divisible by 16."""
    return not any(size % 16 for size in linear.weight.shape)


@dataclass(frozen=True, kw_only=True)
class BasePrecision(Ablation):
    """Base: the frozen linears below PEFT's layers become linears of torchao's over the same weights."""

    slot: ClassVar[str] = "base_precision"
    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(MULTIPLY, "it multiplies with the frozen weights itself"),
        "loading": "the frozen weights are quantized already",
    }
    made: ClassVar[str]  # the class of torchao's that stands in a linear's place

    def convert(self, model: nn.Module, fits: Callable[[nn.Module, str], bool]) -> None:
        raise NotImplementedError

    def patch(self, model: nn.Module) -> int:
        from torch import nn

        def fits(module: nn.Module, name: str) -> bool:
            return name.endswith("base_layer") and type(module) is nn.Linear and divisible(module)

        self.convert(model, fits)
        return sum(type(module).__name__ == self.made for module in model.modules())

    def audit(self, evidence: Evidence) -> int:
        if not evidence.patched:
            raise NotApplied("no frozen linear below an adapter has sizes divisible by 16")
        return evidence.patched

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {"torchao": version("torchao"), "linears": evidence.patched}}


@dataclass(frozen=True, kw_only=True)
class Float8Training(BasePrecision):
    """torchao's `convert_to_float8_training`: weights, inputs and gradients are rounded to e4m3 for each product.

    Eagerly it also computes the gradient of the frozen weights and keeps their inputs for it; only the compiler drops
    both, so put `torch_compile` beside it. A CPU rounds likewise and multiplies in the compute dtype.
    """

    name: ClassVar[str] = "float8_training"
    summary: ClassVar[str] = "the frozen linears' products in FP8 (torchao's float8 training)"
    made: ClassVar[str] = "Float8Linear"
    requires: ClassVar[Requires] = Fp8Products(packages={"torchao": TORCHAO})
    # Two bits of mantissa less than bfloat16's own eighth: as coarse as fp8_base, which see for the reasons.
    tolerance: ClassVar[Tolerance] = Tolerance(
        words="frozen weights, their inputs and gradients in e4m3", grad=0.5, eps=2**-3, loss=0.02
    )

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"

    def convert(self, model: nn.Module, fits: Callable[[nn.Module, str], bool]) -> None:
        from dataclasses import replace

        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        weight = next(p for p in model.parameters() if not p.requires_grad)
        if weight.is_cuda and weight.dtype != torch.bfloat16:
            raise Unsupported(f"float8_training multiplies beside bfloat16; this model computes in {weight.dtype}")
        config = replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=not weight.is_cuda)
        convert_to_float8_training(model, config=config, module_filter_fn=fits)

    def collate(self, batch: Batch) -> Batch:
        """As it is. The gradient of the frozen weights, which is made on a GPU, adds up over tokens, and its product
        wants a multiple of 16 of them."""
        import torch

        tokens = batch.inputs["input_ids"].numel()
        if torch.cuda.is_available() and tokens % 16:
            raise NotApplied(
                f"a micro-batch has {tokens} tokens, and torchao's float8 products want a multiple of 16: give the "
                "workload a length of 16's multiple, as 4x2048"
            )
        return batch

    def settings(self) -> Settings:
        return Settings(axolotl={"fp8": True, "torch_compile": True}, note="put torch_compile beside it")


@dataclass(frozen=True, kw_only=True)
class Qat(BasePrecision):
    """torchao's `QATConfig(…, step="prepare")`: inputs are rounded to 8 bits a token and weights to 4 bits a group, in
    the compute dtype. It prepares for a quantized model later; it saves nothing while it trains."""

    name: ClassVar[str] = "qat"
    summary: ClassVar[str] = "quantization-aware training: int8 inputs, int4 weights, simulated (torchao)"
    made: ClassVar[str] = "FakeQuantizedLinear"
    requires: ClassVar[Requires] = Requires(packages={"torchao": TORCHAO})
    rounds_weights: ClassVar[bool] = True
    # Against dense weights a gradient of tiny models is off by at most 0.3.
    tolerance: ClassVar[Tolerance] = Tolerance(
        words="simulated int4 weights and int8 inputs", grad=0.5, eps=2**-3, loss=0.05
    )

    group_size: Annotated[int, Field(ge=16, multiple_of=16)] = 32

    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        """With `upcast` each weight gets the numbers that its products have."""
        if not upcast:
            return

        from torchao.quantization.qat import FakeQuantizedLinear

        def rounded(name: str, linear: Any) -> torch.Tensor | None:
            if not (divisible(linear) and self._has_groups(linear)):
                return None
            made: Any = FakeQuantizedLinear.from_linear(linear, weight_config=self._weights())
            return made.weight_fake_quantizer(linear.weight)

        round_weights(base, rounded)

    def convert(self, model: nn.Module, fits: Callable[[nn.Module, str], bool]) -> None:
        import torch
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
        from torchao.quantization.qat.api import QATStep

        inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        config = QATConfig(activation_config=inputs, weight_config=self._weights(), step=QATStep.PREPARE)
        quantize_(model, config, lambda module, name: fits(module, name) and self._has_groups(module))

    def _weights(self) -> Any:
        import torch
        from torchao.quantization.qat import IntxFakeQuantizeConfig

        return IntxFakeQuantizeConfig(torch.int4, group_size=self.group_size)  # pyright: ignore

    def _has_groups(self, linear: Any) -> bool:
        return linear.in_features % self.group_size == 0

    def settings(self) -> Settings:
        keys = {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": self.group_size}
        return Settings(axolotl={"qat": keys})


@dataclass(frozen=True, kw_only=True)
class Tf32(Ablation):
    """`torch.set_float32_matmul_precision("high")`. Only what multiplies in float32 has it: PEFT's float32 adapters,
    and a model in float32. A step all in bfloat16 has nothing of the kind."""

    name: ClassVar[str] = "tf32"
    slot: ClassVar[str] = "float32_matmul"
    summary: ClassVar[str] = "float32 products in TF32, which has ten bits of mantissa"
    requires: ClassVar[Requires] = Requires(device="cuda", capability=(8, 0))
    global_patch: ClassVar[bool] = True
    switches: ClassVar[tuple[str, ...]] = ("torch.set_float32_matmul_precision",)
    tolerance: ClassVar[Tolerance | None] = Tolerance(words="float32 products in TF32", grad=2**-8, eps=2**-10)

    def patch(self, model: nn.Module) -> int:
        import torch

        torch.set_float32_matmul_precision("high")
        linears = (m for m in model.modules() if type(m) is torch.nn.Linear)
        return sum(m.weight.dtype == torch.float32 for m in linears)

    def audit(self, evidence: Evidence) -> int:
        import torch

        if not evidence.patched:
            raise NotApplied("no linear holds float32")
        return evidence.patched if torch.get_float32_matmul_precision() == "high" else 0

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        low = any(a.slot == "adapter_dtype" for a in reference)
        return f"nothing is multiplied in float32: the adapters are in {dtype}" if low and dtype != "float32" else None

    def settings(self) -> Settings:
        return Settings(trainer={"tf32": True}, axolotl={"tf32": True})
