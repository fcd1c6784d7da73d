"""The page in a real Chromium: it sorts, filters, opens, obeys keys, fits a phone, is dark, and runs nothing else.

Needs the package playwright, of which only the driver is used, and a Chromium of the system (Debian's `chromium`).
"""

import io
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from record.arms import Simulated, written

from lorabench.report import write_report

driver = pytest.importorskip("playwright.sync_api", reason="needs the package playwright; it is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.exhaustive,  # of make test-all: a browser takes seconds to start
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium; none is installed"),
]

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\u2028<!-- ]]> $\\frac{"
TIME, WHOLE = "median ms, ref → cand", "total × [95 %]"


@pytest.fixture(scope="module")
def browser():
    with driver.sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield found
        found.close()


@pytest.fixture
def report(tmp_path, record, sweep, folder):
    """Two models, every failure, an unclear row, three groups by their references, and a hostile cell."""
    unclear = record(["unclear_one"], speedup=1.02, sd=0.2)
    other = [record([], model="other"), record(["lora_kernels"], speedup=2.0, model="other")]
    bad = record([EVIL], speedup=1.1, model=EVIL, notes={EVIL: EVIL})
    dead = record([f"b{EVIL}"], status="crash", reason=EVIL, log=EVIL, model=EVIL)
    run = folder(tmp_path / "run", [*sweep(), unclear, *other, bad, dead])
    write_report(run)
    return run / "report.html"


@pytest.fixture
def opened(browser, report):
    """Opens the page in a context of its own; whatever the browser says or asks for is an error in the end."""
    said, contexts = [], []

    def open_page(**how):
        context = browser.new_context(**how)
        contexts.append(context)
        context.set_default_timeout(5000)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: request.url == report.as_uri() or said.append(request.url))
        page.goto(report.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def names(page):
    """The toggles of the rows that are shown, from the top."""
    return page.locator("tr[data-cell]:visible > td:first-child").all_inner_texts()


def heading(page, text):
    return page.locator("table.results th[scope=col]").filter(has_text=text).first


def column(page, text):
    """Of the first group, what a column shows."""
    place = heading(page, text).evaluate("th => th.cellIndex")
    rows = page.locator("table.results tbody").first.locator("tr[data-cell]")
    return [row.locator("td").nth(place).inner_text() for row in rows.all()]


def row(page, name):
    button = page.locator("td:first-child button").filter(has_text=re.compile(f"^{re.escape(name)}$"))
    return page.locator("tr[data-cell]").filter(has=button).first


def test_a_heading_sorts_by_the_candidates_number_within_a_group(opened):
    page = opened()
    before = names(page)
    order = heading(page, TIME)
    took = lambda: [float(t.split(" → ")[1]) for t in column(page, TIME) if "none" not in t and t]  # noqa: E731
    order.get_by_role("button").click()
    assert order.get_attribute("aria-sort") == "ascending" and took() == sorted(took()) and len(took()) > 4
    order.get_by_role("button").click()
    assert order.get_attribute("aria-sort") == "descending" and took() == sorted(took(), reverse=True)
    order.get_by_role("button").click()
    assert order.get_attribute("aria-sort") == "none" and names(page) == before
    heading(page, "verdict").get_by_role("button").click()
    assert order.get_attribute("aria-sort") == "none"
    assert page.locator("th[aria-sort=ascending]").count() == 1
    titles = page.locator("tr.group th").all_inner_texts()
    assert titles[0] == "smollm2-135m @ alpaca" and len(titles) == page.locator("table.results tbody").count()


def test_an_unclear_row_is_below_those_that_have_a_ratio_whichever_way(opened):
    page = opened()
    for _ in range(2):
        heading(page, WHOLE).get_by_role("button").click()
        shown = [text.startswith("unclear") for text in column(page, WHOLE) if text]
        assert shown[-1] and not any(shown[:-1])


def test_filters_by_model_workload_status_and_toggle(opened):
    page = opened()
    every = names(page)
    count = page.locator(".filters output")
    assert count.inner_text() == f"{len(every)} of {len(every)} rows"
    page.locator("select[name=model]").select_option("other")
    assert names(page) == ["reference again (A/A)", "lora_kernels"]
    assert page.locator("tr.group:visible").count() == 1 and count.inner_text() == f"2 of {len(every)} rows"
    page.locator("select[name=toggle]").select_option("lora_kernels")
    assert names(page) == ["lora_kernels"]
    assert page.locator("#tradeoff [data-cell].off").count() > 2
    page.get_by_role("button", name="show all").click()
    assert names(page) == every and page.locator("#tradeoff [data-cell].off").count() == 0
    page.locator("select[name=status]").select_option("crash")
    assert len(names(page)) == 2 and names(page)[0] == "toggle_crash"
    page.locator("select[name=status]").select_option("")
    page.locator("select[name=workload]").select_option("alpaca")
    assert names(page) == every


def test_a_row_opens_to_its_trials_numerics_and_command(opened):
    page = opened()
    button = row(page, "lora_kernels").get_by_role("button")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    detail = page.locator("tr.detail")
    assert button.get_attribute("aria-expanded") == "true" and detail.count() == 1
    for said in ("numerics", "adapter gradient", "what was patched", "python -m lorabench.sweep"):
        assert said in detail.inner_text()
    chart = detail.locator("canvas")
    assert _colours(chart.screenshot()) > 2  # both arms are drawn
    before = chart.screenshot()
    detail.get_by_role("combobox").select_option("step")
    assert detail.locator("canvas").count() == 1 and detail.locator("canvas").screenshot() != before
    detail.get_by_text("every trial, ms").click()
    assert detail.get_by_text("backward, candidate").is_visible()
    button.click()
    assert page.locator("tr.detail").count() == 0 and button.get_attribute("aria-expanded") == "false"


def _colours(png):
    """How many colours of some saturation a picture has."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3).astype(int)
    return len({tuple(p // 16) for p in pixels})


def test_keys_alone_sort_and_open(opened):
    page = opened()
    heading(page, WHOLE).get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert heading(page, WHOLE).get_attribute("aria-sort") == "ascending"
    rows = page.locator("tr[data-cell] button")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    assert rows.nth(1).evaluate("button => button === document.activeElement")
    page.keyboard.press("Space")
    assert page.locator("tr.detail").count() == 1
    page.keyboard.press("ArrowUp")
    assert rows.first.evaluate("button => button === document.activeElement")
    page.keyboard.press("Tab")  # from one row to the next, in the order of the page
    assert rows.nth(1).evaluate("button => button === document.activeElement")


def test_an_answer_and_a_point_of_a_figure_lead_to_their_row(opened):
    page = opened()
    page.locator("select[name=model]").select_option("other")
    page.locator(".answers a").first.click()
    assert row(page, "lora_kernels").get_by_role("button").get_attribute("aria-expanded") == "true"
    assert names(page)[0] == "reference again (A/A)" and len(names(page)) > 2  # what hid it is off
    page.reload()
    point = page.locator("#tradeoff [data-cell]").first
    assert "GiB" in point.locator("title").text_content()
    point.dispatch_event("click")
    assert page.locator("tr.detail").count() == 1


def test_a_phone_shows_the_columns_that_fit_and_nothing_hangs_over(opened):
    page = opened(viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = [h for h in page.locator("table.results").first.locator("th[scope=col]").all() if h.is_visible()]
    assert [h.inner_text() for h in shown] == ["toggle", TIME, WHOLE, "verdict"]
    row(page, "lora_kernels").get_by_role("button").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_label("all columns").check()
    assert heading(page, "peak GiB").is_visible()


def test_figures_are_dark_in_a_dark_page(opened):
    light, dark = (
        np.asarray(
            Image.open(io.BytesIO(opened(color_scheme=scheme).locator("#speedup svg").screenshot())).convert("L")
        )
        for scheme in ("light", "dark")
    )
    assert np.median(light) > 240 and np.median(dark) < 40
    assert (dark > 200).mean() > 0.005  # its text is light
    page = opened(color_scheme="dark")
    ink = page.locator("#speedup svg text").first.evaluate("text => getComputedStyle(text).fill")
    assert ink == "rgb(255, 255, 255)"


def test_hostile_text_is_text(opened):
    page = opened()
    assert page.locator("img").count() == 0 and page.locator("script").count() == 3
    for button in page.locator("tr[data-cell] button").filter(has_text="alert('x')").all():
        button.click()
    details = page.locator("tr.detail")
    assert details.count() == 2 and page.locator("img").count() == 0
    assert details.last.locator("pre").text_content() == EVIL
    assert page.locator("#tradeoff svg text").filter(has_text="<script>").count() > 0
    choices = page.locator("select[name=model]").locator("option").all_text_contents()
    assert " ".join(EVIL.split()) in [" ".join(choice.split()) for choice in choices]


def test_without_scripts_the_table_and_figures_are_there(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("tr[data-cell]").first.is_visible() and page.locator("#tradeoff svg").is_visible()
    assert not page.locator(".filters").is_visible()
    assert not heading(page, "padding").is_visible()
    page.locator("#more").check()
    assert heading(page, "padding").is_visible()


def test_a_click_on_a_row_shows_its_group_over_that_row_and_another_one_over_the_reference(browser, tmp_path):
    made = Simulated()
    run = written(tmp_path / "family", [made.arm(), made.twin(), made.arm(["a"], 1.5), made.arm(["b"], 1.2)])
    write_report(run)
    page = browser.new_page()
    page.goto((run / "report.html").as_uri())
    before, title = column(page, WHOLE), page.locator("tr.group th").first
    row_a = page.locator("tr[data-cell]").filter(has=page.get_by_role("button", name=re.compile("^a$"))).first
    over = row_a.locator("button.over")
    over.click()
    assert title.inner_text() == "smollm2-135m @ alpaca, over a" and over.get_attribute("aria-pressed") == "true"
    shown = column(page, WHOLE)
    assert "1" in shown and any(text.startswith("0.80") and text.endswith("] within") for text in shown), "b over a"
    assert not any(column(page, "verdict"))
    over.click()
    assert column(page, WHOLE) == before and title.inner_text() == "smollm2-135m @ alpaca"
    page.close()
