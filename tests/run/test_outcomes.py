"""Every outcome of an arm, produced for real, in real worker processes, by an installed third party's toggles."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers import sweep

from lorabench.record.store import read_records
from lorabench.report.__main__ import main

# Those whose process ends come first: with each of them whoever was prepared before it is prepared again.
TOGGLES = (
    "hang,killed,raises,odd_notes,wrong,deep_wrong,nothing,refuses,absent,not_a_number,polite,leaky,grumpy,greedy,"
    "frozen_limit,{polite:{times:2}},compiles"
)  # fmt: skip
COMMON = ("models=[tiny-llama]", "workload=2x16", "trials=2", "warmup=1", "timeout_s=8")


@pytest.fixture(scope="module")
def outcomes(plugin, tmp_path_factory):
    """One sweep over all of them: (process, records by toggle, folder)."""
    folder = tmp_path_factory.mktemp("outcomes")
    done = sweep(*COMMON, f"ablations=[{TOGGLES}]", f"output={folder}", cwd=folder, env=plugin)
    assert done.returncode == 0, done.stderr + done.stdout
    return done, {" + ".join(r.ablations): r for r in read_records(folder)}, folder


def test_a_failing_cell_never_stops_the_sweep(outcomes):
    done, records, folder = outcomes
    assert len(records) == 18
    assert (folder / "report.html").exists() and (folder / "summary.md").exists()
    assert "Traceback" not in done.stderr


def test_a_sweep_may_leave_its_tables_to_another_machine(outcomes, plugin, tmp_path):
    """The same command goes on with nothing to measure, so that it shows who writes."""
    folder = tmp_path / "measured"
    folder.mkdir()
    for name in ("records.jsonl", "environment.json"):
        shutil.copy(outcomes[2] / name, folder)
    again = (*COMMON, f"ablations=[{TOGGLES}]", f"output={folder}")
    done = sweep(*again, "report=false", cwd=tmp_path, env=plugin)
    assert done.returncode == 0 and f"python -m lorabench.report {folder}" in done.stdout
    assert {file.name for file in folder.iterdir() if not file.name.startswith(".")} == {
        "records.jsonl",
        "environment.json",
    }
    assert main([str(folder)]) == 0 and (folder / "report.html").exists()


def test_a_third_party_s_toggle_is_measured_like_ours(outcomes):
    record = outcomes[1]["polite"]
    assert record.status == "ok" and record.pairing == "paired"
    assert record.applied["polite"] == 21
    assert len(record.ms("candidate")) == 2
    assert outcomes[1]["polite(times=2)"].applied["polite"] == 42


def test_what_an_arm_s_children_computed_before_the_rounds_is_held_against_nobody(outcomes):
    record = outcomes[1]["compiles"]
    assert record.status == "ok", record.reason


def test_a_limit_has_fewer_phases_than_were_told_trial_by_trial(outcomes):
    record = outcomes[1]["frozen_limit"]
    assert record.status == "ok", record.reason
    assert list(record.phases) == ["forward", "backward", "total"]


def test_a_global_patch_is_measured_in_processes_of_its_own(outcomes):
    record = outcomes[1]["leaky"]
    assert record.status == "ok" and record.pairing == "turns"
    assert record.processes == {"reference": [1] * 2, "candidate": [1] * 2}
    assert {c.name: c.found for c in record.numerics.checks}["the loss"] == 0.0


@pytest.mark.parametrize(
    ("toggle", "status", "reason", "arm"),
    [
        ("grumpy", "conflict", "grumpy excludes sdpa: it wants to be alone", "candidate"),
        ("greedy", "oom", "ran out of memory", "candidate"),
        ("hang", "timeout", "no answer after 8 s; it was numerics gate at plugin_toggles.py:87", "candidate"),
        ("killed", "crash", "killed by SIGKILL", "candidate"),
        ("raises", "crash", "the toggle raises's patch raised LookupError: nobody expected this", "candidate"),
        ("wrong", "wrong_numerics", "lora_A", "candidate"),
        ("deep_wrong", "wrong_numerics", "each gradient before the trials", "candidate"),
        ("not_a_number", "wrong_numerics", "is off by inf from float32 PEFT", "candidate"),
        (
            "odd_notes",
            "crash",
            "the toggle odd_notes's notes returned {'odd': {torch.float32: b'\\xff'}}; expected what JSON can hold",
            "candidate",
        ),
        ("nothing", "not_applied", "nothing changed nothing in tiny-llama", "candidate"),
        ("refuses", "unsupported", "it does not like this model", "candidate"),
        ("absent", "unsupported", "pip install no-such-package", "candidate"),
    ],
)
def test_each_failure_has_its_status_and_a_reason(outcomes, toggle, status, reason, arm):
    record = outcomes[1][toggle]
    assert record.status == status, record.reason
    assert reason in record.reason
    assert record.arm == arm
    assert record.phases == {} or status == "oom"


def test_what_a_crashed_worker_printed_is_kept(outcomes):
    assert "what it printed before" in outcomes[1]["raises"].log
    assert "LookupError" in outcomes[1]["raises"].log


def test_wrong_numerics_carry_what_was_found(outcomes):
    numerics = outcomes[1]["wrong"].numerics
    assert numerics is not None and not numerics.passed
    assert numerics.grad_error == pytest.approx(0.5, rel=1e-3)


def test_a_broken_plugin_is_one_line(plugin, tmp_path):
    broken = sweep(*COMMON, "ablations=[broken]", cwd=tmp_path, env=plugin)
    assert broken.returncode == 2 and "the ablation broken" in broken.stderr and "Traceback" not in broken.stderr


def test_the_list_shows_a_third_party_s_toggle_and_the_broken_one(plugin, tmp_path):
    listed = sweep("list=true", cwd=tmp_path, env={**plugin, "COLUMNS": "400"}).stdout
    assert "somebody else's toggle" in listed
    assert "does not load" in listed
    assert "(exits_at_import:Exits) does not load: its import raised SystemExit: 0" in listed
    assert "needs the package no_such_package" in listed


def test_a_reference_that_does_not_fit_still_shows_the_candidate(plugin, tmp_path):
    reference = "reference=[sdpa,adamw_foreach,padding,greedy]"
    done = sweep(
        *COMMON, reference, "ablations=[polite]", "report=false", f"output={tmp_path}", cwd=tmp_path, env=plugin
    )
    assert done.returncode == 0, done.stderr
    record = next(r for r in read_records(tmp_path) if r.ablations)
    assert (record.status, record.arm) == ("oom", "reference")
    assert "reference" not in record.phases["total"]
    assert len(record.ms("candidate")) == 2


@pytest.mark.exhaustive
def test_what_does_not_fit_says_how_much_would(plugin, tmp_path):
    own = ("models=[tiny-llama]", "workload=1x256", "trials=4", "warmup=1", "ablations=[lengthy,polite]")
    done = sweep(*own, f"output={tmp_path}", cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    record = next(r for r in read_records(tmp_path) if r.ablations == ["lengthy"])
    assert record.status == "oom"
    assert record.reason.endswith("; samples of 100 tokens fit, of 104 they do not")
    edge = record.notes["candidate"]["edge"]
    assert (edge["of"], edge["asked"], edge["fits"], edge["too_many"]) == ("tokens", 256, 100, 104)
    assert 0 < edge["measured_gib"] < edge["room_gib"]
    assert "samples of 100 tokens fit" in (tmp_path / "summary.md").read_text()


def test_provenance_is_written(outcomes):
    session = json.loads((outcomes[2] / "environment.json").read_text())["sessions"][0]
    assert session["machine"]["device"] == "cpu" and session["machine"]["packages"]["torch"]
    ((dtype, rate),) = session["ceilings"]["gemm_tflops"].items()
    assert dtype in ("float32", "bfloat16") and rate > 0  # the second where the CPU has products of its own for it
    assert session["command"][:3] == ["python", "-m", "lorabench.sweep"]
    assert {r.session for r in outcomes[1].values()} == {session["id"]}
