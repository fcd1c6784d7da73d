"""Slot `checkpointing`: what is kept for the backward and what is computed again. `offloading.py` has what is moved to
host memory instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported, added
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.work import Recomputed

if TYPE_CHECKING:
    from collections import Counter

    from torch import nn

SLOT = "checkpointing"
MARK = "_lorabench_saved"  # on the model: what the toggle counts there of the tensors that are kept or moved
NO_CAPTURE = {"capture": "a graph cannot hold the pinned host memory that every step allocates and copies into"}


@dataclass(frozen=True, kw_only=True)
class GradientCheckpointing(Ablation):
    """transformers' `gradient_checkpointing_enable`: each decoder layer keeps its input and runs again in backward.

    `every_n_layers`: only the first of every n layers does. `offload`: the inputs wait in pinned host memory, as with
    transformers' argument of that name; the copies are on the compute stream.
    """

    name: ClassVar[str] = "gradient_checkpointing"
    slot: ClassVar[str] = SLOT
    summary: ClassVar[str] = "keep each decoder layer's input only, compute the rest again in backward"
    worth_trying: ClassVar[Worth | None] = "memory"

    use_reentrant: bool = False
    every_n_layers: PositiveInt = added(1)
    offload: bool = added(False)

    @property
    def excludes(self) -> Mapping[str, str]:  # type: ignore[override]
        return NO_CAPTURE if self.offload else {}

    @property
    def recomputes(self) -> Recomputed:  # type: ignore[override]
        return Recomputed(linears=1 / self.every_n_layers, attention=1 / self.every_n_layers)

    def patch(self, model: nn.Module) -> int:
        layers = enable(model, self.every_n_layers, use_reentrant=self.use_reentrant)
        if self.offload:
            self._offload(model, layers)
        return len(layers)

    def _offload(self, model: nn.Module, layers: Sequence[Any]) -> None:
        from .saved_tensors import Moved, offload_inputs

        if next(model.parameters()).device.type != "cuda":
            raise Unsupported("gradient_checkpointing(offload=True) needs a CUDA device: on a CPU nothing would move")
        moved = Moved.of(model)
        setattr(model, MARK, moved)
        offload_inputs(layers, moved, self.use_reentrant)

    def audit(self, evidence: Evidence) -> int:
        enabled, again = super().audit(evidence), check_ran_again(evidence)
        if self.offload:
            getattr(evidence.arm.model, MARK).check()
        return enabled if again is None else min(enabled, again)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        moved = getattr(evidence.arm.model, MARK, None)
        return {self.name: {"layers_run_again": ran_again(evidence)} | (moved.told() if moved else {})}

    def settings(self) -> Settings:
        changed = {"every_n_layers": self.every_n_layers} if self.every_n_layers > 1 else {}
        changed |= {"offload": True} if self.offload else {}
        known = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": self.use_reentrant}}
        ours = known | {"gradient_checkpointing_kwargs": known["gradient_checkpointing_kwargs"] | changed}
        return Settings(trainer=ours, axolotl=None if changed else known)


@dataclass(frozen=True, kw_only=True)
class NoGradientCheckpointing(Ablation):
    """Takes the place of what a reference has in this slot: nothing is computed again, every activation stays."""

    name: ClassVar[str] = "no_gradient_checkpointing"
    slot: ClassVar[str] = SLOT
    clears: ClassVar[bool] = True
    summary: ClassVar[str] = "switch the reference's gradient checkpointing off: keep every activation"
    worth_trying: ClassVar[Worth | None] = "time"

    def patch(self, model: nn.Module) -> int:
        base = model.get_base_model()  # type: ignore[operator]
        base.gradient_checkpointing_disable()
        return base.config.get_text_config().num_hidden_layers

    def audit(self, evidence: Evidence) -> int:
        if again := sum(getattr(m, "gradient_checkpointing", False) for m in evidence.arm.model.modules()):
            raise NotApplied(f"{again} modules still run again in backward")
        return super().audit(evidence)

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        if any(a.slot == self.slot and a.name != self.name for a in reference):
            return None
        return "the reference keeps every activation already; put gradient_checkpointing into reference="

    def settings(self) -> Settings:
        return Settings(trainer={"gradient_checkpointing": False}, axolotl={"gradient_checkpointing": False})


@dataclass(frozen=True, kw_only=True)
class SelectiveCheckpointing(Ablation):
    """torch's `create_selective_checkpoint_contexts`: a layer runs again in backward but for what is costly there.

    `save`: `attention` keeps what one fused attention operator returned, `mm` what the products with the frozen weights
    and with lora_A returned, `both` all of that. lora_B's products, over the rank, are as large and cost next to
    nothing, so they are computed again.
    """

    name: ClassVar[str] = "selective_checkpointing"
    slot: ClassVar[str] = SLOT
    summary: ClassVar[str] = "compute each layer again in backward, but for its attention or its GEMMs"

    save: Literal["attention", "mm", "both"] = "attention"

    @property
    def excludes(self) -> Mapping[str, str]:  # type: ignore[override]
        if self.save == "attention":
            return {}
        return dict.fromkeys(
            ("lora_linear", "fused_kernels", "mlp", "qkv", "o"),
            f"these kernels write into the products that save={self.save} has to keep; save=attention goes with them",
        )

    @property
    def recomputes(self) -> Recomputed:  # type: ignore[override]
        return Recomputed(linears=float(self.save == "attention"), attention=float(self.save == "mm"))

    def patch(self, model: nn.Module) -> int:
        from .selective_policy import Policy

        rank = max(config.r for config in model.peft_config.values())  # type: ignore[union-attr,operator]
        policy = Policy(attention=self.save != "mm", mm=self.save != "attention", rank=rank)
        setattr(model, MARK, policy)
        return len(enable(model, use_reentrant=False, context_fn=policy.contexts()))

    def audit(self, evidence: Evidence) -> int:
        policy = getattr(evidence.arm.model, MARK)
        if not policy.again:
            raise NotApplied("no checkpointed layer asked what to keep")
        if missing := policy.missing():
            raise NotApplied(f"no {missing} came by as one operator of torch, so that nothing of it was kept")
        return super().audit(evidence)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        policy = getattr(evidence.arm.model, MARK)
        return {self.name: {"operators_kept": dict(policy.kept), "operators_run_again": policy.again}}


def enable(model: nn.Module, every_n_layers: int = 1, **kwargs: Any) -> list[Any]:
    """Switch transformers' checkpointing on, `kwargs` to torch's `checkpoint`; returns the layers that it is on in."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    base = model.get_base_model()  # type: ignore[operator]
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, every_n_layers=every_n_layers)
    layers = (m for m in base.modules() if isinstance(m, GradientCheckpointingLayer))
    return [layer for layer in layers if layer.gradient_checkpointing]


def ran_again(evidence: Evidence) -> int | None:
    """How many layers ran their forward again in backward: attention runs once for each backward of its own, and once
    more in such a layer. None where no attention is an operator that can be counted."""
    forwards, backwards = _attention(evidence.ops)
    config: Any = evidence.arm.model.config
    return round(config.get_text_config().num_hidden_layers * (forwards / backwards - 1)) if backwards else None


def check_ran_again(evidence: Evidence) -> int | None:
    """The same; raises NotApplied where none did."""
    again = ran_again(evidence)
    if again == 0:
        raise NotApplied("no layer ran again in backward: attention ran no more often than its own backward")
    return again


def _attention(ops: Counter[str]) -> tuple[int, int]:
    """How often attention's operators ran, and their backwards; those of eager attention are softmax's."""
    forwards = backwards = 0
    for op, count in ops.items():
        if "attention" in op or "attn" in op or op == "aten::_softmax":
            names = {f"{op}_backward", f"{op}_backward_data", op.replace("_forward", "_backward")} - {op}
            if found := sum(ops[name] for name in names):
                forwards, backwards = forwards + count, backwards + found
    return forwards, backwards
