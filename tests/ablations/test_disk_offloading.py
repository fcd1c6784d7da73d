"""What goes to a file and comes back: the same bits, counted in bytes, and nothing of it stays."""

import errno
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.measure.fairness import settings
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations.checkpointing import MARK
from lorabench_ablations.tensor_file import WRITES, TensorFile

LAYERS, BATCH, LENGTH = 3, 2, 16
CPU = torch.device("cpu")
DROPOUT = {"overrides": ("lora.lora_dropout=0.1",)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Python's folder for temporary files, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def file(folder):
    return TensorFile(CPU)


FILESYSTEM = TensorFile.filesystem


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch):
    """Wherever this machine's folder for temporary files lies."""
    monkeypatch.setattr(TensorFile, "filesystem", lambda self: "ext4")


def gradients(made):
    torch.manual_seed(1)
    made.step.backward(made.step.forward(made.step.batches[0]))
    return made.gradients()


def audited(made, ops):
    toggle = next(a for a in made.ablations if a.slot == "checkpointing")
    found = Evidence(made, made.patched[toggle.name], ops)
    return toggle.audit(found), toggle.notes(found)[toggle.name]


def test_gradients_are_plain_checkpointing_s_bit_for_bit():
    """With the dropout that PEFT draws: what runs again has to draw the same mask."""
    plain, ours = (gradients(arm("sdpa", name, **DROPOUT)) for name in ("gradient_checkpointing", "disk_offloading"))
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], ours[name]) for name in plain)


def test_of_a_layer_its_input_goes_and_the_record_says_so():
    made = arm("sdpa", "disk_offloading")
    _, ops = traced(lambda: run_trial(made))
    hidden = LAYERS * BATCH * LENGTH * made.model.config.hidden_size * 4
    assert audited(made, ops) == (LAYERS, {
        "layers_run_again": LAYERS, "tensors_moved": LAYERS, "bytes_out": hidden, "bytes_back": hidden,
        "file_bytes": hidden, "filesystem": "ext4",
    })  # fmt: skip
    assert not settings()["hooks of saved tensors"]


def test_what_did_not_come_back_is_not_applied():
    made = arm("sdpa", "disk_offloading")
    _, ops = traced(lambda: run_trial(arm("sdpa")))
    with pytest.raises(NotApplied, match="0 bytes went to the disk and 0 came back"):
        audited(made, ops)
    run_trial(made)
    with pytest.raises(NotApplied, match="no layer ran again in backward"):
        audited(made, ops)


def test_a_folder_in_memory_is_no_disk(folder, monkeypatch):
    monkeypatch.setattr(TensorFile, "filesystem", lambda self: "tmpfs")
    with pytest.raises(Unsupported) as error:
        arm("sdpa", "disk_offloading")
    assert str(error.value) == f"{folder} lies in memory (tmpfs); let TMPDIR name a folder on a disk"


def test_the_next_step_writes_over_the_last_one_s_bytes():
    made = arm("sdpa", "disk_offloading")
    run_trial(made)
    held = getattr(made.model, MARK)
    size = held.size
    made.step.forward(made.step.batches[0])  # without a backward
    for _ in range(2):
        run_trial(made)
    assert held.size == os.fstat(held.descriptor).st_size == size and held.tensors == 4 * LAYERS


def test_micro_batches_whose_backward_comes_later_keep_their_bytes(file):
    waiting = [[torch.randn(5, 3) for _ in range(2)] for _ in range(3)]
    packed = [[file.pack(x.clone()) for x in batch] for batch in waiting]
    for batch, places in zip(waiting, packed, strict=True):
        assert all(torch.equal(file.unpack(p), x) for p, x in zip(places[::-1], batch[::-1], strict=True))
    assert file.size == 6 * 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_every_dtype_and_shape_comes_back(file, dtype):
    for tensor in (torch.randn(7, 3, 5), torch.randn(4, 6).T, torch.tensor(2.0), torch.randn(1)):
        tensor = tensor.to(dtype)
        back = file.unpack(file.pack(tensor))
        assert back is not tensor and back.dtype == dtype and torch.equal(back, tensor)


def test_what_is_written_to_afterwards_comes_back_as_it_was(file):
    tensor = torch.ones(100)
    place = file.pack(tensor)
    tensor.zero_()
    assert torch.equal(file.unpack(place), torch.ones(100))


def test_what_cannot_be_moved_stays(file):
    for tensor in (torch.empty(0, 3), torch.nn.Parameter(torch.ones(2)), torch.empty(2, device="meta")):
        assert file.unpack(file.pack(tensor)) is tensor
    assert file.tensors == 0


