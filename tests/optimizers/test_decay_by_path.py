"""Weight decay that differs from leaf to leaf: mappings, and masks that select nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"a": jnp.float32(2.0), "ab": jnp.float32(2.0), "c": {"d": jnp.float32(2.0)}}
BLOCKS = {
    "add_weight_decay": lambda *args: jstep.chain(jstep.add_weight_decay(*args), jstep.scale_by_learning_rate(1.0)),
    "decay_weights": lambda *args: jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(*args)),
    "cautious": lambda *args: jstep.chain(jstep.gradient_descent(1e-9), jstep.decay_weights(*args, cautious=True)),
}


def decayed(optimizer: jstep.Optimizer, step: int = 0) -> list[float]:
    """Return the fraction by which an update reduced each weight."""
    state = jstep.TrainState.create(PARAMS, optimizer, global_step=step)
    train_step = jstep.minimize(lambda params: 1e-9 * sum(jax.tree.leaves(params)), optimizer)
    state, _ = train_step(state)
    return [round(float(1 - new / 2), 6) for new in jax.tree.leaves(state.params)]


@pytest.mark.thorough(except_for=["add_weight_decay"])
@pytest.mark.parametrize("block", BLOCKS)
def test_forms_of_decay_and_mask(block: str) -> None:
    make = BLOCKS[block]
    cases: list[tuple[Any, list[float]]] = [
        ((0.1,), [0.1, 0.1, 0.1]),
        ((0.1, {"a": 2.0, "ab": 0.5, "c/d": 0.0}), [0.2, 0.05, 0.0]),
        ((0.1, {"a": np.float32(2.0), "a*": 3.0}), [0.2, 0.3, 0.1]),
        (({"a": 0.1, "c/*": 0.3},), [0.1, 0.0, 0.3]),
        (({"a": 0.1, "*": 0.2}, {"a": 2.0, "c/d": 0.5}), [0.2, 0.2, 0.1]),
        (({"a": 0.1, "*": 0.2}, ["a", "c/d"]), [0.1, 0.0, 0.2]),
        (({"a": jstep.linear(0.0, 1.0, 10), "ab": 0.2},), [0.4, 0.2, 0.0]),
        ((0.1, {"a": True, "ab": False, "c": {"d": True}}), [0.1, 0.0, 0.1]),
        ((0.1, {"a": True, "ab": False, "c": True}), [0.1, 0.0, 0.1]),
    ]
    for args, expected in cases:
        assert decayed(make(*args), step=4) == expected, args


@pytest.mark.thorough(except_for=["decay_weights"])
@pytest.mark.parametrize("block", BLOCKS)
def test_held_decay_and_partition(block: str) -> None:
    make = BLOCKS[block]
    assert decayed(make({"a": jstep.held("wd", 0.1)}, {"a": 2.0})) == [0.2, 0.0, 0.0]
    half = make(0.1, {"a": 2.0, "ab": 3.0})
    optimizer = jstep.partition({"x": half, "y": half}, lambda path, leaf: "x" if path == "a" else "y")
    assert decayed(optimizer) == [0.2, 0.3, 0.1]


def test_hyperparameters_are_reported_by_entry() -> None:
    optimizer = jstep.chain(jstep.gradient_descent(1.0), jstep.decay_weights({"a": 0.1, "c/*": 0.2}))
    assert set(optimizer.hyperparameters(0)) == {
        "decoupled_weight_decay/a", "decoupled_weight_decay/c/*", "learning_rate"
    }  # fmt: skip
    assert set(jstep.add_weight_decay(0.1, {"a": 2.0}).hyperparameters(0)) == {"weight_decay"}
