"""A reader that meets the eviction or replacement of a checkpoint looks again: it is neither
corrupted nor gone."""

import os

import pytest
from checkpoint_states import save_all, state_at

from jstep.array_store.array_reader import ArrayReader
from jstep.array_store.manifest import CheckpointError
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


@pytest.mark.parametrize("method", ["foreign_content", "read"])
def test_evicted_while_it_is_read(tmp_path, caplog, monkeypatch, method):
    """Before its files are checked, or its arrays are read. No file that nothing reads is said to
    be missing."""
    with Saver(tmp_path, max_to_keep=1) as writer:
        save_all(writer, [1])
        real, due = getattr(ArrayReader, method), [2, 3, 4]

        def evicted(reader, *arguments):
            if due:
                save_all(writer, [due.pop(0)])
                reader._indices.clear()  # it may hold all of so small a state
            return real(reader, *arguments)

        monkeypatch.setattr(ArrayReader, method, evicted)
        assert int(Saver(tmp_path).restore(state_at(0)).global_step) == 4
        due.append(5)
        with pytest.raises(FileNotFoundError, match="step=4"):
            Saver(tmp_path).restore(state_at(0), step=4)
        due.append(6)
        with pytest.raises(
            CheckpointError, match="model-5 was deleted or replaced while it was read"
        ):
            load_weights(tmp_path / "model-5", state_at(0).params)
        due.append(7)
        with pytest.raises(
            CheckpointError, match="model-6 was deleted or replaced while it was read"
        ):
            load_weights(tmp_path / "model-6", state_at(0).params, partial=True)
    assert not caplog.records
