"""The rates that loading is held against, and what a record makes of them."""

import torch

from lorabench.contract.work import Work
from lorabench.measure import rates
from lorabench.measure.roofline import phase_rooflines
from lorabench.measure.trial import Trial

CPU = torch.device("cpu")


def test_all_bytes_of_the_files_are_read_by_every_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "BLOCK", 1000)
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(2500))
    read, states = [], []
    plain = rates.fill
    monkeypatch.setattr(
        rates, "fill", lambda fd, at, memory, pieces: (read.append(pieces), plain(fd, at, memory, pieces))
    )
    assert rates.read_gbs(files, CPU, lambda: states.append(len(read))) > 0
    assert states == [6 * i for i in range(len(states))] and len(read) == 6 * len(states)
    assert sum(size for pieces in read[:6] for _, size in pieces) == 5000


def test_no_files_have_no_rate_and_a_copy_has_one():
    assert rates.read_gbs([], CPU, lambda: None) is None
    assert rates.copy_gbs(CPU) > 0.1


def trial(**ms):
    return Trial(ms, ms, {}, 0.0, 1.0)


def test_a_phase_of_which_no_rate_was_measured_has_none():
    found = phase_rooflines([trial(read=10.0, place=5.0)], None, Work(gbytes={"read": 1.0}), None, {"read": 4.0})
    assert (found["read"].gbytes, found["read"].ceiling_gbs) == (1.0, 4.0)
    assert (found["place"].gbytes, found["place"].ceiling_gbs) == (None, None)
