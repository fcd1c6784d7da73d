"""What `lorakernels.apply` gives each decoder family of transformers: measured on small models, as the table of
kernels/README.md.

    python tests/lorakernels/family_table.py          # writes the table anew (a minute on one core)

`test_families.py` holds each of its rows against what it measures.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lorakernels
import transformers
from family_models import FAMILIES, build, step
from lorakernels.model.lora_modules import is_lora
from tiny_models import worst

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "kernels/README.md"
BEGIN, END = "<!-- families: python tests/lorakernels/family_table.py -->", "<!-- /families -->"
PARTS = ("qkv", "o", "rope", "mlp", "rms_norm", "linear_cross_entropy", "linear")
HEAD = [
    "family",
    "whole layers",
    "q, k, v",
    "o",
    "rope",
    "MLP",
    "RMSNorm",
    "loss",
    "linears alone",
    "LoRA sites",
    "left",
]
LOSS, GRADIENT = 1e-5, 1e-3  # of the loss, and of a gradient's largest entry: float32 sums in another order


class CannotBuild(Exception):
    """Why there is no small model of a family that plain PEFT trains."""


def measure(family: str) -> list[str]:
    """The cells of a family's row. Raises CannotBuild, and AssertionError where a loss or a gradient is not PEFT's, or
    a forward of training was left although `apply` had changed the module."""
    try:
        model = build(family)
        loss, gradients = step(model)
    except Exception as error:
        raise CannotBuild(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:100]}") from error
    report = lorakernels.apply(model)
    got, got_gradients = step(model)
    assert abs(got - loss) <= LOSS * abs(loss), (family, got, loss)
    assert worst(got_gradients, gradients) < GRADIENT, (family, worst(got_gradients, gradients))
    empty = {key for key in report.forwards.left if "no rows" in key[1]}
    assert set(report.forwards.left) == empty, (family, report.forwards)
    return row(family, model, report)


def row(family: str, model: Any, report: lorakernels.Report) -> list[str]:
    """The cells: how many modules got which part, of how many LoRA linears, and which parts were left."""
    whole = sum({"qkv", "rms_norm"} <= set(change.parts) for change in report.changed)
    counts = report.counts
    adapted = {n: m for n, m in model.named_modules() if is_lora(m) and not n.endswith(".base_layer")}
    fused = sum(in_buffer(m) for m in adapted.values())
    left = ", ".join(sorted({entry.part for entry in report.left}))
    numbers = [whole, *(counts.get(part, 0) for part in PARTS)]
    return [family, *(str(n or "") for n in numbers), f"{fused} of {len(adapted)}", left]


def in_buffer(module: Any) -> bool:
    """Whether a LoRA layer's frozen weight lies in one of our buffers, beside the adapter's columns."""
    weight = getattr(module.base_layer, "weight", None)
    return weight is not None and weight.untyped_storage().nbytes() > weight.nbytes


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rows_of_readme() -> dict[str, str]:
    """The lines of the table as they stand in kernels/README.md, by family."""
    text = README.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [entry for entry in text.splitlines() if entry.startswith("| ")][1:]
    return {entry.split("|")[1].strip(): entry for entry in lines}


def write() -> None:
    """Measures every family and writes the table between its markers."""
    lines, missing = [line(HEAD), "|" + "---|" * len(HEAD)], []
    for family in FAMILIES:
        try:
            lines.append(line(measure(family)))
        except CannotBuild as reason:
            missing.append(family)
            print(reason)
    count = len(lines) - 2
    said = (
        f"{count} of {len(FAMILIES)} families of transformers {transformers.__version__}. No small model was built of "
        f"{', '.join(missing)}."
    )
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text("\n".join([before + BEGIN, "", said, "", *lines, "", END + after]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write()
