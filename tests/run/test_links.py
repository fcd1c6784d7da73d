"""Link curves: on processes of a CPU, in a session's ceilings, and what the doctor says of them."""

from __future__ import annotations

import pytest
from helpers import MACHINE, cells

from lorabench import doctor
from lorabench.contract.family import Family
from lorabench.run import links
from lorabench.run.links import curve, with_links

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
KNOWN = {"ceilings": {"gemm_tflops": {"float32": 1.0}, "copy_gbs": 2.0}}


def family(toggles: str, ranks: int = 2) -> Family:
    _, cell = cells(f"world_size={ranks}", f"ablations=[{toggles}]")
    return Family((cell,))


def test_every_collective_has_a_point_of_every_size() -> None:
    # Forked: torch is imported here. Below, the doctor's ranks import it for themselves, as they do for a user.
    found = curve("cpu", 2, (4096, 1 << 20), busy_s=links.BRIEF_S, method="fork")
    assert {(p.collective, p.bytes) for p in found} == {(n, size) for n in COLLECTIVES for size in (4096, 1 << 20)}
    for point in found:
        assert point.ms > 0
        share = 0.5 if point.collective in ("reduce_scatter", "all_to_all") else 1  # half of it stays where it is
        assert abs(point.gbs - share * point.bytes / point.ms / 1e6) < 1e-9


def test_a_session_has_a_curve_once_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(device: str, ranks: int, *_: object) -> list[links.Link]:
        asked.append(ranks)
        return [links.Link(collective="send", ranks=ranks, bytes=4096, ms=1.0, gbs=0.1)]

    asked: list[int] = []
    monkeypatch.setattr(links, "curve", of)
    assert with_links(KNOWN, family("adamw_fused", ranks=1), MACHINE, "") is KNOWN, "nobody talks"
    assert with_links(KNOWN, family("[ddp,cuda_graph]"), MACHINE, "") is KNOWN, "it is never started"
    found = with_links(KNOWN, family("ddp"), MACHINE, "")
    assert with_links(found, family("fsdp2"), MACHINE, "") is found
    found = with_links(found, family("ddp", ranks=4), MACHINE, "")
    assert [link["ranks"] for link in found["ceilings"]["links"]] == asked == [2, 4]
    assert found["ceilings"].items() > KNOWN["ceilings"].items()


def test_a_curve_that_fails_costs_a_session_nothing_but_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SESSION_S", 0.0)
    found = with_links(KNOWN, family("ddp"), MACHINE, "spawn")
    why = "TimeoutError: 2 ranks have not answered each other within 0 s"
    assert found == {"ceilings": KNOWN["ceilings"] | {"no_links": why}}
    assert with_links(found, family("ddp"), MACHINE, "spawn") is found, "it is not tried again"


@pytest.mark.exhaustive
def test_the_doctor_names_latency_and_bandwidth() -> None:
    found = list(doctor.links("cpu", 2))
    assert [finding.words.partition(" of 2 ranks: ")[0] for finding in found] == list(COLLECTIVES)
    for finding in found:
        assert finding.level == "ok"
        assert " µs for 4 KiB, " in finding.words
        assert finding.words.endswith(" GB/s of bus bandwidth at 1 MiB")


@pytest.mark.exhaustive  # two processes that import torch; in make test a session's curve fails above
def test_ranks_that_do_not_reach_each_other_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(links.FEW, "no such device", (4096,))
    (found,) = doctor.links("no such device", 2)
    assert found.level == "note"
    assert "2 ranks do not reach each other" in found.words
