"""An age counts the updates that slots have had, whatever moves the clock: several updates in a
step, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import TABLE

import jstep

GRADS = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)


def start(optimizer, global_step=0):
    params = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    return jstep.TrainState.create(params, optimizer, global_step)


def as_scaled_grads(state, g):
    """Return gradients of the loss times the scale, which is 1 without one."""
    return jax.tree.map(lambda leaf: leaf * jstep.loss_scale(state), {"w": g, "b": g[0]})


def usual(state, g, optimizer):
    return jstep.apply_gradients(state, as_scaled_grads(state, g), optimizer, scaled=True)


def at_the_same_step(state, g, optimizer):
    return jstep.apply_gradients(
        state, as_scaled_grads(state, g), optimizer, increment_global_step=False, scaled=True
    )


def after_waiting(state, g, optimizer):
    return usual(jstep.increment_global_step(state, 7), g, optimizer)


def mixed(state, g, optimizer):
    """An update without a step, two steps without an update."""
    return jstep.increment_global_step(
        jstep.increment_global_step(at_the_same_step(state, g, optimizer))
    )


WAYS = {"at the same step": at_the_same_step, "after waiting": after_waiting, "mixed": mixed}


def trained(change, optimizer, global_step=0):
    step = jax.jit(lambda state, g: change(state, g, optimizer))
    state = start(optimizer, global_step)
    for g in GRADS:
        state = step(state, g)
    return state


def ages(state):
    counts = {
        name: value
        for name, value in state.slots.items()
        if name.rsplit("/", 1)[-1] == "start_step"
    }
    return {name: int(state.global_step) - int(value) for name, value in counts.items()}


# What is due by the step itself depends on the clock: update_every, averages that wait, noise by
# step.
BY_UPDATES = [name for name, entry in TABLE.items() if not entry.by_step and "every" not in name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", BY_UPDATES)
def test_updates_do_not_depend_on_what_moves_the_clock(name):
    optimizer = TABLE[name].make(0.01)
    expected = trained(usual, optimizer)
    for way, change in WAYS.items():
        found = trained(change, optimizer)
        assert ages(found) == ages(expected), way
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(found.params),
            jax.tree.leaves(expected.params),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other, err_msg=f"{way}: {path}")


def test_start_step_is_the_step_minus_the_updates():
    optimizer = jstep.adam()
    state = start(optimizer, 100)
    assert int(state.slots["start_step"]) == 100
    assert int(usual(state, GRADS[0], optimizer).slots["start_step"]) == 100
    for _ in range(16):
        state = at_the_same_step(state, GRADS[0], optimizer)
    assert int(state.slots["start_step"]) == 100 - 16
    assert int(jstep.increment_global_step(state, 5).slots["start_step"]) == 100 - 16 + 5
    early = at_the_same_step(
        at_the_same_step(start(optimizer), GRADS[0], optimizer), GRADS[0], optimizer
    )
    assert int(early.slots["start_step"]) == -2


def own_slots_named_like_ages():
    def init(params, step):
        return {"start_step": jnp.float32(3.0), "born": jnp.asarray(step, jnp.int32)}

    init.ages = ("born",)
    return jstep.Optimizer(
        init, lambda updates, slots, params, step: (updates, slots), lambda step: {}
    )


def test_an_age_is_declared_and_never_spelled():
    optimizer = own_slots_named_like_ages()
    state = jstep.increment_global_step(at_the_same_step(start(optimizer), GRADS[0], optimizer), 4)
    assert (float(state.slots["start_step"]), int(state.slots["born"])) == (3.0, 3)
    inner = jstep.scope(jstep.partition({"b": optimizer}, lambda path, leaf: "b"), "a")
    state = jstep.increment_global_step(at_the_same_step(start(inner), GRADS[0], inner), 4)
    assert (float(state.slots["a/b/start_step"]), int(state.slots["a/b/born"])) == (3.0, 3)


def test_an_age_may_be_a_tree():
    def init(params, step):
        return {"born": jax.tree.map(lambda leaf: jnp.asarray(step, jnp.int32), params)}

    init.ages = ("born",)
    plain = jstep.Optimizer(
        init, lambda updates, slots, params, step: (updates, slots), lambda step: {}
    )
    parted = jstep.partition(
        {"a": plain, "b": jstep.adam()}, lambda path, leaf: "a" if path == "w" else "b"
    )
    for optimizer, slot in (
        (jstep.skip_nonfinite(plain), "born"),
        (jstep.scope(parted, "s"), "s/a/born"),
    ):
        state = at_the_same_step(start(optimizer), GRADS[0], optimizer)
        assert int(state.slots[slot]["w"]) == -1
        assert int(jstep.increment_global_step(state, 4).slots[slot]["w"]) == 3
        idle = {"w": np.nan * GRADS[0] if slot == "born" else None, "b": GRADS[0][0]}
        assert int(jstep.apply_gradients(state, idle, optimizer).slots[slot]["w"]) == 0


# Wrappers around the whole optimizer in steps of several updates: each leaf counts the updates with
# its gradient.

EMA = jstep.ExponentialMovingAverage
NAME = EMA(0.9).name
PLAYERS = ("d", "g")
ORDERS = {
    "critic twice": [("d", False), ("d", False), ("g", True)],
    "then a step": [("g", False), ("d", False), (None, True)],
}
"""Updates of a cycle: the player, and whether the update increments the step."""


def players(rate=1.0):
    return jstep.partition(
        {name: jstep.gradient_descent(rate) for name in PLAYERS}, lambda path, leaf: path[0]
    )


def run(optimizer, order):
    """Return the states after each update, and the player of each."""

    @jax.jit(static_argnums=(1, 2))
    def apply(state, player, increment):
        grads = {
            name: jnp.cos(3 * state.params[name] + 1) if name == player else None
            for name in PLAYERS
        }
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=increment)

    state = jstep.TrainState.create({"d": 1.0, "g": 2.0}, optimizer)
    states = [(None, state)]
    for player, increment in list(order) * 6:
        state = (
            jstep.increment_global_step(state)
            if player is None
            else apply(state, player, increment)
        )
        states.append((player, state))
    return states


@pytest.mark.thorough(except_for=["then a step"])
@pytest.mark.parametrize("order", ORDERS)
def test_lookahead_counts_the_updates_of_each_leaf(order):
    states = run(jstep.lookahead(players(), 3, 0.5), ORDERS[order])
    for player in PLAYERS:
        alone = jstep.lookahead(jstep.gradient_descent(1.0), 3, 0.5)
        state = jstep.TrainState.create({player: states[0][1].params[player]}, alone)
        for moved, whole in states[1:]:
            if moved == player:
                grads = {player: jnp.cos(3 * state.params[player] + 1)}
                state = jstep.apply_gradients(state, grads, alone)
            np.testing.assert_allclose(whole.params[player], state.params[player], rtol=1e-6)
            np.testing.assert_allclose(
                whole.slots["slow"][player], state.slots["slow"][player], rtol=1e-6
            )


def test_labels_of_labels():
    """Each innermost label counts its own updates."""
    inner = jstep.partition(
        {"x": jstep.gradient_descent(1.0), "y": jstep.adam()}, lambda path, leaf: path[-1]
    )
    parts = jstep.partition(
        {"d": inner, "g": jstep.gradient_descent(1.0)}, lambda path, leaf: path[0]
    )
    optimizer = jstep.with_moving_average(parts, EMA(0.9, zero_debias=True))
    state = jstep.TrainState.create({"d": {"x": 1.0, "y": 1.0}, "g": 1.0, "free": None}, optimizer)
    ages = sorted(name for name in state.slots if name.endswith("start_step"))
    assert ages == [
        "d/y/start_step",
        *(f"with_moving_average/{label}/start_step" for label in ("d/x", "d/y", "g")),
    ]
    state = jstep.apply_gradients(
        state, {"d": {"x": jnp.float32(1), "y": None}, "g": None, "free": None}, optimizer
    )
    slots = [f"with_moving_average/{label}/start_step" for label in ("d/x", "d/y", "g")]
    assert [int(state.slots[slot]) for slot in slots] == [0, 1, 1]


def test_rows_of_a_table_are_a_gradient_for_its_average():
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), EMA(0.5))
    rows = jstep.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
    state = jstep.apply_gradients(
        jstep.TrainState.create({"t": jnp.ones((4, 1))}, optimizer), {"t": rows}, optimizer
    )
    assert state.slots[NAME]["t"].ravel().tolist() == [1.0, 1.0, 0.5, 1.0]


def test_averages_from_zeros_of_leaves_that_are_not_trained():
    """They take the first value of the parameter: evaluation does not see zeros."""
    for inner in (jstep.adam(), players()):
        optimizer = jstep.with_moving_average(inner, EMA(0.9, zero_debias=True))
        state = jstep.TrainState.create({"d": 1.0, "g": 2.0}, optimizer)
        for _ in range(3):
            state = jstep.apply_gradients(state, {"d": jnp.float32(1), "g": None}, optimizer)
        assert jstep.averaged_params(state)["g"] == 2.0
