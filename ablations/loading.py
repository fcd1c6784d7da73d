"""Slot `loading`: how the frozen weights are held: in 4 bits, as QLoRA has them. reading.py has how they come from
the disk.

    pip install 'lorabench[gpu]'
    python -m lorabench.sweep suite=qlora output=results/h200/qlora

What both arms of a cell have from this slot is part of the model: the gate's gold is made from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Requires, Tolerance
from lorabench.contract.settings import Code, Settings, Worth

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Nf4Base(Ablation):
    """transformers' `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", …)`, in the arm's compute dtype.

    Every linear but the head becomes one of bitsandbytes, as transformers makes it, and PEFT puts its own layer for
    those on it. The weights are those of every other arm, quantized where they lie. `prepare_model_for_kbit_training`
    is not called: it turns norms, embedding and head, and so all activations between, to float32, and switches
    gradient checkpointing on, which is a toggle of its own.
    """

    name: ClassVar[str] = "nf4_base"
    slot: ClassVar[str] = "loading"
    kinds: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    changes_weights: ClassVar[bool] = True
    summary: ClassVar[str] = "frozen linears in 4 bits (bitsandbytes NF4), as QLoRA has them"
    worth_trying: ClassVar[Worth | None] = "memory"
    requires: ClassVar[Requires] = Requires(packages={"bitsandbytes": "pip install 'lorabench[gpu]'"})
    excludes: ClassVar[dict[str, str]] = {
        "fp8_base": "it rounds dense weights to 8 bits, and these are in 4 already",
        "limit": "the limit is that of dense weights",
    }
    # Against dense weights. Measured on two layers of tiny models (dtype does not matter): a gradient is off by 0.2, in
    # Gemma2 by 0.41, the loss by 1e-3 at most; of SmolLM2-135M's real weights by 0.28 and 0.016.
    tolerance: ClassVar[Tolerance] = Tolerance(words="frozen weights in 4 bits", grad=0.5, loss=0.05)

    bnb_4bit_use_double_quant: bool = True  # the blocks' scales in 8 bits: 0.37 bits a weight less

    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        for name in list(linears(base)):  # the dense weight of each goes before the next is quantized
            linear = base.get_submodule(name)
            quantized = self._quantized(linear)
            if upcast:
                dequantize(linear, quantized)
            else:
                base.set_submodule(name, quantized)
        # By this PEFT knows; transformers' loader sets it.
        base.is_loaded_in_4bit = not upcast  # pyright: ignore[reportArgumentType]  # torch's stub: tensors and modules

    def _quantized(self, linear: Any) -> Any:
        from bitsandbytes.nn import Linear4bit

        double = self.bnb_4bit_use_double_quant
        made = Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, device="meta",
            compress_statistics=double, quant_type="nf4",
        )  # fmt: skip
        made.weight = as_nf4(linear.weight.data, double, made)
        made.bias = linear.bias
        return made

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


def linears(model: Any) -> dict[str, nn.Linear]:
    """What is quantized, by name: every linear but the head, as transformers does."""
    from torch import nn

    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}


def as_nf4(weight: torch.Tensor, double: bool, module: Any = None) -> Any:
    """A dense weight as bitsandbytes' parameter in 4 bits, on its device. `double`: the blocks' scales in 8 bits."""
    from bitsandbytes.nn import Params4bit

    params: Any = Params4bit  # its annotations take `to` for a module's
    made = params(weight, requires_grad=False, module=module, compress_statistics=double, quant_type="nf4")
    return made.to(weight.device)  # it quantizes when it is moved, even to the device where it is


def quantized_weights(model: nn.Module) -> list[Any]:
    """The weights that lie in 4 bits."""
    return [p for p in model.parameters() if getattr(p, "quant_state", None) is not None]


def dequantize(linear: Any, quantized: Any) -> None:
    """Into a plain linear the very numbers that the quantized one multiplies with, rounded to its dtype as there."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    weight = quantized.weight
    with torch.no_grad():
        linear.weight.copy_(dequantize_4bit(weight.data, weight.quant_state))
