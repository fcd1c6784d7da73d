"""Two runs against each other: ratios, not milliseconds."""

import pytest
from record.arms import slower

from lorabench.compare import compare, hardware, machine_changes, main, table
from lorabench.report.analysis import Analysis


def outcomes(changes):
    return {"+".join((c.after or c.before).ablations): c.outcome for c in changes}


def test_each_outcome(record):
    a, b, crash = (
        (lambda *x, **k: record(*x, seed=1, **k)),
        (lambda *x, **k: record(*x, seed=77, **k)),
        {"status": "crash"},
    )
    before = [a([]), a(["up"], speedup=1.2), a(["down"], speedup=1.4), a(["as_was"], speedup=1.3, sd=0.003)]
    after = [b([]), b(["up"], speedup=1.5), b(["down"], speedup=1.2), b(["as_was"], speedup=1.3, sd=0.003)]
    before += [a(["noisy"], sd=0.2), a(["breaks"]), a(["heals"], **crash), a(["never"], **crash), a(["gone"])]
    after += [b(["noisy"], sd=0.2), b(["breaks"], **crash), b(["heals"]), b(["never"], **crash), b(["new"])]
    changes = compare(before, after)
    assert outcomes(changes) == {
        "up": "better", "down": "worse", "as_was": "same", "noisy": "unclear", "breaks": "fails now",
        "heals": "works now", "never": "fails in both", "gone": "vanished", "new": "appeared",
    }  # fmt: skip
    assert {c.outcome for c in changes[:2]} == {"worse", "fails now"}  # first what needs attention
    (up,) = (c.change for c in changes if c.outcome == "better")
    assert up.low < 1.5 / 1.2 < up.high


def shown(changes):
    """Of each cell: A, B, B / A and outcome, as the table has them."""
    _, name, *columns = (map(str, column.cells) for column in table(changes).columns)
    return dict(zip(name, zip(*columns, strict=True), strict=True))


def test_what_is_unclear_has_no_ratio_and_says_why(record):
    def run(seed, near, few):
        cells = [record(["wide"], sd=0.2, speedup=1.02), record(["near"], speedup=near)]
        cells += [record(["as_was"], sd=0.003, speedup=1.2, seed=seed), record(["few"], speedup=few, trials=5)]
        return [record([], seed=seed), *cells, record(["fewest"], trials=2)]

    told = shown(compare(run(1, 1.2, 1.0), run(2, 1.218, 2.0)))
    a, b, change, outcome = told["wide"]
    assert all(text.startswith("unclear [") for text in (a, b, change))
    assert outcome == "unclear (its interval holds 1)"
    a, b, change, outcome = told["near"]
    assert a.startswith("1.") and b.startswith("1.") and change.startswith("unclear [1.0")
    assert outcome.startswith("unclear (its interval meets the noise floor of ±")
    assert told["as_was"][2].startswith(("0.99", "1.00")) and told["as_was"][3] == "same"
    assert told["few"][2].startswith("better [") and told["few"][3] == "better (5 trials, a figure needs 6)"
    assert told["fewest"] == ("ok", "ok", "", "unclear (too few trials)")


def test_what_only_the_correction_makes_unclear_says_so(record):
    before, after = ([record([f"t{i}"], sd=0.05, trials=12, speedup=of) for i in range(60)] for of in (1.0, 1.08))
    assert any(change.doubt.endswith(" after Holm's correction)") for change in compare(before, after))


def test_a_machine_twice_as_fast_changes_no_ratio(record):
    before = [record([], sd=0.003), record(["a"], speedup=1.3, sd=0.003)]
    cell = record(["a"], speedup=1.3, sd=0.003, seed=5)
    (change,) = compare(before, [before[0], slower(cell, 1 / 2)])
    assert change.outcome == "same"


def test_cells_of_two_kinds_are_two_cells(record):
    a, b = record(["x"]), record(["x"], kind="evaluate")
    assert sorted(c.outcome for c in compare([a], [b])) == ["appeared", "vanished"]


def test_the_least_work_is_no_cell(record):
    before, after = ([record(["x"]), record(["frozen_limit"], speedup=of, kind="limit")] for of in (2.0, 1.5))
    assert outcomes(compare(before, after)) == {"x": "same"} and outcomes(compare(before, [])) == {"x": "vanished"}


def test_cells_match_by_content_whatever_the_key_and_the_order_of_toggles(record):
    before = record(["a", "b"], speedup=1.3, key="one")
    after = record(["b", "a"], speedup=1.3, key="two", reference=("adamw_fused", "sdpa"), design="factorial")
    other = record(["a", "b"], speedup=1.3, key="three", reference=("eager", "adamw_fused"))
    assert [c.change is not None for c in compare([before], [after])] == [True]
    assert sorted(c.outcome for c in compare([before], [other])) == ["appeared", "vanished"]


