"""benchmarks/dram_bytes.py: ncu's CSV to bytes per arm and phase; the arms are the suite's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import benchmark

from lorabench.measure.trial import run_trial
from lorabench.report.claims import load_claims, tabled

PUBLISHED = Path(__file__).resolve().parents[1] / "results/h200/dram_bytes/dram.csv"

HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'


@pytest.fixture(scope="module")
def dram():
    with benchmark("dram_bytes") as module:
        yield module


def lines(dram, per_arm):
    """What ncu writes for a run in which every phase of an arm is two kernels of so many MB."""
    rows, launch = ["==PROF== Connected to process 1", "==PROF== Disconnected", HEADER], 0

    def kernel(name, read, written):
        nonlocal launch
        for metric, unit, value in (("read", "Mbyte", f"{read:,.1f}"), ("write", "byte", f"{written * 1e6:,.0f}")):
            rows.append(f'"{launch}","1","{name}","cmd","dram__bytes_{metric}.sum","{unit}","{value}"')
        launch += 1

    for segment in dram.segments():
        kernel("at::cuda::<unnamed>::spin_kernel(long)", 1e6, 1e6)
        for _ in range(2):
            kernel("gemm, bf16", per_arm[segment.arm], 1000 if segment.phase == "forward" else 0)
    return [row + "\n" for row in rows]


def test_bytes_are_summed_by_phase_and_set_against_torch_lora(dram):
    found = dram.read(lines(dram, {"torch LoRA": 2000, "bare_linear": 500, "lora_addmm": 1500, "lora_kernels": 1000}))
    assert found[dram.Segment(5120, 0.0, "lora_addmm", "forward")] == [("gemm, bf16", 1.5e9, 1e9)] * 2
    shown = dram.table(found)
    assert len(shown) == 2 + 3 * 2 * 4
    ours = next(line for line in shown if line.startswith("| 4096 → 4096, dropout 0.1 | lora_kernels"))
    assert [c.strip() for c in ours.split("|")[3:-1]] == [
        "2.000 + 2.000", "−33.3 %", "4.000 + 2.000", "−40.0 %", "−37.4 %",
    ]  # fmt: skip
    assert sum("−37.4 %" in line for line in shown) == 1  # published for dropout 0.1 alone
    assert dram.kernels(found)[1].split() == ["2000.0", "1000.0", "gemm,", "bf16"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda rows: rows[:2], "not what ncu --csv writes"),
        (lambda rows: rows[:-6], "47 phases are marked, 48 expected"),
        (lambda rows: [*rows[:3], *rows[5:]], "before the first marker"),
        (lambda rows: [r.replace('"Mbyte"', '"Mibyte"') for r in rows], "unit 'Mibyte'"),
    ],
)
def test_what_is_not_a_whole_run_is_refused(dram, spoil, says):
    rows = lines(dram, dict.fromkeys(dram.ARMS, 1000))
    with pytest.raises(ValueError, match=says):
        dram.read(spoil(rows))


def test_the_arms_are_the_suite_s(dram):
    made = {arm.name: arm for arm in dram.arms(32, 64, 0.1, torch.device("cpu"))}
    assert tuple(made) == dram.ARMS
    for arm in made.values():
        run_trial(arm)
    gradients = [p.grad for _, p in made["lora_kernels"].adapters()]
    assert all(g is not None for g in gradients)
    assert all(p.grad is None for _, p in made["bare_linear"].adapters())
    assert made["lora_addmm"].step.x.shape == (1, 64, 32)


def test_the_least_bytes_are_every_operand_and_every_result_once(dram):
    """By hand, for 4096: X, Y, dY and dX are 64 MiB each, W 32 MiB, A and B (or dA and dB) 256 KiB together."""
    mib = 2**20
    assert dram.least(4096, "forward") == (64 + 64 + 32) * mib + mib // 4
    assert dram.least(4096, "backward") == (3 * 64 + 32) * mib + mib // 2


def test_what_the_claims_say_was_counted_is_what_the_published_file_holds(dram):
    """The sources' shapes: dropout 0.1, 8192 tokens, forward and backward."""
    with open(PUBLISHED, encoding="utf-8") as file:
        found = dram.read(file)
    counted = {}
    for hidden in dram.HIDDEN:
        ours, base = (sum(dram.total(found, hidden, 0.1, arm, dram.PHASES)) for arm in (dram.ARMS[-1], dram.ARMS[0]))
        counted[dram.model(hidden, 0.1)] = f"{100 * (1 - ours / base):.1f}"
    assert dram.tidy(found) == PUBLISHED.with_name("dram_bytes.csv").read_text().splitlines()
    results = PUBLISHED.parents[2]
    claims = {s.id: [c for c in s.claims if c.quantity == "memory_traffic_saved_pct"] for s in load_claims()}
    own = {c.model: [f"{n:.1f}" for n in tabled(c.counted, results)] for c in claims["lorafusion_kernels"]}
    assert own == {model: [saved] for model, saved in counted.items()}
    (together,) = claims["lorafusion"]
    assert [f"{n:.1f}" for n in tabled(together.counted, results)] == list(counted.values())
