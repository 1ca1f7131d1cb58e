"""The file operations of saves, restores, evictions and deletions, in their order."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import file_operations
import jax.numpy as jnp
import pytest

import jstep

OPTIMIZER = jstep.gradient_descent(0.1)
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")


def state(step: int) -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, global_step=step)


@pytest.fixture
def operations(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`with operations() as seen:` lists the changes of files, with what is opened to be written and flushed."""

    @contextlib.contextmanager
    def watch() -> Iterator[list[str]]:
        seen: list[str] = []
        fsync = os.fsync

        def note(event: str, path: str) -> None:
            name = os.path.relpath(os.path.realpath(path), os.path.realpath(tmp_path / "run"))
            line = re.sub(r"(os\.\w+) (.*\.jstep-(deleted|replaced)).*", r"removed \2", f"{event} {name}")
            # The files of the arrays and of their metadata are tensorstore's and Orbax's.
            if not name.startswith("../") and not re.search(r"ocdbt|/_|/d/", line) and line not in seen[-1:]:
                seen.append(line)

        def flushed(descriptor: int) -> None:
            note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        with contextlib.ExitStack() as stack:
            for event in EVENTS:
                stack.enter_context(file_operations.before(event, "*", lambda path, e=event: note(e, path)))  # type: ignore[misc]
            stack.enter_context(file_operations.before("open", "*", lambda path: note("write", path), mode="w"))
            monkeypatch.setattr(os, "fsync", flushed)
            yield seen
            monkeypatch.setattr(os, "fsync", fsync)

    return watch


SAVED = [
    *("os.mkdir model-{}.orbax-checkpoint-tmp", "write model-{}.orbax-checkpoint-tmp/manifest.json"),
    *("fsync model-{}.orbax-checkpoint-tmp/manifest.json", "write model-{}.orbax-checkpoint-tmp/commit_success.txt"),
    *("fsync model-{}.orbax-checkpoint-tmp", "os.rename model-{}.orbax-checkpoint-tmp", "fsync ."),
]
"""A checkpoint has its name once all of it is on disk, and then the name is."""


def saved(step: int) -> list[str]:
    return [line.format(step) for line in SAVED]


def test_saves_evictions_and_deletions(operations: Any, tmp_path: pathlib.Path) -> None:
    with jstep.Saver(tmp_path / "run", max_to_keep=2, async_save=False) as saver:
        with operations() as seen:
            saver.save(state(1))
        claimed = ["os.mkdir .", "fsync ..", "write .model.jstep-writer", "os.truncate .model.jstep-writer"]
        assert seen == [*claimed, *saved(1)]
        saver.save(state(2))
        with operations() as seen:
            saver.save(state(3))
        assert seen == ["os.mkdir .", *saved(3), "os.rename model-1", "removed model-1.jstep-deleted"]
        with operations() as seen:
            saver.save(state(3))  # the one before has its name until the new one is on disk
        replaced = saved(3)
        replaced.insert(4, "os.rename model-3")
        assert seen == ["os.mkdir .", *replaced, "removed model-3.jstep-replaced"]
        with operations() as seen:
            saver.restore(state(0))
            assert saver.latest_step() == 3
        assert seen == []
        with operations() as seen:
            saver.delete(3)
        assert seen == ["os.mkdir .", "os.rename model-3", "removed model-3.jstep-deleted"]
    assert os.listdir(tmp_path / "run") == ["model-2"]


def test_a_save_that_fails_leaves_the_names_as_they_were(operations: Any, tmp_path: pathlib.Path) -> None:
    with jstep.Saver(tmp_path / "run", max_to_keep=1, async_save=False) as saver:
        saver.save(state(1))
        full = file_operations.before("open", "*/manifest.json", file_operations.disk_is_full, mode="w")
        with operations() as seen, full, pytest.raises(jstep.CheckpointError) as error:
            saver.save(state(2))
        assert [line for line in seen if "model-1" in line] == []
        text = re.sub(r"[\d.]+ [KMGTi]*B free", "SIZE free", str(error.value).replace(f"{tmp_path}/run/", ""))
        assert text == (
            "model-2 was not saved: the disk is full (12 B needed, SIZE free: No space left on device); make room, or "
            "keep fewer checkpoints by max_to_keep. Earlier checkpoints are unchanged; the newest is model-1."
        )
        assert saver.latest_step() == 1
        saver.save(state(3))
    assert os.listdir(tmp_path / "run") == ["model-3"]
