"""The whole report: from records to files, with whatever records there are; the page is self-contained and escaped."""

import re
from html import unescape
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest

from lorabench.report import load_results, page, plots, write_report
from lorabench.report.__main__ import main
from lorabench.report.plots import short

TEXTS = {"summary.csv", "summary.md", "summary.tex", "report.html"}
PNG = b"\x89PNG"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_full_sweep_writes_every_file_and_nothing_else(tmp_path, sweep, record, session, folder):
    ladder = [record(["a", "b"][: n + 1], speedup=1.2 + n / 5, design="ladder", model="m2") for n in range(2)]
    run = folder(tmp_path / "run", [*sweep(), *ladder], [session(), session("s2", device="cpu")])
    before = (run / "records.jsonl").read_bytes()
    written = write_report(str(run))
    expected = {run / name for name in TEXTS} | {run / "plots" / name for name in plots.NAMES}
    assert set(written) == expected
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == expected | {
        run / "records.jsonl",
        run / "environment.json",
    }
    assert all((run / "plots" / name).read_bytes().startswith(PNG) for name in plots.NAMES)
    assert (run / "records.jsonl").read_bytes() == before
    assert plt.get_fignums() == []  # pyplot never heard of our figures
    html = (run / "report.html").read_text()
    # Nothing is fetched: pictures are in the page, and the one link leads to another part of it.
    assert {link for link in Tags(html).links if not link.startswith("data:image/png;base64,")} == {"#where"}
    assert "http" not in re.sub(r"base64,[^\"]*", "", html)
    assert html.count("data:image/png") == len(plots.NAMES)
    text = " ".join(Tags(html).text.split())
    for said in ("python -m lorabench.sweep", "0123abcd with uncommitted changes", "680 TFLOP/s", "took 40 %"):
        assert said in text
    assert "layers.0.q_proj.lora_A.weight" in text and "Traceback: the last line" in text
    assert len(load_results(run)) == len(sweep()) + 2


@pytest.mark.parametrize("case", ["nothing", "only failures", "one ok on a CPU", "no environment"])
def test_any_records_will_do(case, tmp_path, record, folder):
    records = {
        "nothing": [],
        "only failures": [record(["a"], status="crash"), record([], status="timeout")],
        "one ok on a CPU": [record(["a"], gpu=False, trials=2)],
        "no environment": [record(["a"], status="unsupported")],
    }[case]
    run = folder(tmp_path, records, [])
    if case == "no environment":
        (run / "environment.json").unlink()
    write_report(run)
    assert {p.name for p in run.iterdir()} >= TEXTS
    html = (run / "report.html").read_text()
    assert ("No records yet." in html) == (not records)
    assert all(r.reason in html for r in records if r.reason)
    assert "None" not in Tags(html).text and "nan" not in Tags(html).text.split()
    assert (run / "plots" / "phases.png").exists() == (case == "one ok on a CPU")
    assert not (run / "plots" / "memory.png").exists()


def test_stale_plots_are_removed_and_a_second_run_gives_the_same_bytes(tmp_path, record, folder):
    run = folder(tmp_path, [record(["a"], status="crash")])
    (run / "plots").mkdir()
    (run / "plots" / "ladder.png").write_bytes(b"old")
    (run / "plots" / "mine.png").write_bytes(b"the user's own")
    first = {p: p.read_bytes() for p in write_report(run)}
    assert {p.name for p in (run / "plots").iterdir()} == {"speedup.png", "mine.png"}
    assert {p: p.read_bytes() for p in write_report(run)} == first


def test_the_page_escapes_all_that_it_shows(record, session):
    evil = "<script>alert('x')</script><img src=x onerror=y>"
    bad = record([evil], status="crash", reason=evil, log=evil, notes={evil: evil}, model=evil, workload=evil)
    where = session() | {"command": [evil], "commit": evil}
    html = page.page([bad, record([evil])], [where])
    assert Tags(html).tags.count("script") == 1  # ours, which sorts
    assert "img" not in Tags(html).tags
    assert unescape(html).count(evil) >= 8


def test_command_line(tmp_path, record, folder, capsys):
    run = folder(tmp_path / "run", [record(["lora_kernels"], status="crash")])
    assert main([str(run)]) == 0
    assert "lora_kernels" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    (run / "records.jsonl").write_text('{"schema": 1}\n')
    assert main([str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "nowhere" in errors[0] and "line 1" in errors[1]


def test_a_broken_environment_is_one_clear_error(tmp_path, record, folder, capsys):
    run = folder(tmp_path, [record(["a"], status="crash")])
    for content in ("{", '{"sessions": 3}', '{"sessions": [{"no": "id"}]}', "[]"):
        (run / "environment.json").write_text(content)
        assert main([str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all("environment.json is not an environment file" in e for e in errors)


def test_results_come_first_and_what_does_not_fit_a_screen_is_folded_away(record, session):
    html = page.page([record([]), record(["a"])], [session(), session("s2")])
    assert html.index("<h2>Results</h2>") < html.index('<h2 id="where">')
    first, rest = html.split("<summary>More columns", 1)
    assert "verdict" in first and "real tokens/s" not in first and "real tokens/s" in rest
    assert html.count("<details><summary>", html.index('id="where"'), html.index("What the words mean")) == 2


def test_a_plots_label_names_what_tells_rows_apart():
    low = "adapters_in_compute_dtype"
    assert short(low) == low
    assert short(f"lora_kernels + {low} + cuda_graph") == f"lora_kernels +\n{low} + cuda_graph"
    assert short(f"liger + {low}") == f"liger + {low}"
    rungs = [f"rung_number_{i}" for i in range(9)]
    assert short(" + ".join(rungs)) == "8 more + rung_number_8"
    assert len(short("x" * 60)) == 40
