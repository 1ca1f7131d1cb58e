"""A NamedTuple from a loader is one argument, wherever a plain tuple is passed as several."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import jstep


class Batch(NamedTuple):
    x: np.ndarray
    weight: np.ndarray


ROWS = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
BATCHES = [Batch(ROWS * n, np.full(8, 0.5, np.float32)) for n in range(1, 7)]
OPTIMIZER = jstep.adam(0.1)


def loss_fn(params, batch, scale=None):
    """The second argument is optional, so that a batch of two fields would fit as two arguments."""
    assert type(batch) is Batch
    assert scale is None
    return jnp.mean(batch.weight * (batch.x @ params["w"] - 1.0) ** 2)


STEP = jstep.minimize(loss_fn, OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": jnp.ones(4)}, OPTIMIZER)


def by_hand(steps):
    state = make_state()
    for batch in BATCHES[:steps]:
        state, _ = STEP(state, batch)
    return state


@pytest.mark.thorough(except_for=["3"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_train_passes_one_argument(steps_per_call, tmp_path):
    options = {"steps_per_call": steps_per_call, "progress": False, "checkpoint_dir": tmp_path}
    jstep.train(STEP, make_state(), BATCHES, 3, **options)
    state = jstep.train(STEP, make_state(), lambda n: BATCHES[n], 6, **options)
    np.testing.assert_allclose(state.params["w"], by_hand(6).params["w"], rtol=1e-6)
