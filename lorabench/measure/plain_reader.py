"""How safetensors files are read without any toggle: the reference of such cells, and what a toggle builds on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lorabench.contract.ablation import WeightsReader

if TYPE_CHECKING:  # a toggle's reader is a subclass, and a list of toggles does without torch
    import torch
    from torch import Tensor


class PlainReader(WeightsReader):
    """File after file into host memory, then tensor after tensor to the device."""

    def read(self, files: Sequence[Path]) -> list[dict[str, Tensor]]:
        return [read_file(file) for file in files]

    def place(self, held: list[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
        return {name: tensor.to(device) for shard in held for name, tensor in shard.items()}


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, really read: `load_file` maps it, and reads when a tensor is first used."""
    from safetensors.torch import load

    return load(file.read_bytes())
