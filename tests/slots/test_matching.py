"""What gradients must be for their parameters, and what is said of some that are not."""

from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep.slots.matching import as_slots, match_gradients

PARAMS = {"n": jnp.int32(3), "w": jnp.ones((2, 3), jnp.bfloat16)}
SLICES = jstep.IndexedSlices(jnp.ones((1, 3)), jnp.array([1]), (2, 3))


def of(n: Any, w: Any) -> dict[str, Any]:
    return {"n": n, "w": w}


def test_gradients_of_parameters() -> None:
    numbers = {"x": jnp.ones((), jnp.bfloat16)}
    (made,) = match_gradients({"x": 2.0}, numbers)
    assert (made.dtype, made.shape, float(made)) == (jnp.bfloat16, (), 2.0)
    array = jnp.ones((2, 3))
    assert match_gradients(of(None, array), PARAMS) == [None, array]
    assert match_gradients(of(None, SLICES), PARAMS) == [None, SLICES]


def test_slots_that_a_state_lacks() -> None:
    assert as_slots(["a"], {"a": 1, "b": 2}) == {"a": 1}
    for held, has in (
        ({"b": 2, "a": 1}, "it has ['a', 'b']"),
        ({}, "nor any other of this optimizer"),
    ):
        with pytest.raises(ValueError, match="no slot 'c'") as caught:
            as_slots(["c"], held)
        assert str(caught.value) == (
            f"the state has no slot 'c', {has}. It was created with another optimizer: "
            "use that one, or create new "
            "slots with TrainState.create(params, optimizer, global_step=state.global_step)."
        )
