"""Training on a mesh of 8 devices matches training on one device under every layout."""

import functools
import itertools

import jax
import pytest
from layouts import LAYOUTS, assert_close, create, init, loss_fn, run, shardings
from optimizer_table import TABLE

import jstep

NORMS = ("grad_norm", "param_norm")


@functools.lru_cache(maxsize=1)
def trained_on_one_device(name):
    optimizer = TABLE[name].make(TABLE[name].rate)
    state = jstep.TrainState.create(init(), optimizer)
    return run(
        jstep.minimize(loss_fn, optimizer, metrics=NORMS), state, steps=TABLE[name].matching_steps
    )


@pytest.mark.thorough(except_for=["adam-model"])
@pytest.mark.parametrize(("name", "layout"), list(itertools.product(TABLE, LAYOUTS)))
def test_sharded_training_matches_one_device(name, layout, compilations):
    """50 steps of every optimizer: one compilation, unchanged shardings, donated states."""
    optimizer, steps, mesh = (
        TABLE[name].make(TABLE[name].rate),
        TABLE[name].matching_steps or 50,
        LAYOUTS[layout][0],
    )
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
