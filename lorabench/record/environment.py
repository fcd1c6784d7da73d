"""environment.json: where and with what the records were measured. A session a run.

What the reports compute with is checked; a session may say more, and a field that it does not have is unknown.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Loose(BaseModel):
    """Known fields have their types, numbers are numbers and not words; other fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class SeenMachine(Loose):
    """What a session says of its machine (contract/machine.py), older lorabenches' included."""

    device: str | None = None
    name: str | None = None
    capability: list[int] | None = None
    gpus: int | None = None
    gpu: dict[str, Any] | None = None
    driver: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    os: str | None = None
    python: str | None = None
    packages: dict[str, str] | None = None
    native_bfloat16: bool | None = None


class Link(Loose):
    """A point of a link curve (run/links.py): what a rank of `ranks` gives (`bytes`), the slowest rank's time, and the
    bus bandwidth."""

    collective: str
    ranks: int
    bytes: int
    ms: float
    gbs: float  # 10⁹ bytes a second


class Ceilings(Loose):
    gemm_tflops: dict[str, float] | None = None  # TFLOP/s of a square GEMM by dtype
    copy_gbs: float | None = None  # GB/s of a copy
    links: list[Link] | None = None  # where arms had several ranks
    no_links: str | None = None  # why their curve is not there


class SessionEntry(Loose):
    """One run. `id` is what its records name."""

    id: str
    started: str | None = None
    command: list[str] | None = None
    lorabench: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    allocator: str | None = None
    workers: str | None = None
    wall_s: float | None = None
    exit_code: int | None = None
    machine: SeenMachine | None = None
    ceilings: Ceilings | None = None
    node: dict[str, str] | None = None


class Environment(Loose):
    """The whole file."""

    sessions: list[SessionEntry]
