"""The leaves of a state are passed over once: bounds of the number of calls of jstep's functions, in all threads."""

import contextlib
import os
import sys
import threading
from collections import Counter

import jax
import jax.numpy as jnp

import jstep

FOLDER = os.path.dirname(jstep.__file__)
LEAVES = 602


@contextlib.contextmanager
def counted():
    calls = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            calls[frame.f_code] += 1

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
    with counted() as calls, jstep.Saver(tmp_path) as saver:
        saver.save(state)
        saver.wait()
    assert LEAVES < calls.total() <= 6300

    with jstep.Saver(tmp_path) as saver:
        saver.extra()  # reads the manifest
        with counted() as calls:
            saver.check_run(state, 0)
        assert LEAVES < calls.total() <= 6800
        with counted() as after_check:
            saver.restore(state)
        with counted() as alone:
            saver.restore(state)
    assert after_check.total() < alone.total() - 0.8 * calls.total()  # the run's checkpoint is matched once
