"""The page cache: what is forgotten has to be read again, and where it cannot be forgotten that is said."""

import pytest

from lorabench.contract.ablation import Unsupported
from lorabench.measure import page_cache


def test_what_was_read_is_there_and_what_was_forgotten_is_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    page_cache.hold([file])
    with open(file, "rb") as opened:
        assert page_cache.resident(opened.fileno(), 1 << 20) == 1.0


def test_a_page_cache_that_does_not_forget_is_unsupported(tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "resident", lambda descriptor, size: 1.0)
    monkeypatch.setattr(page_cache.time, "sleep", lambda seconds: None)
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(Unsupported, match="a cold cache needs a disk"):
        page_cache.forget(tmp_path / "file")
