"""The least work of a step: last, without a verdict, and every other row as a fraction of it."""

import pytest
from helpers import md_rows
from record.arms import slower

from lorabench.contract.kind import kind
from lorabench.record.schema import PhaseRoofline
from lorabench.report import tables
from lorabench.report.analysis import Analysis
from lorabench.report.plots import plots
from lorabench.report.shares import ShareOf, Shares
from lorabench.report.shown import show

BOTH, FORWARD = ("forward", "backward"), ("forward",)


def frame(records, sessions=()):
    return Analysis(records, sessions).table


def markdown(records):
    return tables.markdown(show(Analysis(records)))


def of_limit(record, records, phases=BOTH):
    analysis = Analysis([record, *records])
    return Shares(analysis.records, analysis.devices, analysis.contrasts).of(record, ShareOf(kind("limit"), phases))


@pytest.fixture
def with_limit(record):
    """The reference, two toggles, one failure and a limit that is twice as fast as the reference and has no step."""

    def build(**common):
        bound = record(["frozen_limit"], speedup=2.0, kind="limit", **common)
        others = [record([], **common), record(["lora_kernels"], speedup=1.6, **common)]
        return [bound, *others, record(["liger"], speedup=1.2, **common), record(["x"], status="crash", **common)]

    return build


def test_the_fraction_is_the_ratio_of_the_two_ratios(with_limit):
    table = frame(with_limit()).set_index("toggles")
    for row, expected in (("lora_kernels", 0.8), ("liger", 0.6), ("reference again (A/A)", 0.5)):
        found = table.loc[row]
        assert found["of_limit"] == pytest.approx(expected, rel=0.01)
        assert found["of_limit_low"] < expected < found["of_limit_high"]
        assert found["of_limit_forward"] == pytest.approx(expected, rel=0.01)
        assert found["of_limit_forward_low"] < expected < found["of_limit_forward_high"]
    assert table.loc[["x", "frozen_limit"], "of_limit"].isna().all()


def test_it_is_forward_and_backward_alone(record, with_limit):
    bound = with_limit()[0]
    cell = record(["a"], speedup=1.6)
    slow = cell.phases["step"] | {"candidate": [1e4] * 30}
    same = cell.model_copy(update={"phases": cell.phases | {"step": slow}})
    both = of_limit(same, [bound]), of_limit(cell, [bound])
    assert both[0].contrast.speedup == both[1].contrast.speedup


def test_forward_has_a_share_of_its_own(record, with_limit):
    bound, cell = with_limit()[0], record(["a"], speedup=1.6)
    slow = dict.fromkeys(("reference", "candidate"), cell.phases["forward"]["reference"])
    found = of_limit(cell.model_copy(update={"phases": cell.phases | {"forward": slow}}), [bound], FORWARD)
    assert found and found.contrast.centre == pytest.approx(0.5, rel=0.01)


def test_only_a_limit_of_the_same_cell_counts(record, with_limit):
    bound = with_limit()[0]
    assert of_limit(record(["a"]), [bound])
    for change in ({"model": "big"}, {"workload": "4x2048"}, {"reference": ("sdpa",)}):
        assert of_limit(record(["a"], **change), [bound]) is None


def test_references_of_unlike_hosts_leave_the_two_times_as_they_are(record, with_limit):
    """A host-bound reference on a slower host: its ratio says nothing about a limit that was measured elsewhere."""
    bound, cell = with_limit()[0], record(["a"], speedup=1.6)
    assert of_limit(cell, [bound]).paired
    slow = slower(cell, 1.2)
    found = of_limit(slow, [bound])
    assert not found.paired
    assert found.contrast.low < found.contrast.centre < found.contrast.high
    assert found.contrast.centre == pytest.approx(0.8 / 1.2, rel=0.03)  # not 0.8, as by way of the references
    assert of_limit(slower(cell, 1.03), [bound]).paired
    rows = md_rows(markdown([cell, slow, bound]), "smollm2-135m @ alpaca")
    unpaired = [c for c in (r["of limit [95 %], forward + backward"] for r in rows) if c.endswith(" unpaired")]
    assert len(unpaired) == 1
    assert unpaired[0].startswith("0.65")


def test_a_reference_that_waits_for_its_host_leaves_the_two_times_as_they_are(record, with_limit):
    bound, cell = with_limit()[0], record(["a"], speedup=1.6)
    label = lambda name: {"reference": {"backward": PhaseRoofline(label=name)}}  # noqa: E731
    assert of_limit(cell.model_copy(update={"roofline": label("memory-bound")}), [bound]).paired
    assert not of_limit(cell.model_copy(update={"roofline": label("host-bound")}), [bound]).paired


def test_a_limit_of_another_device_does_not_count(record, with_limit):
    bound, cell = with_limit(session="b")[0], record(["a"], session="a")
    sessions = [
        {"id": i, "machine": {"device": "cuda", "name": n}} for i, n in (("a", "NVIDIA A10G"), ("b", "NVIDIA H200"))
    ]
    assert frame([cell, bound], sessions)["of_limit"].isna().all()
    assert frame([cell, bound], [sessions[0], sessions[0] | {"id": "b"}])["of_limit"].notna().tolist() == [True, False]


def test_the_limit_is_the_last_row_and_has_no_verdict_memory_or_gate(with_limit):
    records = with_limit()
    rows = md_rows(markdown(records), "smollm2-135m @ alpaca")
    assert [r["toggle"] for r in rows] == ["reference again (A/A)", "lora_kernels", "liger", "x", "frozen_limit"]
    assert rows[-1]["verdict"].startswith("limit: ")
    assert float(rows[-1]["total × [95 %]"].split()[0]) == pytest.approx(2, rel=0.01)
    assert rows[-1]["verdict"] == "limit: no candidate; its total is forward + backward, without step"
    assert all(rows[-1][c] == "" for c in ("step ×", "peak GiB, ref → cand", "gradient error / allowed"))
    assert rows[1]["of limit [95 %], forward + backward"].startswith("0.80")
    table = frame(records).set_index("toggles")
    assert table.loc[["frozen_limit"], ["verdict", "p_holm"]].isna().all(axis=None)
    assert plots(Analysis(records))["speedup"].png.startswith(b"\x89PNG")


def test_without_a_limit_there_is_no_such_column(sweep):
    assert "of limit" not in markdown(sweep())


def test_several_references_are_tables_of_their_own(with_limit):
    low = (*("sdpa", "adamw_fused"), "adapters_in_compute_dtype")
    text = markdown([*with_limit(), *with_limit(reference=low)])
    titles = [f"smollm2-135m @ alpaca, reference {w} adapters\\_in\\_compute\\_dtype" for w in ("without", "with")]
    for title in titles:
        assert len(md_rows(text, title)) == 5
