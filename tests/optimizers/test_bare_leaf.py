"""Parameters that are a single array, whose slots look like scalars."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

CASES = {
    "guarded": (lambda: jstep.skip_nonfinite(jstep.adam(jstep.held("rate", 0.1))), ["m", "v"]),
    "prodigy": (jstep.prodigy, ["m", "p0", "s", "v"]),
    "nadam": (lambda: jstep.nadam(momentum_decay=0.004), ["m", "v"]),
    "scaled": (lambda: jstep.dynamic_loss_scale(jstep.lookahead(jstep.adam())), ["m", "slow", "v"]),
    "waiting": (
        lambda: jstep.update_every(1, jstep.adam(), accumulate=True),
        ["gradient_count", "gradient_sum", "m", "v"],
    ),
    "parted": (lambda: jstep.partition({"a": jstep.adam()}, lambda path, leaf: "a"), ["a/m", "a/v"]),
    "optax": (lambda: jstep.from_optax(optax.adam(0.1)), ["optax/0/mu", "optax/0/nu"]),
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("params", [1.0, jnp.ones(3)])
@pytest.mark.parametrize("name", CASES)
def test_slots_are_distinguished_from_scalars(name: str, params: Any) -> None:
    make, slots = CASES[name]
    optimizer = make()
    state, _ = jstep.minimize(lambda p: jnp.sum(p**2), optimizer)(jstep.TrainState.create(params, optimizer))
    assert jstep.get_slot_names(state) == slots
    assert np.isfinite(state.params).all()
