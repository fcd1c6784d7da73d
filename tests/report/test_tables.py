"""Tables: nothing is lost, nothing is read as markup, the same numbers stand in every format."""

import io
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
from helpers import md_rows
from record.arms import line_of, slower, written
from rich.console import Console

from lorabench.record.schema import ARMS, INTERRUPTED, UNCHECKED, Record
from lorabench.record.store import read_records
from lorabench.report import cells, claim_tables, tables, words
from lorabench.report.analysis import Analysis
from lorabench.report.cells import judgement
from lorabench.report.details import detail
from lorabench.report.shown import in_groups, show
from lorabench.report.terminal import print_table, terminal_table


def frame(records, sessions=()):
    return Analysis(records, sessions).table


def markdown(records):
    return tables.markdown(show(Analysis(records)))


def latex(records):
    return tables.latex(show(Analysis(records)))


def console(records, width):
    out = io.StringIO()
    Console(file=out, width=width).print(terminal_table(show(Analysis(records)), width))
    return out.getvalue()


def test_frame_has_the_known_values(sweep, session):
    table = frame(sweep(), [session()]).set_index("toggles")
    kernels = table.loc["lora_kernels"]
    assert kernels["total_speedup"] == pytest.approx(1.4, rel=0.01)
    assert kernels["memory_saved_pct"] == pytest.approx(25)
    assert kernels["candidate_tokens_s"] == pytest.approx(4000 / kernels["total_candidate_ms"] * 1000)
    assert kernels["reference_padded_share"] == pytest.approx(0.2)
    assert kernels["candidate_bound"] == "memory-bound"  # of the backward pass, the longest
    assert kernels["candidate_of_ceiling"] == pytest.approx((0.3 * 0.5 + 0.6 * 0.4) / 0.9, rel=0.01)
    assert kernels["device"] == "NVIDIA H200"
    assert kernels["overhead_share"] == pytest.approx(24 / 60)
    verdicts = table["verdict"].dropna().to_dict()
    assert verdicts == {"lora_kernels": "faster", "gradient_checkpointing": "slower", "adamw_foreach": "same"}
    assert (table.loc[["lora_kernels"], "p_holm"] >= table.loc[["lora_kernels"], "p"]).all()


def test_an_interval_is_of_the_trials_and_not_what_an_older_lorabench_made_of_them(record, tmp_path):
    made = record(["a"], speedup=1.4)
    line = line_of(made)
    line["phases"]["total"] |= {"speedup": 1.23, "low": 1.2, "high": 1.25}
    (tmp_path / "records.jsonl").write_text(json.dumps(line) + "\n")
    assert frame(read_records(tmp_path))["total_low"][0] == frame([made])["total_low"][0] > 1.25


def test_noise_floor_is_that_of_the_same_model(record):
    records = [record([], sd=0.001), record([], model="big", sd=0.2), record(["a"]), record(["a"], model="big")]
    small, big = frame(records)["noise_floor"][2:]
    assert small == 0.01
    assert big > 0.03


def test_a_row_is_judged_by_the_noise_floor_of_its_own_pairing(record):
    apart = {"pairing": "abba", "processes": {arm: [8, 8, 7, 7] for arm in ARMS}}
    rows = [record(["a"], **apart), record(["b"])]
    floors = [record([], sd=0.001), record([], sd=0.2, key="other", **apart)]
    table = frame([*floors, *rows])
    assert table["noise_floor"][2] > 0.05 and table["noise_floor"][3] == 0.01
    assert list(table["noise_pairing"][2:]) == ["abba", "paired"]
    names = [row["toggle"] for row in md_rows(markdown([*floors, *rows]), "smollm2-135m @ alpaca")]
    assert {"reference again (A/A)", "reference again (A/A, separate processes)"} < set(names)
    text = {r["toggle"]: r["verdict"] for r in md_rows(markdown([floors[0], *rows]), "smollm2-135m @ alpaca")}
    assert "noise floor of paired A/A" in text["a"] and "noise floor" not in text["b"]


