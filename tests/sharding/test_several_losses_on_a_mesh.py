"""Several losses, averages and `update_every` on a mesh of 8 devices match one device."""

import jax.numpy as jnp
import pytest
from layouts import LAYOUTS, assert_close, create, init, loss_fn, run, shardings

import jstep


def first(params, x, y, averages):
    return loss_fn(params, x, y) + 0.1 * loss_fn(averages, x, y)


def second(params, x, y, averages):
    return loss_fn(params, x, y) + jnp.mean((params["deep"]["x"] - averages["deep"]["x"]) ** 2)


OPTIMIZER = jstep.with_moving_average(
    jstep.partition(
        {"one": jstep.adam(0.01), "one/two": jstep.update_every(2, jstep.adam(0.01), accumulate=True)},
        lambda path, leaf: "one/two" if path.startswith("deep") else "one",
    ),
    jstep.ExponentialMovingAverage(0.9),
)
LOSSES = {"first": (first, ["a", "bias"]), "second": (second, "deep/*")}


@pytest.fixture(scope="module")
def single_device():
    step = jstep.minimize(LOSSES, OPTIMIZER, use_averages=True, metrics=("grad_norm",))
    return run(step, jstep.TrainState.create(init(), OPTIMIZER), steps=5)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_losses_match_one_device(layout, n, single_device):
    want, metrics = single_device
    step = jstep.minimize(LOSSES, OPTIMIZER, use_averages=True, metrics=("grad_norm",), num_microbatches=n)
    state = create(layout, OPTIMIZER)
    before, mesh = shardings(state), LAYOUTS[layout][0]
    state, got = run(step, state, lambda batch: jstep.shard_batch(batch, mesh), steps=5)
    assert shardings(state) == before
    assert step._cache_size() == 1
    assert_close((state.params, state.slots), (want.params, want.slots))
    names = ("loss", "first/loss", "second/loss", "grad_norm")
    assert_close([got[name] for name in names], [metrics[name] for name in names])
