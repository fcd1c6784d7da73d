"""A folder that cells share is made once, whole or not at all, and nothing of its making stays."""

import weakref

import pytest

from lorabench.measure.saved import saved_once


def test_a_folder_is_made_once_and_what_made_it_is_gone(tmp_path):
    made = []

    def save(folder):
        class Circle:
            pass

        circle = Circle()
        circle.itself = circle
        made.append(weakref.ref(circle))
        folder.mkdir()
        (folder / "file").write_text("saved")

    for _ in range(2):
        assert (saved_once(tmp_path / "shared", save) / "file").read_text() == "saved"
    assert len(made) == 1 and made[0]() is None
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_of_two_processes_the_first_one_is_kept(tmp_path):
    def save(folder):
        for name in (folder, tmp_path / "shared"):  # while this one saves, the other one ends
            name.mkdir()
            (name / "file").write_text(name.name)

    assert (saved_once(tmp_path / "shared", save) / "file").read_text() == "shared"
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_what_could_not_be_saved_is_not_there(tmp_path):
    def save(folder):
        folder.mkdir()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        saved_once(tmp_path / "shared", save)
    assert not (tmp_path / "shared").exists()
