"""A directory that is renamed while a Saver writes there is an error, and not made again."""

import os
import shutil

import pytest
from checkpoint_states import save_all, state_at

from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver


def test_the_next_save_is_an_error(tmp_path):
    with Saver(tmp_path / "run") as saver:
        save_all(saver, [1])
        os.rename(tmp_path / "run", tmp_path / "moved")
        with pytest.raises(CheckpointError, match="run was renamed while it is written"):
            saver.save(state_at(2))
        assert os.listdir(tmp_path) == ["moved"]
    assert Saver(tmp_path / "moved").all_steps() == [1]


def test_a_save_that_was_in_progress_is_an_error(tmp_path):
    with (
        Saver(tmp_path / "run") as saver,
        saver.flushing(lambda: os.rename(tmp_path / "run", tmp_path / "moved")),
    ):
        saver.save(state_at(1))
        with pytest.raises(CheckpointError, match="run was renamed while it is written"):
            saver.wait()
    assert os.listdir(tmp_path) == ["moved"]


def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    with Saver(tmp_path / "run") as saver:
        save_all(saver, [1])
        shutil.rmtree(tmp_path / "run")
        save_all(saver, [2])
        assert saver.all_steps() == [2]
