"""Training on a mesh of 8 devices matches training on one device under every layout."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, assert_close, create, data, init, loss_fn, run, shardings
from optimizer_table import TABLE

import jstep

NORMS = ("grad_norm", "param_norm")


@functools.lru_cache(maxsize=1)
def trained_on_one_device(name):
    optimizer = TABLE[name].make(TABLE[name].rate)
    state = jstep.TrainState.create(init(), optimizer)
    return run(jstep.minimize(loss_fn, optimizer, metrics=NORMS), state, steps=TABLE[name].matching_steps)


@pytest.mark.thorough(except_for=["muon-model"])
@pytest.mark.parametrize(("name", "layout"), list(itertools.product(TABLE, LAYOUTS)))
def test_sharded_training_matches_one_device(name, layout, compilations):
    """50 steps of every optimizer: one compilation, unchanged shardings, donated states."""
    optimizer, steps, mesh = TABLE[name].make(TABLE[name].rate), TABLE[name].matching_steps or 50, LAYOUTS[layout][0]
    step = jstep.minimize(loss_fn, optimizer, metrics=NORMS)
    state = create(layout, optimizer)
    before, first = shardings(state), state
    with compilations() as seen:
        state, got = run(step, state, lambda batch: jstep.shard_batch(batch, mesh), steps)
    assert len(seen) == 1
    assert step._cache_size() == 1
    assert shardings(state) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert int(state.global_step) == steps
    if TABLE[name].matching_steps:
        want, metrics = trained_on_one_device(name)
        assert_close((state.params, state.slots), (want.params, want.slots))
        assert_close([got[norm] for norm in NORMS], [metrics[norm] for norm in NORMS], rtol=1e-3)


AVERAGED = jstep.with_moving_average(
    jstep.chain(jstep.clip_gradients(by_global_norm=0.05), jstep.adam(0.01)), jstep.ExponentialMovingAverage(0.9)
)


def noisy(params, x, y, rng):
    return loss_fn(params, x + 0.1 * jax.random.uniform(rng, x.shape), y), {"rows": x.shape[0] * jnp.ones(())}


NOISY_STEP = jstep.minimize(noisy, AVERAGED, has_aux=True, num_microbatches=4, rng=jax.random.key(3))


@pytest.fixture(scope="module")
def noisy_reference():
    """State and metrics after 12 steps on one device, with the same microbatches as on a mesh."""
    return run(NOISY_STEP, jstep.TrainState.create(init(), AVERAGED), steps=12)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_microbatches_scans_and_random_numbers(layout, noisy_reference):
    mesh = LAYOUTS[layout][0]
    want, metrics = noisy_reference
    scanned = jstep.scan_steps(NOISY_STEP)
    state = create(layout, AVERAGED)
    before = shardings(state)
    batches = jstep.batches(data(), 32, seed=2)
    for first in (0, 4, 8):
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches[first : first + 4])
        rows = NamedSharding(mesh, P(None, "data"))
        state, got = scanned(state, *jax.device_put(stacked, rows))
    assert shardings(state) == before
    assert scanned._cache_size() == 1
    assert_close((state.params, state.slots), (want.params, want.slots))
    assert_close(got["loss"][-1], metrics["loss"])
    assert float(got["rows"][-1]) == 8
