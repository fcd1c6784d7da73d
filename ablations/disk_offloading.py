"""Slot `checkpointing`, on the disk: each layer runs again in backward, and its input waits in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.work import Recomputed

from .checkpointing import MARK, NO_CAPTURE, SLOT, check_ran_again, enable, ran_again

if TYPE_CHECKING:
    from torch import nn

IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True)
class DiskOffloading(Ablation):
    """torch's checkpointing of each decoder layer, whose input is written to a file behind the forward and read one
    layer ahead of the backward. The state of the random numbers is kept, so gradients are plain checkpointing's bit
    for bit.

    Axolotl's `activation_offloading: disk` would be this. Its files are pickles and it keeps no such state, so this one
    is ours.
    """

    name: ClassVar[str] = "disk_offloading"
    slot: ClassVar[str] = SLOT
    summary: ClassVar[str] = "compute each decoder layer again in backward, its input waits in a file on the disk"
    excludes: ClassVar[Mapping[str, str]] = NO_CAPTURE
    recomputes: ClassVar[Recomputed | None] = Recomputed(linears=1, attention=1)

    def patch(self, model: nn.Module) -> int:
        from .tensor_file import TensorFile

        file = TensorFile(next(model.parameters()).device)
        if (kind := file.filesystem()) in IN_MEMORY:
            raise Unsupported(f"{file.folder} lies in memory ({kind}); let TMPDIR name a folder on a disk")
        setattr(model, MARK, file)
        layers = enable(model, use_reentrant=False)
        for layer in layers:
            layer._gradient_checkpointing_func = file.checkpoint
        return len(layers)

    def audit(self, evidence: Evidence) -> int:
        file = getattr(evidence.arm.model, MARK)
        if not file.bytes_out or not file.bytes_back:
            raise NotApplied(f"{file.bytes_out} bytes went to the disk and {file.bytes_back} came back")
        check_ran_again(evidence)
        return super().audit(evidence)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        file = getattr(evidence.arm.model, MARK)
        return {
            self.name: {
                "layers_run_again": ran_again(evidence), "tensors_moved": file.tensors, "bytes_out": file.bytes_out,
                "bytes_back": file.bytes_back, "file_bytes": file.size, "filesystem": file.filesystem(),
            }
        }  # fmt: skip
