"""Slot `attention`: torch's flex_attention, which inductor compiles from a block mask; through transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from lorabench.contract.ablation import Requires
from lorabench.contract.settings import Settings
from lorabench_ablations.attention import CUDA, Fused, RequiresSupport

FORWARD = "flex_attention"  # in the names that inductor gives to the kernels it makes of it
PREFIXES = ("triton_", "cutedsl_")


@dataclass(frozen=True, kw_only=True)
class FlexAttention(Fused):
    """transformers makes a block mask in every forward and compiles one function for the whole process, with the
    options of whoever calls it first: so the arms are measured in processes of their own. It does not train on a CPU.
    """

    name: ClassVar[str] = "flex_attention"
    summary: ClassVar[str] = "torch's flex_attention with a block mask, compiled to Triton"
    requires: ClassVar[Requires] = RequiresSupport(**CUDA, words="flex_attention", attribute="_supports_flex_attn")
    implementation: ClassVar[str] = "flex_attention"
    global_patch: ClassVar[bool] = True

    def ran(self, ops: Counter[str]) -> dict[str, int]:
        """Kernels of the forward, by the names under which inductor launches them."""
        return {n: c for n, c in ops.items() if n.startswith(PREFIXES) and FORWARD in n and "backward" not in n}

    def settings(self) -> Settings:
        return Settings(model={"attn_implementation": "flex_attention"}, axolotl={"flex_attention": True})
