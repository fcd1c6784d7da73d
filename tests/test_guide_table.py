"""benchmarks/guide_table.py: docs/guide.md has the guide's entries in order, each beside its published row or none."""

import pandas as pd
import pytest
import yaml
from helpers import benchmark

from lorabench.plan.compose import load_config, plan
from lorabench.plan.registry import registered


@pytest.fixture(scope="module")
def script():
    with benchmark("guide_table") as module:
        yield module


def rows(**changed):
    plain = {
        "kind": "train", "model": "llama-3.1-8b", "workload": "4x2048", "status": "ok", "toggles": "liger",
        "reference": "sdpa + adamw_foreach + padding", "candidate": "sdpa + liger", "verdict": "faster", "session": "1",
        "total_speedup": 1.25, "total_low": 1.2, "total_high": 1.3, "reference_peak_gib": 90.0, "reason": None,
        "candidate_peak_gib": 70.0, "memory_saved_pct": 22.0, "total_candidate_ms": 500.0, "gpu": "h200",
    }  # fmt: skip
    return pd.DataFrame([plain | changed])


def test_the_page_is_made_of_todays_results(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.markers.all_filled(text, script.tables()) == text, "run: python benchmarks/guide_table.py"


def test_every_toggle_of_the_page_is_measured_by_the_suite(script):
    named = {
        name.partition("(")[0]
        for section in yaml.safe_load(script.ENTRIES.read_text(encoding="utf-8"))
        for entry in section["entries"]
        for toggles in entry["rows"]
        for name in toggles.split(" + ")
    }
    assert named <= registered().keys()
    suites = [plan(load_config([f"suite={name}"]), "cuda").cells for name in ("guide", "long_context", "peers")]
    assert named <= {t.name for cells in suites for cell in cells for t in cell.toggles}


def test_a_row_is_shown_with_interval_and_peaks_and_held_to_the_words(script):
    row = script.row_of(rows(), "llama-3.1-8b", "liger")
    assert script.said(row) == "1.25 × [1.20, 1.30], 90.0 → 70.0 GiB (4x2048, H200)"
    assert script.verdict(row, ["time", "memory"]) == "time: as said; memory: as said"
    assert script.verdict(row, []) == ""
    unclear = script.row_of(rows(verdict="unclear"), "llama-3.1-8b", "liger")
    assert script.said(unclear) == "unclear [1.20, 1.30], 90.0 → 70.0 GiB (4x2048, H200)"
    over_ours = rows(reference="sdpa + adamw_fused + padding + lora_kernels + adapters_in_compute_dtype")
    assert script.said(script.row_of(over_ours, "llama-3.1-8b", "liger")).endswith("(4x2048, over lora_kernels, H200)")


@pytest.mark.parametrize(
    ("h200", "h100", "shown"),
    [
        ({}, {}, "h200"),
        ({"verdict": "unclear"}, {}, "h100"),
        ({"verdict": "faster, few trials"}, {"verdict": "same"}, "h100"),
        ({"verdict": "unclear"}, {"verdict": "unclear"}, "h200"),
        ({"status": "wrong_numerics", "verdict": None}, {"verdict": "unclear"}, "h200"),
        ({"status": "wrong_numerics", "verdict": None}, {}, "h100"),
        ({"workload": "2x2048"}, {}, "h200"),
    ],
)
def test_a_figure_stands_before_what_is_none_and_an_h200_before_an_h100(script, h200, h100, shown):
    both = pd.concat([rows(**h100, gpu="h100"), rows(**h200)])
    assert script.row_of(both, "llama-3.1-8b", "liger").gpu == shown


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"verdict": "slower"}, "time: not true on this GPU; memory: as said"),
        ({"verdict": "same", "memory_saved_pct": 0.2}, "time: not noticed; memory: not noticed"),
        ({"verdict": "unclear", "memory_saved_pct": -9.0}, "time: unclear; memory: not true on this GPU"),
    ],
)
def test_words_follow_from_the_row(script, changed, words):
    assert script.verdict(script.row_of(rows(**changed), "llama-3.1-8b", "liger"), ["time", "memory"]) == words


def test_what_was_not_measured_is_no_guess(script):
    assert script.row_of(rows(), "llama-3.1-8b", "axolotl") is None
    assert script.said(None) == "not measured yet" and script.verdict(None, ["time"]) == ""
    assert script.row_of(rows(workload="1x512"), "llama-3.1-8b", "liger") is None
    failed = script.row_of(rows(status="oom", reason="it ran out. Tried more"), "llama-3.1-8b", "liger")
    assert script.said(failed) == "oom: it ran out (H200)" and script.verdict(failed, ["time"]) == ""
    with_low = rows(toggles="adapters_in_compute_dtype + liger")
    in_low = script.said(script.row_of(with_low, "llama-3.1-8b", "liger"))
    assert in_low.endswith(", adapters in the compute dtype, H200)")


def test_what_fits_is_the_fastest_measured_step_below_the_size(script):
    both = pd.concat([rows(candidate="small", candidate_peak_gib=20.0, total_candidate_ms=900.0), rows()])
    lines = script.fits(both).splitlines()[2:]
    said = [line.split("|")[2].strip() for line in lines]
    assert said == ["`small`", "`small`", "`sdpa + liger`", "`sdpa + liger`"]  # of 24, 48, 80 and 141 GB: 70 GiB is 75
    assert "not measured yet" in script.fits(rows(candidate_peak_gib=200.0))
