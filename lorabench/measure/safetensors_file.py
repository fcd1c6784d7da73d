"""Where each tensor of a safetensors file lies: the format's header is eight bytes of length and as many of JSON, and
behind it come the tensors' bytes without a gap (https://huggingface.co/docs/safetensors)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LENGTH = 8  # bytes that say how long the header is
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `size` bytes from `offset` on, counted from the file's beginning."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    def of(self, buffer: Tensor, begin: int) -> Tensor:
        """The tensor as a view of bytes that hold it from `begin` on, which its dtype's size divides."""
        return buffer[begin : begin + self.size].view(self.dtype).view(self.shape)


def entries(file: Path) -> list[Entry]:
    """In the order in which they lie. Raises ValueError for what is no safetensors file."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(LENGTH), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file: its header would be longer than the file")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    found = [
        Entry(name, DTYPES[said["dtype"]], tuple(said["shape"]), LENGTH + length + said["data_offsets"][0],
              said["data_offsets"][1] - said["data_offsets"][0])
        for name, said in header.items()
    ]  # fmt: skip
    return sorted(found, key=lambda entry: (entry.offset, entry.size))


def aligned(found: Sequence[Entry], boundary: int) -> tuple[list[int], int]:
    """Where the tensors would begin one after the other, each on a multiple of `boundary`; and how many bytes that
    takes. In the file an odd number of bytes (a quantization's state) leaves all that follows it on odd addresses."""
    begins, end = [], 0
    for entry in found:
        begins.append(-(-end // boundary) * boundary)
        end = begins[-1] + entry.size
    return begins, end
