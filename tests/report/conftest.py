"""Records as a sweep would leave them, with simulated trials of a known speed-up; and as older sweeps left them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from record.arms import line_of, slower, tokens

from lorabench.record.schema import ARMS, Record

SHARES = {"forward": 0.3, "backward": 0.6, "step": 0.1}  # of a step's time
PHASES = {"train": SHARES, "op": {"forward": 0.4, "backward": 0.6}, "limit": {"forward": 0.3, "backward": 0.6},
          "load": {"read": 0.5, "place": 0.5},
          "evaluate": {"generate": 0.6, "decode": 0.1, "metrics": 0.1, "score": 0.2}}  # fmt: skip
FAILED = {"timeout", "crash", "wrong_numerics", "not_applied", "unsupported", "conflict"}


def simulate(speedup, trials, sd, seed, shares, reference_ms=100.0):
    """{phase: (reference, candidate)} in ms: a drift that both arms share, noise of their own, one ratio throughout."""
    rng = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(rng.normal(0, 0.005, trials)))
    times = {}
    for phase, share in shares.items():
        times[phase] = tuple(
            share * reference_ms / by * drift * np.exp(rng.normal(0, sd, trials)) for by in (1.0, speedup)
        )
    times["total"] = tuple(sum(times[p][arm] for p in shares) for arm in (0, 1))
    return times


def build_record(
    ablations=(), *, speedup=1.0, status="ok", trials=30, sd=0.01, seed=0, gpu=True, model="smollm2-135m",
    workload="alpaca", reference=("sdpa", "adamw_fused"), design="solo", arm=None, peaks=(8.0, 6.0),
    kind="train", **changes,
):  # fmt: skip
    ablations = list(ablations)
    both = [*reference, *ablations]
    fields = {
        "kind": kind, "session": "s1",
        "key": f"{model}|{workload}|{design}|{'+'.join(both)}|{'+'.join(ablations)}",
        "model": model, "workload": workload, "design": design, "against": list(reference), "candidate": both,
        "ablations": ablations, "status": status,
    }  # fmt: skip
    if status != "ok":
        fields |= {"reason": f"{status} because of a cause", "arm": arm, "log": "Traceback: the last line"}
    if status == "ok" or (status == "oom" and arm):
        times = simulate(speedup, trials, sd, seed + sum(map(ord, fields["key"])), PHASES[kind])
        hide = None if status == "ok" else arm
        fields["phases"] = {
            p: {a: list(ms) for a, ms in zip(ARMS, t, strict=True) if a != hide} for p, t in times.items()
        }
        fields["tokens"] = tokens(4000, 3000, reference=1000)
        fields["pairing"] = "paired"
        fields["memory"] = {a: _memory(gib, gpu) for a, gib in zip(ARMS, peaks, strict=True)}
        fields["memory"].pop(hide, None)
    if status == "ok":
        fields |= {
            "numerics": _numerics(),
            "applied": dict.fromkeys(ablations, 30),
            "roofline": _roofline(kind) if gpu else {},
        }
        fields["cost"] = {"wall": 60.0, "spawn": 5.0, "build": 10.0, "gate": 5.0, "warmup": 20.0, "trials": 16.0}
    if kind == "limit":
        fields |= {"numerics": None}
    fields |= changes
    return Record.model_validate({"family": f"{kind} {fields['key']}"} | fields)


def faster_host(record, by=2.0):
    """The same record of a host on which both arms took so many times less time."""
    return slower(record, 1 / by)


def as_schema_1(record):
    """A record as the first lorabench wrote it: a limit was a flag, with the reference's step in its total."""
    old = line_of(record) | {"schema": 1}
    if old.pop("kind") == "limit":
        old["limit"] = True
        total = old["phases"]["total"]
        old["phases"]["total"] = {name: [ms + 10 for ms in times] for name, times in total.items()}
        old["phases"]["total"] |= {"speedup": 99.0, "low": 98.0, "high": 100.0}
    if "roofline" in old:
        old["bound"] = old.pop("roofline")
    for held in old.get("memory", {}).values():
        held |= held.pop("peaks", {})
    return old


def _memory(gib, gpu):
    size = int(gib * 2**30)
    return (
        {"peaks": {"forward": size // 2, "backward": size, "step": size // 3}, "peak": size}
        if gpu
        else {"process": size}
    )


def _numerics():
    return {"passed": True, "loss_error": 1e-3, "loss_allowed": 5e-3, "grad_error": 4e-3, "grad_allowed": 2e-2,
            "plain_grad_error": 6e-3, "worst": "layers.0.q_proj.lora_A.weight", "tensors": 56}  # fmt: skip


def _roofline(kind):
    phases = {
        "forward": {"host_ms": 5.0, "device_busy_ms": 28.0, "of_ceiling": 0.5, "label": "compute-bound"},
        "backward": {"of_ceiling": 0.4, "label": "memory-bound"},
        "step": {"label": "host-bound"},
    }
    own = {p: found for p, found in phases.items() if p in PHASES[kind]}
    return {"reference": own, "candidate": own}


def build_session(session="s1", device="NVIDIA H200", **machine):
    return {
        "id": session, "started": "2026-11-21T04:00:00+00:00", "command": ["python", "-m", "lorabench.sweep"],
        "lorabench": "0.1.0", "commit": "0123abcd", "dirty": True,
        "machine": {"device": device, "gpu": None, "driver": "570.1", "cores": 2, "memory_bytes": 2**34,
                    "packages": {"torch": "2.13.0"}} | machine,
        "ceilings": {"gemm_tflops": {"bfloat16": 680.0}, "copy_gbs": 4230.0},
    }  # fmt: skip


def build_folder(folder: Path, records, sessions=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(line_of(r))}\n" for r in records))
    environment = {"schema": 1, "sessions": [build_session()] if sessions is None else sessions}
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def build_sweep(**common):
    """The reference again, three toggles that worked and one record of every failure."""
    done = [build_record([], **common), build_record(["lora_kernels"], speedup=1.4, **common)]
    done += [build_record(["gradient_checkpointing"], speedup=0.75, peaks=(8.0, 3.0), **common)]
    done += [build_record(["adamw_foreach"], speedup=1.0, sd=0.002, **common)]
    done += [build_record([f"toggle_{s}"], status=s, **common) for s in sorted(FAILED)]
    return [*done, build_record(["packing"], status="oom", arm="reference", **common)]


class Tags(HTMLParser):
    """What a browser would see: tags, links, text, and the contents of the scripts apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.scripts = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data
        self.text += data


@pytest.fixture
def tags():
    """HTML to what a browser sees."""
    return Tags


@pytest.fixture
def cells_of():
    """HTML of a page to the families in it."""

    def read(html):
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
        return json.loads(data)

    return read


@pytest.fixture
def record():
    return build_record


@pytest.fixture
def on_a_faster_host():
    return faster_host


@pytest.fixture
def older():
    return as_schema_1


@pytest.fixture
def several_jobs(record):
    """A record of two jobs on two ranks."""
    jobs = {
        arm: {
            "a": {"r": 8, "tokens": own, "numerics": _numerics()},
            "b": {"r": 16, "tokens": own | {"real": 1024}},
        }
        for arm, own in tokens(512, 500, reference=10).items()
    }
    ranks = {"candidate": {"size": 2, "slowest": [0] * 20 + [1] * 10, "spread": 0.03}}
    return record(["a"], jobs=jobs, ranks=ranks)


@pytest.fixture
def session():
    return build_session


@pytest.fixture
def folder():
    return build_folder


@pytest.fixture
def sweep():
    return build_sweep
