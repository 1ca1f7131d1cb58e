"""The contract of every optimizer: slots, structure, dtypes and their precision, leaves without a
gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
    FEW,
    avals,
    bitwise_equal,
    compiled_step,
    each_optimizer,
    for_each,
    make_optimizer,
    mixed_gradients,
    mixed_params,
)
from optimizer_entries.entry import MADE_AT
from optimizer_table import TABLE

import jstep


@each_optimizer
def test_slot_names_and_initial_values(name):
    entry, params = TABLE[name], mixed_params()
    state = jstep.TrainState.create(params, make_optimizer(name), 7)
    assert tuple(jstep.get_slot_names(state)) == entry.slots
    assert sorted(set(state.slots) - set(entry.slots)) == sorted(entry.scalars)
    for scalar, first in entry.scalars.items():
        value = state.slots[scalar]
        assert value.shape == ()
        assert value.dtype == (jnp.float32 if isinstance(first, float) else jnp.int32)
        assert value == (7 if first is MADE_AT else jnp.asarray(first, value.dtype))
    for slot, initial in entry.initial.items():
        check_slot(state, slot, initial)


def check_slot(state, slot, initial):
    floats = {"a", "b/a", "b/scalar", "half"}
    seen = set()
    for path in ("a", "b/a", "b/scalar", "half", "count", "flags", "key", "b/none"):
        leaf = jstep.get_slot(state, slot, path)
        if path not in floats:
            assert leaf is None
            continue
        if leaf is None:  # a slot of another label, or a leaf without a slot
            assert "/" in slot or initial == "other"
            continue
        seen.add(path)
        assert leaf.dtype == jnp.float32
        if initial != "other":
            param = functools.reduce(lambda tree, key: tree[key], path.split("/"), mixed_params())
            number = initial if isinstance(initial, float) else 0.0
            first = np.full(() if initial == "scalar" else param.shape, np.float32(number))
            np.testing.assert_array_equal(
                leaf, param.astype(jnp.float32) if initial == "copy" else first
            )
            assert leaf.shape == first.shape
    assert seen or initial == "other"
    assert seen == floats or "/" in slot or initial == "other"
    # The tree of a slot has the containers of params.
    is_leaf = lambda x: x is None or isinstance(x, jax.Array)  # noqa: E731
    want = jax.tree.structure(state.params, is_leaf=is_leaf)
    assert jax.tree.structure(state.slots[slot], is_leaf=is_leaf) == want


@each_optimizer
def test_structure_dtype_and_untrained_leaves_are_unchanged(name):
    optimizer = make_optimizer(name)
    before = jstep.TrainState.create(mixed_params(), optimizer)
    step, after = compiled_step(name), before
    for _ in range(TABLE[name].idle + 1):
        after = step(after, mixed_gradients())
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert avals(before) == avals(after)
    for path in ("count", "flags", "key"):
        assert bitwise_equal(before.params[path], after.params[path])
    for old, new in (
        (before.params["a"], after.params["a"]),
        (before.params["half"], after.params["half"]),
    ):
        assert not np.array_equal(old, new)
    assert int(after.global_step) == TABLE[name].idle + 1


@for_each(TABLE, ["adafactor"])
def test_update_is_pure_and_the_same_under_jit(name):
    optimizer = make_optimizer(name)
    before = jstep.TrainState.create(mixed_params(), optimizer)
    copy = jax.tree.map(lambda x: x.copy(), before)
    eager = jstep.apply_gradients(before, mixed_gradients(), optimizer, scaled=True)
    compiled = compiled_step(name)(before, mixed_gradients())
    assert jax.tree.all(jax.tree.map(bitwise_equal, before, copy))
    eager, compiled = (s.replace(params=s.params | {"key": None}) for s in (eager, compiled))
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5)


@for_each(TABLE, FEW)
def test_a_leaf_without_gradient_keeps_value_and_slots(name):
    step = compiled_step(name)
    before = step(jstep.TrainState.create(mixed_params(), make_optimizer(name)), mixed_gradients())
    grads = mixed_gradients(2.0)
    grads["a"] = grads["b"]["scalar"] = None
    after = step(before, grads)
    for path in ("a", "b/scalar"):
        pick = functools.partial(functools.reduce, lambda t, k: t[k], path.split("/"))
        assert bitwise_equal(pick(before.params), pick(after.params))
        for slot in jstep.get_slot_names(before):
            old, new = jstep.get_slot(before, slot, path), jstep.get_slot(after, slot, path)
            assert (old is None and new is None) or bitwise_equal(old, new)
    assert not bitwise_equal(before.params["half"], after.params["half"])


@for_each(TABLE, ["adam"])
def test_gradients_of_another_precision_are_accepted(name):
    optimizer = make_optimizer(name)
    state = jstep.TrainState.create({"a": jnp.ones(2)}, optimizer)
    new = jstep.apply_gradients(state, {"a": jnp.ones(2, jnp.bfloat16)}, optimizer, scaled=True)
    assert avals(new) == avals(state)


# float64, float16 and bfloat16.


@pytest.mark.usefixtures("x64")
@for_each(TABLE, ["adam"])
def test_x64_keeps_float64_and_float32_apart(name):
    optimizer = make_optimizer(name)
    params = {"a": np.array([1.0, 2.0]), "b": np.array([3.0], np.float32)}
    before = jstep.TrainState.create(params, optimizer)
    grads = {"a": np.array([0.1, 0.2]), "b": np.array([0.3], np.float32)}
    after = compiled_step(name)(before, grads)
    assert after.global_step.dtype == jnp.int64
    assert avals(before) == avals(after)
    assert after.params["a"].dtype == jnp.float64
    assert after.params["b"].dtype == jnp.float32
    for slot in jstep.get_slot_names(after):
        for path, dtype in (("a", jnp.float64), ("b", jnp.float32)):
            leaf = jstep.get_slot(after, slot, path)
            assert leaf is None or leaf.dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@for_each(TABLE, ["adam", "stochastic_rounding"])
def test_low_precision_params_are_updated_in_float32(name, dtype):
    """One update of a low-precision leaf is the float32 update, rounded once."""
    optimizer = make_optimizer(name)
    low, grad = jnp.array([1.0, -2.0, 0.375], dtype), jnp.array([0.5, 0.03125, -4.0], dtype)
    step = compiled_step(name)
    state = step(jstep.TrainState.create({"a": low}, optimizer), {"a": grad})
    wide = step(
        jstep.TrainState.create({"a": low.astype(jnp.float32)}, optimizer),
        {"a": grad.astype(jnp.float32)},
    )
    assert state.params["a"].dtype == dtype
    np.testing.assert_allclose(
        state.params["a"].astype(jnp.float32), wide.params["a"], rtol=float(jnp.finfo(dtype).eps)
    )
    for slot in jstep.get_slot_names(state):
        leaf = jstep.get_slot(state, slot, "a")
        if leaf is not None:
            assert leaf.dtype == jnp.float32
            # Averages follow the rounded parameter; all other slots depend only on the gradient.
            follows = slot in TABLE[name].averages
            tolerance = float(jnp.finfo(dtype).eps) if follows else 1e-5
            np.testing.assert_allclose(leaf, wide.slots[slot]["a"], rtol=tolerance)
