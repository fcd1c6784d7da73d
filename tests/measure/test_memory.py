"""Memory of an arm is its own, whatever the other arm has left behind."""

from types import SimpleNamespace

import pytest
import torch
from helpers import cells, seat_of

from lorabench.contract.hooks import described
from lorabench.measure import memory
from lorabench.measure.memory import growth

MIB = 1 << 20


def test_the_growth_of_a_call_on_a_cpu_is_its_largest_at_a_time():
    def call():
        one = torch.empty(3 * MIB, dtype=torch.uint8)
        del one
        two, three = (torch.empty(2 * MIB, dtype=torch.uint8) for _ in range(2))
        del two, three

    held = torch.empty(MIB, dtype=torch.uint8)
    assert growth(torch.device("cpu"), call) == 4 * MIB
    assert growth(torch.device("cpu"), held.zero_) == 0


@pytest.mark.parametrize(("fraction", "left"), [(1.0, 40 + 5), (0.75, 75 - 50)])
def test_what_is_left_to_nccl_is_not_free(fraction, left, monkeypatch):
    """Of 100 bytes this process holds 50 and keeps 5 more; 40 nobody has."""
    pretended = {
        "mem_get_info": lambda device: (40, 100), "memory_reserved": lambda: 55, "memory_snapshot": lambda: [],
        "memory_allocated": lambda: 50, "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=100),
        "get_per_process_memory_fraction": lambda: fraction,  # torch refuses a device without an index
    }  # fmt: skip
    for name, what in pretended.items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(memory, "synchronize", lambda device: None)
    assert memory.free(torch.device("cuda")) == left


@pytest.mark.gpu
def test_what_is_free_can_be_had():
    free = memory.free(torch.device("cuda"))
    assert MIB < free <= torch.cuda.mem_get_info()[1]
    held = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    assert memory.free(torch.device("cuda")) == pytest.approx(free - held.nbytes, abs=64 * MIB)


@pytest.mark.gpu
def test_both_arms_of_one_kind_reserve_alike(tmp_path):
    """Else the second arm lives on what the first has freed, and seems to reserve nothing; what it has of the base
    counts, as if it were alone."""
    from lorabench.measure.machine import describe

    cell = cells("models=[smollm2-135m]", "workload=2x256", "ablations=[eager]")[0]
    assert not cell.toggles
    seat, _ = seat_of(cell, tmp_path, describe())
    first, second = (seat.call("prepare", stack.name, stack, False) for stack in seat.family.stacks)
    one, two = first.memory, second.memory
    assert two.reserved == pytest.approx(one.reserved, rel=0.15)
    assert two.reserved >= two.peak * 0.95  # what was in use at once had to be reserved
    assert two.static == pytest.approx(one.static, rel=0.15)
    assert second.own_bytes < two.static - two.weights / 2  # the base is there once


@pytest.mark.parametrize(
    ("first", "short"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (ValueError("a shape"), False)],
)
def test_what_was_raised_from_it_is_out_of_memory_too(first, short):
    """As torch's pipelines do with whatever a stage raises."""
    with pytest.raises(RuntimeError) as raised:
        try:
            raise first
        except Exception as error:
            raise RuntimeError("[Stage 0] failed to run forward:\nargs: …") from error
    assert memory.out_of_memory(raised.value) is short
    assert described(raised.value) == (
        f"RuntimeError: [Stage 0] failed to run forward: from {type(first).__name__}: {first}"
    )
