"""The doctor: what this machine can run, and why not the rest.

    python -m lorabench.doctor

It looks at the device, its precision, what else runs on it, the commit and the versions; then at the
optimizations: how many can be had here, and what the others lack, with the command that installs it. `lorabench list`
shows each. Where there are several GPUs it times their links, a line a collective. Nothing is written.
Exit code 0 when the default sweep can run, 1 when something it needs is missing, 2 for an argument: it takes none.
"""

from __future__ import annotations

from lorabench.cli import entry

if __name__ == "__main__":  # as in sweep.py
    entry("doctor")

import os
import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape

from lorabench.contract.machine import Machine
from lorabench.listing import show_lacking
from lorabench.measure.machine import commit, describe, nvml_handle
from lorabench.plan.registry import registered
from lorabench.run.load import disturbing, load_average

MARK = {"ok": "[green]ok", "note": "[yellow]note", "bad": "[red]bad"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: `bad` keeps the default sweep from running, `note` makes its figures weaker."""

    level: Literal["ok", "note", "bad"]
    what: str
    words: str


def findings(machine: Machine) -> Iterator[Finding]:
    """Everything worth knowing before a sweep."""
    if machine.device == "cuda":
        gpu = machine.gpu or {}
        words = f"{machine.name}, {gpu.get('memory_bytes', 0) / 2**30:.0f} GiB, driver {machine.driver}"
        yield Finding("ok", "GPU", words)
        yield from _gpu_findings(machine)
    else:
        yield Finding("note", "GPU", "none: the sweep measures on the CPU; memory is the process's, busy time unknown")
    low = "computes in bfloat16" if machine.native_bfloat16 else "has no bfloat16 instructions: dtype=auto is float32"
    yield Finding("ok" if machine.native_bfloat16 else "note", "precision", f"{machine.name} {low}")
    load = load_average()
    disturbed = disturbing(load, machine)
    words = disturbed.removeprefix("load ") or f"{load:.1f} on {machine.cores} cores"
    yield Finding("note" if disturbed else "ok", "load", words)
    head, dirty = commit()
    words = f"{head[:12]}{', with uncommitted changes' if dirty else ''}" if head else "unknown: not a git checkout"
    yield Finding("note" if dirty or not head else "ok", "commit", words)
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        yield Finding("note", "compiler", "no C++ compiler: torch_compile cannot run on a CPU")
    if not registered():
        yield Finding("bad", "ablations", "none registered: install the project (pip install -e ./kernels -e .)")


def _gpu_findings(machine: Machine) -> Iterator[Finding]:
    nvml = nvml_handle()
    if nvml is None:
        yield Finding("note", "telemetry", "no NVML binding, so no clocks or power: pip install 'lorabench[gpu]'")
        return
    library, handle = nvml
    others = [p.pid for p in library.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid != os.getpid()]
    words = f"other processes on the GPU: {others}" if others else "nothing else on the GPU"
    yield Finding("note" if others else "ok", "neighbours", words)
    if machine.gpus > 1:
        yield Finding("ok", "GPUs", f"{machine.gpus}; a cell uses the first one, with world_size=N and ddp the first N")
        yield from links("cuda", machine.gpus)


def links(device_type: str, ranks: int) -> Iterator[Finding]:
    """How fast the ranks talk, a line a collective, or why they do not."""
    from lorabench.run.links import FEW, curve

    try:
        found = curve(device_type, ranks, FEW[device_type])
    except Exception as error:  # whatever the first collective of a machine ends with
        yield Finding("note", "links", f"{ranks} ranks do not reach each other: {' '.join(str(error).split())[-200:]}")
        return
    for name in dict.fromkeys(point.collective for point in found):
        *small, most = (point for point in found if point.collective == name)
        words = ", ".join(f"{1000 * point.ms:.0f} µs for {point.bytes // 1024} KiB" for point in small)
        bandwidth = f"{most.gbs:.1f} GB/s of bus bandwidth at {most.bytes // 2**20} MiB"
        yield Finding("ok", "links", f"{name} of {ranks} ranks: {words}, {bandwidth}")


def main(arguments: list[str]) -> int:
    parser = ArgumentParser("python -m lorabench.doctor", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    console = Console()
    console.print("looking at this machine …", style="dim")
    machine = describe()
    found = list(findings(machine))
    for finding in found:
        console.print(f"{MARK[finding.level]}[/]  {finding.what}: {escape(finding.words)}", highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    console.print(f"[green]ok[/]  versions: {escape(versions)}", highlight=False)
    show_lacking(console, machine)
    return 1 if any(f.level == "bad" for f in found) else 0