def test_the_one_before_is_read_meanwhile(file):
    first, second, third = (file.pack(torch.full((4,), float(n))) for n in range(3))
    file.unpack(third)
    assert second.read is not None and first.read is None
    assert third.read is None, "it holds what it read no longer"
    assert torch.equal(file.unpack(third), torch.full((4,), 2.0)), "asked for twice, it is read twice"


def test_what_the_system_takes_piece_by_piece_is_whole(file, monkeypatch):
    """Linux moves 2 GiB at most in one call."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: read(file, [into[0][:70]], offset))
    tensor = torch.randn(111)
    assert torch.equal(file.unpack(file.pack(tensor)), tensor)
    assert file.bytes_out == file.bytes_back == 444


def test_a_slow_disk_holds_the_forward_up(file, monkeypatch):
    write, go = os.pwrite, threading.Event()
    monkeypatch.setattr(os, "pwrite", lambda *given: go.wait(60) and write(*given))
    packed = [file.pack(torch.ones(3)) for _ in range(WRITES)]
    with ThreadPoolExecutor(1) as other:
        one_more = other.submit(file.pack, torch.ones(3))
        threading.Event().wait(0.2)
        assert not one_more.done()
        go.set()
        packed.append(one_more.result(60))
    assert all(torch.equal(file.unpack(place), torch.ones(3)) for place in reversed(packed))


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_room_is_one_line(folder, monkeypatch):
    made = arm("sdpa", "disk_offloading")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unsupported) as error:
        run_trial(made)
    assert str(error.value).startswith(
        f"the disk of {folder} has no room for 8,192 more bytes (No space left on device)"
    )
    assert "TMPDIR" in str(error.value) and "\n" not in str(error.value)
    assert not settings()["hooks of saved tensors"] and not list(folder.iterdir())


def test_what_fails_in_the_thread_is_raised_in_the_step(file, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full)
    place = file.pack(torch.ones(3))
    with pytest.raises(Unsupported, match="has no room for 12 more bytes"):
        file.unpack(place)
    with pytest.raises(Unsupported, match="has no room"):
        for _ in range(WRITES):
            file.pack(torch.ones(3))


def test_bytes_that_are_missing_are_no_tensor(file):
    place = file.pack(torch.ones(3))
    place.written.result()
    os.ftruncate(file.descriptor, 5)
    with pytest.raises(EOFError, match="7 bytes of a tensor are missing"):
        file.unpack(place)


def test_no_name_and_no_file_are_left(folder):
    made = arm("sdpa", "disk_offloading")
    descriptor = getattr(made.model, MARK).descriptor
    loss = made.step.forward(made.step.batches[0])
    assert not list(folder.iterdir()), "between forward and backward"
    made.step.backward(loss)
    delattr(made.model, MARK)
    for module in made.model.modules():
        module.__dict__.pop("_gradient_checkpointing_func", None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_its_filesystem_is_named(file):
    named = FILESYSTEM(file)
    assert named is None or named.partition(".")[0] in Path("/proc/filesystems").read_text().split()


def test_no_graph_holds_its_copies():
    told = conflict([registry.ablation(name) for name in ("disk_offloading", "cuda_graph")])
    assert told is not None and "pinned host memory" in told


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_plain_checkpointing_s_bit_for_bit():
    """Attention of several operators, because the backward of a fused one may add in any order."""
    made = [arm("sdpa_math", name, device="cuda", **DROPOUT) for name in ("gradient_checkpointing", "disk_offloading")]
    for _ in range(3):
        plain, ours = map(gradients, made)
        assert all(torch.equal(plain[name], ours[name]) for name in plain)
        for one in made:
            one.step.clear()
    assert getattr(made[1].model, MARK).bytes_back > 0


@pytest.mark.gpu
def test_on_a_gpu_the_copies_wait_for_the_computation_and_it_for_them():
    """Each tensor is still to be computed when it is packed, its memory is taken by others as soon as it is free, and
    what comes back is used at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    file = TensorFile(device)
    for _ in range(3):
        packed = []
        for n in range(8):
            torch.cuda._sleep(10_000_000)
            packed.append(file.pack(torch.full((1 << 20,), float(n), device=device)))
            torch.full((1 << 20,), -1.0, device=device)
        sums = [file.unpack(place).sum() for place in reversed(packed)]
        assert [float(s) for s in sums] == [n * 2.0**20 for n in reversed(range(8))]
        packed.clear()
    assert file.size == 8 << 22
