"""Our reading of safetensors files against the library's own."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorabench.measure.plain_reader import fill, read_file
from lorabench.measure.safetensors_file import aligned, entries

ODD = {  # sizes of which none leaves the next one on an even address
    "state": torch.arange(7, dtype=torch.uint8),
    "packed": torch.arange(33, dtype=torch.uint8).view(33, 1),
    "norm": torch.randn(5).bfloat16(),
    "weight": torch.randn(3, 5),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "number": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def file(tmp_path):
    save_file(ODD, tmp_path / "odd.safetensors", {"format": "pt"})
    return tmp_path / "odd.safetensors"


def test_every_tensor_is_the_one_that_the_library_reads(file):
    ours, theirs = read_file(file), load_file(file)
    assert set(ours) == set(theirs) == set(ODD)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_every_tensor_begins_on_a_boundary_and_none_overlaps(file):
    found = entries(file)
    begins, size = aligned(found, 64)
    ends = [begin + entry.size for begin, entry in zip(begins, found, strict=True)]
    assert all(begin % 64 == 0 for begin in begins) and ends[-1] == size
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert aligned([], 64) == ([], 0)


def test_what_is_no_such_file_is_said(tmp_path):
    (tmp_path / "text").write_text("no tensors in here")
    with pytest.raises(ValueError, match="no safetensors file"):
        entries(tmp_path / "text")


def test_a_read_that_comes_in_pieces_goes_on_and_one_past_the_end_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "bytes").write_bytes(bytes(range(100)))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:3]], offset))
    memory = bytearray(120)
    with open(tmp_path / "bytes", "rb") as opened:
        fill(opened.fileno(), 10, memory, [(0, 4), (4, 0), (16, 50)])
        assert memory[:4] == bytes(range(10, 14)) and memory[16:66] == bytes(range(14, 64))
        assert not any(memory[4:16])
        with pytest.raises(EOFError, match="ends at byte 100"):
            fill(opened.fileno(), 90, memory, [(0, 20)])
