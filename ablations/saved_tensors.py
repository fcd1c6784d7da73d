"""Saved tensors on their way to host memory and back, counted. `checkpointing.py` and `offloading.py` have the toggles.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lorabench.contract.ablation import NotApplied
from lorabench.contract.arm import inside
from lorabench.contract.batch import Batch
from lorabench.contract.step import Step, Wrapped


@dataclass
class Moved:
    """What autograd saved and a hook took to host memory, of all steps so far. `weight_bytes`: the part that is frozen
    weights or views of them, which lie on the device all the same."""

    weights: set[int] = field(default_factory=set)  # addresses of the parameters' storages
    tensors: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    weight_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> Moved:
        return cls({part.untyped_storage().data_ptr() for p in model.parameters() for part in inside(p)})

    def went(self, tensor: Tensor) -> None:
        self.tensors += 1
        self.bytes_out += tensor.nbytes
        if tensor.untyped_storage().data_ptr() in self.weights:
            self.weight_bytes += tensor.nbytes

    def check(self) -> int:
        """How many tensors; raises NotApplied where nothing went there, or nothing came back."""
        if not self.bytes_out or not self.bytes_back:
            raise NotApplied(f"{self.bytes_out} bytes went to host memory and {self.bytes_back} came back")
        return self.tensors

    def told(self) -> dict[str, int]:
        """For a record, where one step has been."""
        return {
            "tensors_moved": self.tensors, "bytes_out": self.bytes_out, "bytes_back": self.bytes_back,
            "bytes_out_of_weights": self.weight_bytes,
        }  # fmt: skip


def counted(hooks: saved_tensors_hooks, moved: Moved, is_away: Callable[[Any], bool]) -> saved_tensors_hooks:
    """The same hooks, which note in `moved` each tensor that they take away and bring back. `is_away`: whether a tensor
    is in host memory, of what its pack hook returned."""
    pack, unpack = hooks.pack_hook, hooks.unpack_hook

    def noted_pack(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if is_away(packed):
            moved.went(tensor)
        return packed

    def noted_unpack(packed: Any) -> Tensor:
        away, tensor = is_away(packed), unpack(packed)
        moved.bytes_back += away * tensor.nbytes
        return tensor

    hooks.pack_hook, hooks.unpack_hook = noted_pack, noted_unpack
    return hooks


def saved_on_cpu(moved: Moved, pin_memory: bool) -> saved_tensors_hooks:
    """torch's `save_on_cpu`, counted."""
    return counted(save_on_cpu(pin_memory=pin_memory), moved, lambda packed: True)


def offloaded_checkpoint(function: Callable[..., Any], *args: Any, moved: Moved, **kwargs: Any) -> Any:
    """torch's `checkpoint`, whose inputs wait in pinned host memory."""
    with saved_on_cpu(moved, pin_memory=True):
        return checkpoint(function, *args, **kwargs)


def offload_inputs(layers: Iterable[Any], moved: Moved, use_reentrant: bool) -> None:
    """Of layers with transformers' checkpointing. Its own `offload=True` does the same, and cannot be asked how much
    it moved."""
    for layer in layers:
        layer._gradient_checkpointing_func = partial(offloaded_checkpoint, moved=moved, use_reentrant=use_reentrant)


class SavedOnCpu(Wrapped):
    """What the forward saves goes to host memory."""

    def __init__(self, inner: Step, moved: Moved, pin_memory: bool) -> None:
        super().__init__(inner)
        self.hooks = saved_on_cpu(moved, pin_memory)

    def forward(self, batch: Batch) -> Tensor:
        with self.hooks:
            return self.inner.forward(batch)


class Offloaded(Wrapped):
    """Under TRL's hooks from the forward's beginning to the backward's end, as SFTTrainer's training step is."""

    def __init__(self, inner: Step, hooks: saved_tensors_hooks) -> None:
        super().__init__(inner)
        self.hooks = hooks

    def forward(self, batch: Batch) -> Tensor:
        self.hooks.__enter__()
        try:
            return self.inner.forward(batch)
        except BaseException as error:
            self.hooks.__exit__(type(error), error, error.__traceback__)
            raise

    def backward(self, loss: Tensor) -> None:
        try:
            self.inner.backward(loss)
        finally:
            self.hooks.__exit__(None, None, None)


def trl_hooks(model: nn.Module, moved: Moved, **options: Any) -> Any:
    """TRL's `OffloadActivations` for this model, counted. It hooks into the head, whose activations stay."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    hooks = get_act_offloading_ctx_manager(model, **options)
    return counted(hooks, moved, lambda number: hooks.tracker[number][1])
