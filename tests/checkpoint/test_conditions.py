"""What a reader finds out about checkpoints that it cannot use, with stores that answer as they are told."""

from typing import Any

import jax.numpy as jnp
import pytest
from checkpoint_states import state_at
from doubles import raising

import jstep
from jstep.checkpoint.directory import DirectoryStore
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.reading import CheckpointReader
from jstep.checkpoint.saver import Saver


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


def test_an_error_before_anything_is_written_names_the_newest(tmp_path: Any, monkeypatch: Any) -> None:
    with Saver(tmp_path) as saver:
        for there in ("there are none yet.", f"the newest is {tmp_path}/model-1."):
            with monkeypatch.context() as patch:
                patch.setattr(saver._store, "save", raising(OSError(28, "No space left", "file")))
                with pytest.raises(CheckpointError) as caught:
                    saver.save(state_at(2))
            assert str(caught.value) == (
                f"{tmp_path}/model-2 was not saved: No space left: file. Earlier checkpoints are unchanged; {there}"
            )
            saver.save(state_at(1))
