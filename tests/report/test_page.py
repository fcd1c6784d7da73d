"""The page: self-contained, escaped, every row once, and a cell's details as data that scripts show when asked."""

import re

from lorabench.report.analysis import Analysis
from lorabench.report.page import page
from lorabench.report.shown import show

EVIL = "</script><script>alert('x')</script><img src=x onerror=y>\u2028<!-- ]]>"


def html_of(records, sessions=()):
    analysis = Analysis(records, sessions)
    return page(analysis, show(analysis))


def test_nothing_that_is_shown_can_break_out(record, session, tags, cells_of):
    bad = record([EVIL], status="crash", reason=EVIL, log=EVIL, notes={EVIL: EVIL}, model=EVIL, workload=EVIL)
    html = html_of([bad, record([EVIL])], [session() | {"command": [EVIL], "commit": EVIL}])
    found = tags(html)
    assert found.tags.count("script") == 2  # the data, and ours that opens and sorts
    assert "img" not in found.tags
    assert "alert" not in found.scripts[1]
    shown = next(cell for cell in cells_of(html) if cell["status"] == "crash")
    assert (shown["title"], shown["log"]) == (EVIL, EVIL)
    assert shown["facts"]["status"] == f"crash: {EVIL}"
    assert " ".join(EVIL.split()) in " ".join(found.text.split())  # and in the tables it stands as text


def test_the_script_makes_no_markup_of_text(record, tags):
    script = tags(html_of([record(["a"])])).scripts[1]
    assert not any(way in script for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("))


def test_every_row_stands_once_and_names_its_details(sweep, cells_of):
    records = sweep()
    html = html_of(records)
    cells = cells_of(html)
    assert len(cells) == len(records)
    rows = re.findall(r'<tr class="[^"]*" data-cell="(\d+)"><td>(.*?)</td>', html)
    assert [int(n) for n, _ in rows] == list(range(len(records)))
    assert [name for _, name in rows] == [cell["title"] for cell in cells]


def test_the_details_of_a_cell_are_all_there(record, cells_of):
    (cell,) = cells_of(html_of([record(["a"], speedup=1.4, notes={"backend": "triton"})]))
    facts = cell["facts"]
    assert list(facts)[:3] == ["status", "kind", "reference"]  # what matters first, not by the alphabet
    assert facts["backward"].startswith("reference ") and "× 1." in facts["backward"]
    assert facts["memory, candidate"] == "peak 6.00 GiB, forward 3.00 GiB, backward 6.00 GiB, step 2.00 GiB"
    assert facts["roofline, candidate step"] == "label host-bound"
    assert facts["notes"] == "backend triton"
    assert "layers.0.q_proj.lora_A.weight" in facts["numerics"]


def test_without_scripts_the_tables_are_whole_and_what_does_not_fit_is_behind_a_checkbox(record, session):
    html = html_of([record([]), record(["a"])], [session(), session("s2")])
    assert html.index("<h2>Results</h2>") < html.index('<h2 id="where">')
    heads = re.findall(r"<th>(.*?)</th>", html[: html.index("</thead>")])
    assert "real tokens/s, ref → cand" in heads and heads[-1] == "verdict"
    assert "<noscript>" in html
    (rule,) = re.findall(r"\.more:not\(:checked\)(.*?)\{ display: none; \}", html, re.DOTALL)
    hidden = {int(n) for n in re.findall(r"nth-child\((\d+)\)", rule)}
    assert {heads[n - 1] for n in hidden} == {
        "real tokens/s, ref → cand", "padding, ref → cand", "bound (of ceiling)", "gradient error / allowed",
    }  # fmt: skip
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
