"""Several savers: each is tried when due, at a signal, at the end and in a rescue; the run's own
first."""

import os
import signal
from pathlib import Path

import pytest
from doubles import raising
from loop_runs import DATA, train

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.record.starts import read_starts


def fails(name):
    return raising(OSError(f"the disk of {name} is full"))


def savers(directory, broken, **kwargs):
    return [
        jstep.CheckpointSaverHook(
            directory / name, before_save=(fails(name),) if name in broken else (), **kwargs
        )
        for name in ("first", "second")
    ]


def steps_in(directory):
    return [jstep.Saver(directory / name).all_steps() for name in ("own", "first", "second")]


def breaks(number):
    """A hook that ends the run after step 5 by a signal."""
    return jstep.every(5, lambda *_: os.kill(os.getpid(), number))


def lost_after(step):
    """Batches of which one cannot be read: an error between two iterations, after which the state
    is saved."""

    def batches(n):
        if n == step:
            raise ValueError("my loader")
        return DATA[n]

    return batches


def test_at_a_signal(tmp_path):
    hooks = [*savers(tmp_path, "first"), breaks(signal.SIGTERM)]
    with pytest.raises(OSError, match="the disk of first is full") as caught:
        train(50, hooks=hooks, checkpoint_dir=tmp_path / "own")
    assert steps_in(tmp_path) == [[5], [], [5]]
    assert (
        "at step 5, after the update with batch 4, in CheckpointSaverHook.save"
        in caught.value.__notes__[-1]
    )
    prevented = jstep.CheckpointSaverHook(tmp_path / "other", before_save=(lambda step: True,))
    with pytest.raises(jstep.Preempted, match="after step 5, which is saved; start the run again"):
        train(50, hooks=[prevented, breaks(signal.SIGTERM)], checkpoint_dir=tmp_path / "another")


def test_when_due(tmp_path):
    hooks = savers(tmp_path, "first second", save_steps=7)
    with pytest.raises(OSError, match="the disk of first is full") as caught:
        train(50, hooks=hooks, checkpoint_dir=tmp_path / "own", save_checkpoint_steps=7)
    assert "Additionally, OSError: the disk of second is full" in caught.value.__notes__
    assert steps_in(tmp_path) == [[7], [], []]


def test_in_a_rescue(tmp_path):
    with pytest.raises(ValueError, match="my loader") as caught:
        train(50, lost_after(5), hooks=savers(tmp_path, "first"), checkpoint_dir=tmp_path / "own")
    assert steps_in(tmp_path) == [[5], [], [5]]
    first, last = caught.value.__notes__
    assert first == (
        "Additionally, CheckpointSaverHook could not save step 5: "
        "OSError: the disk of first is full"
    )
    assert "and is saved as model-5" in last


def test_a_rescue_in_which_the_own_saver_fails(tmp_path, monkeypatch):
    own, save = tmp_path / "own", jstep.Saver.save

    def full(self, *args, **kwargs):
        if Path(self.directory) == own:
            raise OSError("the own disk is full")
        return save(self, *args, **kwargs)

    monkeypatch.setattr(jstep.Saver, "save", full)
    with pytest.raises(ValueError, match="my loader") as caught:
        train(50, lost_after(5), hooks=savers(tmp_path, ""), checkpoint_dir=own)
    assert "and could not be saved: OSError: the own disk is full" in caught.value.__notes__[-1]
    assert steps_in(tmp_path) == [[], [5], [5]]


@pytest.mark.thorough(except_for=["1-end"])
@pytest.mark.parametrize("ends_by", ["end", "signal", "due"])
@pytest.mark.parametrize("fails", [1, 9])
def test_a_write_that_fails_while_the_run_waits_for_it(ends_by, fails, tmp_path):
    """It is tried again, and what is not there is not said to be."""
    flushed = []

    def full():
        flushed.append(None)
        if len(flushed) <= fails:
            raise OSError(28, "No space left on device")

    saver = jstep.Saver(tmp_path)
    with (
        saver.flushing(full),
        pytest.raises(jstep.CheckpointError, match="No space left") as caught,
    ):
        train(
            9 if ends_by == "signal" else 5,
            hooks=[breaks(signal.SIGTERM)] if ends_by == "signal" else [],
            checkpoint_dir=saver,
            save_checkpoint_steps=5 if ends_by == "due" else 100,
        )
    is_there = fails == 1
    assert jstep.Saver(tmp_path).all_steps() == ([5] if is_there else [])
    assert ("is saved as model-5" in caught.value.__notes__[-1]) == is_there
    assert ("not saved" in caught.value.__notes__[-1]) != is_there
    saver.close()


class Prevents(RunHook):
    def __init__(self, *steps):
        self.steps = steps

    def before_save(self, step):
        return step in self.steps


def test_a_save_that_a_hook_prevents_is_not_in_the_record(tmp_path):
    hook = Prevents(2, 4)
    train(6, hooks=[hook], checkpoint_dir=tmp_path, save_checkpoint_steps=2)
    assert [saved[0] for saved in read_starts(str(tmp_path))["model"][0]["saved"]] == [6]
    assert jstep.Saver(tmp_path).all_steps() == [6]
