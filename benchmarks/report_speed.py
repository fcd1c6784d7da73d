"""How long a report takes: of a published folder, of 1,000 records, and the reading of 10,000.

    python benchmarks/report_speed.py [FOLDER]

Each figure is of a fresh process, with and without what importing takes; FOLDER is results/h200/peers if not given. The
synthetic records are train cells of 30 trials: groups of ten, the first the reference against itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PHASES = {"forward": 0.3, "backward": 0.6, "step": 0.1}
TIMED = """
import json, sys, time
began = time.perf_counter()
import lorabench.report.write, lorabench.contract.kind
from lorabench.report import load_results, write_report
lorabench.contract.kind.registered()
imported, cpu = time.perf_counter(), time.process_time()
found = {"load": load_results, "write": write_report}[sys.argv[1]](sys.argv[2])
ended = time.perf_counter()
print(json.dumps([ended - imported, time.process_time() - cpu, imported - began]))
"""


def synthetic(folder: Path, count: int, seed: int = 0) -> Path:
    """A results folder of so many records, of schema 2 and complete."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    with open(folder / "records.jsonl", "w") as file:
        for n in range(count):
            file.write(json.dumps(_record(n, rng), separators=(",", ":")) + "\n")
    return folder


def _record(n: int, rng: np.random.Generator) -> dict[str, object]:
    ablations = [f"toggle_{n % 10}"] if n % 10 else []
    phases = {p: _trials(share, rng) for p, share in PHASES.items()}
    phases["total"] = {
        arm: [round(float(sum(ms)), 4) for ms in zip(*(p[arm] for p in phases.values()), strict=True)]
        for arm in ("reference_ms", "candidate_ms")
    }
    ratio = {"speedup": 1.25, "low": 1.24, "high": 1.26}
    gib = {"weights": 2**31, "static": 2**32, "peaks": dict.fromkeys(PHASES, 2**33), "peak": 2**33, "reserved": 2**33}
    profiled = {p: {"host_ms": 1.0, "device_busy_ms": 2.0, "tflop": 0.1, "of_ceiling": 0.5, "label": "compute-bound"}
                for p in PHASES}  # fmt: skip
    return {
        "schema": 2, "kind": "train", "key": f"{n:016x}", "session": "s", "model": f"model-{n // 10}",
        "workload": "4x2048", "design": "solo", "reference": ["sdpa"], "candidate": ["sdpa", *ablations],
        "ablations": ablations, "status": "ok", "pairing": "paired",
        "phases": {name: {**trials, **ratio} for name, trials in phases.items()},
        "tokens": {"real": 8192, "trained": 8000, "reference_padded": 10, "candidate_padded": 0},
        "memory": {"reference": gib, "candidate": gib},
        "numerics": {"passed": True, "loss_error": 1e-3, "loss_allowed": 5e-3, "grad_error": 4e-3,
                     "grad_allowed": 2e-2, "worst": "layers.0.q_proj.lora_A.weight", "tensors": 420},
        "applied": dict.fromkeys(ablations, 210), "roofline": {"reference": profiled, "candidate": profiled},
        "cost": {"wall": 60.0, "spawn": 5.0, "build": 10.0, "gate": 5.0, "warmup": 20.0, "trials": 16.0},
    }  # fmt: skip


def _trials(share: float, rng: np.random.Generator) -> dict[str, list[float]]:
    drift = np.exp(np.cumsum(rng.normal(0, 0.005, 30)))
    arms = {"reference_ms": 100.0, "candidate_ms": 80.0}
    return {a: np.round(share * ms * drift * np.exp(rng.normal(0, 0.01, 30)), 4).tolist() for a, ms in arms.items()}


def measure(what: str, folder: Path) -> str:
    """Seconds in words, of `load` or `write` in a process of its own."""
    command = [sys.executable, "-c", TIMED, what, str(folder)]
    wall, cpu, imports = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return f"{wall:.1f} s ({cpu:.1f} s of CPU) after {imports:.1f} s of imports"


def main() -> None:
    published = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200" / "peers"
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(published, Path(scratch) / "published")
        thousand, ten_thousand = (synthetic(Path(scratch) / str(n), n) for n in (1000, 10_000))
        print(f"write_report of {published.name}:", measure("write", copy))
        print("write_report of 1,000 records:", measure("write", thousand))
        size = (thousand / "report.html").stat().st_size
        print(f"  its page, figures and all: {size / 1e6:.1f} MB")
        print("load_results of 10,000 records:", measure("load", ten_thousand))


if __name__ == "__main__":
    main()
