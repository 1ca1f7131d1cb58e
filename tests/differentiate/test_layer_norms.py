"""`layer_norms`: the norm of each layer of a tree, by its path."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


class Model(NamedTuple):
    head: Any
    layers: list[Layer]


TREE = {
    "dense": {"b": jnp.array([3.0]), "w": jnp.array([[4.0, 0.0]])},
    "dense_2": {"b": None, "inner": {"w": jnp.array([6.0]), "v": jnp.array([8.0])}},
    "frozen": {"w": None},
    "scale": jnp.float32(-2.0),
}
MODEL = Model(
    jnp.array([1.0]), [Layer(jnp.array([3.0]), jnp.array([4.0])), Layer(jnp.array([5.0]), None)]
)


@pytest.mark.parametrize(
    ("tree", "depth", "want"),
    [
        (TREE, 1, {"dense": 5, "dense_2": 10, "scale": 2}),
        (TREE, 2, {"dense/b": 3, "dense/w": 4, "dense_2/inner": 10, "scale": 2}),
        (
            TREE,
            9,
            {"dense/b": 3, "dense/w": 4, "dense_2/inner/v": 8, "dense_2/inner/w": 6, "scale": 2},
        ),
        (MODEL, 1, {"head": 1, "layers": 50**0.5}),
        (MODEL, 2, {"head": 1, "layers/0": 5, "layers/1": 5}),
        (
            MODEL,
            np.int64(3),
            {"head": 1, "layers/0/kernel": 3, "layers/0/bias": 4, "layers/1/kernel": 5},
        ),
        ({"a/b": 1.0, "a": {"b": 2.0}}, 1, {"a": 2, "a/b": 1}),
        ({"a": {"b": 2.0}, "ab": 3}, 1, {"a": 2, "ab": 3}),
        (jnp.array([3.0, 4.0]), 2, {"": 5}),
        ({}, 1, {}),
        (None, 1, {}),
    ],
)
def test_norms_by_path(tree, depth, want):
    found = jstep.layer_norms(tree, depth)
    assert list(found) == list(jstep.layer_norms(tree, depth=depth))
    assert {path: float(norm) for path, norm in found.items()} == pytest.approx(want)
    assert all(norm.dtype == jnp.float32 and norm.shape == () for norm in found.values())
    squares = sum(float(norm) ** 2 for norm in found.values())
    assert squares**0.5 == pytest.approx(float(jstep.global_norm(tree)))


@pytest.mark.thorough
def test_every_dtype():
    tree = {
        # Neither the squares nor the norm fit float16.
        "half": jnp.full(10_000, 600.0, jnp.float16),
        "complex": jnp.array([3 + 4j]),
        "integer": jnp.array([3, 4], jnp.int8),
        "host": np.array([3.0, 4.0]),
    }
    want = {"half": 6e4, "complex": 5, "integer": 5, "host": 5}
    for norms in (jstep.layer_norms(tree), jax.jit(jstep.layer_norms)(tree)):
        assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(want, rel=1e-2)
        assert {norm.dtype for norm in norms.values()} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        (norm,) = jstep.layer_norms({"w": jnp.full(4, 0.5, jnp.float64)}).values()
    assert (norm.dtype, float(norm)) == (jnp.float32, 1.0)


def test_rows_of_a_table_are_summed_first():
    rows = jstep.IndexedSlices(jnp.array([[3.0], [1.0], [2.0]]), jnp.array([0, 2, 2]), (4, 1))
    assert float(jstep.layer_norms({"table": rows})["table"]) == pytest.approx(18**0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_norms_are_replicated(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    placed = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("x", "y")))
    tree = {
        "a": {"w": placed, "b": jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x")))},
        "b": placed,
    }
    with jax.set_mesh(mesh):
        for norms in (jstep.layer_norms(tree), jax.jit(jstep.layer_norms)(tree)):
            assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
                {"a": 1244**0.5, "b": 1240**0.5}
            )
            assert all(norm.sharding.is_fully_replicated for norm in norms.values())
