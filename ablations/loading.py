"""Slot `loading`: how the frozen weights are held: in 4 or 8 bits, as bitsandbytes has them. `quantized.py` has other
packages' forms, reading.py how weights come from the disk.

    pip install 'lorabench[gpu]'
    python -m lorabench.sweep suite=qlora output=results/h200/qlora

What both arms of a cell have from this slot is part of the model: the gate's gold is made from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat

from lorabench.contract.ablation import Ablation, Evidence, Requires, Tolerance
from lorabench.contract.settings import Code, Settings, Worth

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class QuantizedLinears(Ablation):
    """Base: every frozen linear but the head is quantized where it lies, before PEFT puts its layers on.

    `quantized` makes it of a linear, `dense` are the very numbers that it then multiplies with. The gate's gold holds
    these in plain linears, so what is compared is the arithmetic; a base whose backward drops dX cannot pass.
    """

    slot: ClassVar[str] = "loading"
    kinds: ClassVar[tuple[str, ...]] = ("train",)
    changes_weights: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = {
        "fp8_base": "it rounds dense weights to 8 bits, and these are quantized already",
        "limit": "the limit is that of dense weights",
    }
    mark: ClassVar[str] = ""  # the attribute by which PEFT knows such a model; transformers' loader sets it

    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        if upcast:
            round_weights(base, lambda name, linear: self.dense(self.quantized(linear)))
        else:
            for name in list(linears(base)):  # the dense weight of each goes before the next is quantized
                base.set_submodule(name, self.quantized(base.get_submodule(name)))
        if self.mark:
            setattr(base, self.mark, not upcast)

    def quantized(self, linear: Any) -> Any:
        """A module in the linear's place. The linear stays as it is."""
        raise NotImplementedError

    def dense(self, quantized: Any) -> torch.Tensor:
        """(out_features, in_features): what the module multiplies with, in the dtype that it does so in."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Nf4Base(QuantizedLinears):
    """transformers' `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", …)`, in the arm's compute dtype.

    Every linear but the head becomes one of bitsandbytes, as transformers makes it, and PEFT puts its own layer for
    those on it. The weights are those of every other arm, quantized where they lie. `prepare_model_for_kbit_training`
    is not called: it turns norms, embedding and head, and so all activations between, to float32, and switches
    gradient checkpointing on, which is a toggle of its own.
    """

    name: ClassVar[str] = "nf4_base"
    kinds: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    summary: ClassVar[str] = "frozen linears in 4 bits (bitsandbytes NF4), as QLoRA has them"
    worth_trying: ClassVar[Worth | None] = "memory"
    requires: ClassVar[Requires] = Requires(packages={"bitsandbytes": "pip install 'lorabench[gpu]'"})
    mark: ClassVar[str] = "is_loaded_in_4bit"
    # Against dense weights. Measured on two layers of tiny models (dtype does not matter): a gradient is off by 0.2, in
    # Gemma2 by 0.41, the loss by 1e-3 at most; of SmolLM2-135M's real weights by 0.28 and 0.016.
    tolerance: ClassVar[Tolerance] = Tolerance(words="frozen weights in 4 bits", grad=0.5, loss=0.05)

    bnb_4bit_use_double_quant: bool = True  # the blocks' scales in 8 bits: 0.37 bits a weight less

    def quantized(self, linear: Any) -> Any:
        from bitsandbytes.nn import Linear4bit

        double = self.bnb_4bit_use_double_quant
        made = Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, device="meta",
            compress_statistics=double, quant_type="nf4",
        )  # fmt: skip
        made.weight = as_nf4(linear.weight.data, double, made)
        made.bias = linear.bias
        return made

    def dense(self, quantized: Any) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(quantized.weight.data, quantized.weight.quant_state)

    def audit(self, evidence: Evidence) -> int:
        return len(quantized_weights(evidence.arm.model))

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        states = [w.quant_state for w in quantized_weights(evidence.arm.model)]
        kinds = {(s.quant_type, s.nested, s.blocksize, str(s.dtype)) for s in states}
        return {"nf4_base": {"bitsandbytes": version("bitsandbytes"), "kinds": sorted(kinds), "linears": len(states)}}

    def settings(self) -> Settings:
        double = self.bnb_4bit_use_double_quant
        config = (
            f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant={double}, "
            "bnb_4bit_compute_dtype=dtype)"
        )
        return Settings(
            model={"quantization_config": Code(config)},
            imports=("from transformers import BitsAndBytesConfig",),
            axolotl={"adapter": "qlora", "load_in_4bit": True} if double else None,  # its default, without a key
        )


@dataclass(frozen=True, kw_only=True)
class LoadIn8bit(QuantizedLinears):
    """transformers' `BitsAndBytesConfig(load_in_8bit=True)`: LLM.int8. Weights in int8 with a scale a row, inputs too.

    `llm_int8_threshold`: columns of an input that hold a value beyond it are multiplied in the compute dtype, for which
    every linear looks for them; 0 looks for none. On a GPU the products of float32 inputs are made in float16.
    """

    name: ClassVar[str] = "load_in_8bit"
    summary: ClassVar[str] = "frozen linears in 8 bits (bitsandbytes LLM.int8)"
    requires: ClassVar[Requires] = Requires(packages={"bitsandbytes": "pip install 'lorabench[gpu]'"})
    mark: ClassVar[str] = "is_loaded_in_8bit"
    # Against dense weights a gradient of tiny models is off by at most 0.04, the loss by 1e-4. `eps` is of its
    # inputs: a row's largest number, some four to eight times the typical one, has 127 steps.
    tolerance: ClassVar[Tolerance] = Tolerance(
        words="frozen weights and their inputs in 8 bits", grad=0.2, loss=0.02, eps=2**-4
    )

    llm_int8_threshold: NonNegativeFloat = 6.0

    def quantized(self, linear: Any) -> Any:
        from bitsandbytes import nn
        from bitsandbytes.functional import int8_vectorwise_quant

        params: Any = nn.Int8Params  # its annotations know neither CB nor SCB
        made: Any = nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False,
            threshold=self.llm_int8_threshold, device="meta",
        )  # fmt: skip
        # Not by `Int8Params.to`: it quantizes on the way from the host alone, and leaves what lies on a GPU as it is.
        rows, scales, _ = int8_vectorwise_quant(linear.weight.data.half())
        made.weight = params(rows, requires_grad=False, has_fp16_weights=False, CB=rows, SCB=scales)
        made.bias = linear.bias
        return made

    def dense(self, quantized: Any) -> torch.Tensor:
        weight = quantized.weight
        return weight.CB * (weight.SCB / 127).unsqueeze(1)  # a row's scale is its largest magnitude

    def audit(self, evidence: Evidence) -> int:
        import torch
        from bitsandbytes.nn import Linear8bitLt

        made = (m for m in evidence.arm.model.modules() if isinstance(m, Linear8bitLt))
        return sum(linear.weight.dtype == torch.int8 for linear in made)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {"bitsandbytes": version("bitsandbytes"), "linears": self.audit(evidence)}}

    def settings(self) -> Settings:
        config = f"BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold={self.llm_int8_threshold})"
        return Settings(
            model={"quantization_config": Code(config)},
            imports=("from transformers import BitsAndBytesConfig",),
            axolotl={"adapter": "lora", "load_in_8bit": True} if self == LoadIn8bit() else None,
        )


def linears(model: Any) -> dict[str, nn.Linear]:
    """What is quantized, by name: every linear but the head, as transformers does."""
    from torch import nn

    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}


def round_weights(base: nn.Module, rounded: Callable[[str, Any], torch.Tensor | None]) -> None:
    """Give each of `linears`, in place, the numbers that its products have; None: its own stay."""
    import torch

    with torch.no_grad():
        for name, linear in linears(base).items():
            if (numbers := rounded(name, linear)) is not None:
                linear.weight.copy_(numbers)


def as_nf4(weight: torch.Tensor, double: bool, module: Any = None) -> Any:
    """A dense weight as bitsandbytes' parameter in 4 bits, on its device. `double`: the blocks' scales in 8 bits."""
    from bitsandbytes.nn import Params4bit

    params: Any = Params4bit  # its annotations take `to` for a module's
    made = params(weight, requires_grad=False, module=module, compress_statistics=double, quant_type="nf4")
    return made.to(weight.device)  # it quantizes when it is moved, even to the device where it is


def quantized_weights(model: nn.Module) -> list[Any]:
    """The weights that lie in 4 bits."""
    return [p for p in model.parameters() if getattr(p, "quant_state", None) is not None]
