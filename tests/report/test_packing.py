"""Predicted beside measured: rows from records with a layout, fitted without the row's own workload, drawn and said."""

import pytest
from matplotlib.text import Text
from record.arms import slower, tokens

from lorabench.plan.packing_gain import Batching, Costs, MicroBatch, padded
from lorabench.report.analysis import Analysis
from lorabench.report.packing import packing, packing_frame, packing_tables
from lorabench.report.plots import figures
from lorabench.report.shown import show
from lorabench.report.tables import latex, markdown

TRUE = Costs(step=4.0, micro_batch=3.0, token=0.02, pair=2e-5)
LENGTHS = {"short": [10, 40, 20, 30], "even": [50, 60, 55, 65], "long": [100, 400, 150, 30]}
NF4 = ("nf4_base", "sdpa", "padding", "adamw_fused", "auto_batch_size")


def packed(lengths, rows):
    size = len(lengths) // rows
    parts = [tuple(lengths[i * size : (i + 1) * size]) for i in range(rows)]
    return Batching(tuple(MicroBatch(1, sum(part), part) for part in parts))


def made(record, workload, toggle="packing", rows=1, sd=0.002, **changes):
    """A record whose times are those of the true costs, but for noise."""
    lengths = LENGTHS[workload]
    plain, own = padded(lengths, 2), packed(lengths, rows)
    real = sum(lengths)
    note = {"padded": plain.batches, "own": own.batches, "knows_borders": False, "token_flop": 1000, "pair_flop": 1,
            "lengths": "approximate"}  # fmt: skip
    both = tokens(real, real - len(lengths), reference=sum(b.positions for b in plain.batches) - real)
    found = record([toggle], workload=workload, speedup=plain.time(TRUE) / own.time(TRUE), sd=sd,
                   notes={"layout": note}, tokens=both, **changes)  # fmt: skip
    return slower(found, plain.time(TRUE) / 100)  # the simulated reference takes 100 ms


@pytest.fixture
def several(record):
    return [made(record, workload, toggle, rows) for workload in LENGTHS for toggle, rows in (("packing", 1), ("b", 2))]


def test_a_row_says_what_was_predicted_and_what_was_measured(several):
    frame = packing_frame(Analysis(several))
    assert list(frame["workload"]) == ["short", "short", "even", "even", "long", "long"]
    row = frame.iloc[0]
    plain = padded(LENGTHS["short"], 2)
    assert row["by_tokens"] == pytest.approx(1 / plain.efficiency) == pytest.approx(140 / 100)
    assert row["by_flops"] < row["by_tokens"]
    assert (row["reference_micro_batches"], row["candidate_micro_batches"]) == (2, 1)
    assert (row["reference_efficiency"], row["candidate_efficiency"]) == (pytest.approx(100 / 140), 1)
    assert row["fitted"] == pytest.approx(row["measured"], rel=0.05)
    assert (frame["fitted"] / frame["measured"]).tolist() == pytest.approx([1] * 6, rel=0.3)


def test_what_is_fitted_has_not_seen_its_own_workload(several, record):
    """Ten times the time on one workload moves the prediction of the others, and not its own."""
    slow = [r for r in several if r.workload != "long"]
    before = packing_frame(Analysis(several)).set_index(["workload", "toggles"])["fitted"]
    shifted = [slower(r, 10, "candidate") if r.workload == "long" else r for r in several]
    after = packing_frame(Analysis(shifted)).set_index(["workload", "toggles"])["fitted"]
    assert after["long"].tolist() == pytest.approx(before["long"].tolist())
    assert after["short"].tolist() != pytest.approx(before["short"].tolist())
    assert packing_frame(Analysis(slow[:2]))["fitted"].isna().all()  # one workload: nothing to fit to


def test_only_rows_whose_layout_is_theirs(record, several):
    other = made(record, "short")
    reference = other.tokens["reference"].model_copy(update={"padded": 7})
    moved = other.model_copy(update={"tokens": other.tokens | {"reference": reference}})
    two = made(record, "short").model_copy(update={"ablations": ["packing", "eager"]})
    failed = record(["packing"], workload="short", status="crash")
    strange = [
        record(["a"], notes={"layout": note}) for note in ("wide", {"padded": 3}, {**other.notes["layout"], "own": []})
    ]
    assert packing_frame(Analysis([moved, two, failed, record(["packing"]), *strange])).empty
    assert packing(Analysis([record(["packing"])])) is None and packing_tables(Analysis([])) == []


def test_claims_stand_beside_packing(record):
    frame = packing_frame(Analysis([made(record, "short"), made(record, "even", reference=NF4)]))
    assert frame[["claimed_low", "claimed_high"]].to_numpy().tolist() == [[2, 5], [2, 5]]
    assert frame["baseline_differs"].tolist() == ["without nf4_base + padding + auto_batch_size", ""]
    ((_, _, rows),) = packing_tables(Analysis([made(record, "short"), made(record, "even", reference=NF4)]))
    assert [row[-1] for row in rows] == ["2.00–5.00 (of another baseline)", "2.00–5.00"]


def test_an_unclear_row_has_no_centre(record):
    analysis = Analysis([made(record, "short", sd=1.0)])
    ((_, headings, (row,)),) = packing_tables(analysis)
    assert row[headings.index("measured × [95 %]")].startswith("unclear [")


def test_table_plot_and_page_have_it(several):
    analysis = Analysis(several)
    shown = show(analysis)
    ((caption, headings, rows),) = shown.predicted
    assert "fitted elsewhere is off by" in caption and len(rows) == 6 and all(len(r) == len(headings) for r in rows)
    assert rows[0][0] == "smollm2-135m @ short (approximate lengths)"
    assert caption in markdown(shown) and "What the lengths predict" in latex(shown)
    figure, left_out = figures(analysis)["packing"]
    said = [t.get_text() for t in figure.findobj(Text)]
    assert "≈ short\npacking" in said and left_out == ""
    assert any(text.endswith("71 % → 100 % real") for text in said)
