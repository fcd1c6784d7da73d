"""Slot `optimizer`: torch's three AdamW implementations, bitsandbytes' 8-bit and paged ones, torchao's 8-bit one,
LoRA+, and none at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Tolerance, Unsupported
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.step import Step, Wrapped

if TYPE_CHECKING:
    import torch
    from torch import nn


def optimizer_named(name: str) -> Settings:
    """transformers' name of an optimizer, which is Axolotl's too."""
    return Settings(trainer={"optim": name}, axolotl={"optimizer": name})


@dataclass(frozen=True, kw_only=True)
class TorchAdamW(Ablation):
    """Base: torch.optim.AdamW with `foreach` and `fused` given, so that torch's default cannot decide."""

    slot: ClassVar[str] = "optimizer"
    foreach: ClassVar[bool]
    fused: ClassVar[bool]

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(params, lr=lr, foreach=self.foreach, fused=self.fused)

    def audit(self, evidence: Evidence) -> int:
        for group in evidence.arm.step.optimizer.param_groups:
            if (bool(group["foreach"]), bool(group["fused"])) != (self.foreach, self.fused):
                raise NotApplied(f"the optimizer runs with foreach={group['foreach']}, fused={group['fused']}")
        return len(evidence.arm.step.optimizer.state)


@dataclass(frozen=True, kw_only=True)
class AdamW(TorchAdamW):
    name: ClassVar[str] = "adamw"
    summary: ClassVar[str] = "torch AdamW, one parameter after the other (foreach=False)"
    foreach: ClassVar[bool] = False
    fused: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class AdamWForeach(TorchAdamW):
    name: ClassVar[str] = "adamw_foreach"
    summary: ClassVar[str] = "torch AdamW over lists of tensors, torch's default on a GPU"
    foreach: ClassVar[bool] = True
    fused: ClassVar[bool] = False

    def settings(self) -> Settings:
        return optimizer_named("adamw_torch")


@dataclass(frozen=True, kw_only=True)
class AdamWFused(TorchAdamW):
    name: ClassVar[str] = "adamw_fused"
    summary: ClassVar[str] = "torch AdamW in one kernel (fused=True), transformers' default"
    worth_trying: ClassVar[Worth | None] = "time"
    foreach: ClassVar[bool] = False
    fused: ClassVar[bool] = True

    def settings(self) -> Settings:
        return optimizer_named("adamw_torch_fused")


