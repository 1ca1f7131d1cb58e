"""Randomly nested optimizers: each leaf is updated by its own optimizer and not affected by the others."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from random_optimizers import PATHS, Wrapped, gradients_of, leaf_at, nested_optimizers, params_of, train_alone
from thorough import examples

import jstep


def build(spec):
    """Return the optimizer and the state of a spec; reject specs whose names collide."""
    try:
        optimizer = spec.build()
    except ValueError as error:
        if "both have a" not in str(error):
            raise
        hypothesis.reject()
    return optimizer, jstep.TrainState.create(params_of(np.random.default_rng(0)), optimizer)


@examples(25)
@given(spec=nested_optimizers())
def test_each_leaf_is_updated_by_its_own_optimizer(spec):
    optimizer, state = build(spec)
    rng = np.random.default_rng(1)
    gradients = [gradients_of(rng, state.params) for _ in range(3)]
    before = state
    for gradient in gradients:
        state = jstep.apply_gradients(state, gradient, optimizer)
    for path in PATHS:
        expected = train_alone(
            spec.base_of(path),
            leaf_at(before.params, path),
            [leaf_at(g, path) for g in gradients],
        )
        np.testing.assert_allclose(leaf_at(state.params, path), expected, rtol=2e-6, atol=1e-6, err_msg=path)
    assert state.params["decoder"]["steps"] == 7
    assert state.params["decoder"]["nothing"] is None
    assert jax.tree.structure(state) == jax.tree.structure(before)


@examples(20)
@given(spec=nested_optimizers())
def test_a_skipped_update_changes_no_params_and_no_slots(spec):
    optimizer, state = build(Wrapped("skip", "", spec))
    gradient = gradients_of(np.random.default_rng(1), state.params)
    nonfinite = jax.tree.map(lambda g: g.at[0].set(jnp.nan), gradient)
    state = jstep.apply_gradients(state, gradient, optimizer)
    after = jstep.apply_gradients(state, nonfinite, optimizer)
    for path in PATHS:
        np.testing.assert_array_equal(leaf_at(after.params, path), leaf_at(state.params, path), err_msg=path)
    for name in jstep.get_slot_names(state):
        for a, b in zip(jax.tree.leaves(after.slots[name]), jax.tree.leaves(state.slots[name]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
    assert after.global_step == 2


@examples(15)
@given(spec=nested_optimizers())
def test_resume_of_nested_optimizers_is_bitwise(spec, tmp_path_factory):
    optimizer, state = build(spec)
    rng = np.random.default_rng(2)
    gradients = [gradients_of(rng, state.params) for _ in range(2)]
    step = jax.jit(lambda state, gradient: jstep.apply_gradients(state, gradient, optimizer))
    half = step(state, gradients[0])
    with jstep.Saver(tmp_path_factory.mktemp("nest"), async_save=False) as saver:
        saver.save(half)
        restored = saver.restore(jstep.TrainState.create(params_of(rng), optimizer))
    a, b = step(half, gradients[1]), step(restored, gradients[1])
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("frozen", ["decoder", "decoder/attn"])
def test_labels_that_are_prefixes_of_each_other(frozen):
    other = "decoder/attn" if frozen == "decoder" else "decoder"
    optimizer = jstep.partition(
        {"decoder": jstep.adam(0.1), "decoder/attn": jstep.adam(0.1)},
        labels=lambda path, leaf: "decoder/attn" if "attn" in path else "decoder",
    )
    state = jstep.TrainState.create(params_of(np.random.default_rng(0)), optimizer)
    gradient = gradients_of(np.random.default_rng(1), state.params)
    partial_gradient = jax.tree_util.tree_map_with_path(
        lambda keys, g: None if ("attn" in jax.tree_util.keystr(keys)) == (frozen == "decoder/attn") else g, gradient
    )
    state = jstep.apply_gradients(state, partial_gradient, optimizer)
    moved = jax.tree.leaves(state.slots[f"{other}/v"])
    assert all(np.all(np.asarray(v) > 0) for v in moved)
    assert all(np.all(np.asarray(v) == 0) for v in jax.tree.leaves(state.slots[f"{frozen}/v"]))
