"""The notebooks: what is committed was executed in order and names no machine's paths; each runs in a fresh kernel."""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import resource
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lorabench.report.analysis import Analysis
from notebooks import execute

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 450_000
MOST_CPU_S = 120  # of all notebooks together, theirs and their children's: a machine's other work does not count
CONSTANTS = {"1", "95"}  # numbers that are no result: a ratio of equals, the level of an interval
A_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|work|opt|usr|var|mnt|Users|private)/|[A-Z]:\\\\|\.venv|site-packages"
)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def committed(request):
    return json.loads(request.param.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def markdown_cells(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def test_there_is_a_notebook_for_each_question():
    assert len(FILES) >= 5
    assert max(path.stat().st_size for path in FILES) <= MOST_BYTES


def test_every_cell_was_executed_in_order_from_the_first_to_the_last(committed):
    counts = [cell["execution_count"] for cell in code_cells(committed)]
    assert counts == list(range(1, len(counts) + 1))


def test_there_is_output_and_none_of_it_is_an_error_or_a_warning(committed):
    kinds = [(o["output_type"], o.get("name")) for o in outputs(committed)]
    assert ("display_data", None) in kinds
    assert not [kind for kind in kinds if kind[0] == "error" or kind[1] == "stderr"]
    assert code_cells(committed)[-1]["outputs"], "the last cell says what follows"


def test_nothing_of_the_machine_is_kept(committed):
    assert execute.stripped(json.loads(json.dumps(committed))) == committed
    text = json.dumps([o.get("data", {}).get("text/markdown", o.get("text")) for o in outputs(committed)])
    assert not A_PATH.search(text), A_PATH.search(text)
    assert not re.search(r"object at 0x", json.dumps(outputs(committed)))


def test_it_opens_with_a_question_and_ends_with_what_follows(committed):
    first, *_, last = markdown_cells(committed)
    assert re.match(r"# .*\?$", first, re.M)
    assert last.startswith("## What follows")


def test_no_number_is_typed_into_a_sentence(committed):
    """Numbers come out of the data: in the text between cells and in what `say` is given there is none."""
    typed = [number for text in markdown_cells(committed) for number in numbers(text)]
    for cell in code_cells(committed):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                typed += [number for text in sentences(node) for number in numbers(text)]
    assert not typed, typed


def sentences(call):
    """The constant text of a call, an f-string as one; what stands in its braces is computed."""
    inside = {id(part) for node in ast.walk(call) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(call):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def numbers(text):
    plain = re.sub(r"`[^`]*`", "", text)
    return [n for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", plain) if n not in CONSTANTS]


def test_the_rule_about_numbers_finds_one():
    typed = ast.parse('say(f"It is {x:.2f} × as fast, {y} of 17, in 95 % of `4x2048`")').body[0].value
    assert [n for text in sentences(typed) for n in numbers(text)] == ["17"]


def test_a_wrong_name_costs_one_line(capsys):
    assert execute.main(["1_which_stak"]) == 2
    assert "did you mean 1_which_stack?" in capsys.readouterr().err


@pytest.fixture
def kernel(monkeypatch):
    """nbclient, and an environment in which a kernel finds the project."""
    pytest.importorskip("nbclient", reason=f"the notebooks' extra is not installed: {execute.EXTRA}")
    pytest.importorskip("ipykernel", reason=f"the notebooks' extra is not installed: {execute.EXTRA}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.exhaustive
def test_each_runs_in_a_fresh_kernel_and_all_of_them_are_quick(kernel):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for path in FILES:
        again = execute.executed(path)
        assert all(cell["execution_count"] for cell in code_cells(again)), path.name
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S


def write(path, *sources):
    """A notebook of these code cells."""
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for n, source in enumerate(sources)
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))


@pytest.mark.exhaustive
def test_a_notebook_that_fails_is_left_as_it_was_and_the_exit_code_says_so(kernel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(execute, "HERE", tmp_path)
    write(tmp_path / "fine.ipynb", "print(1 + 1)")
    write(tmp_path / "wrong.ipynb", "1 / 0")
    left = (tmp_path / "wrong.ipynb").read_bytes()
    assert execute.main(["fine"]) == 0
    saved = (tmp_path / "fine.ipynb").read_bytes()
    assert json.loads(saved)["cells"][0]["outputs"][0]["text"] == ["2\n"]
    assert execute.main([]) == 1
    assert (tmp_path / "fine.ipynb").read_bytes() == saved, "twice the same results, twice the same file"
    assert (tmp_path / "wrong.ipynb").read_bytes() == left
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.fixture
def grown(tmp_path):
    """The project with results that grew: an empty sweep, one in which nothing was measured, one of a machine without
    a GPU. And without the cheats, which are measured elsewhere."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for name in ("benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("plots", "*.html"))
    lines = (ROOT / "results/h200/peers/records.jsonl").read_text().splitlines()
    known = [json.loads(line) for line in lines[:3]]
    kept = ("schema", "key", "session", "model", "workload", "design", "reference", "candidate", "ablations")
    failed = [{k: r[k] for k in kept} | {"status": "crash", "reason": "a cause"} for r in known]
    bare = [{k: v for k, v in r.items() if k not in ("bound", "roofline", "telemetry", "memory")} for r in known]
    for name, records in {"new/empty": [], "new/failed": failed, "new/bare": bare}.items():
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    last = tmp_path / "notebooks" / "4_can_i_trust_it.ipynb"
    without = re.sub(r"CHEATS = \[[^\]]*\]", "CHEATS = []", last.read_text())
    assert without != last.read_text()
    last.write_text(without)
    return tmp_path


@pytest.mark.exhaustive
def test_new_empty_and_failed_sweeps_do_not_stop_them(kernel, grown):
    for path in FILES:
        again = execute.executed(grown / "notebooks" / path.name)
        said = "".join(o["data"]["text/markdown"] for o in outputs(again) if "text/markdown" in o.get("data", {}))
        assert "nan" not in re.findall(r"\w+", said), path.name
        assert all(cell["execution_count"] for cell in code_cells(again)), path.name


CHOICES = {
    "a small model that waits for its host": ("h200/peers", "smollm2-135m", "1x512", 80.0),
    "rows that failed, and two references": ("h200/axolotl_blog", "qwen2.5-1.5b(bias=all)", "4x2048", 80.0),
    "nothing fits": ("h200/peers", "llama-3.1-8b", "4x2048", 1.0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", CHOICES.values(), ids=list(CHOICES))
def test_which_stack_answers_other_choices(kernel, tmp_path, choice):
    chosen = dict(zip(("SWEEP", "MODEL", "WORKLOAD", "MEMORY_GIB"), choice, strict=True))
    text = FILES[0].read_text()
    for name, value in chosen.items():
        written = json.dumps(repr(value))[1:-1]
        text, found = re.subn(rf"(\"{name} = )[^ ]+?(?= |\\n)", lambda m, new=written: m[1] + new, text)
        assert found == 1, name
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    shutil.copy(ROOT / "notebooks/show.py", tmp_path / "notebooks")
    (tmp_path / "notebooks/choice.ipynb").write_text(text)
    again = execute.executed(tmp_path / "notebooks/choice.ipynb")
    said = ["".join(o["data"].get("text/markdown", "")) for o in outputs(again) if "data" in o]
    assert any(f"**{chosen['MODEL']} @ {chosen['WORKLOAD']}**" in text for text in said)
    assert not any(re.search(r"\bnan\b", text) for text in said)
    answers = ("fits into 1 GiB",) if chosen["MEMORY_GIB"] == 1 else ("Use `", "No stack is clearly faster")
    assert any(words in said[-1] for words in answers), said[-1]


def test_a_figure_that_nobody_measured_is_a_sentence(monkeypatch):
    pytest.importorskip("IPython", reason=f"the notebooks' extra is not installed: {execute.EXTRA}")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    show = importlib.import_module("show")
    shown = []
    monkeypatch.setattr(show, "display", lambda item: shown.append(item.data))
    runs = {"h200/qlora": Analysis.read(ROOT / "results/h200/qlora")}
    show.measured_figure(runs, "predibase_ladder", "ladder")
    show.measured_figure(runs, "qlora", "ladder")
    assert all(text.startswith("**Not measured yet**") for text in shown) and len(shown) == 2
    assert "suite=predibase_ladder" in shown[0]
    show.measured_figure(runs, "qlora", "speedup")
    assert isinstance(shown[2], bytes)


def test_what_the_notebooks_show():
    pytest.importorskip("IPython", reason=f"the notebooks' extra is not installed: {execute.EXTRA}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "notebooks"))
        show = importlib.import_module("show")
        shown = []
        patch.setattr(show, "display", lambda item: shown.append(item.data))
        show.table(pd.DataFrame({"a|b": ["x_y", None], "ms": [1.23456, math.nan]}))
        show.table(pd.DataFrame({"a": []}))
        show.figure(None, "Nothing.")
    assert shown == ["| a\\|b | ms |\n| --- | --- |\n| x\\_y | 1.23 |\n|  |  |", "*No row.*", "Nothing."]
