"""The accumulator of a node: zeroed once, cast once, and nothing of the scratch kept alive."""

import pytest
import torch
from lorakernels.ops.grad_accumulator import GradAccumulator, gradient_zeros

CPU = torch.device("cpu")


def test_one_buffer_and_one_cast():
    accumulator = GradAccumulator(CPU, 3 * 4 + 2 * 5, 6)
    ds, da, db = accumulator.scratch(3, 2), accumulator.gradient(3, 4), accumulator.gradient(2, 5)
    assert ds.untyped_storage().data_ptr() == da.untyped_storage().data_ptr() == db.untyped_storage().data_ptr()
    assert not any(t.any() for t in (ds, da, db))
    ds.fill_(9)
    da.copy_(torch.arange(12.0).view(3, 4))
    db.copy_(torch.arange(10.0).view(2, 5) + 0.1)
    first, last, rest = (
        accumulator.cast(da[:1], torch.bfloat16),
        accumulator.cast(da[1:], torch.bfloat16),
        accumulator.cast(db, torch.bfloat16),
    )
    assert torch.equal(torch.cat((first, last)), da.bfloat16()) and torch.equal(rest, db.bfloat16())
    assert first.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 2 * (12 + 10)  # no scratch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_do_not_keep_the_scratch(dtype):
    accumulator = GradAccumulator(CPU, 4, 1000)
    da = accumulator.gradient(2, 2)
    da.fill_(3)
    cast = accumulator.cast(da, dtype)
    assert cast.dtype == dtype and cast.untyped_storage().nbytes() == 4 * cast.element_size() and (cast == 3).all()


def test_what_is_not_in_the_accumulator():
    accumulator, own = GradAccumulator(CPU, 4, 0), torch.ones(2, 2)
    assert accumulator.cast(None, torch.float32) is None
    assert accumulator.cast(own, torch.float32) is own and accumulator.cast(own, torch.float16).dtype == torch.float16
    accumulator.gradient(2, 2)
    assert accumulator.cast(own, torch.float32) is own


def test_more_than_there_is():
    accumulator = GradAccumulator(CPU, 4, 0)
    first, second = accumulator.gradient(2, 2), accumulator.gradient(2, 2)
    first.fill_(1)
    assert not second.any() and accumulator.cast(second, torch.float32) is second
    assert not gradient_zeros(None, 2, 3, CPU).any()