def test_separate_processes_that_differ_are_no_difference_of_the_arms(record, tmp_path):
    """Blocks 10 % apart in either arm: the trials alone would say 'faster'."""
    made = record(["a"], speedup=1.03, sd=0.001)
    level = np.repeat([1.0, 1.1, 1.0, 1.1], [8, 8, 7, 7])
    made = slower(made, level)
    changes = {"pairing": "abba", "processes": {arm: [8, 8, 7, 7] for arm in ARMS}}
    said = frame([made.model_copy(update=changes)]).iloc[0]
    assert said["verdict"] == "unclear" and said["total_low"] < 0.95 and said["total_high"] > 1.1
    older = written(tmp_path, [made.model_copy(update=changes | {"processes": None})])  # which had two of each arm
    (old,) = read_records(older)
    assert old.trials_by_process == ([15, 15], [15, 15])
    assert frame([old])["processes"][0] == "2 and 2"


@pytest.mark.parametrize(
    ("low", "high", "why"),
    [(0.9, 1.2, "its interval holds 1"), (1.005, 1.2, "its interval meets the noise floor of ±1.0 %"),
     (0.8, 0.995, "its interval meets the noise floor of ±1.0 %"), (1.95, 2.76, "p 0.19 after Holm's correction")],
)  # fmt: skip
def test_an_unclear_verdict_says_why(record, low, high, why):
    made = record(["a"])
    analysis = Analysis([made])
    row = analysis.row(made) | {"verdict": "unclear", "total_low": low, "total_high": high, "p_holm": 0.187}
    assert judgement(row, made, analysis.groups[0]).startswith(f"unclear ({why})")


def test_failed_rows_are_kept_everywhere_with_status_and_reason(sweep):
    records = sweep()
    failed = [r for r in records if r.status != "ok"]
    rows = {row["toggle"]: row["verdict"] for row in md_rows(markdown(records), "smollm2-135m @ alpaca")}
    assert len(rows) == len(records)
    for r in failed:
        assert f"{r.status}" in rows["+".join(r.ablations)] and r.reason in rows["+".join(r.ablations)]
        assert tables.tex(r.reason) in latex(records)
    assert set(pd.read_csv(io.StringIO(tables.csv(frame(records))))["status"]) == {r.status for r in records}


def test_reference_that_does_not_fit_shows_the_candidates_time(record):
    cell = record(["packing"], status="oom", arm="reference")
    (row,) = md_rows(markdown([cell]), "smollm2-135m @ alpaca")
    assert row["verdict"].startswith("reference does not fit, candidate does")
    assert re.fullmatch(r"none → \d+", row["median ms, ref → cand"])
    assert row["peak GiB, ref → cand"] == "none → 6.00"
    assert row["total × [95 %]"] == ""


def test_order_is_noise_floor_then_fastest_then_failed_whatever_the_order_of_records(sweep):
    records = sweep()
    rows = [r["toggle"] for r in md_rows(markdown(records[::-1]), "smollm2-135m @ alpaca")]
    assert rows[:4] == ["reference again (A/A)", "lora_kernels", "adamw_foreach", "gradient_checkpointing"]
    assert md_rows(markdown(records[::-1]), "smollm2-135m @ alpaca")[1] in md_rows(
        markdown(records), "smollm2-135m @ alpaca"
    )


def test_csv_round_trip(sweep):
    table = frame(sweep())
    again = pd.read_csv(io.StringIO(tables.csv(table)))
    assert list(again.columns) == list(table.columns)
    for column in table.select_dtypes("float"):
        pd.testing.assert_series_equal(again[column], table[column], check_dtype=False, rtol=1e-12)


def test_md_and_tex_show_the_same_numbers_as_the_frame(sweep):
    records = sweep()
    row = frame(records).set_index("toggles").loc["lora_kernels"]
    shown = f"{row['total_speedup']:.3f} [{row['total_low']:.3f}, {row['total_high']:.3f}]"
    (cell,) = [
        r["total × [95 %]"]
        for r in md_rows(markdown(records), "smollm2-135m @ alpaca")
        if r["toggle"] == "lora_kernels"
    ]
    assert cell == shown
    assert tables.tex(shown) in latex(records)


def test_columns_empty_throughout_are_dropped_on_a_cpu(sweep):
    on_cpu, on_gpu = (markdown(sweep(gpu=gpu)) for gpu in (False, True))
    assert "peak GiB" in on_gpu and "bound" in on_gpu
    assert "peak GiB" not in on_cpu and "bound" not in on_cpu
    assert "nan" not in on_cpu + on_gpu


