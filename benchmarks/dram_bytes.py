"""DRAM bytes that one LoRA linear moves, forward and backward, counted by Nsight Compute, beside LoRAFusion's figures.

    ncu --profile-from-start off --clock-control none --print-units base --csv --log-file dram.csv \\
        --metrics dram__bytes_read.sum,dram__bytes_write.sum python benchmarks/dram_bytes.py run
    python benchmarks/dram_bytes.py table dram.csv              # the table
    python benchmarks/dram_bytes.py kernels dram.csv            # every kernel of every arm
    python benchmarks/dram_bytes.py csv dram.csv > results/h200/dram_bytes/dram_bytes.csv   # what claims stand beside

The arms are those of suite=lorafusion_kernels, without the graph capture. ncu empties the caches before every kernel
(--cache-control all, its default, and LoRAFusion's), so what one kernel leaves in L2 for the next is not to be seen
here: the figures are somewhat above what a step moves, for every arm.

`run` profiles one forward and backward of each arm, warm, and launches a marker (torch.cuda._sleep) before each phase,
by which the table tells the phases apart.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

HIDDEN, TOKENS = (4096, 5120, 8192), 8192
DROPOUT = (0.1, 0.0)
R, BYTES = 16, 2  # of the adapters, and of a bfloat16
ARMS = ("torch LoRA", "bare_linear", "lora_addmm", "lora_kernels")  # the reference, then the suite's toggles
PHASES = ("forward", "backward")
MARKER = "spin_kernel"  # of torch.cuda._sleep
PREFIX = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}


class Segment(NamedTuple):
    """One phase of one arm of one linear."""

    hidden: int
    dropout: float
    arm: str
    phase: str


class Kernel(NamedTuple):
    """One launch, and the bytes that it read from and wrote to DRAM."""

    name: str
    read: float
    written: float


def model(hidden: int, dropout: float) -> str:
    """The name that the suite's records have."""
    return f"linear-{hidden}x{hidden}" + (f"(lora_dropout={dropout})" if dropout else "")


def segments() -> list[Segment]:
    """In the order in which `run` launches them."""
    return [Segment(h, p, arm, phase) for h in HIDDEN for p in DROPOUT for arm in ARMS for phase in PHASES]


# ---- under ncu -------------------------------------------------------------------------------------------------------
def run() -> None:
    import torch

    for hidden in HIDDEN:
        for dropout in DROPOUT:
            for arm in arms(hidden, TOKENS, dropout, torch.device("cuda")):
                profile(arm)


def arms(hidden: int, tokens: int, dropout: float, device):
    """The suite's arms of one linear, built one after the other."""
    import torch

    from lorabench.contract.kind import kind
    from lorabench.measure.kind import request_of
    from lorabench.measure.machine import describe
    from lorabench.plan.compose import load_config, plan

    models = f"models=[{{linear-{hidden}x{hidden}@1x{tokens}: {{lora_dropout: {dropout}}}}}]"
    cells = plan(load_config(["suite=lorafusion_kernels", "reference=linear", models]), device.type).cells
    dtype = getattr(torch, describe().dtype(cells[0].model.dtype))
    names = tuple(cell.toggles[0].name if cell.toggles else ARMS[0] for cell in cells)
    if names != ARMS:
        raise RuntimeError(f"the suite has the arms {names}, expected {ARMS}")
    for name, cell in zip(names, cells, strict=True):
        yield replace(kind(cell.kind).build(request_of(cell, "candidate", dtype, device)), name=name)


