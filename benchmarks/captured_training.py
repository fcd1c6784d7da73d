"""Tokens a second of whole SFTTrainer runs, with and without captured steps: the loop that a user starts.

    python benchmarks/captured_training.py --model smollm2-135m --out results/h200/captured_training/smollm2-135m
    python benchmarks/captured_training.py --weights smollm2-135m-instruct --text gsm8k_train.jsonl
    python benchmarks/captured_training.py --model qwen3-1.7b --text gsm8k_train.jsonl --tokenizer FOLDER
    python benchmarks/captured_training.py --model tiny-llama --steps 6 --warm 3 --batch 2 --out somewhere   # on a CPU

Each arm is a process of its own: `plain` (PEFT), `captured` (the same through `lorakernels.captured`), `lorakernels`,
`lorakernels_captured`, and `unsloth` (its model in its own trainer), where that is installed. In an arm with
`padding_free` in its name a batch is one row without padding, as SFTConfig's setting of that name makes it. All train
--weights, or the shapes of --model with random ones, on the same samples in the same order: real lengths (the quantiles
of GSM8K, or another table of lorabench's) with random tokens, or real text with --text. The loader pads a batch of the
others to its longest sample, buckets come on top; only real tokens count.

Two rates: `whole` over the run from its first step on, which holds compilation, warm-up and captures; `steady` over the
steps behind --warm. The losses of an arm must be those of `plain`: the first and the last, and the largest distance
over the run, are written beside the rates. Only of real weights and text do they fall, so only there does the distance
show that an arm learns. Writes captured_training.json and captured_training.md, after each arm: what is there when a
run is stopped is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from lorabench.plan.compose import load_config, plan
from lorabench.plan.samples import draw_lengths
from lorabench.record.store import write_atomically
from lorabench_ablations.flash_attention import FA2

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import load, write_found

ARMS = (
    "plain", "captured", "lorakernels", "lorakernels_captured", "padding_free", "padding_free_captured",
    "lorakernels_padding_free", "lorakernels_padding_free_captured", "unsloth",
)  # fmt: skip
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # Unsloth wants names
LAST_WORDS_S = 2.0  # that an arm has at its limit to say where it stands
LOGS = 20  # of a run: each is a wait for the device


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.only:
        faulthandler.register(signal.SIGUSR1)
        options.out.write_text(json.dumps(run(options, options.only)))
        return 0
    arms: dict[str, Any] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    for arm in options.arms:
        arms[arm] = apart(options, arm)
        print(f"{arm}: {arms[arm].get('unsupported') or arms[arm].get('failed') or told(arms[arm])}", flush=True)
        found = {
            "settings": {n: str(v) if isinstance(v, Path) else v for n, v in vars(options).items() if n != "only"},
            "lora": LORA,
            "arms": compared(arms),
        }
        found = write_found(options.out / "captured_training.json", found)
        write_atomically(options.out / "captured_training.md", table(found).encode())
    print(table(found))
    return int(any("failed" in arm for arm in arms.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a shape of lorabench/conf/model")
    parser.add_argument("--lengths", default="gsm8k", help="lorabench's table of token counts")
    parser.add_argument(
        "--text", type=Path, help="JSONL file with the fields question and answer, instead of --lengths"
    )
    parser.add_argument(
        "--weights", help="as `weights=` of a sweep: real ones in place of random ones, and their shape"
    )
    parser.add_argument("--tokenizer", help="of --text: folder or hub name; that of --weights unless given")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=100, help="steps before the steady rate is taken")
    parser.add_argument("--seq-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--timeout", type=int, default=1800, help="seconds an arm")
    parser.add_argument("--out", type=Path, default=Path("output/captured_training"))
    parser.add_argument("--only", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.tokenizer = options.tokenizer or (options.weights if options.text else None)
    if bool(options.text) != bool(options.tokenizer):
        parser.error("--text needs --tokenizer or --weights, and --tokenizer needs --text")
    if options.text and not options.text.is_file():
        parser.error(f"{options.text}: no such file; expected JSON lines with the fields question and answer")
    if not 0 < options.warm < options.steps:
        parser.error(f"--warm {options.warm} must lie between 0 and --steps {options.steps}")
    return options


def apart(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """The arm in a process of its own: patches of others are global, and a GPU's memory is its own."""
    if arm == "unsloth" and find_spec("unsloth") is None:
        return {"unsupported": "needs unsloth: pip install 'lorabench[unsloth]'"}
    if attention_of(arm) == "flash_attention_2" and find_spec("flash_attn") is None:
        return {"unsupported": f"needs flash_attn: {FA2}"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "arm.json")
        given = {n: v for n, v in vars(options).items() if v is not None and n not in ("arms", "out", "only")}
        words = [w for n, v in given.items() for w in (f"--{n.replace('_', '-')}", str(v))]
        command = [sys.executable, __file__, *words, "--only", arm, "--out", str(answer)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, said = process.communicate(timeout=options.timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                time.sleep(LAST_WORDS_S)
                process.kill()
                return failed(options, arm, f"no end within {options.timeout} s", process.communicate()[1])
        if process.returncode or not answer.exists():
            return failed(options, arm, (said.strip().splitlines() or ["no message"])[-1], said)
        return json.loads(answer.read_text())


def failed(options: argparse.Namespace, arm: str, reason: str, said: str) -> dict[str, Any]:
    """The arm's reason; all that it said, with where it stood at its limit, is kept beside the results."""
    (options.out / f"{arm}.stderr.txt").write_text(said)
    return {"failed": reason}


def run(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One arm in this process: rates, memory, losses and what was captured."""
    if arm == "unsloth":
        from lorabench_ablations.peers import silence_unsloth

        silence_unsloth()
        import unsloth  # noqa: F401  # before transformers' trainers, which it patches
    import lorakernels

    samples = samples_of(options)
    model = model_of(options, arm)
    if arm.startswith("lorakernels"):
        lorakernels.apply(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, model, samples, folder, padding_free="padding_free" in arm)
        if arm.endswith("captured"):
            lorakernels.captured(trainer)
        clock = Clock(options.warm)
        trainer.add_callback(clock)
        trainer.train()
    losses = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}
    return {
        **clock.rates(tokens_of(options, samples)),
        "losses": losses,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else None,
        "capture": captured_of(trainer),
    }


class Clock(TrainerCallback):
    """When steps began and ended, on the device."""

    def __init__(self, warm: int):
        self.warm = warm
        self.times: dict[str, float] = {}

    def _note(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times[name] = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.warm:
            self._note("warm")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("end")

    def rates(self, tokens: list[int]) -> dict[str, Any]:
        """Of the tokens of each step: real tokens a second of the whole run and of its steady part."""
        t = self.times
        steady = len(tokens) - self.warm
        return {
            "whole_tokens_per_s": sum(tokens) / (t["end"] - t["begin"]),
            "steady_tokens_per_s": sum(tokens[self.warm :]) / (t["end"] - t["warm"]),
            "steady_ms_per_step": (t["end"] - t["warm"]) / steady * 1e3,
            "real_tokens_per_step": sum(tokens) / len(tokens),
        }


def samples_of(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of every sample that the run needs, the same for every arm."""
    count = options.steps * options.batch * options.accumulate
    rng = np.random.default_rng(options.seed)
    if options.text is None:
        vocabulary = spec_of(options).config["vocab_size"]
        lengths = np.clip(draw_lengths(options.lengths, count, rng), 2, options.seq_len)
        return [rng.integers(3, vocabulary, int(n)).tolist() for n in lengths]
    from lorabench.plan.weights import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    rows = [json.loads(line) for line in options.text.read_text().splitlines() if line.strip()]
    chosen = [rows[i % len(rows)] for i in range(count)]
    return [tokenizer(f"{r['question']}\n{r['answer']}")["input_ids"][: options.seq_len] for r in chosen]


def spec_of(options: argparse.Namespace) -> Any:
    return plan(load_config([f"models=[{options.model}]"]), "cpu").cells[0].model


def attention_of(arm: str) -> str:
    """Rows without padding want FlashAttention, which a CPU has not; SDPA makes masks for them."""
    return "flash_attention_2" if "padding_free" in arm and torch.cuda.is_available() else "sdpa"


def model_of(options: argparse.Namespace, arm: str) -> Any:
    """A PEFT model of --weights or of random ones: bfloat16 with float32 adapters on a GPU, float32 on a CPU."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from lorabench.plan.weights import source_arguments

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    if options.weights:
        where, kwargs = source_arguments(options.weights)
        config = AutoConfig.from_pretrained(where, **kwargs)
    else:
        config = spec_of(options).hf_config()

    def base() -> Any:
        if options.weights:
            return load(options.weights, dtype, device)
        torch.manual_seed(options.seed)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")

    lora = LoraConfig(**LORA, lora_dropout=options.dropout, task_type="CAUSAL_LM")
    if arm != "unsloth":
        made = base()
        made.set_attn_implementation(attention_of(arm))
        torch.manual_seed(options.seed)
        return get_peft_model(made, lora)
    from lorabench.contract.ablation import Blueprint
    from lorabench_ablations.peers import Unsloth

    adapter = {**LORA, "target_modules": LINEARS, "lora_dropout": options.dropout}
    return Unsloth().build(Blueprint(config, dtype, {"config": adapter}, base))


def trainer_of(
    options: argparse.Namespace, model: Any, samples: list[list[int]], folder: str, padding_free: bool = False
) -> Any:  # fmt: skip
    """SFTTrainer with its defaults but for what a comparison fixes."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # a fingerprint of its own: datasets would make one by pickling
    columns = {"input_ids": samples, "labels": samples}
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="samples")
    cpu = not torch.cuda.is_available()
    arguments = trl.SFTConfig(
        folder, max_steps=options.steps, per_device_train_batch_size=options.batch, use_cpu=cpu, bf16=not cpu,
        gradient_accumulation_steps=options.accumulate, learning_rate=2e-4, warmup_steps=10, seed=options.seed,
        lr_scheduler_type="cosine", logging_steps=max(1, options.steps // LOGS), save_strategy="no", report_to=[],
        gradient_checkpointing=False, disable_tqdm=True, padding_free=padding_free,
        max_length=None if padding_free else options.seq_len,  # which TRL would not enforce without padding
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=_tokenizer())
    trainer._get_train_sampler = lambda *_: SequentialSampler(data)  # the samples are in random order already
    return trainer


def _tokenizer() -> Any:
    """For a trainer that insists on one; nothing is tokenized with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, "<pad>")
    made = Tokenizer(words)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def tokens_of(options: argparse.Namespace, samples: list[list[int]]) -> list[int]:
    """Real tokens of each step."""
    size = options.batch * options.accumulate
    return [sum(map(len, samples[i * size : (i + 1) * size])) for i in range(options.steps)]


def captured_of(trainer: Any) -> dict[str, Any] | None:
    """What was captured and what was not, or None of an arm that captures nothing."""
    capture = getattr(trainer, "capture", None)
    if capture is None:
        return None
    status = capture.status()
    graphs = [{"rows": g.rows, "length": g.length, "masks": g.masks, "replays": g.replays} for g in status.graphs]
    return {"graphs": graphs, "eager": dict(status.eager), "updates": dict(status.updates)}


def compared(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The arms beside `plain`: how much faster, and how far their losses are off at most."""
    plain = arms.get("plain", {})
    out = {}
    for name, arm in arms.items():
        out[name] = dict(arm)
        if "losses" in arm and "losses" in plain:
            off = [abs(arm["losses"][step] - loss) for step, loss in plain["losses"].items() if step in arm["losses"]]
            out[name]["largest_loss_distance"] = max(off, default=None)
            for rate in ("whole", "steady"):
                key = f"{rate}_tokens_per_s"
                out[name][f"{rate}_against_plain"] = arm[key] / plain[key]
    return out


def told(arm: dict[str, Any]) -> str:
    return f"{arm['steady_tokens_per_s']:,.0f} tokens/s steady, {arm['whole_tokens_per_s']:,.0f} over the whole run"


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    s, machine = found["settings"], found["machine"]
    lines = [
        f"{s['weights'] or s['model']}, {s['batch']} samples a batch, {s['accumulate']} batches an update, "
        f"{s['steps']} steps, {s['text'] or s['lengths']}; {machine['name']}; commit {found['commit']['head']}",
        "",
        "| arm | steady, tokens/s | × plain | whole, tokens/s | × plain | ms a step | GiB | replayed | loss | off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in found["arms"].items():
        if "losses" not in arm:
            lines.append(f"| {name} | {arm.get('unsupported') or arm.get('failed')} | | | | | | | | |")
            continue
        replayed = "" if not arm["capture"] else str(sum(g["replays"] for g in arm["capture"]["graphs"]))
        peak = "" if arm["peak_gib"] is None else f"{arm['peak_gib']:.1f}"
        cells = [f"{arm[f'{r}_{w}']:{f}}" if f"{r}_{w}" in arm else "" for r in ("steady", "whole")
                 for w, f in (("tokens_per_s", ",.0f"), ("against_plain", ".2f"))]  # fmt: skip
        off = arm.get("largest_loss_distance")
        losses = list(arm["losses"].values())
        lines.append(
            f"| {name} | {' | '.join(cells)} | {arm['steady_ms_per_step']:.1f} | {peak} | {replayed} "
            f"| {losses[0]:.3f} → {losses[-1]:.3f} | {'' if off is None else f'{off:.4f}'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