def test_markup_in_names_and_reasons_is_escaped(record):
    nasty = r"a|b *c* <script> 50% & $x_1$ {y} \n ~^#"
    records = [record(["t"], status="crash", reason=f"{nasty}\nsecond line")]
    text = markdown(records)
    (row,) = md_rows(text, "smollm2-135m @ alpaca")  # a bare | would have made more cells
    assert "<script>" not in text and "&lt;script&gt;" in row["verdict"] and "second line" in row["verdict"]
    made = latex(records)
    assert r"50\% \& \$x\_1\$ \{y\} \textbackslash{}n \textasciitilde{}\textasciicircum{}\#" in made
    assert r"a\textbar{}b" in made
    body = made.split(r"\midrule")[1]
    assert not re.search(r"(?<!\\)[%$#_]", body.split(r"\bottomrule")[0])


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_console_fits_its_width_and_keeps_the_total(sweep, width):
    text = console([*sweep(), *sweep(model="llama-3.1-8b")], width)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"1\.\d\d\d \[1\.\d\d\d, 1\.\d\d\d\]", text)
    assert "wrong_numerics" in re.sub(r"\s*│\s*|\s*\n\s*", "", text)


LONG = ["lora_kernels", "adapters_in_compute_dtype", "selective_checkpointing(save=attention)"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_name_is_whole_on_a_narrow_terminal(record, width):
    lines = console([record([]), record(LONG, speedup=1.4), record(["torch_compile"], speedup=1.2)], width)
    assert max(map(len, lines.splitlines())) <= width
    names = {word for line in lines.splitlines() for word in line.split()}
    assert {*LONG, "torch_compile", "alpaca"} <= names
    assert re.search(r"1\.\d+ \[1\.\d+, 1\.\d+\]", lines)


def test_in_a_pipe_a_row_is_a_line(record, monkeypatch):
    reason = "no plain LoRA linear has its adapters in the dtype of its weight; " * 3
    shown = show(Analysis([record(LONG, speedup=1.4), record(["b"], status="crash", reason=reason)]))

    def printed():
        out = io.StringIO()
        print_table(shown, Console(file=out, width=80))
        return out.getvalue()

    monkeypatch.delenv("COLUMNS", raising=False)
    assert " + ".join(LONG) in printed() and reason.strip() in printed()
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, printed().splitlines())) <= 80


def test_number_keeps_three_digits_and_no_false_zero():
    assert [words.number(x) for x in (1234.6, 12.34, 0.01234, 3e-6, 0, math.nan, None)] == [
        "1235", "12.3", "0.0123", "3.00e-06", "0", "", "",
    ]  # fmt: skip


def test_a_source_that_several_candidates_test_is_a_table_of_its_own(record):
    low = ("sdpa", "adamw_fused", "padding", "adapters_in_compute_dtype")
    cells = [record(names, speedup=1.3, reference=r) for r in (low[:3], low) for names in ([], ["axolotl"], ["liger"])]
    cells.append(record(["lora_kernels"], speedup=1.6, reference=low[:3]))
    mine, other = claim_tables.claim_tables(Analysis([*cells, record(["gradient_checkpointing"])]))
    assert "Axolotl" in mine[0] and other[1] == claim_tables.CLAIMS
    same, another = (
        "reference without adapters_in_compute_dtype",
        "against another baseline: with adapters_in_compute_dtype",
    )
    columns = [f"axolotl, {same}", f"axolotl, {another}", f"lora_kernels, {same}"]
    assert mine[1] == ["model @ workload", "quantity", "published", *columns]
    assert mine[2][0][:3] == ["smollm2-135m @ alpaca", "forward speedup", "1.48"]
    assert [cell.split("]")[-1].strip() for cell in mine[2][0][3:]] == ["below", "", "above"]
    assert len(mine[2]) == 4
    assert not any("axolotl" in row[0] for row in other[2])
    text = markdown(cells)
    assert all(h in text.replace("\\", "") for h in mine[1])


def test_few_trials_are_said(record):
    for trials, said in (
        (5, "faster, few trials (5 trials, a figure needs 6)"),
        (2, "too few trials (2 trials"),
        (12, "faster"),
    ):
        (row,) = md_rows(markdown([record(["a"], speedup=2.0, trials=trials)]), "smollm2-135m @ alpaca")
        assert row["verdict"].startswith(said)


