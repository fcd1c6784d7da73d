"""The suites of several GPUs, small and over gloo as the head of each says: what becomes of every row."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from helpers import sweep

from lorabench.record.store import read_records

SUITES = Path(__file__).resolve().parents[2] / "lorabench/conf/suite"
REFUSED = {  # here, by what a row begins with: how the reason does
    "context_parallel": "context_parallel needs a GPU",
    "fsdp2(copy_engine=True)": "copy engines copy between GPUs",
} | ({} if find_spec("deepspeed") else {"deepspeed_zero": "deepspeed_zero needs the package deepspeed"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", ["several_gpus", "scaling", "lorafusion_pipeline"])
def test_swept_small_each_row_of_a_suite_is_right_or_refused_with_its_reason(tmp_path: Path, suite: str) -> None:
    text = (SUITES / f"{suite}.yaml").read_text()
    head = " ".join(re.findall(r"^# *(.*)$", text, re.MULTILINE))
    (command,) = re.findall(r"Small, over gloo: (suite=.*? trials=\d)", head)
    done = sweep(*shlex.split(command), "warmup=1", "report=false", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_records(tmp_path)
    assert len(found) == 1 + len(yaml.safe_load(text)["ablations"])
    for record in found:
        first = record.ablations[0] if record.ablations else ""
        reason = next((reason for row, reason in REFUSED.items() if first.startswith(row)), None)
        assert record.status == ("unsupported" if reason else "ok"), (record.ablations, record.reason)
        assert reason is None or str(record.reason).startswith(reason)
