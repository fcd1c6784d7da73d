"""The page: self-contained, escaped, every row once, answers first, and a cell's details as data that scripts show."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from lorabench.record.schema import ARMS
from lorabench.report.analysis import Analysis
from lorabench.report.answers import answers, fastest, published_answer
from lorabench.report.page import page
from lorabench.report.plots import PHASE_COLOURS, plots
from lorabench.report.shown import show
from lorabench.report.tradeoff import COLOURS

RESULTS = Path(__file__).resolve().parents[2] / "results"
EVIL = "</script><script>alert('x')</script><img src=x onerror=y>\u2028<!-- ]]> $\\frac{"


def html_of(records, sessions=(), drawn=False):
    analysis = Analysis(records, sessions)
    return page(analysis, show(analysis), plots(analysis) if drawn else None)


def test_nothing_that_is_shown_can_break_out(record, session, tags, cells_of):
    bad = record([EVIL], status="crash", reason=EVIL, log=EVIL, notes={EVIL: EVIL}, model=EVIL, workload=EVIL)
    html = html_of([bad, record([EVIL])], [session() | {"command": [EVIL], "commit": EVIL}], drawn=True)
    found = tags(html)
    assert found.tags.count("script") == 3  # the data, uPlot, and ours
    assert "img" not in found.tags
    assert not any("alert" in script for script in found.scripts[1:])
    shown = next(cell for cell in cells_of(html) if cell["status"] == "crash")
    assert (shown["title"], shown["log"]) == (EVIL, EVIL)
    assert shown["facts"]["status"] == f"crash: {EVIL}"
    assert " ".join(EVIL.split()) in " ".join(found.text.split())  # and in the tables it stands as text


def test_the_policy_allows_the_pages_own_scripts_and_style_and_nothing_else(sweep):
    html = html_of(sweep(), drawn=True)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    own = re.findall(r"<script>(.*?)</script>", html, re.DOTALL) + re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own]
    assert len(own) == 3 and set(re.findall(r"sha256-([\w+/=]+)", policy.replace("&#39;", "'"))) == set(hashes)
    assert "default-src" in policy and "unsafe" not in policy
    body = html[html.index("<body>") : html.index("<script type=")]
    assert " style=" not in body and not re.search(r"<[^>]* on\w+=", body)  # the policy would block them


def test_the_script_makes_no_markup_of_text(record, tags):
    for script in tags(html_of([record(["a"])])).scripts[1:]:
        assert not any(
            way in script for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        )


def test_every_row_stands_once_and_names_its_details(sweep, cells_of):
    records = sweep()
    html = html_of(records)
    cells = cells_of(html)
    assert len(cells) == len(records)
    rows = re.findall(r'<tr class="[^"]*" id="cell-\d+" data-cell="(\d+)"><td>(.*?)</td>', html)
    assert [int(n) for n, _ in rows] == list(range(len(records)))
    assert [name for _, name in rows] == [cell["title"] for cell in cells]


def test_a_cell_sorts_by_the_number_that_it_shows_of_the_candidate(record):
    html = html_of([record(["a"], speedup=1.25), record(["b"], speedup=1.02, sd=0.2)])
    heads = re.findall(r'<th scope="col">(.*?)</th>', html[html.index('class="results') :])
    values = {}
    for name, line in re.findall(r'data-cell="\d+"><td>(\w)</td>(.*?)</tr>', html, re.DOTALL):
        cells = re.findall(r'<td(?: data-value="([^"]*)")?>(.*?)</td>', line)
        values[name] = dict(zip(heads[1:], cells, strict=True))
    value, text = values["a"]["median ms, ref → cand"]
    assert float(value) == pytest.approx(float(text.split(" → ")[1]), rel=0.01) and float(value) < 90
    assert values["a"]["peak GiB, ref → cand"] == ("6.0", "8.00 → 6.00 (-25.0 %)")
    value, text = values["a"]["total × [95 %]"]
    assert float(value) == pytest.approx(float(text.split()[0]), abs=0.01)
    assert values["b"]["total × [95 %]"][0] == ""  # unclear: it has an interval, and no ratio to sort by


def test_rows_whose_references_differ_stand_in_groups_of_their_own_with_milliseconds_first(record, on_a_faster_host):
    slow, fast = record(["slow"], speedup=1.5), record(["fast"], speedup=1.2)
    shown = show(Analysis([record([]), slow, on_a_faster_host(fast), record(["gone"], status="crash")]))
    assert [[row["toggle"] for row in group.rows] for group in shown.groups] == [
        ["fast"], ["reference again (A/A)", "slow"], ["gone"],
    ]  # fmt: skip
    assert all(re.search(r", (references of [\d.–]+ ms|without times)$", group.title) for group in shown.groups)
    assert all(group.columns[:2] == ["toggle", "median ms, ref → cand"] for group in shown.groups)
    together = show(Analysis([record([]), slow, record(["fast"], speedup=1.2)])).groups
    assert [group.title for group in together] == ["smollm2-135m @ alpaca"]


def test_the_first_table_names_the_fastest_what_it_buys_and_how_sure(record, session):
    best, next_best = record(["a"], speedup=1.5, peaks=(8.0, 2.0)), record(["b"], speedup=1.2)
    (answer,) = answers(Analysis([record([]), next_best, best]))
    assert (answer.fastest, answer.record) == ("a", best)
    assert re.fullmatch(r"1\.\d+ \[.*\] × as fast, 75.0 % less memory", answer.buys)
    assert answer.sure == "one session, whose interval knows nothing of the next"
    (answer,) = answers(Analysis([record([]), best], [session() | {"dirty": True}]))
    assert answer.sure.endswith("; uncommitted changes")
    (answer,) = answers(Analysis([record([]), record(["d"], speedup=0.8), record(["e"], status="crash")]))
    assert answer.record is None and answer.sure == "1 of 2 measured, 0 of them unclear"
    assert answers(Analysis([record([])])) == []


def test_the_fastest_is_the_one_with_the_fewest_milliseconds_and_what_is_level_stands_beside_it(
    record, on_a_faster_host
):
    """A ladder's page named 343 ms the fastest, because 271 ms had an interval that met it and more toggles."""
    few, far = record(["a"], speedup=1.8, sd=0.001), record(["c"], speedup=1.5, sd=0.001)
    more = on_a_faster_host(few.model_copy(update={"key": "more", "ablations": ["a", "b"]}), 1.004)
    analysis = Analysis([record([], sd=0.001), more, few, far])
    assert fastest([few, more, far], analysis) == [more, few]
    (answer,) = answers(analysis)
    assert (answer.fastest, answer.record) == ("a + b", more)
    assert answer.sure.startswith("level with a; ")


