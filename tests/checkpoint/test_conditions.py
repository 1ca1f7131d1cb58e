"""What a reader finds out about checkpoints that it cannot use, with stores that answer as they are told."""

import logging
import types
from typing import Any

import jax.numpy as jnp
import pytest
from checkpoint_states import save_all, state_at
from doubles import raising

import jstep
from jstep.checkpoint.directory import DirectoryStore
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.reading import CORRUPTED, CheckpointReader, is_usable
from jstep.checkpoint.saver import Saver
from jstep.stores.files import ForeignFileError
from jstep.stores.owners import owner_in


@pytest.mark.parametrize(
    ("most", "step", "corruption", "expected"),
    [
        (30, 7, [], (True, 30)),
        (29, 7, [], (True, 0)),
        (30, 7, ["a: differs"], (False, 30)),
        (30, 8, [], (False, 0)),
        (30, FileNotFoundError("gone"), [], (None, 0)),
        (30, CheckpointError("corrupted"), [], (False, 0)),
        (30, PermissionError("no"), [], (False, 0)),
    ],
)
def test_the_condition_of_a_checkpoint(most: int, step: Any, corruption: Any, expected: Any) -> None:
    def manifest(path: str) -> Any:
        if isinstance(step, Exception):
            raise step
        return types.SimpleNamespace(step=step, files={"a": {"bytes": 10}, "b": {"bytes": 20}})

    found: Any = types.SimpleNamespace(manifest=manifest, find_corruption=lambda path, manifest: corruption)
    assert is_usable(found, "model-7", 7, most) == expected


def test_a_checkpoint_that_cannot_be_looked_at_again() -> None:
    manifest: Any = types.SimpleNamespace(files={"a": 1})
    found: Any = DirectoryStore("nowhere", "model")
    found.manifest = lambda path: types.SimpleNamespace(files={"a": 1})
    reader = CheckpointReader(found, "model", True)
    assert not found.is_gone("model-7", manifest)
    found.manifest = lambda path: types.SimpleNamespace(files={"a": 2})
    assert found.is_gone("model-7", manifest)
    found.manifest = raising(FileNotFoundError("gone"))
    assert found.is_gone("model-7", manifest)
    assert reader._manifest("model-7") == (None, "", CORRUPTED)
    for error in (OSError("no"), CheckpointError("damaged")):
        found.manifest = raising(error)
        assert not found.is_gone("model-7", manifest)
    assert reader._manifest("model-7") == (None, "damaged", CORRUPTED)
    found.newest_first = raising(OSError("no network"))
    assert str(reader.unusable("model-7", ["it is damaged"], CORRUPTED, " Its extra can be read.")) == (
        "model-7 is corrupted: it is damaged. Its extra can be read. "
        "The other checkpoints cannot be listed now (no network)."
    )


def test_params_of_another_model_without_slots(tmp_path: Any) -> None:
    optimizer = jstep.gradient_descent(0.1)
    with Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create({"w": jnp.ones(3)}, optimizer, 2))
    reader = CheckpointReader(DirectoryStore(str(tmp_path), None), "model", True)
    reader.check_run(jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer), 2)
    with pytest.raises(ValueError, match="saved by a run with another model: its params differ from those of state"):
        reader.check_run(jstep.TrainState.create({"b": jnp.ones(3)}, optimizer), 2)
    with Saver(tmp_path) as saver:
        saver.save({"params": {"w": jnp.ones(3)}, "global_step": jnp.int32([3, 3])})
    with pytest.raises(
        ValueError, match=r"^target does not fit .*/model-3; differing \(1\): 'global_step' \(int32\[2\]"
    ):
        reader.check_run(jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer), 3)


def test_folders_that_are_hidden_moved_or_stay(tmp_path: Any, caplog: Any) -> None:
    with Saver(tmp_path) as saver:
        save_all(saver, [1, 2])
        with pytest.raises(FileNotFoundError, match=rf"step=7: there is no checkpoint model-7 in {tmp_path}$"):
            saver.delete(7)
    found = DirectoryStore(str(tmp_path), None)
    assert found.hide(f"{tmp_path}/model-7") == []
    for number in range(2):
        assert (
            found.command_to_set_aside(f"{tmp_path}/model-1")
            == f"mv {tmp_path}/model-1 {tmp_path}/model-1.aside.{number}"
        )
        (tmp_path / f"model-1.aside.{number}").mkdir()
    found.log_undeleted("model-1", OSError("busy"))
    # The user has taken the name of a checkpoint that was being replaced when the run was killed.
    (tmp_path / "model-2").rename(tmp_path / "model-2.jstep-replaced")
    (tmp_path / "model-2").write_text("notes")
    with Saver(tmp_path) as saver, pytest.raises(ForeignFileError, match=r"model-2: .* it is not a checkpoint"):
        saver.save(state_at(3))
    assert (tmp_path / "model-2").read_text() == "notes"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "model-1 could not be deleted: busy"
    ]


def test_the_owner_in_a_lock() -> None:
    assert [owner_in(data) for data in (None, b"", b"{", b"[1]", b'{"pid": 3}')] == [{}, {}, {}, {}, {"pid": 3}]
