"""Is what `lorabench recommend` switches on as good as what somebody who knows the toggles puts together?

    python benchmarks/recommend_case.py gsm8k_train.jsonl --out results/h200/recommend
    python benchmarks/recommend_case.py FILE.jsonl --model FOLDER/config.json --tokenizer FOLDER --rows 60 --minutes 3

A person comes with a config.json and a file of chats. OUT/recommend has the answer for them. Then OUT/by_hand has the
stack that was recommended in one family with HAND, so that they share their rounds: `beside` in OUT/beside.json is the
speed of each of these over the recommended one's, of which WITHIN is the most that is asked for.

FILE.jsonl: one object a line, with the fields `question` and `answer`; each becomes a chat of two turns. The tokenizer
is that of `smollm2-135m-instruct` unless given, whose vocabulary all SmolLM2 share.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorabench import load_results
from lorabench.plan.compose import load_config, model
from lorabench.record.store import write_atomically
from lorabench.report.recommendation import Recommendation, read
from lorabench.report.rerun import in_hydra

OURS = "lora_kernels, adapters_in_compute_dtype, adamw_fused"
HAND = (OURS, f"{OURS}, packing", f"{OURS}, auto_batch_size", f"{OURS}, auto_batch_size, cuda_graph",
        f"{OURS}, cuda_graph", "torch_compile, adapters_in_compute_dtype, adamw_fused, auto_batch_size")  # fmt: skip
WITHIN = 1.05  # what the recommended stack may be slower than the best


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    case = [f"models=[{options.out}/case/config.json]",
            f"workload={{{options.out}/case/chats.jsonl: {{tokenizer: {options.tokenizer}}}}}"]  # fmt: skip
    write_case(options)
    own = options.out / "recommend"
    run("recommend", *case, f"budget_minutes={options.minutes:g}", f"output={own}")
    found = read(own)
    if found is None or not found.switch_on:
        print("nothing is recommended, so there is nothing to hold against anything")
        return 1
    others = [stack for stack in options.hand if set(stack.split(", ")) != set(found.switch_on)]
    stacks = [in_hydra(found.switch_on), *others]
    by_hand = options.out / "by_hand"
    run("sweep", *case, f"ablations=[{', '.join(f'[{stack}]' for stack in stacks)}]", f"trials={options.trials}",
        f"budget_minutes={options.minutes:g}", f"output={by_hand}")  # fmt: skip
    beside = held_against(by_hand, found)
    write_atomically(options.out / "beside.json", (json.dumps(beside, indent=1) + "\n").encode())
    print(json.dumps(beside, indent=1))
    return int(not beside["passed"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="JSONL file with the fields question and answer")
    parser.add_argument("--model", default="smollm2-1.7b", help="a shape of lorabench/conf/model, or a config.json")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=5.0, help="for the recommendation, and for what follows")
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--hand", nargs="+", default=list(HAND), metavar="'NAME, NAME'", help="stacks of toggles")
    parser.add_argument("--out", type=Path, default=Path("output/recommend_case"))
    options = parser.parse_args(argv)
    if not options.text.is_file():
        parser.error(f"{options.text}: no such file; expected JSON lines with the fields question and answer")
    return options


def write_case(options: argparse.Namespace) -> None:
    """What a person has: config.json, and so many chats."""
    folder = options.out / "case"
    folder.mkdir(parents=True, exist_ok=True)
    if Path(options.model).is_file():
        shutil.copy(options.model, folder / "config.json")
    else:
        model(options.model, load_config([])).hf_config().save_pretrained(folder)
    rows = [json.loads(line) for line in options.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(rows) < options.rows:
        raise SystemExit(f"{options.text} has {len(rows)} rows; --rows {options.rows} need more")
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for row in rows[: options.rows]:
            turns = (("user", row["question"]), ("assistant", row["answer"]))
            file.write(json.dumps({"messages": [{"role": who, "content": text} for who, text in turns]}) + "\n")


def run(command: str, *arguments: str) -> None:
    if status := subprocess.run([sys.executable, "-m", f"lorabench.{command}", *arguments]).returncode:
        raise SystemExit(status)  # it has said why


def held_against(folder: Path, found: Recommendation) -> dict[str, Any]:
    """The speed of each other stack over the recommended one's, [low, high] beside it, from the rounds that they
    share."""
    every = load_results(folder).toggles
    ours = next(stack for stack in every if set(stack.split(" + ")) == set(found.switch_on))  # in an order of its own
    table = load_results(folder, against=ours)
    others = table[(table.status == "ok") & (table.toggles != ours) & ~table.toggles.str.startswith("reference again")]
    columns = ["total_speedup", "total_low", "total_high"]
    beside = {row.candidate: [round(float(row[column]), 4) for column in columns] for _, row in others.iterrows()}
    passed = bool(beside) and all(speed <= WITHIN for speed, _, _ in beside.values())
    shown = {"recommended": ours, "spent_s": found.spent_s, "left_open": found.more}
    return {"passed": passed, **shown, "beside": beside}


if __name__ == "__main__":
    raise SystemExit(main())