def test_the_opening_of_the_page_counts_the_published_numbers_that_the_tables_show():
    analysis = Analysis.read(Path(__file__).resolve().parents[2] / "results/h200/predibase_ladder")
    own, steps = re.findall(r"(\d+) above, (\d+) within, (\d+) below", published_answer(analysis))
    rows = [row for table in show(analysis).claims for row in table[2]]
    cells = [cell for group in show(analysis).groups for _, _, rungs in group.tables for rung in rungs for cell in rung]
    for word, over_the_start, over_the_rung_below in zip(("above", "within", "below"), own, steps, strict=True):
        assert int(over_the_start) == sum(row[4] == word for row in rows)
        assert int(over_the_rung_below) == sum(cell.count(f"(ours {word})") for cell in cells)


def test_the_fastest_of_a_host_is_said_in_milliseconds(record):
    waits = {"forward": {"device_busy_ms": 6.0, "label": "host-bound"}}
    made = record(["a"], speedup=1.3, roofline={"reference": waits, "candidate": waits})
    (answer,) = answers(Analysis([made]))
    assert answer.buys.startswith("on this host ") and "×" not in answer.buys and "host-bound" in answer.sure
    assert '<tr class="host-bound"><td>smollm2-135m @ alpaca' in html_of([made])


def test_the_details_of_a_cell_are_all_there(record, cells_of, session):
    checks = [{"name": "loss of trial 7", "found": 0.01, "allowed": 0.02, "where": "trial 7"}]
    made = record(["a"], speedup=1.4, notes={"backend": "triton", "a": {"left": ["x"]}})
    made = made.model_copy(
        update={"numerics": made.numerics.model_validate(made.numerics.model_dump() | {"checks": checks})}
    )
    telemetry = {"sm_clock_mhz": (1395.0, 1650.0, 1965.0), "throttle": ["power cap"], "disturbed_trials": [3]}
    made = type(made).model_validate(made.model_dump(by_alias=True) | {"telemetry": telemetry})
    command = ["python", "-m", "lorabench.sweep", "seed=3", "models=[other]", "output=elsewhere"]
    (cell,) = cells_of(html_of([made], [session() | {"command": command}]))
    facts = cell["facts"]
    assert list(facts)[:3] == ["status", "kind", "reference"]  # what matters first, not by the alphabet
    assert facts["backward"].startswith("reference ") and "× 1." in facts["backward"]
    assert facts["memory, candidate"] == "peak 6.00 GiB, forward 3.00 GiB, backward 6.00 GiB, step 2.00 GiB"
    assert facts["roofline, candidate step"] == "label host-bound"
    assert facts["notes"] == "backend triton"
    assert facts["what was patched"] == [["toggle", "sites", "says"], ["a", "30", "left ['x']"]]
    assert ["adapter gradient", "0.00400", "0.0200", "layers.0.q_proj.lora_A.weight, of 56", "passed"] in facts[
        "numerics"
    ]
    assert ["loss of trial 7", "0.0100", "0.0200", "trial 7", "passed"] in facts["numerics"]
    assert ["SM clock, MHz", "1395", "1650", "1965"] in facts["telemetry"]
    assert ["disturbed trials", "3", "", ""] in facts["telemetry"]
    assert facts["measure it again"] == (
        "python -m lorabench.sweep seed=3 kind=train 'models=[smollm2-135m]' workload=alpaca "
        "'reference=[sdpa, adamw_fused]' 'ablations=[[a]]' design=solo output=output/rerun"
    )
    (session_trials,) = cell["trials"]
    assert session_trials["phases"]["total"][1] == [float(f"{ms:.4g}") for ms in made.phases["total"].candidate_ms]


