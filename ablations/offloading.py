"""Slot `checkpointing`, its other half: what is saved for the backward goes to host memory, nothing runs again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from lorabench.contract.ablation import Ablation, Evidence, Requires, Unsupported
from lorabench.contract.settings import Settings
from lorabench.contract.step import Step
from lorabench.contract.work import Recomputed
from lorabench_ablations.peers import silence_unsloth

from .checkpointing import MARK, NO_CAPTURE, SLOT, check_ran_again, enable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Offloading(Ablation):
    """Base: every tensor that a hook takes to host memory is counted, on the model."""

    slot: ClassVar[str] = SLOT
    excludes: ClassVar[Mapping[str, str]] = NO_CAPTURE

    def patch(self, model: nn.Module) -> None:
        from .saved_tensors import Moved

        setattr(model, MARK, Moved.of(model))

    def audit(self, evidence: Evidence) -> int:
        return getattr(evidence.arm.model, MARK).check()

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: getattr(evidence.arm.model, MARK).told()}


@dataclass(frozen=True, kw_only=True)
class SaveOnCpu(Offloading):
    """torch's `save_on_cpu` around the forward: all that autograd saves, frozen weights too, which it saves for dX."""

    name: ClassVar[str] = "save_on_cpu"
    summary: ClassVar[str] = "torch's save_on_cpu around the forward: all that is saved waits in host memory"
    requires: ClassVar[Requires] = Requires(device="cuda")

    pin_memory: bool = True

    def step(self, step: Step) -> Step:
        from .saved_tensors import SavedOnCpu

        return SavedOnCpu(step, getattr(step.model, MARK), self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class ActivationOffloading(Offloading):
    """TRL's `OffloadActivations`: activations of 1 KiB and more, no weights and not the head's, on a stream of its own.

    Its parameters are TRL's. Where bitsandbytes is imported it empties the allocator's cache in every step.
    """

    name: ClassVar[str] = "activation_offloading"
    summary: ClassVar[str] = "TRL's OffloadActivations: activations to host memory, on a stream of its own"
    requires: ClassVar[Requires] = Requires(device="cuda", packages={"trl": "pip install trl"})

    use_pin_memory: bool = True
    use_streams: bool = True
    min_offload_size: int = 1024
    max_fwd_stash_size: int = 5

    def step(self, step: Step) -> Step:
        from .saved_tensors import Offloaded, trl_hooks

        return Offloaded(step, trl_hooks(step.model, getattr(step.model, MARK), **asdict(self)))

    def settings(self) -> Settings | None:
        if self != type(self)():  # no trainer takes the parameters
            return None
        return Settings(sft={"activation_offloading": True}, axolotl={"activation_offloading": True})


@dataclass(frozen=True, kw_only=True)
class UnslothCheckpointing(Ablation):
    """unsloth_zoo's `Unsloth_Offloaded_Gradient_Checkpointer` in transformers' layers, without Unsloth's kernels.

    Each layer runs again in backward, and its input waits in host memory. No state of the random numbers is kept: with
    `lora_dropout` its backward would draw other masks than its forward, so it refuses dropout.
    """

    name: ClassVar[str] = "unsloth_checkpointing"
    slot: ClassVar[str] = SLOT
    summary: ClassVar[str] = "Unsloth's checkpointing: each layer's input waits in host memory"
    global_patch: ClassVar[bool] = True  # the import of unsloth_zoo replaces a function of transformers
    requires: ClassVar[Requires] = Requires(
        device="cuda", packages=dict.fromkeys(("unsloth_zoo", "unsloth"), "pip install 'lorabench[unsloth]'")
    )
    excludes: ClassVar[Mapping[str, str]] = NO_CAPTURE | {"unsloth": "it brings the same checkpointing itself"}
    recomputes: ClassVar[Recomputed | None] = Recomputed(linears=1, attention=1)

    def patch(self, model: nn.Module) -> int:
        silence_unsloth()
        # The package asks the environment whether unsloth was imported, whose import would patch every model.
        with mock.patch.dict(os.environ, UNSLOTH_IS_PRESENT="1"):
            from unsloth_zoo.gradient_checkpointing import Unsloth_Offloaded_Gradient_Checkpointer

        if any(config.lora_dropout for config in model.peft_config.values()):  # type: ignore[union-attr,operator]
            raise Unsupported(
                "unsloth_checkpointing draws other dropout masks in backward than in forward; give it lora_dropout=0"
            )
        layers = enable(model, use_reentrant=True)
        for layer in layers:
            layer._gradient_checkpointing_func = Unsloth_Offloaded_Gradient_Checkpointer.apply
        return len(layers)

    def audit(self, evidence: Evidence) -> int:
        check_ran_again(evidence)
        return super().audit(evidence)

    def settings(self) -> Settings:
        return Settings(note="unsloth's get_peft_model(use_gradient_checkpointing='unsloth') has it")
