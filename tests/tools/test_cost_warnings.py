"""Warnings in the cost of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
OPTIMIZER = jstep.adam(1e-3)


def mlp():
    return {"a": jnp.zeros((64, 32)), "b": jnp.zeros((32,)), "x": jnp.zeros((32, 64))}


def regression(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["a"] + params["b"][None]) @ params["x"] - y) ** 2)


def on_rows(params, x, y):
    """The constraint that the warning suggests."""
    mesh = MESH
    return regression(params, jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data"))), y)


STEP = jstep.minimize(regression, OPTIMIZER)


def state(mesh=MESH, specs=None):
    return jstep.TrainState.create(mlp, OPTIMIZER, mesh=mesh, param_specs=specs)


PAIRS = jstep.shard_batch([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, MESH)


def test_undonated_state_warns():
    def only_metrics(state, x, y):
        return {"loss": regression(state.params, x, y)}

    (found,) = jstep.cost(jstep.minimize(regression, OPTIMIZER, donate=False), state(), *PAIRS).warnings
    total = 3 * 4 * (64 * 32 + 32 + 32 * 64) + 8
    assert found.startswith(f"{total / 1024:.3g} KiB of the state is not donated, so that the old and the new state")
    assert "jax.jit(step, donate_argnums=0)" in found
    for step in (STEP, jax.jit(STEP.__wrapped__, donate_argnums=0), only_metrics):
        assert jstep.cost(step, state(), *PAIRS).warnings == ()


@pytest.mark.thorough
def test_batch_outside_the_mesh_warns():
    """Its program differs from that of a run with a sharded batch."""
    x, y = np.ones((64, 64), np.float32), jnp.ones((64, 64))
    for batch in ((x, y), jax.eval_shape(lambda: (x, y))):
        (found,) = jstep.cost(STEP, state(), *batch).warnings
        assert found.startswith("the batch is not on the mesh of the state, so each of its 8 devices gets all of it")
        assert "jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))" in found
    for arguments in ((state(), *jstep.shard_batch((x, y), MESH)), (state(), x, PAIRS[1])):
        assert jstep.cost(STEP, *arguments).warnings == ()
    assert jstep.cost(STEP, state(jax.make_mesh((1,), ("data",))), x, y).warnings == ()
