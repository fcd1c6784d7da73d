"""The table of kernels, from a run of the micro-benchmarks: of each group the fastest form of ours, beside the others.

    python -m pytest benchmarks/micro --benchmark-json=micro.json
    python benchmarks/kernel_table.py micro.json [--json kernel_table.json]

Prints Markdown; kernel_table.json has the rows as notebook 3 draws them. docs/micro-benchmarks.md says what is timed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorabench.report.tables import md_table

OTHERS = ("torch", "peft", "liger", "bitsandbytes", "bare")  # forms that are not of this package
HEADINGS = ["kernel", "computes", "least", "µs", "rate", "of the ceiling", "others, µs"]


def rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each group of which it is known what it has to move or to compute at the least."""
    groups = defaultdict(list)
    for one in run["benchmarks"]:
        groups[one["group"]].append(one["extra_info"] | {"us": 1e6 * one["stats"]["median"]})
    made = []
    for group, forms in groups.items():
        ours = [form for form in forms if form["form"] not in OTHERS]
        best = min(ours, key=lambda form: form["us"], default=None)
        if best is None or not (best["least_bytes"] or best["flops"]):
            continue
        kernel, _, what = group.partition(": ")
        computes = what if best["form"] in (None, "ours") else f"{what}, {best['form']}"
        work = {"bytes": best["least_bytes"] or 0, "flops": best["flops"] or 0}
        others = {form["form"]: form["us"] for form in forms if form["form"] in OTHERS}
        shown = {"us": best["us"], "share": best["share_of_ceiling"], "others_us": others}
        made.append({"kernel": kernel, "computes": computes, **work, **shown})
    return made


def cells(row: Mapping[str, Any]) -> list[str]:
    moved, us = row["bytes"], row["us"]
    amount = f"{moved / 2**20:.0f} MiB" if moved else f"{row['flops'] / 1e12:.2f} TFLOP"
    rate = f"{moved / us / 1e3:.0f} GB/s" if moved else f"{row['flops'] / us / 1e6:.0f} TFLOP/s"
    share = "" if row["share"] is None else f"{100 * row['share']:.0f} %"
    others = ", ".join(f"{form} {other:.1f}" for form, other in row["others_us"].items())
    return [f"`{row['kernel']}`", row["computes"], amount, f"{us:.1f}", rate, share, others]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what --benchmark-json or --benchmark-save wrote")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    run = json.loads(options.run.read_text())
    if options.json and run["copy_gbs"] is None:
        parser.error(f"--json: {options.run} is of a CPU, whose limits are not measured; expected a run on a GPU")
    made = rows(run)
    print(md_table(HEADINGS, [cells(row) for row in made]))
    if options.json:
        found = {name: run[name] for name in ("machine", "tokens", "copy_gbs", "tflops")} | {"rows": made}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
