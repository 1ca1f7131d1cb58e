"""`train` saves the last complete state when a run fails, and the error reports the step and the
cause."""

import asyncio
import math
import os
import re
import signal

import doubles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import DATA, STEP, by_hand, make_state, same, train

import jstep


def raising(error, at=5):

    def batches(step):
        if step == at:
            raise error
        return DATA[step]

    return batches


def wrong_batch(step):
    return DATA[step] if step != 5 else {"x": np.ones((4, 3), np.float32)}


def hook_failing(error):
    return [jstep.every(5, doubles.raising(error))]


def note_of(error):
    """Return the note that `train` added; JAX may have added others."""
    (note,) = [note for note in error.__notes__ if note.startswith("jstep:")]
    return note


FAILURES = {
    "loader": (
        lambda: {"batches": raising(OSError("no shard"))},
        OSError,
        "with batch 4, while batch 5 was fetched",
    ),
    "wrong batch": (
        lambda: {"batches": wrong_batch},
        TypeError,
        "while running the step on batch 5",
    ),
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("saves", [False, True])
def test_the_last_state_is_in_the_exception_and_saved(name, saves, tmp_path):
    make, error, words = FAILURES[name]
    kwargs = make() | ({"checkpoint_dir": tmp_path} if saves else {})
    with pytest.raises(error) as caught:
        train(12, **kwargs)
    assert same(caught.value.state, by_hand(5))
    note = note_of(caught.value)
    assert re.search(words, note)
    assert "the state after step 5 is in the exception's `state`" in note
    assert ("and is saved as model-5; start the run again to resume" in note) == saves
    if saves:
        assert jstep.Saver(tmp_path).all_steps() == [5]
        assert same(train(12, checkpoint_dir=tmp_path), by_hand(12))


LEAVES = {
    "an error": KeyError("no"),
    "ctrl-c in a library": KeyboardInterrupt(),
    "an exit": SystemExit(3),
    "a cancelled task": asyncio.CancelledError(),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_leaves_a_hook_saves_nothing_of_its_iteration(name, tmp_path, caplog):
    error = LEAVES[name]
    with pytest.raises(type(error)) as caught:
        train(12, hooks=hook_failing(error), checkpoint_dir=tmp_path, save_checkpoint_steps=2)
    assert same(caught.value.state, by_hand(5))
    note = note_of(caught.value)
    assert re.search(
        r"at step 5, after the update with batch 4, in every\(5, .*\).after_step",
        note,
    )
    assert (
        "is not saved, because the iteration has not ended; a restart resumes from model-4, "
    ) in note
    # Python shows the notes of the others.
    lines = [
        record.getMessage() for record in caplog.records if "ends the run" in record.getMessage()
    ]
    assert lines == ([] if name in ("an error", "ctrl-c in a library") else [
        f"{type(error).__name__} ends the run {note.removeprefix('jstep: ')}"
    ])  # fmt: skip
    assert jstep.Saver(tmp_path).all_steps() == [2, 4]
    assert same(train(12, checkpoint_dir=tmp_path), by_hand(12))


def test_the_batch_that_does_not_fit_is_named_also_in_a_call_of_several(tmp_path):
    def batches(step):
        return DATA[step] if step < 6 else {"x": np.ones((4, 3), np.float32)}

    with pytest.raises(TypeError) as caught:
        train(12, batches, steps_per_call=3, checkpoint_dir=tmp_path)
    assert (
        "at step 6, after the update with batch 5, while running the step on batch 6;"
        in note_of(caught.value)
    )
    assert jstep.Saver(tmp_path).latest_step() == 6


def test_a_failure_before_the_first_step_saves_nothing(tmp_path):
    state = make_state()
    with pytest.raises(OSError, match="no shard") as caught:
        train(12, raising(OSError("no shard"), at=0), state=state, checkpoint_dir=tmp_path)
    assert caught.value.state is state
    assert "at step 0, while batch 0 was fetched" in note_of(caught.value)
    assert jstep.Saver(tmp_path).all_steps() == []


@pytest.mark.parametrize(("skipped", "steps"), [(0, []), (1, [4])])
def test_a_state_after_a_nan_is_not_saved_by_a_signal(skipped, steps, tmp_path):
    """The loss of a skipped update does not count, because the state does not depend on it."""

    def step(state, batch):
        state, metrics = STEP(state, batch)
        return state, {**metrics, "loss": np.float32(np.nan), "skipped": np.int32(skipped)}

    def stop(step, state, metrics):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(jstep.Preempted) as caught:
        train(12, step=step, hooks=[jstep.every(4, stop)], checkpoint_dir=tmp_path)
    assert ("which is not saved: its loss is not finite" in str(caught.value)) == (not steps)
    assert jstep.Saver(tmp_path).all_steps() == steps
    assert jstep.global_step(caught.value.state) == 4


def test_the_note_names_the_hook_that_failed_first_not_one_whose_numbers_were_delivered_later():
    def fail(step, state, metrics):
        jax.block_until_ready(metrics)  # the numbers are there when they are queued
        raise KeyError("no")

    with pytest.raises(KeyError) as caught:
        train(
            12,
            hooks=[
                jstep.every(5, fail),
                jstep.MetricsHook(doubles.raising(OSError("also")), every_n_steps=5),
            ],
        )
    assert any(
        text.startswith("Additionally, OSError: also\nraised by the `write`")
        for text in caught.value.__notes__
    )
    assert "in every(5, " in note_of(caught.value)


def test_a_donated_state_is_reported_as_lost():
    """The step fails on the device, after the state was donated."""

    def step(state, batch):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError) as caught:
        train(3, step=step)
    assert caught.value.state is None
    assert "it is lost" in note_of(caught.value)


@pytest.mark.parametrize("has_log", [False, True])
def test_a_bad_loss_within_the_last_call_prevents_a_save_whether_or_not_a_log_has_its_mean(
    has_log, tmp_path
):
    step = jstep.minimize(
        lambda params, x: jnp.sum(params["w"] ** 2) + jax.lax.stop_gradient(x), jstep.sgd(0.1)
    )
    state = jstep.TrainState.create({"w": jnp.ones(2)}, jstep.sgd(0.1))
    batches = [np.float32(math.nan if i == 1 else 0.0) for i in range(8)]
    hooks = [jstep.every(4, lambda *_: os.kill(os.getpid(), signal.SIGTERM))]
    if has_log:
        hooks.append(jstep.MetricsHook(lambda step, row: None, every_n_steps=4, mean=True))
    with pytest.raises(jstep.Preempted, match="which is not saved: its loss is not finite"):
        train(8, batches, hooks, state, step, steps_per_call=4, checkpoint_dir=tmp_path)


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_loss_that_was_infinite_long_ago_prevents_no_save(steps_per_call, tmp_path):
    def loss_fn(params, batch):
        return jnp.sum(params["w"] ** 2) + jax.lax.stop_gradient(batch)

    step = jstep.minimize(loss_fn, jstep.sgd(0.1))
    state = jstep.TrainState.create({"w": jnp.ones(2)}, jstep.sgd(0.1))
    batches = [np.float32(math.inf if i == 2 else 0.0) for i in range(20)]

    def lost_after(n):
        if n == 12:
            raise KeyError(12)
        return batches[n]

    with pytest.raises(KeyError) as raised:
        train(
            20, lost_after, [], state, step, steps_per_call=steps_per_call, checkpoint_dir=tmp_path
        )
    assert ", and is saved as model-12" in note_of(raised.value)
