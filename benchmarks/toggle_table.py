"""The table of docs/toggles.md: every toggle that this project registers, from the registry.

    python benchmarks/toggle_table.py            # writes it into the page
    python benchmarks/toggle_table.py --print    # shows it

A toggle of another package is not on the page, whatever is installed here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lorabench.contract.ablation import Ablation, Requires
from lorabench.plan.registry import ablation_class, registered
from lorabench.report.tables import md, md_table

sys.path.insert(0, str(Path(__file__).parent))
import markers

PAGE = Path(__file__).resolve().parents[1] / "docs/toggles.md"
OURS = "lorabench_ablations."
# Where more stands of a toggle: by its name, else by its slot. Seen from docs/.
PAGES = {
    "attention": "attention.md",
    "batch_size": "batch-size.md",
    "batching": "packing.md",
    "checkpointing": "checkpointing.md",
    "adapter_dtype": "toggles.md#adapters-in-the-compute-dtype",
    "capture": "toggles.md#captured-and-compiled-steps",
    "compilation": "toggles.md#captured-and-compiled-steps",
    "fused_kernels": "methodology.md#peers",
    "lora_kernels": "../kernels/README.md",
    "fp8_base": "../kernels/README.md#fp8",
    "generation": "evaluation.md",
    "text_metrics": "evaluation.md",
    "jobs": "several-adapters.md",
    "scheduler": "several-adapters.md#who-shares-a-micro-batch",
    "limit": "methodology.md#the-limit",
    "loading": "toggles.md#frozen-weights-in-few-bits",
    "nf4_base": "toggles.md#weights-in-4-bits",
    "base_precision": "toggles.md#products-in-another-precision",
    "float32_matmul": "toggles.md#products-in-another-precision",
    "weight_placement": "toggles.md#long-context",
    "tiled_mlp": "toggles.md#long-context",
    "tiled_loss": "toggles.md#long-context",
    "transformers_loss": "toggles.md#long-context",
    "trl_fused_lm_head": "toggles.md#long-context",
    "liger_fused_linear_cross_entropy": "toggles.md#long-context",
    "cut_cross_entropy": "toggles.md#long-context",
    "gradient_accumulation": "toggles.md#smaller-ones",
    "embedding_noise": "toggles.md#smaller-ones",
    "loraplus": "toggles.md#smaller-ones",
    "torchao_adamw_8bit": "toggles.md#smaller-ones",
    "quantizing": "loading.md",
    "reading": "loading.md",
    "lora_linear": "methodology.md#single-operations",
    "loss": "toggles.md#parts-of-our-kernels",
    "mlp": "toggles.md#parts-of-our-kernels",
    "norm": "toggles.md#parts-of-our-kernels",
    "o": "toggles.md#parts-of-our-kernels",
    "qkv": "toggles.md#parts-of-our-kernels",
    "rope": "toggles.md#parts-of-our-kernels",
    "optimizer": "optimizers.md",
    "parallel": "several-gpus.md",
    **dict.fromkeys(
        ("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_multi_adapter"), "pipelines.md"
    ),
}


def names() -> list[str]:
    """The toggles of this project, those of a slot together."""
    own = [name for name, point in registered().items() if point.value.startswith(OURS)]
    return sorted(own, key=lambda name: (ablation_class(name).slot, name))


def table() -> str:
    heads = ["toggle", "slot", "what it does", "needs", "more in"]
    rows = [row(ablation_class(name)) for name in names()]
    return md_table(heads, rows)


def row(toggle: type[Ablation]) -> list[str]:
    page = PAGES.get(toggle.name) or PAGES[toggle.slot]
    file, _, anchor = page.partition("#")
    title = "kernels" if file.startswith("..") else Path(file).stem
    link = f"#{anchor}" if file == PAGE.name else page
    return [
        f"`{toggle.name}`", f"`{toggle.slot}`", md(toggle.summary), md(needs(toggle.requires)),
        f"[{title if file != PAGE.name else 'below'}]({link})",
    ]  # fmt: skip


def needs(requires: Requires) -> str:
    """The device and the packages, in words. Several packages that one command installs are one."""
    device = {"cuda": "a GPU", "cpu": "a CPU"}.get(requires.device or "", "")
    if device and requires.capability:
        device += f" of capability {'.'.join(map(str, requires.capability))} or newer"
    commands = dict.fromkeys(requires.packages.values())
    return "; ".join(filter(None, (device, *commands))) or "nothing"


def tables() -> dict[str, str]:
    return {"toggles": table()}


if __name__ == "__main__":
    sys.exit(markers.main(__doc__, PAGE, tables))
