"""Four tables of docs/several-gpus.md: what of a model fits on 1, 2, 4 and 8 GPUs of 80 and 141 GB, by a memory model,
what that model says of published arms beside their measured peaks, what published arms sent beside the least, and for
how much of a step the stages of published pipelines waited, beside the simulator and LoRAFusion.

    python benchmarks/several_gpus_table.py            # writes them into the page
    python benchmarks/several_gpus_table.py --print    # shows them

Sizes come from each model on the meta device. docs/several-gpus.md has the memory model in words.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorabench.contract.model import ModelSpec
from lorabench.plan.architecture import decoder_layers, skeleton
from lorabench.plan.compose import load_config, plan
from lorabench.record.schema import ArmRecord
from lorabench.record.store import read_arms
from lorabench.report.tables import md_table
from lorabench_ablations.deepspeed import LIVE

sys.path.insert(0, str(Path(__file__).parent))
import markers

PAGE = Path(__file__).resolve().parents[1] / "docs/several-gpus.md"
RESULTS = PAGE.parents[1] / "results"
FOLDERS = ("h200/lorafusion_pipeline*", "h200/several_gpus*")  # whose peaks are held against the memory model
MODELS = ("llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b")
GPUS, MEMORIES_GB = (1, 2, 4, 8), (80, 141)
LOW = 2  # bytes of a number in bfloat16
ADAPTER = 16  # bytes of a trained number: float32, with its gradient and AdamW's two moments
RESERVED = 4e9  # bytes for the context, the libraries' workspaces and NCCL's buffers: assumed, not measured
NF4 = 0.516  # bytes of a weight, its scale included
IN_4_BITS, ZERO, SEQUENCE = "ddp`, `nf4_base", "deepspeed_zero(stage=3)", "ulysses`, `context_parallel"
STRATEGIES = ("ddp", IN_4_BITS, "fsdp2", ZERO, "tensor_parallel", "pipeline", SEQUENCE)


@dataclass(frozen=True)
class Sizes:
    """Of a model. `layer`, `head`, `embedding`: weights; `adapters`: trained numbers; `residual`, `inner`: numbers that
    lorakernels keeps of a token and layer for backward, in the residual stream and inside of attention and MLP."""

    layers: int
    layer: int
    head: int
    embedding: int
    adapters: int
    residual: int
    inner: int

    @property
    def kept(self) -> int:
        """Bytes kept of a token in all layers, nothing recomputed."""
        return LOW * self.layers * (self.residual + self.inner)

    @property
    def checkpointed(self) -> int:
        """Bytes kept of a token where each layer keeps its input alone."""
        return LOW * self.layers * self.residual // 2


def sizes(spec: ModelSpec) -> Sizes:
    """Counted on the meta device; adapters of the rank and on the modules that the model's specification has."""
    from lorabench.measure.flops import decoder

    model = skeleton(spec)
    config, layers = model.config, decoder_layers(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    return Sizes(
        layers=len(layers), layer=sum(p.numel() for p in layers[0].parameters()),
        head=config.vocab_size * config.hidden_size, embedding=config.vocab_size * config.hidden_size,
        adapters=decoder(spec, spec.lora).adapter, residual=2 * config.hidden_size,
        inner=2 * q + 2 * kv + 2 * config.intermediate_size,
    )  # fmt: skip


def static(strategy: str, s: Sizes, n: int, adapter: float = ADAPTER) -> float:
    """Bytes that the fullest rank holds of weights and adapters, of `adapter` bytes a trained number. `fsdp2`: two
    gathered layers, head and embedding come to its part; stage 3 of ZeRO: as many weights as it lets stay, and it
    divides the optimizer's three quarters of an adapter; `pipeline`: its layers and the larger end."""
    whole = LOW * (s.layers * s.layer + s.head + s.embedding)
    ends = LOW * max(s.head, s.embedding)
    weights = {
        "ddp": whole,
        SEQUENCE: whole,
        IN_4_BITS: NF4 * s.layers * s.layer + LOW * (s.head + s.embedding),
        "fsdp2": whole / n + LOW * (2 * s.layer + s.head + s.embedding) * (n > 1),
        ZERO: whole / n + min(whole, LOW * LIVE),
        "tensor_parallel": LOW * ((s.layers * s.layer + s.head) / n + s.embedding),
        "pipeline": LOW * -(-s.layers // n) * s.layer + (ends if n > 1 else 2 * ends),
    }[strategy]
    share = {ZERO: (1 + 3 / n) / 4, "tensor_parallel": 1 / n, "pipeline": 1 / n}.get(strategy, 1)
    return weights + adapter * s.adapters * share


def a_token(strategy: str, s: Sizes, n: int, checkpointed: bool) -> float:
    """Bytes that a token of a micro-batch takes on the fullest rank. Tensor parallelism divides what is inside of a
    layer; a pipeline's first stage holds `n` micro-batches of 1 / n of the layers. With checkpoints one layer at a
    time is whole."""
    split = n if strategy == "tensor_parallel" else 1
    if checkpointed:
        return s.checkpointed + LOW * (s.residual + s.inner / split)
    return LOW * s.layers * (s.residual + s.inner / split)


def tokens(strategy: str, s: Sizes, n: int, memory_gb: int, checkpointed: bool) -> int | None:
    """The most tokens of a micro-batch on one rank, in hundreds; None where the weights alone do not fit. Where ranks
    share a sequence, on all of them."""
    room = memory_gb * 1e9 - RESERVED - static(strategy, s, n)
    rows = n if strategy == SEQUENCE else 1
    return rows * int(room / a_token(strategy, s, n, checkpointed)) // 100 * 100 or None if room > 0 else None


def tables() -> dict[str, str]:
    """By the name of their markers."""
    cells = plan(load_config([f"models=[{','.join(MODELS)}]", "ablations=[]"]), "cuda").cells
    every = {cell.model.name: sizes(cell.model) for cell in cells}
    heads = ["model", "GPUs", "GB each", *(f"`{name}`" for name in STRATEGIES)]
    fits = [
        [name, str(n), str(memory), *(_cell(strategy, s, n, memory) for strategy in STRATEGIES)]
        for name, s in every.items() for n in GPUS for memory in MEMORIES_GB
    ]  # fmt: skip
    held, sent, waited = md_table(HELD, _held(every)), md_table(SENT, _sent()), md_table(WAITED, _waited())
    return {"what fits": md_table(heads, fits), "what was held": held, "what was sent": sent, "what waited": waited}


HELD = ["model", "GPUs", "arm", "tokens", "kept", "predicted GB", "peak GB", "between steps GB", "folder"]


def _held(every: dict[str, Sizes]) -> list[list[str]]:
    """A row for each published arm of which the memory model says something: on lorakernels, or checkpointed. The same
    arm in a later folder has none."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for folder, record in _arms(*FOLDERS):
        memory, label = record.memory, next((t for t in record.toggles if t.startswith(DIVIDING)), "")
        name, kernels = label.partition("(")[0], {"lora_kernels"} & {*record.toggles} or "kernels=True" in label
        checkpointed = "gradient_checkpointing" in record.toggles
        if not (memory and memory.peak and label and (kernels or checkpointed)):
            continue
        notes = record.notes[name]
        n, at_once = notes["world_size"], _tokens(record, notes)
        if n == 1 or "reshard=False" in label:
            continue
        strategy = "pipeline" if name.startswith("pipeline") else name
        adapter = ADAPTER * len(record.jobs or [1]) / (2 if "adapters_in_compute_dtype" in record.toggles else 1)
        s = every[record.model]
        predicted = static(strategy, s, n, adapter) + at_once * a_token(strategy, s, n, checkpointed)
        arm = [*_arm(record, label, n), f"{at_once:,}", "layers' inputs" if checkpointed else "all"]
        found = [f"{number / 1e9:.1f}" for number in (predicted, memory.peak, memory.static or 0)]
        rows.setdefault(tuple(arm), [*arm, *found, _link(folder)])
    return list(rows.values())


SENT = ["model", "GPUs", "arm", "workload", "positions", "sent GB", "least GB", "weights held GB", "folder"]


def _sent() -> list[list[str]]:
    """A row for each arm of several ranks whose collectives were counted: of the rank that sends the most. The same arm
    in a later folder has none."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for folder, record in _arms("*/*"):
        every = {label: record.notes.get(label.partition("(")[0], {}) for label in record.toggles}
        label, notes = next(((t, n) for t, n in every.items() if "sent_bytes" in n), ("", {}))
        if not notes or not record.tokens:
            continue
        positions = record.tokens.real + record.tokens.padded
        arm = [*_arm(record, label, notes["world_size"]), f"`{record.workload}`", f"{positions:,}"]
        counted = (notes["sent_bytes"], notes["least_bytes"], notes["held_bytes"]["weights"])
        most = [max(n) if isinstance(n, list) else n for n in counted]
        rows.setdefault(tuple(arm), [*arm, *(f"{n / 1e9:.3g}" for n in most), _link(folder)])
    return sorted(rows.values())


WAITED = [
    "model", "GPUs", "adapters", "arm", "micro-batches", "by rank, %", "mean %", "simulated %", "LoRAFusion %",
    "folder",
]  # fmt: skip
PUBLISHED = {1: "44.17", 4: "11.09"}  # by the number of adapters; of how many stages its text does not say


def _waited() -> list[list[str]]:
    """A row for each published pipeline of several jobs whose stages were timed, those of one number of adapters beside
    one another. Simulated: of the times that its own stages took."""
    rows = []
    for folder, record in _arms("*/lorafusion_*"):
        label = next((t for t in record.toggles if t.startswith("pipeline_multi_adapter")), "")
        found, jobs = record.said.get("pipeline", {}), len(record.jobs or [1])
        if not label or "bubble_pct" not in found:
            continue
        by_rank = ", ".join(f"{share:.1f}" for share in found["bubble_pct_by_rank"])
        means = (f"{found[name]:.1f}" for name in ("bubble_pct", "predicted_bubble_pct"))
        arm = [record.model, str(record.notes["pipeline_multi_adapter"]["world_size"]), str(jobs), f"`{label}`"]
        published = PUBLISHED.get(1 if "flush=True" in label else jobs, "")
        rows.append([*arm, str(found["micro_batches"]), by_rank, *means, published, _link(folder)])
    return sorted(rows, key=lambda row: (row[0], int(row[2]), "flush=True" not in row[3], float(row[6])))


def _arms(*patterns: str) -> Iterator[tuple[Path, ArmRecord]]:
    """Every arm but twins of the published folders like these, with its folder."""
    for folder in sorted({found for pattern in patterns for found in RESULTS.glob(pattern)}):
        if (folder / "records.jsonl").exists():
            yield from ((folder, record) for record in read_arms(folder) if record.role != "twin")


def _arm(record: ArmRecord, label: str, n: int) -> list[str]:
    return [record.model, str(n), f"`{label}`" + " on our kernels" * ("lora_kernels" in record.toggles)]


def _link(folder: Path) -> str:
    return f"[{folder.name}](../results/{folder.parent.name}/{folder.name}/summary.md)"


DIVIDING = ("ddp", "fsdp2", "tensor_parallel", "pipeline_")


def _tokens(record: ArmRecord, notes: dict[str, Any]) -> int:
    """Positions of a micro-batch on one rank. Where samples are divided these arms have one micro-batch."""
    if "shape" in notes:
        return math.prod(notes["shape"])
    assert record.tokens
    return (record.tokens.real + record.tokens.padded) // notes["world_size"]


def _cell(strategy: str, s: Sizes, n: int, memory: int) -> str:
    if n == 1 and strategy not in ("ddp", IN_4_BITS):
        return ""
    if (kept := tokens(strategy, s, n, memory, False)) is None:
        less = tokens(strategy, s, n, memory, True)
        return "does not fit" if less is None else f"– / {less:,}"
    return f"{kept:,} / {tokens(strategy, s, n, memory, True):,}"


if __name__ == "__main__":
    sys.exit(markers.main(__doc__, PAGE, tables))