def profile(arm) -> None:
    """One step between profiler marks, after three that let every form be tuned and compiled."""
    import torch

    from lorabench.measure.trial import run_trial

    for _ in range(3):
        run_trial(arm)
    arm.step.clear()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    out = arm.step.forward(arm.step.batches[0])
    torch.cuda._sleep(1)
    arm.step.backward(out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---- what it wrote ---------------------------------------------------------------------------------------------------
def read(lines: Iterable[str]) -> dict[Segment, list[Kernel]]:
    """ncu's CSV (a row a metric) to the kernels of each segment. Raises ValueError where it is not `run`'s output."""
    rows = list(lines)
    start = next((i for i, line in enumerate(rows) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('no line begins with "ID": this is not what ncu --csv writes')
    found: dict[int, dict[str, float]] = {}
    names: dict[int, str] = {}
    for row in csv.DictReader(line for line in rows[start:] if line.startswith('"')):
        launch = int(row["ID"])
        names[launch] = row["Kernel Name"]
        found.setdefault(launch, {})[row["Metric Name"]] = in_bytes(row["Metric Value"], row["Metric Unit"])
    parts: list[list[Kernel]] = []
    for launch in sorted(found):
        if MARKER in names[launch]:
            parts.append([])
            continue
        if not parts:
            raise ValueError(f"{names[launch]} ran before the first marker ({MARKER})")
        values = found[launch]
        parts[-1].append(Kernel(names[launch], values["dram__bytes_read.sum"], values["dram__bytes_write.sum"]))
    if len(parts) != len(segments()):
        raise ValueError(f"{len(parts)} phases are marked, {len(segments())} expected: the run did not end")
    return dict(zip(segments(), parts, strict=True))


def in_bytes(value: str, unit: str) -> float:
    """`1,234.5` and `Mbyte` -> bytes; ncu's prefixes are decimal."""
    match = re.fullmatch(r"([KMG]?)byte", unit)
    if not match:
        raise ValueError(f"unit {unit!r}: expected byte, Kbyte, Mbyte or Gbyte")
    return float(value.replace(",", "")) * PREFIX[match[1]]


def published() -> dict[str, float]:
    """LoRAFusion's saving in percent by model, from the claims."""
    from lorabench.report.claims import load_claims

    claims = next(s.claims for s in load_claims() if s.id == "lorafusion_kernels")
    return {str(c.model): c.low for c in claims if c.quantity == "memory_traffic_saved_pct"}


def table(found: dict[Segment, list[Kernel]]) -> list[str]:
    """Markdown: an arm a row, GB (10^9 bytes) read and written, forward and both, and against torch LoRA."""
    head = "| linear, r 16, 8192 tokens | arm | forward: read + written, GB | against torch LoRA |"
    head += " forward + backward: read + written, GB | against torch LoRA | published, LoRAFusion on an H100 |"
    lines = [head, "|" + " --- |" * 7]
    theirs = published()
    for hidden in HIDDEN:
        for dropout in DROPOUT:
            moved = {arm: [total(found, hidden, dropout, arm, PHASES[: n + 1]) for n in range(2)] for arm in ARMS}
            for arm in ARMS:
                cells = [f"{r / 1e9:.3f} + {w / 1e9:.3f} | {change((r, w), b)}" for (r, w), b in
                         zip(moved[arm], moved[ARMS[0]], strict=True)]  # fmt: skip
                saved = theirs.get(model(hidden, dropout)) if arm == "lora_kernels" else None
                words = f"{hidden} → {hidden}, dropout {dropout:g}"
                lines.append(f"| {words} | {arm} | {' | '.join(cells)} | {f'−{saved} %' if saved else ''} |")
    return lines


def tidy(found: dict[Segment, list[Kernel]]) -> list[str]:
    """CSV: an arm of a linear a row, GB (10^9 bytes) read plus written, and what is saved against torch LoRA."""
    lines = ["hidden,dropout,arm,forward_gb,total_gb,saved_pct"]
    for hidden in HIDDEN:
        for dropout in DROPOUT:
            base = sum(total(found, hidden, dropout, ARMS[0], PHASES))
            for arm in ARMS:
                forward, both = (sum(total(found, hidden, dropout, arm, PHASES[: n + 1])) for n in range(2))
                saved = 100 * (1 - both / base)
                lines.append(f"{hidden},{dropout:g},{arm},{forward / 1e9:.4f},{both / 1e9:.4f},{saved:.2f}")
    return lines


def least(hidden: int, phase: str) -> int:
    """Bytes of one phase of a hidden → hidden linear in which each operand is read once and each result written once:
    X, W, A, B → Y; or dY, X, W, A, B → dX, dA, dB. In bfloat16, adapters of rank R; nothing is kept in between."""
    activation, weight, adapters = TOKENS * hidden, hidden * hidden, 2 * R * hidden
    forward = 2 * activation + weight + adapters
    return BYTES * (forward if phase == PHASES[0] else forward + activation + adapters)


def total(found: dict[Segment, list[Kernel]], hidden: int, dropout: float, arm: str, phases: Sequence[str]):
    """(bytes read, bytes written) in these phases."""
    kernels = [k for phase in phases for k in found[Segment(hidden, dropout, arm, phase)]]
    return sum(k.read for k in kernels), sum(k.written for k in kernels)


def change(ours: tuple[float, float], base: tuple[float, float]) -> str:
    return "" if ours == base else f"{100 * (sum(ours) / sum(base) - 1):+.1f} %".replace("-", "−")


def kernels(found: dict[Segment, list[Kernel]]) -> list[str]:
    """A line a launch, in MB."""
    lines = []
    for segment, launched in found.items():
        lines.append(f"{model(segment.hidden, segment.dropout)} {segment.arm} {segment.phase}")
        lines += [f"  {k.read / 1e6:9.1f} {k.written / 1e6:9.1f}  {k.name[:100]}" for k in launched]
    return lines


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["run"]:
        run()
        return 0
    shows = {"table": table, "kernels": kernels, "csv": tidy}
    if len(arguments) != 2 or arguments[0] not in shows:
        print(__doc__)
        return 2
    try:
        with open(arguments[1], encoding="utf-8") as file:
            print("\n".join(shows[arguments[0]](read(file))))
    except (OSError, ValueError, KeyError) as error:
        print(f"dram_bytes: {arguments[1]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
