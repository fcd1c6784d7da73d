"""The tables of docs/guide.md: Axolotl's guide entry by entry, its wording beside what was measured, and what fits.

    python benchmarks/guide_table.py            # writes them into the page
    python benchmarks/guide_table.py --print    # shows them

The wording is in benchmarks/guide.yaml, the numbers are those of results/h200 and results/h100. What has no row is "not
measured yet".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import lorabench
from lorabench.record.stats import without_figure
from lorabench.report.tables import md

sys.path.insert(0, str(Path(__file__).parent))
import markers

ROOT = Path(__file__).resolve().parents[1]
PAGE, ENTRIES, RESULTS = ROOT / "docs/guide.md", Path(__file__).parent / "guide.yaml", ROOT / "results"
GPUS = ("h200", "h100")  # folders below results/, in the order in which their rows are taken
MODELS = {"llama-3.1-8b": "8B", "smollm2-135m": "135M"}
# PEFT as it comes, and in the compute dtype, and ours; a row over the first of them is taken where there are several.
REFERENCES = {
    "sdpa + adamw_foreach + padding": "",
    "sdpa + adamw_foreach + padding + adapters_in_compute_dtype": ", over adapters in the compute dtype",
    "sdpa + adamw_fused + padding + lora_kernels + adapters_in_compute_dtype": ", over lora_kernels",
}
WORKLOADS = ("alpaca", "4x2048", "2x2048")  # of suite=guide, and of the published sweeps
COMMON = "adapters_in_compute_dtype"  # which a published stack has wherever it can
NOTHING = "not measured yet"
SIZES_GB = (24, 48, 80, 141)
KEPT_GB = 1.0  # of a GPU for its context and what libraries allocate
EMPTY = ["kind", "model", "workload", "reference", "toggles", "status", "candidate", "total_candidate_ms"]
NOTICED = 1.0  # percent of the peak


def measured(results: Path = RESULTS) -> pd.DataFrame:
    """Every published training row of the two models on these GPUs, with its GPU."""
    frames = []
    for gpu in GPUS:
        for file in sorted((results / gpu).rglob("records.jsonl")):
            frames.append(lorabench.load_results(file.parent).assign(gpu=gpu))
    found = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=EMPTY)
    return found[(found.kind == "train") & found.model.isin(list(MODELS))]


def row_of(found: pd.DataFrame, model: str, toggles: str) -> Any:
    """The row that stands for these toggles, with or without adapters in the compute dtype: one whose time is a figure
    before others, by GPU, a timed one before one without times, by what is in it, by reference and workload, the last
    published. None where there is none."""
    wanted = set(toggles.split(" + "))
    rows = found[(found.model == model) & found.reference.isin(list(REFERENCES)) & found.workload.isin(WORKLOADS)]
    sets = rows.toggles.map(lambda label: set(label.split(" + ")))
    rows = rows[sets.map(lambda own: own in (wanted, wanted | {COMMON})).astype(bool)]
    if not len(rows):
        return None
    order = rows.assign(
        a=rows.status.ne("ok") | rows.verdict.map(without_figure), b=rows.gpu.map(GPUS.index), c=rows.status.ne("ok"),
        d=rows.toggles.str.contains(COMMON), e=rows.reference.map(list(REFERENCES).index),
        f=rows.workload.map(WORKLOADS.index),
    ).sort_values([*"abcdef", "session"], ascending=[True] * 6 + [False])  # fmt: skip
    return order.iloc[0]


def said(row: Any) -> str:
    """What a row came to, in a cell."""
    if row is None:
        return NOTHING
    if row.status != "ok":
        return f"{row.status.replace('_', ' ')}: {str(row.reason).partition('. ')[0]} ({row.gpu.upper()})"
    low = REFERENCES[row.reference]
    low += ", adapters in the compute dtype" if COMMON in row.toggles else ""
    peaks = f"{row.reference_peak_gib:.1f} → {row.candidate_peak_gib:.1f} GiB"
    interval = f"[{row.total_low:.2f}, {row.total_high:.2f}]"
    bare = without_figure(row.verdict)
    time = f"{row.verdict.partition(',')[0]} {interval}" if bare else f"{row.total_speedup:.2f} × {interval}"
    return f"{time}, {peaks} ({row.workload}{low}, {row.gpu.upper()})"


def verdict(row: Any, gains: list[str]) -> str:
    """The guide's promise held to a row: as said, not noticed, not true on this GPU, or unclear; '' where nothing was
    promised or measured."""
    if row is None or row.status != "ok":
        return ""
    words = []
    if "time" in gains:
        word = {"faster": "as said", "slower": "not true on this GPU", "same": "not noticed"}.get(
            row.verdict, "unclear"
        )
        words.append(f"time: {word}")
    if "memory" in gains:
        saved = row.memory_saved_pct
        word = "as said" if saved > NOTICED else "not true on this GPU" if saved < -NOTICED else "not noticed"
        words.append(f"memory: {word}")
    return "; ".join(words)


def table(section: dict[str, Any], found: pd.DataFrame) -> str:
    lines = ["| the guide's entry | its words | toggle | 8B | 135M |", "|---|---|---|---|---|"]
    for entry in section["entries"]:
        title, says = md(entry["title"]), f"“{md(entry['says'])}”"
        for toggles in entry["rows"]:
            cells = []
            for model in MODELS:
                row = row_of(found, model, toggles)
                held = verdict(row, entry["gains"])
                cells.append(md(said(row)) + (f" **{held}**" if held else ""))
            lines.append(f"| {title} | {says} | `{toggles}` | {' | '.join(cells)} |")
            title = says = ""
        if note := entry.get("note"):
            lines.append(f"| {title} | {says} | {md(note)} | | |")
    return "\n".join(lines)


def fits(found: pd.DataFrame) -> str:
    """Of each size of GPU the fastest step of the 8B at 4 × 2048 tokens whose measured peak fits it."""
    lines = ["| a GPU of | the fastest measured step that fits | its time | its peak |", "|---|---|---|---|"]
    rows = found[(found.model == "llama-3.1-8b") & (found.workload == "4x2048") & (found.status == "ok")]
    rows = rows[~rows.candidate.str.contains("no_optimizer") & rows.total_candidate_ms.notna()]
    for size in SIZES_GB:
        room = (size - KEPT_GB) * 1e9 / 2**30
        fitting = rows[rows.candidate_peak_gib <= room].sort_values("total_candidate_ms")
        if len(fitting):
            best = fitting.iloc[0]
            time = f"{best.total_candidate_ms:.0f} ms ({best.gpu.upper()})"
            lines.append(f"| {size} GB | `{best.candidate}` | {time} | {best.candidate_peak_gib:.1f} GiB |")
        else:
            lines.append(f"| {size} GB | {NOTHING} | | |")
    return "\n".join(lines)


def content(found: pd.DataFrame) -> str:
    sections = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    parts = [f"## {s['section']}\n\n{s['advice'].strip()}\n\n{table(s, found)}" for s in sections]
    return "\n\n".join([*parts, f"## What fits\n\n{fits(found)}"])


def tables() -> dict[str, str]:
    return {"guide": content(measured())}


if __name__ == "__main__":
    sys.exit(markers.main(__doc__, PAGE, tables))
