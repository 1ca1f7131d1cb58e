"""Runs in lanes: their cards, and the warning if a run resumes with another number."""

import jax.numpy as jnp
import numpy as np
from cards import recorded

import jstep
from jstep.record.differences import changes

OPTIMIZER = jstep.gradient_descent(0.1)
DATA = jstep.batches(np.ones((64, 2), np.float32), 8, seed=0)


def step(lanes):
    return jstep.minimize(lambda params, x: params["w"] * jnp.mean(x), OPTIMIZER, lanes=lanes)


def run(directory, train_step, last_step):
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    return jstep.train(train_step, state, DATA, last_step, checkpoint_dir=directory, progress=False)


def test_the_card_has_the_lanes(tmp_path):
    run(tmp_path / "a", step(4), 2)
    run(tmp_path / "b", step(None), 2)
    run(tmp_path / "c", {0: step(None), 1: step(8)}, 2)
    (a,), (b,), (c,) = (recorded(tmp_path / name) for name in "abc")
    assert (a["lanes"], b["lanes"], c["lanes"]) == (4, None, {"0": None, "1": 8})
    assert "lanes: 4 before, null now" in changes({"card": a}, {"card": b}).bits
