"""Wrappers around the whole optimizer in steps of several updates: each leaf counts the updates with its gradient."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

EMA = jstep.ExponentialMovingAverage
NAME = EMA(0.9).name
PLAYERS = ("d", "g")
ORDERS = {
    "critic twice": [("d", False), ("d", False), ("g", True)],
    "then a step": [("g", False), ("d", False), (None, True)],
}
"""Updates of a cycle: the player, and whether the update increments the step."""


def players(rate: float = 1.0) -> jstep.Optimizer:
    return jstep.partition({name: jstep.gradient_descent(rate) for name in PLAYERS}, lambda path, leaf: path[0])


def run(optimizer: jstep.Optimizer, order: Sequence[Any]) -> Any:
    """Return the states after each update, and the player of each."""

    @jax.jit(static_argnums=(1, 2))
    def apply(state: jstep.TrainState, player: str, increment: bool) -> jstep.TrainState:
        grads = {name: jnp.cos(3 * state.params[name] + 1) if name == player else None for name in PLAYERS}
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=increment)

    state = jstep.TrainState.create({"d": 1.0, "g": 2.0}, optimizer)
    states = [(None, state)]
    for player, increment in list(order) * 6:
        state = jstep.increment_global_step(state) if player is None else apply(state, player, increment)
        states.append((player, state))
    return states


@pytest.mark.parametrize("order", ORDERS)
def test_lookahead_counts_the_updates_of_each_leaf(order: str) -> None:
    states = run(jstep.lookahead(players(), 3, 0.5), ORDERS[order])
    for player in PLAYERS:
        alone = jstep.lookahead(jstep.gradient_descent(1.0), 3, 0.5)
        state = jstep.TrainState.create({player: states[0][1].params[player]}, alone)
        for moved, whole in states[1:]:
            if moved == player:
                grads = {player: jnp.cos(3 * state.params[player] + 1)}
                state = jstep.apply_gradients(state, grads, alone)
            np.testing.assert_allclose(whole.params[player], state.params[player], rtol=1e-6)
            np.testing.assert_allclose(whole.slots["slow"][player], state.slots["slow"][player], rtol=1e-6)


def test_labels_of_labels() -> None:
    """Each innermost label counts its own updates."""
    inner = jstep.partition({"x": jstep.gradient_descent(1.0), "y": jstep.adam()}, lambda path, leaf: path[-1])
    parts = jstep.partition({"d": inner, "g": jstep.gradient_descent(1.0)}, lambda path, leaf: path[0])
    optimizer = jstep.with_moving_average(parts, EMA(0.9, zero_debias=True))
    state = jstep.TrainState.create({"d": {"x": 1.0, "y": 1.0}, "g": 1.0, "free": None}, optimizer)
    ages = sorted(name for name in state.slots if name.endswith("start_step"))
    assert ages == ["d/y/start_step", *(f"with_moving_average/{label}/start_step" for label in ("d/x", "d/y", "g"))]
    state = jstep.apply_gradients(state, {"d": {"x": jnp.float32(1), "y": None}, "g": None, "free": None}, optimizer)
    assert [int(state.slots[f"with_moving_average/{label}/start_step"]) for label in ("d/x", "d/y", "g")] == [0, 1, 1]


def test_a_leaf_without_a_gradient_keeps_its_average() -> None:
    """Whatever its value, also without a partition; rows of a table are a gradient."""
    for ema in (EMA(0.9), EMA(0.9, num_updates=True), EMA(0.9, zero_debias=True)):
        optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
        params = {"w": jnp.ones(2), "t": jnp.ones((4, 1)), "rest": jnp.ones(2)}
        state = jstep.TrainState.create(params, optimizer)
        rows = jstep.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
        state = jstep.apply_gradients(state, {"w": jnp.ones(2), "t": rows, "rest": jnp.ones(2)}, optimizer)
        before = state.slots[NAME]
        state = state.replace(params={**state.params, "rest": jnp.full(2, 50.0)})
        after = jstep.apply_gradients(state, {"w": None, "t": rows, "rest": None}, optimizer).slots[NAME]
        assert after["w"].tolist() == before["w"].tolist()
        assert after["rest"].tolist() == before["rest"].tolist()
        assert after["t"][2] != before["t"][2]


def test_averages_from_zeros_of_leaves_that_are_not_trained() -> None:
    """They take the first value of the parameter: evaluation does not see zeros."""
    for inner in (jstep.adam(), players()):
        optimizer = jstep.with_moving_average(inner, EMA(0.9, zero_debias=True))
        state = jstep.TrainState.create({"d": 1.0, "g": 2.0}, optimizer)
        for _ in range(3):
            state = jstep.apply_gradients(state, {"d": jnp.float32(1), "g": None}, optimizer)
        assert jstep.averaged_params(state)["g"] == 2.0