class _ForwardBackward(Wrapped):
    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.updates = False

    def update(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class NoOptimizer(Ablation):
    """Forward and backward alone, as benchmarks of kernels time them: their sum is the total, and nothing is learned.

    In float16 it is also the only way to compare adapters in the compute dtype: AdamW's eps and its squared gradients
    underflow there, and the first update is NaN.
    """

    name: ClassVar[str] = "no_optimizer"
    slot: ClassVar[str] = "optimizer"
    summary: ClassVar[str] = "forward and backward alone, no update"
    excludes: ClassVar[dict[str, str]] = {"capture": "a captured step has an update"}
    rank: ClassVar[int] = -1  # innermost: what wraps it takes its phases over

    def step(self, step: Step) -> Step:
        return _ForwardBackward(step)

    def audit(self, evidence: Evidence) -> int:
        return int(not evidence.arm.step.updates)


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes(Ablation):
    """Base: an optimizer of bitsandbytes, by its class name."""

    slot: ClassVar[str] = "optimizer"
    requires: ClassVar[Requires] = Requires(device="cuda", packages={"bitsandbytes": "pip install 'lorabench[gpu]'"})
    excludes: ClassVar[dict[str, str]] = {
        "cuda_graph": "bitsandbytes counts its steps on the host, and a captured step would repeat one count for ever"
    }
    cls: ClassVar[str]
    pages: ClassVar[bool] = False

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import bitsandbytes as bnb

        # torch's AdamW decays weights by 0.01, bitsandbytes' default is 0.01 too; written out, so that it stays so
        return getattr(bnb.optim, self.cls)(params, lr=lr, weight_decay=0.01)

    def audit(self, evidence: Evidence) -> int:
        states = [s["state1"] for s in evidence.arm.step.optimizer.state.values() if "state1" in s]
        if self.pages and not any(getattr(t, "is_paged", False) for t in states):
            raise NotApplied("no adapter is large enough: bitsandbytes pages states of 100 000 elements and more")
        return len(states)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        import torch

        states = [s["state1"] for s in evidence.arm.step.optimizer.state.values() if "state1" in s]
        paged = sum(bool(getattr(t, "is_paged", False)) for t in states)
        eight = sum(t.dtype == torch.uint8 for t in states)
        return {"optimizer_states": {"tensors": len(states), "in 8 bits": eight, "paged": paged}}

    def settings(self) -> Settings:
        return optimizer_named(self.name)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(BitsAndBytes):
    name: ClassVar[str] = "adamw_8bit"
    summary: ClassVar[str] = "bitsandbytes AdamW with blockwise 8-bit states"
    cls: ClassVar[str] = "AdamW8bit"
    tolerance: ClassVar[Tolerance] = Tolerance(words="optimizer states are rounded to 8 bits", update=0.1)


@dataclass(frozen=True, kw_only=True)
class PagedAdamW32bit(BitsAndBytes):
    name: ClassVar[str] = "paged_adamw_32bit"
    summary: ClassVar[str] = "bitsandbytes AdamW with states in managed memory (QLoRA's optimizer)"
    cls: ClassVar[str] = "PagedAdamW32bit"
    pages: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class PagedAdamW8bit(BitsAndBytes):
    name: ClassVar[str] = "paged_adamw_8bit"
    summary: ClassVar[str] = "bitsandbytes AdamW, 8-bit states in managed memory"
    cls: ClassVar[str] = "PagedAdamW8bit"
    pages: ClassVar[bool] = True
    tolerance: ClassVar[Tolerance] = Tolerance(words="optimizer states are rounded to 8 bits", update=0.1)


@dataclass(frozen=True, kw_only=True)
class TorchaoAdamW8bit(Ablation):
    """`torchao.optim.AdamW8bit`: the update of each parameter compiled, states in 8 bits from 4096 elements on."""

    name: ClassVar[str] = "torchao_adamw_8bit"
    slot: ClassVar[str] = "optimizer"
    summary: ClassVar[str] = "torchao AdamW with blockwise 8-bit states, compiled"
    requires: ClassVar[Requires] = Requires(packages={"torchao": "pip install 'lorabench[torchao]'"})
    excludes: ClassVar[dict[str, str]] = {"capture": "it compiles its update when it first runs"}
    slow_start: ClassVar[bool] = True
    tolerance: ClassVar[Tolerance] = Tolerance(words="optimizer states are rounded to 8 bits", update=0.1)

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import torch
        from torchao.optim import AdamW8bit

        from .compilation import has_compiler

        if not torch.cuda.is_available() and not has_compiler():
            raise Unsupported("torchao_adamw_8bit needs a C++ compiler on a CPU: install g++ or clang")
        return AdamW8bit(params, lr=lr, weight_decay=0.01)

    def audit(self, evidence: Evidence) -> int:
        eight = self._in_8_bits(evidence)
        if not eight:
            raise NotApplied("no adapter is large enough: torchao holds states of 4096 elements and more in 8 bits")
        return eight

    def _in_8_bits(self, evidence: Evidence) -> int:
        states = evidence.arm.step.optimizer.state.values()
        return sum(type(state["exp_avg"]).__name__ == "OptimState8bit" for state in states)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        states = len(evidence.arm.step.optimizer.state)
        return {"optimizer_states": {"tensors": states, "in 8 bits": self._in_8_bits(evidence)}}


@dataclass(frozen=True, kw_only=True)
class LoraPlus(Ablation):
    """LoRA+ (arXiv 2402.12354) as PEFT's `create_loraplus_optimizer` makes it: lora_B in a group of its own.

    What it costs is the second group; the ratio is a number in it. Every update is held to AdamW's at the job's rate,
    so a row has ratio 1, and another ratio would be another training.
    """

    name: ClassVar[str] = "loraplus"
    slot: ClassVar[str] = "optimizer"
    summary: ClassVar[str] = "LoRA+: lora_B in a group of its own, for a rate of its own"

    loraplus_lr_ratio: float = 1.0

    def patch(self, model: nn.Module) -> int:
        if self.loraplus_lr_ratio != 1:
            raise Unsupported(
                f"loraplus_lr_ratio={self.loraplus_lr_ratio:g} is another training, which no update can be held to; "
                "with ratio 1 a step takes as long"
            )
        of_b = [p for name, p in model.named_parameters() if "lora_B" in name]
        for parameter in of_b:
            parameter._lorabench_of_b = True  # pyright: ignore[reportAttributeAccessIssue]  # `optimize` sees no names
        return len(of_b)

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import torch

        of_b = [p for p in params if hasattr(p, "_lorabench_of_b")]
        others = [p for p in params if not hasattr(p, "_lorabench_of_b")]
        groups = [{"params": others, "lr": lr}, {"params": of_b, "lr": lr * self.loraplus_lr_ratio}]
        return torch.optim.AdamW(groups, foreach=True)

    def audit(self, evidence: Evidence) -> int:
        groups = [len(group["params"]) for group in evidence.arm.step.optimizer.param_groups]
        if len(groups) != 2 or not all(groups):
            raise NotApplied(f"the optimizer has groups of {groups} tensors; expected two")
        return groups[1]

    def settings(self) -> Settings:
        return Settings(axolotl={"loraplus_lr_ratio": 16}, note="16 is the ratio of its authors")
