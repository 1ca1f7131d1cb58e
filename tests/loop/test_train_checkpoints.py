"""`train`: saving and resuming, failing hooks, and states with NaN that are not saved."""

import os

import numpy as np
import pytest
from doubles import raising
from loop_runs import Calls, Counted, by_hand, make_state, same, train

import jstep

# Checkpoints


def test_saves_during_the_run_and_at_the_end(tmp_path):
    train(11, checkpoint_dir=tmp_path, checkpoint_prefix="net", save_checkpoint_steps=4)
    assert sorted(os.listdir(tmp_path)) == ["net-11", "net-4", "net-8", "starts"]
    train(11, checkpoint_dir=tmp_path, checkpoint_prefix="other")
    assert jstep.Saver(tmp_path, prefix="other").all_steps() == [11]


# Hooks that fail


@pytest.mark.thorough(except_for=["0-event0", "0.0005-event1"])
@pytest.mark.parametrize(
    "event",
    [
        ("begin", 0), ("first", 1), ("step", 1), ("step", 5), ("step", 6), ("save", 6), ("end", 8),
        ("close",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("slow", [0, 0.0005])
def test_a_hook_that_raises_leaves_the_last_checkpoint(event, slow, tmp_path):
    calls, other = Calls(fail=event), Calls()
    with pytest.raises(RuntimeError, match="failed at"):
        train(
            8, Counted(slow=slow), hooks=[other, calls], checkpoint_dir=tmp_path / "c",
            save_checkpoint_steps=3, logdir=tmp_path / "l", save_summaries_steps=2,
        )  # fmt: skip
    assert other.seen[-1] == calls.seen[-1] == ("close",)
    assert other.steps("end") == ([8] if event[0] in ("end", "close") else [])
    saver = jstep.Saver(tmp_path / "c")
    # Nothing of the iteration in which the hook failed.
    in_step = {1: None, 5: 3, 6: 3}.get(event[-1])
    steps = {"begin": None, "first": None, "step": in_step, "save": 3, "end": 8, "close": 8}
    last = steps[event[0]]
    assert saver.latest_step() == last
    if last is not None:
        assert same(saver.restore(make_state()), by_hand(last))
        assert same(train(8, Counted(), checkpoint_dir=tmp_path / "c"), by_hand(8))


# NaN


@pytest.mark.thorough(except_for=["3"])
@pytest.mark.parametrize("every_n_steps", [1, 3, 50])
def test_fail_on_nan_loss_false_ends_the_run_without_saving(every_n_steps, tmp_path, caplog):
    def batches(n):
        return {"x": np.full((4, 2), np.nan if n == 8 else 1.0, np.float32)}

    calls = Calls()
    hook = jstep.NanLossHook(every_n_steps=every_n_steps, fail_on_nan_loss=False)
    state = train(
        100, batches, hooks=[hook, calls], checkpoint_dir=tmp_path, save_checkpoint_steps=4
    )
    assert 9 <= jstep.global_step(state) <= 15
    assert calls.steps("end") == [jstep.global_step(state)]
    assert jstep.Saver(tmp_path).all_steps() == [4, 8]
    assert "nan at step 9" in caplog.text


def test_an_error_is_not_replaced_by_one_of_close(tmp_path, monkeypatch):
    """A save fails in the background while another error propagates."""
    from jstep.array_store.manifest import CheckpointError

    calls = Calls(fail=("step", 2))
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="failed at") as caught:  # noqa: PT012
        patched.setattr(jstep.Saver, "close", raising(CheckpointError("the disk is full")))
        train(3, hooks=[calls], checkpoint_dir=tmp_path)
    assert "Additionally, CheckpointError: the disk is full" in caught.value.__notes__
