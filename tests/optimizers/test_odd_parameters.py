"""Every optimizer with parameters of unusual kinds: it trains them, or refuses them by their path."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from contract import avals
from optimizer_table import TABLE

import jstep


class Pair(NamedTuple):
    w: Any
    n: Any


ODD: dict[str, Any] = {
    "NamedTuple": lambda: Pair(jnp.ones((3, 3)), jnp.arange(2)),
    "zero-size": lambda: {"w": jnp.ones((3, 2)), "none": jnp.zeros((0, 4)), "also": jnp.zeros((4, 0))},
    "nothing but zero-size": lambda: {"none": jnp.zeros((0, 4))},
    "one scalar": lambda: jnp.float32(1.0),
    "one matrix": lambda: jnp.ones((2, 3)),
    "axes of one": lambda: {"w": jnp.ones((1, 3)), "e": jnp.ones((1, 1)), "t": jnp.ones((2, 1, 3))},
    "empty parts": lambda: {"w": jnp.ones((3, 3)), "d": {}, "t": (), "n": None, "l": [jnp.ones((2, 2))]},
    "weak types": lambda: {"w": jnp.ones((3, 3)) * 1.0, "python": 3.0},
    "one not in the loss": lambda: {"w": jnp.ones((3, 3)), "unused": jnp.ones((3, 3))},
}


def loss(params: Any) -> Any:
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    used = [leaf for keys, leaf in flat if "unused" not in str(keys) and jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((jnp.sum(leaf**2) for leaf in used), jnp.float32(0.0))


def created(params: Any, optimizer: jstep.Optimizer) -> jstep.TrainState | str:
    """Return a state, or why there is none."""
    try:
        return jstep.TrainState.create(params, optimizer)
    except ValueError as error:
        return str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(TABLE))
def test_odd_leaves(name: str) -> None:
    for kind, make in ODD.items():
        optimizer = TABLE[name].make(0.1)
        state = created(make(), optimizer)
        if isinstance(state, str):  # a matrix is needed
            assert "the leaf at" in state, kind
            continue
        before = avals(state)
        new, _ = jstep.minimize(loss, optimizer)(state)
        assert avals(new) == before, kind
        for path, leaf in jax.tree_util.tree_leaves_with_path(new.params):
            assert bool(jnp.isfinite(leaf).all()), (kind, path)
