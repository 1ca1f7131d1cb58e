"""A reader that meets the eviction or replacement of a checkpoint looks again: it is neither corrupted nor gone."""

import os

import pytest
from checkpoint_states import save_all, state_at

from jstep.checkpoint.array_reader import ArrayReader
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver
from jstep.weights.load import load_weights


@pytest.fixture
def after_listing(monkeypatch):
    """Register a function that runs once, right after the directory was listed."""

    def register(directory, action):
        real, due = os.listdir, [action]

        def listdir(path="."):
            found = real(path)
            if due and str(path) == str(directory):
                due.pop()()
            return found

        monkeypatch.setattr(os, "listdir", listdir)

    return register


def test_an_older_one_is_not_taken_in_place_of_an_evicted_one(tmp_path, after_listing):
    with Saver(tmp_path) as writer:
        save_all(writer, [1, 2])

        def replace():
            save_all(writer, [3])
            writer.delete(2)

        after_listing(tmp_path, replace)
        assert latest_checkpoint(tmp_path) == f"{tmp_path}/model-3"


def test_evicted_while_its_arrays_are_read(tmp_path, caplog, monkeypatch):
    """Files that are missing because the checkpoint was deleted are not told of, also those that nothing reads."""
    with Saver(tmp_path, max_to_keep=1) as writer:
        save_all(writer, [1])
        real, due = ArrayReader.read, [2]

        def read(reader, shardings):
            if due:
                save_all(writer, [due.pop()])
            return real(reader, shardings)

        monkeypatch.setattr(ArrayReader, "read", read)
        assert int(Saver(tmp_path).restore(state_at(0)).global_step) == 2
        due.append(3)
        with pytest.raises(CheckpointError, match="model-2 was deleted or replaced while it was read"):
            load_weights(tmp_path / "model-2", state_at(0).params)
        due.append(4)
        with pytest.raises(CheckpointError, match="model-3 was deleted or replaced while it was read"):
            load_weights(tmp_path / "model-3", state_at(0).params, partial=True)
    assert not caplog.records
