"""How fast the GPUs of this machine (without one: processes of its CPU) talk, by collective and bytes.

    python -m lorabench.log_command FOLDER/log.txt python benchmarks/link_curve.py FOLDER [RANKS]

RANKS is all GPUs, or 2. link_curve.csv and .md in FOLDER have the slowest rank's time, and the bus bandwidth as NCCL's
tests have it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch

from lorabench.run.links import SIZES, curve


def main(folder: Path, ranks: int) -> None:
    cuda = torch.cuda.is_available()
    found = curve("cuda" if cuda else "cpu", ranks, SIZES if cuda else SIZES[:7])
    table = pd.DataFrame([link.model_dump() for link in found]).sort_values(["collective", "bytes"])
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "link_curve.csv", index=False, float_format="%.4g")
    wide = table.pivot(index="bytes", columns="collective", values=["ms", "gbs"])
    lines = [f"{ranks} ranks over {'NCCL' if cuda else 'gloo'}: milliseconds, and GB/s of bus bandwidth.", ""]
    names = sorted({*table["collective"]})
    lines += ["| KiB | " + " | ".join(names) + " |", "| ---: " * (1 + len(names)) + "|"]
    for size, row in wide.iterrows():
        cells = (f"{row['ms', name]:.3f} ({row['gbs', name]:.1f})" for name in names)
        lines.append(f"| {size // 1024} | " + " | ".join(cells) + " |")  # type: ignore[operator]
    (folder / "link_curve.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else max(2, torch.cuda.device_count()))