def test_a_row_of_several_sessions_has_the_trials_of_each(record, cells_of):
    made = [
        record(["a"], speedup=1.3, seed=n).model_copy(update={"session": f"s{n}", "replicate": n}) for n in range(2)
    ]
    (cell,) = cells_of(html_of(made))
    assert [trials["session"] for trials in cell["trials"]] == ["s0", "s1"]


def test_data_is_json_that_a_browser_reads(record, cells_of):
    """A NaN among the details once left the whole page without its scripts."""
    apart = record(["b"], pairing="abba", processes={arm: [8, 8, 7, 7] for arm in ARMS})
    html = html_of([record(["a"]), apart, record(["c"], status="crash")])
    (data,) = re.findall(r'id="cells">(.*?)</script>', html, re.DOTALL)
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_times_that_are_not_trusted_have_a_colour_and_an_explanation(record):
    html = html_of([record(["a"], status="untrusted")])
    assert '<tr class="failed untrusted"' in html and ".untrusted >" in html
    assert "the times cannot be trusted" in html[html.index("What the words mean") :]


def test_what_is_told_apart_by_its_colour_still_is_in_the_dark():
    sheet = page(Analysis([]), show(Analysis([])))
    changed = dict(
        re.findall(r'\[fill="(#\w+)"\] \{ fill: (#\w+); \}', sheet[sheet.index("(prefers-color-scheme: dark)") :])
    )
    assert len(changed) >= 4 and len(set(changed.values())) == len(changed)
    assert not {c.lower() for c in changed.values()} & {c.lower() for c in (*COLOURS, *PHASE_COLOURS)}


def test_without_scripts_the_table_is_whole_and_what_does_not_fit_is_behind_a_checkbox(record, session):
    html = html_of([record([]), record(["a"])], [session(), session("s2")])
    assert html.index('<table class="answers">') < html.index('<h2 id="results">') < html.index('<h2 id="where">')
    results = html[html.index('<table class="results') :]
    heads = re.findall(r'<th scope="col">(.*?)</th>', results[: results.index("</thead>")])
    assert "real tokens/s, ref → cand" in heads and heads[-1] == "verdict"
    assert "<noscript>" in html
    sheet = html[html.index("<style>") : html.index("</style>")]
    always, on_a_phone = (
        {heads[int(n) - 1] for n in re.findall(r"> :nth-child\((\d+)\)", rules)}
        for rules in sheet.split("#more:not(:checked)", 1)[1].split("@media (max-width: 45rem)")
    )
    assert always == {
        "real tokens/s, ref → cand", "padding, ref → cand", "bound (of ceiling)", "gradient error / allowed",
    }  # fmt: skip
    assert set(heads) - on_a_phone == {"toggle", "median ms, ref → cand", "total × [95 %]", "verdict"}
    assert html.count("<details><summary>", html.index('id="where"'), html.index("What the words mean")) == 2


def test_jobs_and_ranks_are_shown(several_jobs, cells_of):
    (cell,) = cells_of(html_of([several_jobs]))
    headings, *rows = cell["facts"]["jobs"]
    assert headings[:3] == ["job", "r", "real tokens"]
    assert [row[:3] for row in rows] == [["a", "8", "512"], ["b", "16", "1024"]]
    assert [row[5] for row in rows] == ["passed", "none"]
    assert cell["facts"]["ranks, candidate"].startswith("2 ranks, slowest behind the fastest by 3.0 % (median)")


def test_a_thousand_cells_are_a_small_page(record):
    one = record(["a"], trials=6, notes={"backend": "triton"})
    many = [one.model_copy(update={"key": str(i), "model": f"m{i // 20}"}) for i in range(1000)]
    assert len(html_of(many).encode()) < 4_000_000


def test_the_page_of_77_published_cells_is_below_a_megabyte_and_a_half():
    analysis = Analysis.read(RESULTS / "h200" / "peers")
    assert len(analysis.records) == 77
    assert len(page(analysis, show(analysis), plots(analysis)).encode()) < 1_500_000