def test_many_equal_cells_rarely_differ(record):
    names = [f"t{i}" for i in range(20)]
    before, after = ([record([n], seed=s, sd=0.01) for n in names] for s in (1000, 2000))
    wrong = [c for c in compare(before, after) if c.outcome in ("better", "worse")]
    assert wrong == []


def test_a_run_against_itself_is_the_same_and_not_certain(record):
    (change,) = compare([record(["a"], speedup=1.3)], [record(["a"], speedup=1.3)])
    assert change.change.low < 0.999 < 1.001 < change.change.high  # the draws of the two runs are independent


def test_what_differs_between_the_machines(session):
    a, b = session(driver="570.1"), session("s9", driver="580.2", packages={"torch": "2.13.0", "peft": "0.21"})
    assert machine_changes([a], [b]) == [("driver", "570.1", "580.2"), ("package peft", "unknown", "0.21")]


def test_two_machines_have_a_row_of_the_same_reference_on_both(tmp_path, record, folder, session, capsys):
    here = folder(tmp_path / "a", [record([]), record(["x"], speedup=1.4), record(["x"], model="big")], [session()])
    slow = [slower(r, 20) for r in (record([], seed=3), record(["x"], speedup=1.4, seed=3))]
    there = folder(tmp_path / "b", slow, [session(device="cpu", name="a CPU")])
    runs = [Analysis.read(path, salt=path.name) for path in (here, there)]
    (row,) = hardware(*runs)
    assert (row.title, row.reference) == ("smollm2-135m @ alpaca", "adamw_fused + sdpa")
    assert row.after_ms / row.before_ms == pytest.approx(20, rel=0.1)
    assert hardware(runs[0], runs[0]) == []
    assert main([str(here), str(there)]) == 0
    said = capsys.readouterr().out
    assert "The same step on other hardware" in said and "smollm2-135m" in said


@pytest.mark.parametrize("columns", [None, "80", "140"])
def test_names_are_whole_however_narrow_it_is(columns, tmp_path, record, folder, session, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    name, model = ["adapters_in_compute_dtype", "cuda_graph"], "a-model-with-a-long-name-1.7b"
    cells = [record(name, model=model, reference=["gradient_checkpointing"], sd=0.2)]
    here = folder(tmp_path / "a", cells, [session()])
    there = folder(tmp_path / "b", cells, [session(device="cpu", name="a CPU")])
    assert main([str(here), str(there)]) == 0
    said = capsys.readouterr().out
    assert "…" not in said.replace("reading both …", "") and said.count(model) == 2  # a table each
    assert all(word in said for word in (*name, "gradient_checkpointing", "unclear", "interval"))
    assert columns or f"{model} @ alpaca │ {' + '.join(name)} │ " in said


@pytest.mark.parametrize("broken", ["missing", "corrupt"])
def test_command_line(tmp_path, record, folder, capsys, broken):
    a = folder(tmp_path / "a", [record([]), record(["x"], speedup=1.4)])
    b = folder(tmp_path / "b", [record([]), record(["x"], speedup=1.2)])
    assert main([str(a), str(b)]) == 0
    first, answer, *_ = capsys.readouterr().out.splitlines()
    assert first == "reading both …" and answer.startswith("1 worse")
    assert main([str(a), str(b), "--fail-on-regression"]) == 1
    assert main([str(b), str(a), "--fail-on-regression"]) == 0
    (b / "records.jsonl").unlink() if broken == "missing" else (b / "records.jsonl").write_text("nonsense\n")
    capsys.readouterr()
    assert main([str(a), str(b)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("lorabench: ") and "records.jsonl" in said


def test_cells_that_are_gone_are_a_regression_and_named(tmp_path, record, folder, capsys):
    a = folder(tmp_path / "a", [record([]), record(["x"], speedup=1.4), record(["y"])])
    b = folder(tmp_path / "b", [record([]), record(["x"], speedup=1.4)])
    assert main([str(a), str(b)]) == 0
    assert main([str(b), str(a), "--fail-on-regression"]) == 0
    assert main([str(a), str(b), "--fail-on-regression"]) == 1
    assert capsys.readouterr().err == f"lorabench: {b} lacks 1 of the 2 cells of {a}: smollm2-135m @ alpaca: y\n"
    (b / "records.jsonl").write_bytes(b"")
    assert main([str(b), str(b), "--fail-on-regression"]) == 1
    assert capsys.readouterr().err == f"lorabench: {b} has no cells to compare {b} with\n"


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_folder_without_records_is_told_before_the_other_is_read(
    wrong, tmp_path, record, folder, capsys, monkeypatch
):
    runs = [folder(tmp_path / "a", [record([])]), folder(tmp_path / "b", [record([])])]
    runs[wrong] = tmp_path / "nowhere"
    monkeypatch.setattr(Analysis, "read", None)
    assert main([str(run) for run in runs]) == 2
    wanted = "has no records.jsonl; expected the folder that a sweep had as output="
    assert capsys.readouterr().err == f"lorabench: {tmp_path / 'nowhere'} {wanted}\n"
