"""What a reader finds out about checkpoints that it cannot use, with stores that answer as they are told."""

from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep.checkpoint.directory import DirectoryStore
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
