"""A state between two calls of a step: what travels with it, by hand, in runs, and from one step to another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.slots.roles import roles_in

OPTIMIZER = jstep.adam(0.1)


def loss(params: Any, x: Any) -> Any:
    return jnp.sum((params["dense"]["kernel"] * x + params["bias"]) ** 2)


def fresh(**options: Any) -> jstep.TrainState:
    params = {"dense": {"kernel": jnp.arange(3.0)}, "bias": jnp.ones(3)}
    return jstep.TrainState.create(params, OPTIMIZER, **options)


def by_hand(step: Any, state: Any, count: int) -> Any:
    for n in range(count):
        state, _ = step(state, batch(n))
    return state


def run(step: Any, state: Any, last_step: int, **options: Any) -> Any:
    return jstep.train(step, state, batch, last_step, log_steps=None, progress=False, **options)


def batch(step: int) -> Any:
    return np.full(3, step, np.float32)


@pytest.mark.parametrize("order", ["run, hand", "hand, run, hand"])
def test_by_hand_and_in_runs_the_bits_are_the_same_and_a_step_is_compiled_once(order: str) -> None:
    expected = by_hand(jstep.minimize(loss, OPTIMIZER), fresh(), 3 * len(order.split(", ")))
    step, state, done = jstep.minimize(loss, OPTIMIZER), fresh(), 0
    for how in order.split(", "):
        if how == "run":
            state = run(step, state, done + 3)
        else:
            for n in range(done, done + 3):
                state, _ = step(state, batch(n))
        done += 3
        assert type(state) is jstep.TrainState
    assert state == expected
    assert step._cache_size() == 1


@pytest.mark.parametrize("first", ["with roles", "without"])
def test_a_state_made_by_hand_has_the_roles_in_a_run_that_it_has_by_hand(first: str) -> None:
    made = fresh()
    without = jstep.TrainState(made.params, made.slots, made.global_step)
    states = [fresh(), without] if first == "with roles" else [without, fresh()]
    seen = []
    for call in (run, by_hand):
        step = jstep.minimize(loss, OPTIMIZER)
        ends = [call(step, jax.tree.map(jnp.copy, state), 3) for state in states]
        seen.append([dict(roles_in(end)) for end in ends])
        assert ends[0] == ends[1]
        assert step._cache_size() == 1
    assert seen[0] == seen[1]


def test_a_step_that_was_called_by_hand_is_not_compiled_again_as_a_later_stage() -> None:
    first, later = jstep.minimize(loss, OPTIMIZER), jstep.minimize(loss, OPTIMIZER)
    later(fresh(), batch(0))
    run({0: first, 3: later}, fresh(), 6)
    assert (first._cache_size(), later._cache_size()) == (1, 1)
