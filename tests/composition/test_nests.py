"""Optimizers nested at random: each leaf sees its own optimizer, and nothing of the others."""

import hypothesis
import jax
import jax.numpy as jnp
import nests
import numpy as np
import pytest
from hypothesis import given, settings

import jstep


def build(nest):
    """The optimizer of a nest, or nothing where names collide, as they should."""
    try:
        optimizer = nest.build()
        state = jstep.TrainState.create(nests.params_of(np.random.default_rng(0)), optimizer)
    except ValueError:
        hypothesis.assume(False)
    return optimizer, state


@settings(max_examples=25)
@given(nest=nests.nests())
def test_each_leaf_sees_its_own_optimizer(nest):
    optimizer, state = build(nest)
    rng = np.random.default_rng(1)
    gradients = [nests.gradients_of(rng, state.params) for _ in range(3)]
    before = state
    try:
        for gradient in gradients:
            state = jstep.apply_gradients(state, gradient, optimizer)
    except ValueError:  # every leaf is frozen
        hypothesis.assume(any(nest.base_of(path) is not None for path in nests.PATHS))
        raise
    for path in nests.PATHS:
        wanted = nests.alone(
            nest.base_of(path), nests.leaf_at(before.params, path), [nests.leaf_at(g, path) for g in gradients]
        )
        np.testing.assert_allclose(nests.leaf_at(state.params, path), wanted, rtol=2e-6, atol=1e-6, err_msg=path)
    assert state.params["decoder"]["steps"] == 7
    assert state.params["decoder"]["nothing"] is None
    assert jax.tree.structure(state) == jax.tree.structure(before)


@settings(max_examples=20)
@given(nest=nests.nests())
def test_a_guard_around_everything_keeps_everything(nest):
    optimizer, _ = build(nest)
    try:
        optimizer = jstep.skip_nonfinite(optimizer)
        state = jstep.TrainState.create(nests.params_of(np.random.default_rng(0)), optimizer)
    except ValueError:  # a guard inside a guard
        hypothesis.assume(False)
    gradient = nests.gradients_of(np.random.default_rng(1), state.params)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradient)
    state = jstep.apply_gradients(state, gradient, optimizer)
    after = jstep.apply_gradients(state, bad, optimizer)
    for path in nests.PATHS:
        np.testing.assert_array_equal(nests.leaf_at(after.params, path), nests.leaf_at(state.params, path))
    names = jstep.get_slot_names(state)
    for name in names:
        for a, b in zip(jax.tree.leaves(after.slots[name]), jax.tree.leaves(state.slots[name]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
    assert after.global_step == 2


@settings(max_examples=15)
@given(nest=nests.nests())
def test_k_and_restore_and_k_are_2k(nest, tmp_path_factory):
    optimizer, state = build(nest)
    rng = np.random.default_rng(2)
    gradients = [nests.gradients_of(rng, state.params) for _ in range(2)]
    step = jax.jit(lambda state, gradient: jstep.apply_gradients(state, gradient, optimizer))
    try:
        half = step(state, gradients[0])
    except ValueError:
        hypothesis.assume(False)
    with jstep.Saver(tmp_path_factory.mktemp("nest"), async_save=False) as saver:
        saver.save(half)
        restored = saver.restore(jstep.TrainState.create(nests.params_of(rng), optimizer))
    a, b = step(half, gradients[1]), step(restored, gradients[1])
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("frozen", ["decoder", "decoder/attn"])
def test_labels_that_are_prefixes_of_one_another(frozen):
    other = "decoder/attn" if frozen == "decoder" else "decoder"
    optimizer = jstep.partition(
        {"decoder": jstep.adam(0.1), "decoder/attn": jstep.adam(0.1)},
        labels=lambda path, leaf: "decoder/attn" if "attn" in path else "decoder",
    )
    state = jstep.TrainState.create(nests.params_of(np.random.default_rng(0)), optimizer)
    gradient = nests.gradients_of(np.random.default_rng(1), state.params)
    kept = jax.tree_util.tree_map_with_path(
        lambda keys, g: None if ("attn" in jax.tree_util.keystr(keys)) == (frozen == "decoder/attn") else g, gradient
    )
    state = jstep.apply_gradients(state, kept, optimizer)
    moved = jax.tree.leaves(state.slots[f"{other}/v"])
    assert all(np.all(np.asarray(v) > 0) for v in moved)
    assert all(np.all(np.asarray(v) == 0) for v in jax.tree.leaves(state.slots[f"{frozen}/v"]))