def test_no_records_at_all():
    assert markdown([]) == "No records.\n"
    assert len(frame([])) == 0
    assert "no records" in latex([])


def test_energy_is_shown_where_it_was_counted_and_nowhere_else(record):
    counted = {
        "reference": {"joules": 800.0, "steps": 40, "seconds": 4.0},
        "candidate": {"joules": 1200.0, "steps": 100, "seconds": 4.0},
    }
    made, other = record(["a"], speedup=1.5, energy=counted), record(["b"], speedup=1.2)
    analysis = Analysis([made, other])
    row = analysis.row(made)
    assert (row["reference_j_per_ktok"], row["candidate_j_per_ktok"]) == (5.0, 3.0)  # of 4000 real tokens a step
    rows = md_rows(markdown([made, other]), "smollm2-135m @ alpaca")
    assert [r["J per 1000 real tokens, ref → cand"] for r in rows] == ["5.00 → 3.00", ""]
    facts = detail(made, row, [])["facts"]
    assert facts["energy, candidate"] == "1200 J in 100 steps alone, 4.00 s, 300 W"
    assert "J per 1000" not in markdown([other]) and "candidate_j_per_ktok" not in frame([other])
    without = record(["c"], tokens={}, kind="load", energy=counted)
    assert "candidate_j_per_ktok" not in frame([without])


def test_no_table_ranks_rows_whose_references_differ(record, on_a_faster_host):
    fast = on_a_faster_host(record(["fast"], speedup=1.2))
    records = [record([]), record(["slow"], speedup=1.5), fast, record(["gone"], status="crash")]
    analysis = Analysis(records)
    shown = show(analysis)
    parts = [["fast"], ["reference again (A/A)", "slow"], ["gone"]]
    titles = [group.title for group in shown.groups]
    text = tables.markdown(shown)
    assert [[row["toggle"] for row in md_rows(text, title)] for title in titles] == parts
    assert all(list(md_rows(text, title)[0])[:2] == ["toggle", "median ms, ref → cand"] for title in titles)
    assert [tables.latex(shown).count(rf"\caption{{{tables.tex(title)}}}") for title in titles] == [1, 1, 1]
    printed = console(records, 200)
    places = [printed.index(name) for name in ("fast ", "slow ", "gone ")]
    assert places == sorted(places) and printed.index("median ms") < printed.index("total ×")
    assert printed.count("references") == 2 and printed.count("without") == 1
    made = pd.read_csv(io.StringIO(tables.csv(in_groups(shown, analysis))))
    assert [list(own["toggles"]) for _, own in made.groupby("group", sort=False)] == parts
    assert list(made["group"].unique()) == titles and made.columns[0] == "group"
    assert list(made.columns).index("total_reference_ms") < list(made.columns).index("total_speedup")


def test_a_time_that_is_none_never_gets_into_a_record(record):
    broken = record(["a"]).model_dump(by_alias=True)
    broken["phases"]["total"]["reference"][3] = math.nan
    with pytest.raises(ValueError, match=r"phases\.total\.reference\.3"):
        Record.model_validate(broken)


def test_rounds_of_a_sweep_that_was_killed_are_said_to_lack_their_last_checks(record):
    killed, stopped = ({INTERRUPTED: 9, UNCHECKED: True}, {INTERRUPTED: 9})
    for notes, said in ((killed, "(ended from outside after 9 rounds, before its last checks)"), (stopped, "faster")):
        (row,) = md_rows(markdown([record(["a"], speedup=2.0, notes=notes)]), "smollm2-135m @ alpaca")
        assert said in row["verdict"] and ("checks" in row["verdict"]) == (UNCHECKED in notes)


@pytest.mark.parametrize("reference, candidate, share", [(math.nan, 0.6, 0.6), (0.6, math.nan, 0.6), (0.1, 0.3, 0.3)])
def test_what_one_arm_waits_is_known_although_the_other_s_is_not(reference, candidate, share):
    """Several processes on one device do not have one wait, whichever side they stand on."""
    row = {"reference_host_share": reference, "candidate_host_share": candidate}
    assert cells.host_share(row) == share and cells.host_bound(row)
