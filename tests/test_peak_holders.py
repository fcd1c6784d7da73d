"""What a trace of the allocator says of the peak."""

from __future__ import annotations

import pytest
from helpers import benchmark

MIB = 2**20


@pytest.fixture(scope="module")
def script():
    with benchmark("peak_holders") as module:
        yield module


def alloc(addr, mib, name):
    frames = [{"filename": "/a/norms.py", "line": 7, "name": name}, {"filename": "/a/torch.so", "line": 1, "name": "x"}]
    return {"action": "alloc", "addr": addr, "size": mib * MIB, "frames": frames}


def free(addr, mib, action="free_completed"):
    return {"action": action, "addr": addr, "size": mib * MIB}


def test_what_is_alive_where_most_is(script):
    trace = [
        alloc(1, 10, "gone"), free(1, 10), alloc(2, 4, "stays"), alloc(3, 8, "twice"), alloc(1, 8, "twice"),
        free(3, 8, "free_requested"), free(3, 8), alloc(4, 7, "behind"), free(4, 7), free(2, 4),
    ]  # fmt: skip
    found = script.holders(trace, before=100 * MIB)
    assert list(found.place) == ["there before the step", "norms:7 twice", "norms:7 stays"]
    assert list(found.mib) == [100, 16, 4] and list(found["count"]) == [1, 2, 1]


def test_what_was_there_before_may_be_freed(script):
    found = script.holders([free(9, 60), alloc(1, 50, "more"), alloc(2, 30, "more")], before=100 * MIB)
    assert dict(zip(found.place, found.mib, strict=True)) == {"norms:7 more": 80, "there before the step": 40}


def test_at_the_end_of_the_trace(script):
    found = script.holders([alloc(1, 5, "last"), {"action": "segment_map", "addr": 1, "size": 1}])
    assert dict(zip(found.place, found.mib, strict=True)) == {"norms:7 last": 5, "there before the step": 0}


def test_without_a_gpu_it_is_one_line(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "expected a CUDA device" in capsys.readouterr().err
