"""Abstract states and batches: created and compiled like arrays, and refused when something would
run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jstep

OPTIMIZER = jstep.adam(0.01)
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",))
X, Y = np.ones((32, 16), np.float32), np.ones((32, 8), np.float32)


def init():
    return {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


def shape_of(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def assert_same(shape, leaf):
    assert isinstance(shape, jax.ShapeDtypeStruct)
    assert (shape.shape, shape.dtype, shape.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "options", [{}, {"slot_axis": "data"}, {"param_specs": [("w", P("data"))]}], ids=str
)
def test_abstract_state_matches_the_concrete_state(mesh, options):
    state = jstep.TrainState.create(
        init, OPTIMIZER, 7, {"mean": np.zeros(3), "n": 1}, mesh=mesh, **options
    )
    variables = {"mean": jax.ShapeDtypeStruct((3,), jnp.float32), "n": 1}
    shapes = jstep.TrainState.create(
        jax.eval_shape(init), OPTIMIZER, 7, variables, mesh=mesh, **options
    )
    jax.tree.map(assert_same, shapes, state)
    assert "abstract" in repr(shapes)


def test_abstract_state_without_a_mesh():
    shapes = jstep.TrainState.create(jax.eval_shape(init), OPTIMIZER)
    want = jax.eval_shape(lambda: jstep.TrainState.create(init(), OPTIMIZER))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    with pytest.raises(ValueError, match="global_step=-1"):
        jstep.TrainState.create(jax.eval_shape(init), OPTIMIZER, -1)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_abstract_batches(mesh):
    batch = jstep.shard_batch((X, Y), mesh)
    shapes = jstep.shard_batch((jax.ShapeDtypeStruct(X.shape, X.dtype), Y), mesh)
    assert_same(shapes[0], batch[0])
    assert isinstance(shapes[1], jax.Array)
    with pytest.raises(ValueError, match="at '0' has 30 rows"):
        jstep.shard_batch([jax.ShapeDtypeStruct((30, 2), jnp.float32)], mesh)


@pytest.mark.usefixtures("no_cached_programs")
@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("options", [{}, {"slot_axis": "data"}], ids=str)
def test_program_from_shapes_is_that_of_arrays(mesh, num_microbatches, options):
    state = jstep.TrainState.create(init, OPTIMIZER, mesh=mesh, **options)
    batch = jstep.shard_batch((X, Y), mesh)

    def compiled_text(step, state, batch):
        return step.lower(state, *batch).compile().as_text()

    both = (state, batch), jax.tree.map(shape_of, (state, batch))
    steps = [jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=num_microbatches) for _ in both]
    from_arrays, from_shapes = (
        compiled_text(step, *inputs) for step, inputs in zip(steps, both, strict=True)
    )
    assert from_shapes == from_arrays
    costs = [
        jstep.cost(step, state, *batch) for step, (state, batch) in zip(steps, both, strict=True)
    ]
    assert costs[0].flops == costs[1].flops
    assert costs[0].alias_bytes == costs[1].alias_bytes
