"""The roles of slots travel with a state: static, from the optimizer that made it, and never from
names or shapes."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jstep

NAMES = ["d", "mine", "beta1", "start_step", "held/x", "model"]


def custom(name, make):
    return jstep.Optimizer(
        lambda params, step: {name: make(params)},
        lambda updates, slots, params, step: (updates, slots),
        lambda step: {},
    )


@pytest.mark.parametrize(
    "params", [1.0, {"w": 1.0}, {"w": np.ones(3, np.float32), "b": 0.0}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_slots_are_found_whatever_they_are_called(name, params):
    for each, shared in ((jnp.zeros_like, False), (lambda p: jnp.int32(0), False), (None, True)):
        optimizer = custom(
            name, lambda p, each=each: jnp.float32(1.0) if each is None else jax.tree.map(each, p)
        )
        for wrapped, prefix in ((optimizer, ""), (jstep.scope(optimizer, "a"), "a/")):
            state = jstep.TrainState.create(params, wrapped)
            assert jstep.get_slot_names(state) == ([] if shared else [prefix + name])


def test_roles_stay_through_everything_that_makes_a_new_state():
    state = jstep.TrainState.create({"w": jnp.ones(4)}, jstep.adam())
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2), jstep.adam(), donate=False)
    made = {
        "replace": state.replace(params={"w": jnp.zeros(4)}),
        "dataclasses.replace": dataclasses.replace(state, params={"w": jnp.zeros(4)}),
        "pickle": pickle.loads(pickle.dumps(state)),
        "copy": copy.deepcopy(state),
        "tree.map": jax.tree.map(jnp.zeros_like, state),
        "shapes": jax.eval_shape(lambda: state),
        "step": step(state)[0],
        "shard_state": jstep.shard_state(state, jax.make_mesh((1,), ("data",))),
        "vmap": jax.vmap(lambda w: jstep.TrainState.create({"w": w}, jstep.adam()))(
            jnp.ones((2, 4))
        ),
    }
    for name, one in made.items():
        assert dict(one.roles) == dict(state.roles), name
        assert len(one.roles) == 3, name


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_slots_of_square_matrices_lie_by_what_they_keep(axis_type):
    mesh = jax.make_mesh((2,), ("data",), (axis_type,))

    def rule(g, p, slots, h):
        return -g, {"up": jnp.mean(g, 1), "down": jnp.mean(g, 0)}

    def half(path, leaf):
        return (leaf.shape[0],)

    slots = {
        "up": jstep.Slot(shape=half, keeps="rows"),
        "down": jstep.Slot(shape=half, keeps="columns"),
    }
    optimizer = jstep.leafwise(rule, hyper={}, slots=slots, sparse=False, finished=True)
    state = jstep.TrainState.create(
        {"w": jnp.ones((4, 4))}, optimizer, mesh=mesh, param_specs=PartitionSpec("data", None)
    )
    assert tuple(state.slots["up"]["w"].sharding.spec) == ("data",)
    assert tuple(state.slots["down"]["w"].sharding.spec) in ((), (None,))
    with pytest.raises(ValueError, match="keeps='diagonal'"):
        jstep.Slot(keeps="diagonal")


def by_hand(state, x):
    """A user-defined step that creates its state with the constructor."""
    new = jstep.apply_gradients(state, {"w": x}, jstep.adam())
    return jstep.TrainState(new.params, new.slots, new.global_step), {}


@pytest.mark.thorough(except_for=["2-True", "1-False"])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_state_made_by_hand_in_a_step_keeps_the_roles(jit, steps_per_call):
    state = jstep.TrainState.create({"w": jnp.ones(4)}, jstep.adam())
    step = jax.jit(by_hand) if jit else by_hand
    after = jstep.train(
        step, state, lambda step: np.ones(4, np.float32), 4, steps_per_call=steps_per_call
    )
    assert dict(after.roles) == dict(state.roles)
    assert int(after.global_step) == 4


def test_a_state_made_by_hand_has_another_structure_unless_it_has_no_slots():
    """JAX reuses the trace of a function for equal structures: what it knows of one would be used
    for the other."""
    optimizer = jstep.adam()
    state = jstep.TrainState.create({"w": jnp.ones(4)}, optimizer)
    hand = jstep.TrainState(state.params, state.slots, state.global_step)
    assert jax.tree.structure(hand) != jax.tree.structure(state)
    assert hand == state
    later = jax.jit(jstep.increment_global_step)
    assert [int(later(one).slots["start_step"]) for one in (hand, state, hand)] == [0, 1, 0]
    with pytest.raises(TypeError, match=r"none; state\.replace\(…\) keeps them"):
        jax.lax.scan(lambda state, x: (by_hand(state, x)[0], x), state, jnp.ones((2, 4)))
    axes = state.replace(params={"w": 0}, slots=dict.fromkeys(state.slots), global_step=None)
    assert jax.vmap(lambda one: one.params["w"], in_axes=(axes,))(state).shape == (4,)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    placed = jax.device_put(state, jax.tree.map(lambda _: there, state))
    assert placed.params["w"].sharding == there
    assert placed.roles == state.roles
    for slots, model_state in (({}, None), ({"model_state": jnp.ones(2)}, jnp.ones(2))):
        created = jstep.TrainState.create(
            state.params, jstep.gradient_descent(0.1), model_state=model_state
        )
        made = jstep.TrainState(state.params, slots, jnp.int32(0))
        assert jax.tree.structure(made) == jax.tree.structure(created)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_a_state_by_hand_are_found_by_shape_and_dtype(name):
    for params, slot, is_shared in (
        (jnp.float32(1.0), jnp.float32(2.0), False),
        (jnp.float32(1.0), jnp.int32(2), True),
        (jnp.ones(3), jnp.ones(3, jnp.int32), False),
        ({"w": jnp.float32(1.0)}, {"w": jnp.int32(2)}, False),
        ({"w": jnp.float32(1.0)}, jnp.float32(2.0), True),
    ):
        state = jstep.TrainState(params, {name: slot}, jnp.int32(0))
        assert jstep.get_slot_names(state) == ([] if is_shared else [name])
