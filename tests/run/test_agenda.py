"""The agenda: what is left to measure, and how a ladder goes on after a toggle that did not apply."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from helpers import MACHINE, config
from rich.console import Console
from run.scripted import Script, ScriptedQueue

from lorabench import sweep
from lorabench.measure.seat import Failed
from lorabench.plan.compose import ConfigError
from lorabench.record.store import Store, read_records
from lorabench.run.agenda import Agenda

THREE = ("packing", "adamw_fused", "gradient_checkpointing")


def measured(folder, design, ablations, outcome, *overrides):
    """(script, (what is under test, what of the ablations is in its reference, status) of each record but the
    reference's against itself). `outcome`: of an arm's stack the status with which it does not come to sit."""
    script = Script(refuses=lambda stack: Failed(outcome(stack), "why"))
    chosen = config(
        "models=[tiny-llama]", "workload=2x16", f"design={design}", f"ablations=[{','.join(ablations)}]",
        f"output={folder}", *overrides,
    )  # fmt: skip
    with Store(folder) as store:
        sweep._measure(store, ScriptedQueue(folder, script), chosen, [], Console(file=io.StringIO()))
    rows = [(r.ablations, set(r.reference) & set(ablations), r.status) for r in read_records(folder) if r.ablations]
    return script, rows


def over_the_start(rows):
    """A ladder's rungs."""
    return [names for names, under, _ in rows if not under]


def prepared(script):
    """The arms that were tried, but the reference and its twin."""
    return [name for _, what, *rest in script.heard if what == "prepare" for name in rest if "reference" not in name]


def test_parts_are_the_whole_and_share_the_reference_against_itself_alone(tmp_path):
    own = ("eager", "adamw", "adamw_fused", "gradient_checkpointing")
    measured(tmp_path / "whole", "solo", own, crash)
    itself, *keys = [r.key for r in read_records(tmp_path / "whole")]
    parts = []
    for name in ("1 of 3", "2 of 3", "3 of 3"):
        measured(tmp_path / name, "solo", own, crash, f"part={name[0]}/3")
        parts.append([r.key for r in read_records(tmp_path / name)])
    assert parts == [[itself, *keys[0::3]], [itself, *keys[1::3]], [itself, *keys[2::3]]]
    again, _ = measured(tmp_path / "2 of 3", "solo", own, crash, "part=2/3")
    assert not again.heard, "a part has no more cells than its own"


def test_a_ladder_in_parts_goes_on_in_the_part_that_saw_what_did_not_apply(tmp_path):
    """The other part's rungs stay its own, whatever became of them there."""
    _, rows = measured(tmp_path / "2", "ladder", THREE, unless("adamw_fused"), "part=2/2")
    again, _ = measured(tmp_path / "2", "ladder", THREE, unless("adamw_fused"), "part=2/2")
    assert (["packing", "adamw_fused"], set(), "not_applied") in rows
    assert not again.heard
    _, other = measured(tmp_path / "1", "ladder", THREE, crash, "part=1/2")
    plan = {(*names, len(under)) for names, under, _ in other} | {(*names, len(under)) for names, under, _ in rows}
    assert {("packing", 0), ("packing", "gradient_checkpointing", 0)} < plan


@pytest.mark.parametrize(("load", "queue", "said"), [(3.1, "local", 1), (0.9, "local", 0), (3.1, "ray", 0)])
def test_a_load_of_others_is_said_once_before_the_first_worker(load, queue, said, tmp_path, monkeypatch):
    asked, written = ScriptedQueue(tmp_path, Script(refuses=lambda stack: Failed("crash", "why"))), io.StringIO()

    def load_average():
        assert asked.looks == 0, "what a sweep does itself makes load, too"
        return load

    monkeypatch.setattr(sweep, "load_average", load_average)
    overrides = ("models=[tiny-llama]", "workload=2x16", "ablations=[eager]", "repeat=2", f"queue={queue}")
    with Store(tmp_path) as store:
        sweep._measure(store, asked, config(*overrides, f"output={tmp_path}"), [], Console(file=written))
    assert asked.looks == 2
    assert written.getvalue().count(f"load 3.1 on {MACHINE.cores} cores: other processes disturb the times") == said


@pytest.mark.parametrize("part", ["3/2", "0/2", "1", "a/b", "1/0", "1/2/3"])
def test_a_part_that_is_none_is_one_line(part):
    with pytest.raises(ConfigError, match=r"part: .*expected one of several, as 1/2 and 2/2"):
        config(f"part={part}")


def crash(stack):
    return "crash"


def unless(name):
    """Every arm with this toggle did not apply."""
    return lambda stack: "not_applied" if name in stack.labels else "crash"


def test_a_ladder_goes_on_without_a_rung_that_did_not_apply(tmp_path):
    script, rows = measured(tmp_path, "ladder", THREE, unless("adamw_fused"))
    assert over_the_start(rows) == [["packing"], ["packing", "adamw_fused"], ["packing", "gradient_checkpointing"]]
    assert (["packing", "adamw_fused"], set(), "not_applied") in rows
    assert (["gradient_checkpointing"], {"packing"}, "crash") in rows  # over the rung below
    tried = prepared(script)
    assert tried == ["packing", "packing + adamw_fused", "packing + gradient_checkpointing"]  # nothing in vain


def test_a_ladder_whose_first_rungs_do_not_apply_begins_with_the_next(tmp_path):
    _, rows = measured(tmp_path, "ladder", THREE, lambda stack: "crash" if stack.is_reference else "not_applied")
    assert over_the_start(rows) == [[name] for name in THREE]


def test_where_nobody_replans_the_others_are_sent_again_without_it(tmp_path, monkeypatch):
    """As the nodes of a cluster do."""
    monkeypatch.setattr(Agenda, "replan", lambda self, family, outcomes: family)
    _, rows = measured(tmp_path, "ladder", THREE, unless("packing"))
    assert (["adamw_fused"], set(), "crash") in rows
    assert (["adamw_fused", "gradient_checkpointing"], set(), "crash") in rows


def test_what_this_machine_cannot_have_is_left_out_beforehand(tmp_path):
    names = ("packing", "adamw_8bit", "adamw_fused", "eager")
    _, rows = measured(tmp_path, "ladder", names, crash)
    assert sorted(over_the_start(rows)) == [
        ["packing"], ["packing", "adamw_8bit"], ["packing", "adamw_fused"], ["packing", "adamw_fused", "eager"],
    ]  # fmt: skip


def test_leave_one_out_does_without_what_this_machine_cannot_have(tmp_path):
    _, rows = measured(tmp_path, "leave_one_out", ("packing", "cuda_graph", "gradient_checkpointing"), crash)
    assert sorted(((r[0], r[1]) for r in rows), key=lambda row: row[0]) == [
        (["cuda_graph"], {"packing", "gradient_checkpointing"}),
        (["gradient_checkpointing"], {"packing"}),
        (["packing"], {"gradient_checkpointing"}),
    ]


def test_leave_one_out_goes_on_without_what_did_not_apply(tmp_path):
    _, rows = measured(tmp_path, "leave_one_out", THREE, unless("packing"))
    assert (["packing"], {"adamw_fused", "gradient_checkpointing"}, "not_applied") in rows
    assert (["adamw_fused"], {"gradient_checkpointing"}, "crash") in rows
    assert (["gradient_checkpointing"], {"adamw_fused"}, "crash") in rows


@pytest.mark.parametrize("design", ["ladder", "leave_one_out"])
def test_the_same_command_again_finds_nothing_missing(tmp_path, design):
    measured(tmp_path, design, THREE, unless("packing"))
    before = read_records(tmp_path)
    again, _ = measured(tmp_path, design, THREE, unless("packing"))
    assert not again.heard and read_records(tmp_path) == before


def test_failed_cells_are_tried_once_more_and_no_more_than_once(tmp_path):
    measured(tmp_path, "ladder", THREE, crash)
    again, _ = measured(tmp_path, "ladder", THREE, crash, "resume=failed")
    assert len(prepared(again)) == 3


def test_a_reference_that_cannot_be_had_is_no_toggles_fault():
    agenda = Agenda(config("models=[tiny-llama]", "design=ladder", f"ablations=[{','.join(THREE)}]"), [])
    agenda.plan_for("cpu")
    rung = agenda.cells[1]
    own = {"key": rung.key, "replicate": 0, "status": "unsupported", "notes": {}}
    agenda.take(SimpleNamespace(**own, arm="reference"))
    assert [t.name for t in agenda.cells[2].toggles] == ["packing", "adamw_fused"]
    agenda.take(SimpleNamespace(**own, arm="candidate"))
    assert [t.name for t in agenda.cells[2].toggles] == ["adamw_fused"]


def test_a_sweep_ends_where_no_record_is_found_under_its_cells_key(tmp_path, monkeypatch):
    monkeypatch.setattr(Agenda, "take", lambda self, record: None)
    script, rows = measured(tmp_path, "leave_one_out", THREE, unless("packing"))
    assert rows and len(script.heard) < 200
