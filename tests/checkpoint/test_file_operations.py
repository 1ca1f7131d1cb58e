"""The interception of file operations that the tests of this folder use."""

import contextlib
import os
import shutil

import pytest
from file_operations import before, killed_at


def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)


def test_paths_relative_to_an_open_folder(tmp_path):
    """`shutil.rmtree` deletes files relative to the descriptor of their folder."""
    os.makedirs(tmp_path / "a" / "b")
    write(tmp_path / "a" / "b" / "file")
    with before(("os.remove", "os.rmdir"), f"{tmp_path}/a*", lambda path: None) as seen:
        shutil.rmtree(tmp_path / "a")
    assert seen.paths == [f"{tmp_path}/a/b/file", f"{tmp_path}/a/b", f"{tmp_path}/a"]


def test_a_killed_process_changes_nothing(tmp_path):
    for name in "abc":
        write(tmp_path / name)
    with killed_at(1, tmp_path) as killed:
        os.remove(tmp_path / "a")
        write(tmp_path / "d")
        assert not killed.is_set()
        for change in (lambda: os.rename(tmp_path / "b", tmp_path / "e"), lambda: write(tmp_path / "c", "y")):
            with pytest.raises(OSError, match="Read-only"):
                change()
        assert killed.is_set()
        with contextlib.suppress(OSError):
            os.mkdir(tmp_path / "f")
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "d"]
