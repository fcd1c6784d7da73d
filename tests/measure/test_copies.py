"""Copies of many tensors in few transfers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorabench.measure.judging import copies as module
from lorabench.measure.judging.copies import copies


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 26])
def test_each_copy_is_what_the_tensor_is_now(device, at_once, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    tensors = [
        torch.randn(3, 5, device=device), torch.nn.Parameter(torch.randn(7, 2, device=device).bfloat16()),
        torch.randn(4, 6, device=device).t(), torch.tensor(3.0, device=device), torch.empty(0, 4, device=device),
        torch.arange(9, device=device), torch.randn(20, device=device),
    ]  # fmt: skip
    wanted = [t.detach().clone().cpu() for t in tensors]
    found = copies(tensors, "cpu")
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    assert [(t.shape, t.dtype, t.device.type, t.requires_grad) for t in found] == [
        (t.shape, t.dtype, "cpu", False) for t in wanted
    ]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if at_once > 100:  # three number formats, a transfer each
        assert len({t.untyped_storage().data_ptr() for t in found if t.numel()}) == 3


def test_what_lies_in_one_storage_can_be_saved(tmp_path):
    tensors = {f"t{n}": torch.randn(n + 1, 3) for n in range(4)}
    save_file(dict(zip(tensors, copies([*tensors.values()], "cpu"), strict=True)), tmp_path / "t.safetensors")
    found = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_wraps_others_is_copied_by_itself():
    """torchao's state of an optimizer in 8 bits has no clone()."""
    torchao = pytest.importorskip("torchao.optim.subclass_8bit", reason="needs the package torchao")
    state = torchao.OptimState8bit.zeros((64, 256), True, 256)
    (found,) = copies([state], "cpu")
    assert type(found) is type(state) and found.shape == state.shape
