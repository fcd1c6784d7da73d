"""The command of one row: it plans the very cell that the row is of."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lorabench.plan.compose import load_config, plan
from lorabench.record.pairs import AGAINST
from lorabench.report.analysis import Analysis
from lorabench.report.rerun import rerun

RESULTS = Path(__file__).resolve().parents[2] / "results"
OWN = {"recommend_1_7b", "recommend_1_7b_by_hand"}  # of a person's config.json and chats, which are not published
FOLDERS = sorted(path.parent for path in RESULTS.rglob("records.jsonl") if path.parent.name not in OWN)
EVERY = 12  # records: composing takes a quarter of a second
FEW = slice(0, EVERY, EVERY)  # rows of one folder are planned by commands of one form
REST = slice(FEW.stop, None, EVERY)


@pytest.mark.parametrize(
    ("folder", "which"),  # in make test one row of every third folder: neighbours are planned by commands of one form
    [
        pytest.param(folder, which, marks=[] if which == FEW and n % 3 == 0 else [pytest.mark.exhaustive])
        for n, folder in enumerate(FOLDERS)
        for which in (FEW, REST)
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "the first" if value == FEW else "the rest",
)
def test_a_published_row_is_planned_by_its_command(folder, which):
    analysis = Analysis.read(folder)
    commands = {s["id"]: s["command"] for s in analysis.sessions}
    for record in analysis.records[which]:
        words = shlex.split(rerun(record, commands[record.session]))
        assert words[:3] == ["python", "-m", "lorabench.sweep"]
        cells = plan(load_config(words[3:]), "cuda").cells
        alone = {replace(cell, design=record.design).key for cell in cells}  # a rung is measured without its ladder
        assert len(cells) <= 2
        # A noise floor between processes, and a reference alone, are no cells of their own: they are measured where an
        # arm sits alone, and until the reference again is.
        own = record.separate or record.design == AGAINST
        assert record.key in alone or (record.is_noise_floor and own)


def test_parameters_of_toggles_models_and_workloads_are_kept(record):
    made = record(["torch_compile(mode=max-autotune)"], model="linear-64x64(r=8)", kind="op")
    words = shlex.split(rerun(made, []))
    assert "ablations=[[{torch_compile: {mode: max-autotune}}]]" in words
    assert "models=[{linear-64x64: {r: 8}}]" in words and "kind=op" in words
    assert load_config(words[3:]).models == [{"linear-64x64": {"r": 8}}]


def test_values_that_python_writes_in_its_own_way_are_hydra_s(record):
    jobs = "lorafusion_xsum(jobs=[{'name': 'job', 'copies': 3}])"
    made = record(["cut_cross_entropy(filter_eps=None)"], workload=jobs)
    read = load_config(shlex.split(rerun(made, []))[3:])
    assert read.workload == {"lorafusion_xsum": {"jobs": [{"name": "job", "copies": 3}]}}
    assert read.ablations == [[{"cut_cross_entropy": {"filter_eps": None}}]]


def test_hostile_names_stay_one_word_of_the_shell(record):
    evil = "a'; rm -rf ~ #$(x)"
    words = shlex.split(rerun(record([evil], model=evil), ["python", "-m", "lorabench.sweep", "suite=x; echo"]))
    assert words[3] == "suite=x; echo" and len(words) == 11
