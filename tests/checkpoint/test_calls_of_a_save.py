"""The leaves of a state are passed over once: bounds of the number of calls of jstep's
functions."""

import contextlib
import os
import sys
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.checkpoint.saver import engine_of
from jstep.hooks import hook_states
from jstep.loop.saving import RunSaverHook

FOLDER = os.path.dirname(jstep.__file__)
LEAVES = 602


@contextlib.contextmanager
def counted(every_thread=True):
    calls = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            calls[frame.f_code] += 1

    if every_thread:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_calls_of_a_save_and_of_a_match(tmp_path):
    params = {f"layer{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} for i in range(100)}
    state = jstep.TrainState.create(params, jstep.adam())
    assert len(jax.tree.leaves(state)) == LEAVES
    with jstep.Saver(tmp_path / "first") as saver:
        # Whatever ran before, modules are imported and names are shown now.
        saver.save(jstep.TrainState.create({"w": 0.0}, jstep.adam()))
    with counted() as calls, jstep.Saver(tmp_path) as saver:
        saver.save(state)
        saver.wait()
    assert LEAVES < calls.total() <= 6700

    with jstep.Saver(tmp_path) as saver:
        saver.extra()  # reads the manifest
        with counted() as calls:
            engine_of(saver).open(0).check_run(state)
        assert LEAVES < calls.total() <= 8000


ROWS = np.ones((40, 4), np.float32)
BATCHES = {
    "batches": lambda: jstep.batches(ROWS, {0: 4, 12: 8}, seed=1),
    "mixture": lambda: jstep.mixture(
        {"a": ROWS, "b": ROWS}, 4, {0: {"a": 1, "b": 1}, 12: {"a": 3, "b": 1}}
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_calls_of_a_save_in_a_run(kind, tmp_path, monkeypatch):
    """The loop's thread does little: what the checkpoint holds of the batches is made while it is
    written."""
    of_saves, save = [], RunSaverHook.save

    def counted_save(*args, **kwargs):
        with counted(every_thread=False) as calls:
            is_saved = save(*args, **kwargs)
        of_saves.append(calls)
        return is_saved

    monkeypatch.setattr(RunSaverHook, "save", counted_save)
    optimizer, batches = jstep.adam(), BATCHES[kind]()
    state = jstep.TrainState.create({"kernel": jnp.ones(4), "bias": jnp.ones(2)}, optimizer)
    step = jstep.minimize(
        lambda params, x: jnp.mean((x @ params["kernel"] + params["bias"].sum()) ** 2), optimizer
    )
    jstep.train(
        step, state, batches, 20, checkpoint_dir=tmp_path, save_checkpoint_steps=5, progress=False
    )
    _, *others, end = of_saves  # the first one claims the directory; the last one waits
    assert [calls[hook_states.get_states.__code__] for calls in of_saves] == [1] * 4
    assert len(others) == 2
    assert end.total() <= 350  # with the copies into memory that is kept, four calls
    assert max(calls.total() for calls in others) <= 340
    with jstep.Saver(tmp_path) as saver:
        pasts = {saved: saver.extra(saved)["past"] for saved in saver.all_steps()}
    assert [(saved, past["rows"]) for saved, past in pasts.items()] == [
        (saved, batches[:saved].rows_hash()) for saved in (5, 10, 15, 20)
    ]
    assert pasts[20]["batches"]["steps"] == [[0, 20, 1]]
