"""Sharding of slots whose shape differs from the parameter's, and of callable models."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import BOTH, DATA

import jstep
from jstep.state.sharding import slot_sharding

MESH = BOTH

CASES = [
    ((8, 4), P("data", "model"), (8, 4), P("data", "model")),
    ((8, 4), P("data", "model"), (8,), P("data")),
    ((8, 4), P("data", "model"), (4,), P("model")),
    ((8, 4), P("data"), (4,), P()),
    ((2, 8, 4), P(None, "data", "model"), (2, 8), P(None, "data")),
    ((8, 8), P(None, "model"), (8,), P("model")),  # either axis may be the one dropped
    ((8, 8), P("data", "model"), (8, 1), P("data", None)),
    ((8, 4), P("data", "model"), (), P()),
    ((8, 4), P("data", "model"), (3, 5), P()),
]


@pytest.mark.parametrize(("shape", "spec", "slot", "want"), CASES)
def test_slots_drop_an_axis_of_the_sharding(shape: Any, spec: Any, slot: Any, want: Any) -> None:
    got = slot_sharding(NamedSharding(MESH, spec), shape, slot, None, None)
    assert got.is_equivalent_to(NamedSharding(MESH, want), len(slot))


@pytest.mark.thorough(except_for=["shape0", "shape3"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (8, 8, 8), (8, 8, 4)])
def test_factored_slots_of_square_parameters(shape: Any) -> None:
    second, largest = np.argsort(shape, kind="stable")[-2:]
    spec = [None] * len(shape)
    spec[second], spec[largest] = "data", "model"
    optimizer = jstep.scope("deep", jstep.adafactor(0.1, min_dim_size_to_factor=1))
    state = jstep.TrainState.create({"w": jnp.ones(shape)}, optimizer, mesh=MESH, param_specs=P(*spec))
    for slot, axis in (("v_row", largest), ("v_col", second)):
        leaf = state.slots[f"deep/{slot}"]["w"]
        want = NamedSharding(MESH, P(*np.delete(np.array(spec, object), axis)))
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), slot


def test_factored_slots_of_replicated_parameters_are_split_if_divisible() -> None:
    optimizer = jstep.adafactor(0.1, min_dim_size_to_factor=1)
    state = jstep.TrainState.create({"w": jnp.ones((16, 6))}, optimizer, mesh=DATA, slot_axis="data")
    leaves = [state.slots[name]["w"] for name in ("v_row", "v_col")]
    assert {leaf.shape: leaf.sharding.is_fully_replicated for leaf in leaves} == {(16,): False, (6,): True}
