"""Errors of `from_direction` for what a new optimizer's equation uses and its hyperparameters lack."""

from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep.optimizers.elements import from_direction


@pytest.mark.parametrize(
    ("direction", "hyper", "message"),
    [
        (lambda g, p, s, h: (g * h.age, {}), {}, r"age: must be one of \[.*'learning_rate'.*prepare="),
        (lambda g, p, s, h: (g * h.betta1, {}), {"beta1": 0.9}, r"betta1: must be one of \[.*'beta1'"),
        (lambda g, p, s, h: (g, {}), {"weight_decay": 0.1}, r"decayed: must be one of .*Masked"),
        (lambda g, p, s, h: (s.v, {}), {}, r"v: must be one of \['m'\]"),
    ],
)
def test_a_missing_value_is_named_with_what_provides_it(direction: Any, hyper: dict[str, Any], message: str) -> None:
    optimizer = from_direction("new", direction, {"m": 0.0}, {"learning_rate": 0.1, **hyper})
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    with pytest.raises(AttributeError, match=message):
        jstep.apply_gradients(state, {"w": jnp.ones(2)}, optimizer)


def test_a_missing_learning_rate_is_named() -> None:
    optimizer = from_direction("new", lambda g, p, s, h: (g, {}), {}, {"beta1": 0.9})
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    with pytest.raises(AttributeError, match=r"learning_rate: must be one of .*add it to hyper"):
        jstep.apply_gradients(state, {"w": jnp.ones(2)}, optimizer)
