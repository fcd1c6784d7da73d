"""Link curves: on processes of a CPU, and what the doctor says of them."""

import pytest

from lorabench import doctor
from lorabench.run.links import curve


def test_every_collective_has_a_point_of_every_size() -> None:
    found = curve("cpu", 2, (4096, 1 << 20))
    assert {(p.collective, p.bytes) for p in found} == {
        (name, size) for name in ("all_reduce", "all_gather", "send") for size in (4096, 1 << 20)
    }
    for point in found:
        assert point.ms > 0
        assert abs(point.gbs - point.bytes / point.ms / 1e6) < 1e-9  # of two ranks a ring sends what one gives, once


@pytest.mark.exhaustive
def test_the_doctor_names_latency_and_bandwidth() -> None:
    found = doctor.links("cpu", 2)
    assert found.level == "ok"
    assert "for 4 KiB" in found.words
    assert "at 64 MiB" in found.words


def test_ranks_that_do_not_reach_each_other_are_a_note() -> None:
    found = doctor.links("no such device", 2)
    assert found.level == "note"
    assert "2 ranks do not reach each other" in found.words
