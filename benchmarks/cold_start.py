"""How long a user waits for the first step: fresh processes, PEFT and lorakernels, with empty and with warm caches.

    python benchmarks/cold_start.py smollm2-135m@1x512 llama-3.1-8b@4x2048 --repeats 2 --out results/h200/cold_start
    python benchmarks/cold_start.py tiny-llama@2x16 --repeats 1

Each process builds the model of a name (or of a YAML file) with random weights on the device, puts PEFT's adapter on
every linear, and trains three steps with AdamW; a lorakernels process calls `lorakernels.apply` before them. It tells
how many seconds each part took: the interpreter's start, imports, the import of lorakernels (own import), the model,
apply, the first, second and third step. Each part ends with the device idle. An "empty" process has new folders for
the driver's cache and for Triton's, in which the choices of lorakernels lie; the "warm" one after it has the same
folders. One process that is not counted comes first, so that none pays for reading libraries from the disk. Writes
cold_start.json and cold_start.md, after each model: what is there when a run is stopped is kept.

Aims: until its first step is done, lorakernels takes at most 5 s longer than PEFT with a warm cache, 20 s without.
"""

from __future__ import annotations

import time

BEGAN = time.time()  # before anything else is imported: a child's start is what it took to get here

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ARMS = ("peft", "lorakernels")
CACHES = ("empty", "warm")
PARTS = ("start", "import", "own_import", "model", "apply", "first_step", "second_step", "third_step")
STEPS = PARTS[PARTS.index("first_step") :]
UNTIL_FIRST = PARTS[: PARTS.index("first_step") + 1]
OF_THE_ARM = ("own_import", "apply", "first_step")  # what differs between the arms; the others are the same work
AIMS = {"empty": 20.0, "warm": 5.0}  # seconds over PEFT
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
CHILD = "--child"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [CHILD]:
        print(json.dumps(train(json.loads(arguments[1]))))
        return 0
    options = parse(arguments)
    from lorabench.contract.names import NameUnknown
    from lorabench.measure.machine import describe
    from lorabench.plan.compose import ConfigError
    from lorabench.record.store import StoreError

    machine = describe()
    try:
        tasks = [task(name, machine) for name in options.models]
        rows: list[dict[str, Any]] = []
        for given in tasks:
            rows.append(measured(given, options.repeats))
            text = write(options, rows, machine)
    except (ConfigError, NameUnknown, StoreError, ChildFailed) as error:
        print(f"cold_start: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def write(options: argparse.Namespace, rows: Sequence[dict[str, Any]], machine: Any) -> str:
    """Both files, of the models that are done: what there is when a run is stopped is kept. The table."""
    from lorabench.measure.machine import commit
    from lorabench.record.store import write_atomically

    found = {
        "rows": rows,
        "aims_seconds_over_peft": AIMS,
        "settings": {"lora": LORA, "optimizer": "AdamW", "repeats": options.repeats},
        "machine": machine.model_dump(mode="json"),
        "commit": dict(zip(("head", "dirty"), commit(), strict=True)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / "cold_start.json", (json.dumps(found, indent=1) + "\n").encode())
    text = table(rows, machine.name)
    write_atomically(options.out / "cold_start.md", text.encode())
    return text


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL@BATCHxLENGTH")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each sort; medians are shown")
    parser.add_argument("--out", type=Path, default=Path("output/cold_start"), help="a folder")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: expected at least 1")
    return options


def task(name: str, machine: Any) -> dict[str, Any]:
    """What a child is told but for its arm. Raises NameUnknown for a name that is none."""
    from lorabench.contract.names import NameUnknown
    from lorabench.contract.workload import fixed
    from lorabench.plan.compose import load_config, model

    model_name, _, shape = name.partition("@")
    feed = fixed(shape)
    if feed is None:
        raise NameUnknown(f"{name}: expected MODEL@BATCHxLENGTH, such as smollm2-135m@1x512")
    return {
        "name": name, "config": model(model_name, load_config([])).config, "batch": feed.batch_size,
        "seq_len": feed.seq_len, "device": machine.device, "dtype": machine.dtype("auto"),
    }  # fmt: skip


# ---- in the parent: fresh processes ----------------------------------------------------------------------------------
class ChildFailed(RuntimeError):
    """A process that measured nothing; the message has the last line of what it said."""


def measured(given: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One model's row: seconds by arm, cache and part (a list of repeats each), and what lorakernels left on disk."""
    with tempfile.TemporaryDirectory() as nowhere:
        run(given | {"arm": "lorakernels"}, Path(nowhere))  # not counted
    seconds: dict[str, Any] = {arm: {cache: {part: [] for part in PARTS} for cache in CACHES} for arm in ARMS}
    left: dict[str, int] = {}
    for repeat in range(repeats):
        for arm in ARMS if repeat % 2 else ARMS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    found = run(given | {"arm": arm}, Path(folder))
                    for part in PARTS:
                        seconds[arm][cache][part].append(found[part])
                    print(f"{given['name']} {arm} {cache}: first step {found['first_step']:.1f} s", file=sys.stderr)
                if arm == "lorakernels":
                    left = left_on_disk(Path(folder))
    return {"name": given["name"], "seconds": seconds, **left}


def run(given: dict[str, Any], folder: Path) -> dict[str, float]:
    """Seconds by part of one fresh process whose caches lie in this folder. Raises ChildFailed."""
    own = {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAKERNELS_CACHE")} | own
    command = [sys.executable, "-W", "ignore", __file__, CHILD, json.dumps(given | {"spawned": time.time()})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise ChildFailed(f"{given['name']} with {given['arm']} ended with {done.returncode} and said: {said[-1]}")
    return json.loads(lines[-1])


def left_on_disk(folder: Path) -> dict[str, int]:
    """How many kernels were compiled, and how many choices of form were measured."""
    choices = [json.loads(file.read_text())["choices"] for file in folder.rglob("choices-*.json")]
    return {"compiled_kernels": len(list(folder.rglob("*.cubin"))), "choices": sum(map(len, choices))}


# ---- in a child: what a user's script does ---------------------------------------------------------------------------
def train(given: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, of three training steps from the start of this process."""
    seconds = {"start": BEGAN - given["spawned"]}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began

    device = "cpu"
    with part("import"):
        import peft
        import torch
        import transformers

    with part("own_import"):
        if given["arm"] == "lorakernels":
            import lorakernels
    device = given["device"]
    with part("model"):
        model = build(given, torch, transformers, peft)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    with part("apply"):
        if given["arm"] == "lorakernels":
            lorakernels.apply(model)
    shape = given["batch"], given["seq_len"]
    for name in STEPS:
        tokens = torch.randint(given["config"]["vocab_size"], shape, device=device)
        with part(name):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seconds


def build(given: dict[str, Any], torch: Any, transformers: Any, peft: Any) -> Any:
    """The model with PEFT's adapter on every linear, weights random, made on the device."""
    config = transformers.AutoConfig.for_model(**given["config"], use_cache=False)
    kwargs = {"dtype": getattr(torch, given["dtype"]), "attn_implementation": "sdpa"}
    with torch.device(given["device"]):
        base = transformers.AutoModelForCausalLM.from_config(config, **kwargs)
        return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA)).train()


# ---- the table -------------------------------------------------------------------------------------------------------
def over_peft(row: dict[str, Any], cache: str) -> float:
    """Seconds that lorakernels takes longer than PEFT for its import, applying and the first step, by medians."""
    peft, ours = (sum(median(row, arm, cache, part) for part in OF_THE_ARM) for arm in ARMS)
    return ours - peft


def median(row: dict[str, Any], arm: str, cache: str, part: str) -> float:
    return statistics.median(row["seconds"][arm][cache][part])


def table(rows: Sequence[dict[str, Any]], machine: str) -> str:
    """Markdown: the parts in seconds, and the distance to PEFT beside the aims."""
    names = [part.replace("_", " ") for part in PARTS]
    lines = [f"Seconds of fresh processes on {machine}, medians.", ""]
    lines += ["| model | arm | caches | " + " | ".join([*names, "until the first step is done"]) + " |"]
    lines += ["|" + "---|" * (len(PARTS) + 4)]
    for row in rows:
        for arm in ARMS:
            for cache in CACHES:
                each = [median(row, arm, cache, part) for part in PARTS]
                until = zip(*(row["seconds"][arm][cache][part] for part in UNTIL_FIRST), strict=True)
                whole = statistics.median(map(sum, until))
                shown = " | ".join(f"{x:.2f}" for x in [*each, whole])
                lines.append(f"| {row['name']} | {arm} | {cache} | {shown} |")
    lines += ["", "| model | caches | own import, apply and first step, over PEFT | aim | |", "|---|---|---|---|---|"]
    for row in rows:
        for cache, aim in AIMS.items():
            over = over_peft(row, cache)
            reached = "reached" if over <= aim else "missed"
            lines.append(f"| {row['name']} | {cache} | {over:+.2f} s | at most {aim:.0f} s | {reached} |")
    lines += [""] + [
        f"{row['name']}: {row['compiled_kernels']} kernels compiled, {row['choices']} choices measured." for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
