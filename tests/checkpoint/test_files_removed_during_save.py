"""Files that another program deletes while a checkpoint gets its name: only that save fails."""

import glob
import os
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import listing
from file_operations import before

import jstep

# Small arrays are stored in the index itself, so this one is large.
LARGE = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)


def state_at(step: int, value: float = 0.0) -> Any:
    params = {"w": jnp.full((3, 2), value), "large": jnp.asarray(LARGE)}
    return jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), global_step=step)


def _remove(folder: str, pattern: str) -> None:
    for path in sorted(glob.glob(os.path.join(folder, pattern)), key=os.path.getsize)[-1:]:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


@pytest.mark.parametrize("replaces", [False, True])
def test_removal_while_publishing_fails_the_save(tmp_path: Any, replaces: bool) -> None:
    saver = jstep.Saver(tmp_path)
    saver.save(state_at(1, 1.0))
    saver.wait()

    def remove(folder: str) -> None:
        _remove(folder, "ocdbt.process_0/d/*")

    with before("os.rename", f"{tmp_path}/*-tmp", remove, times=1):
        saver.save(state_at(1 if replaces else 2, 2.0))
        with pytest.raises(jstep.CheckpointError, match="was removed while the checkpoint was written"):
            saver.wait()
    assert listing(tmp_path) == ["model-1"]
    assert saver.restore(state_at(0)).params["w"][0, 0] == 1.0
