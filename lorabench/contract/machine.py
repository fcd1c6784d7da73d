"""The machine that measures, as a type. `measure/machine.py` looks at the real one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Machine(BaseModel):
    """The machine that measures. What a CPU does not have is None."""

    device: Literal["cuda", "cpu"]
    name: str  # "NVIDIA H200", or the processor's name
    capability: tuple[int, int] | None = None
    gpus: int = 0
    gpu: dict[str, Any] | None = None  # uuid, memory, clocks, power cap
    driver: str | None = None
    cpu: str
    cores: int
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    native_bfloat16: bool

    def dtype(self, wanted: str) -> str:
        """`auto` made concrete: bfloat16 where the device computes in it natively, else float32 (a processor without
        bfloat16 instructions is some 20 times slower in it than in float32)."""
        if wanted != "auto":
            return wanted
        return "bfloat16" if self.native_bfloat16 else "float32"
