"""The agenda: what is left to measure, and how a ladder goes on after a toggle that did not apply."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from helpers import MACHINE, config
from rich.console import Console

from lorabench import sweep
from lorabench.plan.compose import ConfigError
from lorabench.record.store import Store, read_records
from lorabench.run.agenda import Agenda
from lorabench.run.runner import record_of

THREE = ("packing", "adamw_fused", "gradient_checkpointing")


class Queue:
    """Measures nothing: a cell comes to what `outcome` says, (status, arm). `at_once`: it asks for all before the
    first."""

    def __init__(self, outcome, at_once=False):
        self.outcome, self.at_once, self.where, self.measured = outcome, at_once, "here", []
        self.looks = 0
        self.sessions = {"s": {"id": "s", "machine": MACHINE.model_dump(mode="json")}}

    def look(self, command):
        self.looks += 1
        return MACHINE

    def run(self, cells, watch):
        for cell in list(cells) if self.at_once else cells:
            self.measured.append(cell)
            status, arm = self.outcome(cell)
            yield cell, record_of(cell, "s", status=status, reason="why", arm=arm)


def measured(folder, design, ablations, outcome, *overrides, **queue):
    """(left-out or rung, reference beyond PEFT's, status) of each record, the reference against itself left out."""
    asked = Queue(outcome, **queue)
    chosen = config(
        "models=[tiny-llama]", "workload=2x16", f"design={design}", f"ablations=[{','.join(ablations)}]",
        f"output={folder}", *overrides,
    )  # fmt: skip
    with Store(folder) as store:
        sweep._measure(store, asked, chosen, [], Console(file=io.StringIO()))
    rows = [(r.ablations, set(r.reference) & set(ablations), r.status) for r in read_records(folder) if r.ablations]
    return asked, rows


def test_parts_are_the_whole_and_share_nothing(tmp_path):
    own = ("eager", "adamw", "adamw_fused", "gradient_checkpointing")
    whole, _ = measured(tmp_path / "whole", "solo", own, lambda cell: ("unsupported", None))
    keys = [cell.key for cell in whole.measured]
    parts = [
        measured(tmp_path / name, "solo", own, lambda cell: ("unsupported", None), f"part={name[0]}/3")[0].measured
        for name in ("1 of 3", "2 of 3", "3 of 3")
    ]
    assert [[cell.key for cell in part] for part in parts] == [keys[0::3], keys[1::3], keys[2::3]]
    again, _ = measured(tmp_path / "2 of 3", "solo", own, crash, "part=2/3")
    assert not again.measured, "a part has no more cells than its own"


def test_a_ladder_in_parts_goes_on_in_the_part_that_saw_what_did_not_apply(tmp_path):
    """The other part's rungs stay its own, whatever became of them there."""
    first, _ = measured(tmp_path / "1", "ladder", THREE, unless("adamw_fused"), "part=1/2")
    again, _ = measured(tmp_path / "1", "ladder", THREE, unless("adamw_fused"), "part=1/2")
    assert [len(cell.toggles) for cell in first.measured] == [0, 2, 2] and not again.measured
    assert [a.name for a in first.measured[-1].toggles] == ["packing", "gradient_checkpointing"]
    other, _ = measured(tmp_path / "2", "ladder", THREE, unless("nothing"), "part=2/2")
    assert [len(cell.toggles) for cell in other.measured] == [1, 3]


@pytest.mark.parametrize(("load", "queue", "said"), [(3.1, "local", 1), (0.9, "local", 0), (3.1, "ray", 0)])
def test_a_load_of_others_is_said_once_before_the_first_worker(load, queue, said, tmp_path, monkeypatch):
    asked, written = Queue(crash), io.StringIO()

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


def crash(cell):
    return "crash", None


def unless(name, status="not_applied"):
    """`status` for every candidate with this toggle; its reference, where the toggle stands there already."""

    def outcome(cell):
        if any(a.name == name for a in cell.reference):
            return status, "reference"
        return (status, "candidate") if any(a.name == name for a in cell.candidate) else ("crash", None)

    return outcome


def test_a_ladder_goes_on_without_a_rung_that_did_not_apply(tmp_path):
    asked, rows = measured(tmp_path, "ladder", THREE, unless("adamw_fused"))
    assert rows == [
        (["packing"], set(), "crash"),
        (["packing", "adamw_fused"], set(), "not_applied"),
        (["packing", "gradient_checkpointing"], set(), "crash"),
    ]
    assert len(asked.measured) == 4  # and the reference against itself: nothing was tried in vain


def test_a_ladder_whose_first_rungs_do_not_apply_begins_with_the_next(tmp_path):
    outcome = lambda cell: ("not_applied", None) if len(cell.toggles) == 1 else ("crash", None)  # noqa: E731
    _, rows = measured(tmp_path, "ladder", THREE, outcome)
    assert [names for names, _, _ in rows] == [[name] for name in THREE]


def test_where_all_cells_were_sent_at_once_the_others_are_sent_again_without_it(tmp_path):
    _, rows = measured(tmp_path, "ladder", THREE, unless("packing"), at_once=True)
    assert (["adamw_fused"], set(), "crash") in rows
    assert (["adamw_fused", "gradient_checkpointing"], set(), "crash") in rows


def test_what_this_machine_cannot_have_is_left_out_beforehand(tmp_path):
    names = ("packing", "adamw_8bit", "adamw_fused", "eager")
    _, rows = measured(tmp_path, "ladder", names, crash)
    assert [r[0] for r in rows] == [
        ["packing"], ["packing", "adamw_8bit"], ["packing", "adamw_fused"], ["packing", "adamw_fused", "eager"],
    ]  # fmt: skip


def test_leave_one_out_does_without_what_this_machine_cannot_have(tmp_path):
    _, rows = measured(tmp_path, "leave_one_out", ("packing", "cuda_graph", "gradient_checkpointing"), crash)
    assert [(r[0], r[1]) for r in rows] == [
        (["packing"], {"gradient_checkpointing"}),
        (["cuda_graph"], {"packing", "gradient_checkpointing"}),
        (["gradient_checkpointing"], {"packing"}),
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
    asked, _ = measured(tmp_path, design, THREE, unless("packing"))
    assert not asked.measured and read_records(tmp_path) == before


def test_failed_cells_are_tried_once_more_and_no_more_than_once(tmp_path):
    measured(tmp_path, "ladder", THREE, crash)
    asked, rows = measured(tmp_path, "ladder", THREE, crash, "resume=failed")
    assert len(asked.measured) == 4 and len(rows) == 6


def test_a_reference_that_cannot_be_had_is_no_toggles_fault():
    agenda = Agenda(config("models=[tiny-llama]", "design=ladder", f"ablations=[{','.join(THREE)}]"), [])
    agenda.plan_for("cpu")
    rung = agenda.cells[1]
    own = {"key": rung.key, "replicate": 0, "status": "unsupported"}
    agenda.take(SimpleNamespace(**own, arm="reference"))
    assert [t.name for t in agenda.cells[2].toggles] == ["packing", "adamw_fused"]
    agenda.take(SimpleNamespace(**own, arm="candidate"))
    assert [t.name for t in agenda.cells[2].toggles] == ["adamw_fused"]
