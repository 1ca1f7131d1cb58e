"""Odd values of optimizers: names that are no strings, schedules that cannot be traced, leaves that are no arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.optimizers import nested, updates
from jstep.optimizers.soap import FIRST, update_eigenbases

HELD = jstep.adam(jstep.held("rate", 0.5))


def state_of(optimizer: Any) -> jstep.TrainState:
    return jstep.TrainState.create({"w": 1.0}, optimizer)


RATE = jstep.gradient_descent(0.1)


def test_warnings_are_on_the_line_of_the_caller() -> None:
    """Where Python shows those about what is deprecated, and each once."""
    make = lambda: jstep.chain(RATE, jstep.scope("b", RATE))  # noqa: E731
    with pytest.warns(match="the sign flips twice, so this is gradient ascent") as caught:
        make()
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, make.__code__.co_firstlineno)]


def test_a_schedule_that_needs_its_step_may_be_chained() -> None:
    """Its names are known only where it is used."""

    def rate(step: Any) -> dict[str, Any]:
        return {"learning_rate": 0.1 / (int(step) + 1)}

    own = jstep.Optimizer(lambda params, step=0: {}, lambda *args: args[:2], rate)
    chained = jstep.chain(own, jstep.scale_by_trust_ratio())
    assert chained.hyperparameters(1) == {"learning_rate": 0.05}
    assert [nested.makes_finished_updates(one) for one in (own, jstep.gradient_descent(0.1))] == [False, True]


def test_updates_are_wide_where_they_are_numbers() -> None:
    """Slices by their values; what is no floating-point array is passed on."""
    narrow, count = jnp.ones(2, jnp.bfloat16), jnp.arange(2)
    slices = jstep.IndexedSlices(narrow[None], jnp.array([1]), (3, 2))
    found = updates.wide_updates({"a": narrow, "n": count, "none": None, "s": slices}, lambda u: 2 * u)
    assert (found["n"] is count, found["none"]) == (True, None)
    assert (found["a"].dtype, found["a"].tolist()) == (jnp.float32, [2, 2])
    assert (found["s"].values.dtype, found["s"].values.tolist(), found["s"].indices is slices.indices) == (
        jnp.float32, [[2, 2]], True,
    )  # fmt: skip


def test_a_held_value_that_several_processes_hold_is_set_on_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P())
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), state_of(HELD))
    with monkeypatch.context() as patched:
        patched.setattr(NamedSharding, "is_fully_addressable", False)
        new = jstep.set_hyperparameter(state, "rate", 0.25)
    (slot,) = (name for name in state.slots if name.startswith("held/"))
    assert new.slots[slot].sharding == sharding
    np.testing.assert_array_equal(new.slots[slot], np.float32(0.25))


def test_no_leaf_has_an_eigenbasis() -> None:
    assert update_eigenbases(jnp.int32(FIRST), []) == []
