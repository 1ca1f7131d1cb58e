"""Slots of other shapes are sharded like their parameter, without the dimensions that they lack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jstep

PARAMS = {"w": jnp.ones((16, 8)), "q": jnp.ones((8, 8)), "e": jnp.ones((4, 16, 8)), "b": jnp.ones(8)}
SPECS = [("w", P("data", "model")), ("q", P("model", None)), ("e", P(None, "data", "model"))]


def without(axis: int) -> Any:
    return jstep.Slot(shape=lambda path, leaf: leaf.shape[:axis] + leaf.shape[axis:][1:] if leaf.ndim > 1 else None)


def rule(g: Any, p: Any, slots: Any, h: Any) -> Any:
    new = {"scalar": slots["scalar"] + jnp.sum(g), "gram": slots["gram"]}
    for name, axis in (("first", 0), ("last", -1)):
        if slots[name] is not None:
            new[name] = slots[name] + jnp.mean(g, axis=axis)
    return -0.1 * g, new


OPTIMIZER = jstep.leafwise(
    rule,
    hyper={},
    slots={
        "first": without(0),
        "last": jstep.Slot(shape=lambda path, leaf: leaf.shape[:-1] if leaf.ndim > 1 else None),
        "scalar": jstep.Slot(shape=lambda path, leaf: ()),
        "gram": jstep.Slot(shape=lambda path, leaf: (5, 5)),
    },
    sparse=False,
)


def spec(state: Any, slot: str, path: str) -> Any:
    return state.slots[slot][path].sharding.spec


@pytest.mark.thorough(except_for=["shard_state"])
@pytest.mark.parametrize("by", ["create", "shard_state"])
def test_slot_shardings_before_and_after_a_step(by: str) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    if by == "create":
        state = jstep.TrainState.create(PARAMS, OPTIMIZER, mesh=mesh, param_specs=SPECS, slot_axis="data")
    else:
        state = jstep.shard_state(jstep.TrainState.create(PARAMS, OPTIMIZER), mesh, SPECS, slot_axis="data")

    def loss(params: Any) -> Any:
        return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params))

    alone, step = jstep.TrainState.create(PARAMS, OPTIMIZER), jstep.minimize(loss, OPTIMIZER)
    for _ in range(2):
        assert spec(state, "first", "w") == P("model")
        assert spec(state, "last", "w") == P("data")
        assert spec(state, "first", "e") == P("data", "model")
        assert spec(state, "last", "e") == P(None, "data")
        assert spec(state, "first", "q") == spec(state, "last", "q") == P("model")
        assert spec(state, "gram", "w") == spec(state, "scalar", "w") == P()
        assert state.slots["first"]["b"] is None
        (state, _), (alone, _) = step(state), step(alone)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_slots_of_replicated_params_are_sharded_if_divisible() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    state = jstep.TrainState.create(PARAMS, OPTIMIZER, mesh=mesh, slot_axis="data")
    assert spec(state, "first", "w") == P("data")
    assert spec(state, "first", "e") == P("data", None)
    assert spec(state, "last", "e") == P(None, "data")
    assert spec(state, "gram", "w") == P()
