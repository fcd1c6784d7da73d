"""benchmarks/packing_efficiency.py: the tables of docs/packing.md are what the lengths come to."""

import pytest
from helpers import benchmark

from lorabench.contract.workload import length_tables
from lorabench.plan.compose import load_config, workload
from lorabench_ablations.batching import Padding
from lorabench_ablations.packing import Packing


@pytest.fixture(scope="module")
def script():
    with benchmark("packing_efficiency") as module:
        yield module


def test_a_step_is_batched_as_its_toggle_does(script):
    feed = workload("gsm8k")
    plain, packed = (script.batched(toggle, [100, 50, 200], feed) for toggle in (Padding(), Packing()))
    assert plain.efficiency == 350 / 600 and packed.efficiency == 1
    assert [batch[:2] for batch in packed.batches] == [(1, 350)]


def test_every_distribution_of_the_suite_is_there(script):
    models = load_config(["suite=packing"]).models
    assert list(dict.fromkeys(item.partition("@")[2] for item in models)) == list(script.NAMES)
    for name in script.NAMES:
        feed = workload(name)
        assert (feed.count, feed.batch_size, feed.distribution) == (32, 8, name)
        table = length_tables()[feed.lengths_are][name]
        assert feed.seq_len >= (table["quantiles"][-1] if "quantiles" in table else table["clip"][1])  # nothing is cut


def test_a_page_without_its_markers_is_said(script):
    with pytest.raises(ValueError, match="the markers of 'efficiency' once, found them 0 times"):
        script.markers.all_filled("no table", {"efficiency": ""})


@pytest.mark.exhaustive
def test_the_page_has_the_tables_of_today(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.markers.all_filled(text, script.tables()) == text, "run: python benchmarks/packing_efficiency.py"


def test_the_page_s_example_gives_what_stands_beside_it(script):
    blocks = script.PAGE.read_text(encoding="utf-8").split("```")
    code = next(block for block in blocks if block.startswith("python\nfrom"))
    *lines, first, second = code.removeprefix("python\n").strip().splitlines()
    known: dict[str, object] = {}
    exec("\n".join(lines), known)
    for line in (first, second):
        call, _, said = line.partition("#")
        assert eval(call, known) == pytest.approx(float(said.split(",")[0]), abs=0.005)
