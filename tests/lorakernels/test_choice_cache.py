"""Choices on disk: kept between processes, apart for every environment, and never in the way."""

import json
import multiprocessing
import warnings
from pathlib import Path

import pytest
import torch
from lorakernels.tuning import choice_cache
from lorakernels.tuning.choice_cache import FOLDER, SWITCH, ChoiceCache, folder, source_hash

HERE = {"gpu": "a", "torch": "2", "lorakernels": "x"}
KEY = ("norm", 512, 576, torch.bfloat16, True)


def test_a_second_process_knows_what_the_first_has_chosen(tmp_path):
    ChoiceCache(tmp_path, HERE).put(KEY, "plain")
    again = ChoiceCache(tmp_path, HERE)
    assert again.get(KEY) == "plain"
    assert again.get((*KEY[:-1], False)) is None
    assert again.get(("norm", 512, 576, torch.float16, True)) is None


@pytest.mark.parametrize("name", HERE)
def test_another_gpu_version_or_source_knows_nothing_of_it(tmp_path, name):
    ChoiceCache(tmp_path, HERE).put(KEY, "plain")
    other = ChoiceCache(tmp_path, HERE | {name: "another"})
    assert other.get(KEY) is None
    other.put(KEY, "fused")
    assert ChoiceCache(tmp_path, HERE).get(KEY) == "plain"


def test_the_file_can_be_read_and_is_written_whole(tmp_path):
    kept = ChoiceCache(tmp_path / "made" / "here", HERE)
    kept.put(KEY, "plain")
    content = json.loads(kept.path.read_text())
    assert content["environment"] == HERE
    assert content["choices"] == {'["norm", 512, 576, "torch.bfloat16", true]': "plain"}
    assert [f.name for f in kept.path.parent.iterdir()] == [kept.path.name], "nothing temporary is left"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 1, "choices": {}}', b'{"choices": {"a": 1}}',
        json.dumps({"format": 1, "environment": {"gpu": "b"}, "choices": {}}).encode(),
        json.dumps({"format": 99, "environment": HERE, "choices": {}}).encode(),
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_one_warning_and_replaced(tmp_path, content):
    kept = ChoiceCache(tmp_path, HERE)
    kept.path.write_bytes(content)
    with pytest.warns(UserWarning, match="measured again") as told:
        assert kept.get(KEY) is None
        kept.put(KEY, "plain")
    assert len(told) == 1
    assert ChoiceCache(tmp_path, HERE).get(KEY) == "plain"


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    kept = ChoiceCache(tmp_path / "file", HERE)
    with pytest.warns(UserWarning, match=r"cannot be (read|written)") as told:
        kept.put(KEY, "plain")
        kept.put(("other",), "fused")
    assert len(told) == 1
    assert kept.get(KEY) == "plain" and kept.get(("other",)) == "fused", "the process goes on knowing"


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = ChoiceCache(None, HERE)
    kept.put(KEY, "plain")
    assert kept.get(KEY) == "plain" and not list(tmp_path.iterdir())


def write_many(path: str, which: int) -> None:
    kept = ChoiceCache(Path(path), HERE)
    for i in range(20):
        kept.put(("norm", which, i), f"form {i}")


def test_several_processes_write_at_once(tmp_path):
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=write_many, args=(str(tmp_path), which)) for which in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(writer.exitcode == 0 for writer in writers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = ChoiceCache(tmp_path, HERE)
        found = {(w, i): kept.get(("norm", w, i)) for w in range(3) for i in range(20)}
    last = [which for which in range(3) if all(found[which, i] == f"form {i}" for i in range(20))]
    assert last, "whoever wrote last has lost nothing"
    assert all(form in (None, f"form {i}") for (_, i), form in found.items())
    assert len(list(tmp_path.iterdir())) == 1


def test_where_choices_lie(monkeypatch, tmp_path):
    for name in (SWITCH, FOLDER, "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".triton/cache/lorakernels"
    monkeypatch.setenv("TRITON_HOME", "/home/of/triton")
    assert folder() == Path("/home/of/triton/.triton/cache/lorakernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    assert folder() == Path("/scratch/triton/lorakernels")
    monkeypatch.setenv(FOLDER, "~/own")
    assert folder() == tmp_path / "own"
    monkeypatch.setenv(SWITCH, "0")
    assert folder() is None


def test_the_source_decides_as_well(monkeypatch, tmp_path):
    source_hash.cache_clear()
    own = source_hash()
    try:
        for name in ("tuning/choice_cache.py", "ops/other.py"):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text("pass\n")
        monkeypatch.setattr(choice_cache, "__file__", str(tmp_path / "tuning/choice_cache.py"))
        source_hash.cache_clear()
        first = source_hash()
        (tmp_path / "ops/other.py").write_text("changed = True\n")
        source_hash.cache_clear()
        assert len({own, first, source_hash()}) == 3
    finally:
        source_hash.cache_clear()


@pytest.mark.gpu
def test_the_environment_of_a_gpu():
    environment = choice_cache.of_device(torch.device("cuda", 0)).environment
    assert torch.cuda.get_device_name(0) in environment["gpu"]
    assert environment["torch"] == torch.__version__ and environment["lorakernels"] == source_hash()
