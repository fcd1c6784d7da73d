"""The formula against steps that were really measured: a sweep over three distributions of short samples."""

import pytest
from helpers import sweep

from lorabench.record.store import read_records
from lorabench.report.analysis import Analysis
from lorabench.report.packing import packing_frame

WAYS = "[packing,{packing:{row_tokens:512}},{token_budget:{tokens:512}}]"
DISTRIBUTIONS = ("glue", "viggo", "gsm8k")


@pytest.mark.exhaustive
def test_the_gain_of_a_distribution_is_predicted_by_the_others(tmp_path):
    for name in DISTRIBUTIONS:
        lines = f"kind: lengths\ndistribution: {name}\nsamples: 16\nbatch_size: 4\nseq_len: 512\n"
        (tmp_path / f"{name}.yaml").write_text(lines)
    feeds = ",".join(f"tiny-llama@{name}.yaml" for name in DISTRIBUTIONS)
    done = sweep(f"models=[{feeds}]", f"ablations={WAYS}", "trials=8", "warmup=1", "output=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "out")
    assert {r.status for r in records} == {"ok"}
    frame = packing_frame(Analysis(records))
    assert len(frame) == 3 * len(DISTRIBUTIONS) and frame["fitted"].notna().all()
    assert (frame["fitted"] / frame["measured"] - 1).abs().median() < 0.2, frame.to_string()
