"""Files that another program deletes during a save, such as a cleaner of old files: only that save fails."""

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


REMOVED = {
    "all files of a process": "ocdbt.process_0",
    "the data of a process": "ocdbt.process_0/d",
    "the joined index": "d",
    "the root of the index": "manifest.ocdbt",
    "the largest file": "ocdbt.process_0/d/*",
    "everything": ".",
}


def _remove(folder: str, pattern: str) -> None:
    for path in sorted(glob.glob(os.path.join(folder, pattern)), key=os.path.getsize)[-1:]:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


@pytest.mark.thorough(except_for=["all files of a process", "everything"])
@pytest.mark.parametrize("what", REMOVED)
def test_removal_before_publishing_fails_the_save(tmp_path: Any, what: str) -> None:
    saver = jstep.Saver(tmp_path)
    saver.save(state_at(1, 1.0))
    saver.wait()
    removed_from = []

    def remove(folder: str) -> None:
        is_written = os.path.exists(os.path.join(folder, "manifest.ocdbt"))
        if is_written and not removed_from:
            removed_from.append(folder)
            _remove(folder, REMOVED[what])

    with before(("os.walk", "os.scandir", "os.listdir"), f"{tmp_path}/model-2*-tmp", remove):
        saver.save(state_at(2, 2.0))
        with pytest.raises(jstep.CheckpointError, match=r"model-2 was not saved.*the newest is .*model-1"):
            saver.wait()
    assert removed_from
    assert listing(tmp_path) == ["model-1"]
    assert saver.restore(state_at(0)).params["w"][0, 0] == 1.0
    saver.save(state_at(2, 2.0))
    assert saver.restore(state_at(0)).params["w"][0, 0] == 2.0


def test_an_index_that_cannot_be_read_fails_the_save(tmp_path: Any) -> None:
    def overwrite() -> None:
        with open(tmp_path / "model-1.orbax-checkpoint-tmp" / "manifest.ocdbt", "wb") as file:
            file.write(b"no index")

    saver = jstep.Saver(tmp_path)
    with saver.flushing(overwrite):
        saver.save(state_at(1))
        with pytest.raises(jstep.CheckpointError, match="the written files cannot be read"):
            saver.wait()
    assert listing(tmp_path) == []


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
