"""Shared buffers that a step would donate twice or donate and read; JAX would crash on a mesh, jstep raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jstep

MESHES = {
    "one device": None,
    "explicit": jax.make_mesh((8,), ("data",)),
    "auto": jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
}
OPTIMIZER = jstep.lookahead(jstep.adam(0.01))
X = np.ones((8, 3), np.float32)


def loss_fn(params, x, teacher=None):
    return jnp.mean((x @ params["w"]) ** 2) + (0 if teacher is None else jnp.sum(teacher["w"]))


def create(mesh):
    state = jstep.TrainState.create({"w": jnp.ones((3, 2))}, OPTIMIZER)
    return state if mesh is None else jstep.shard_state(state, mesh)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("alias", [lambda tree: tree, lambda tree: jax.device_put(tree, tree["w"].sharding)])
@pytest.mark.parametrize("n", [1, 2])
def test_slots_that_share_buffers_with_parameters(mesh, alias, n):
    step = jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=n)
    state, _ = step(create(mesh), X)
    aliased = state.replace(slots={**state.slots, "slow": alias(state.params)})
    with pytest.raises(ValueError, match="'params/w' and 'slots/slow/w' share one buffer"):
        step(aliased, X)
    with pytest.raises(ValueError, match="'params/w' and 'slots/slow/w' share one buffer"):
        jstep.scan_steps(step)(aliased, X[None])
    copied = state.replace(slots={**state.slots, "slow": jax.tree.map(jnp.copy, state.params)})
    assert jstep.global_step(step(copied, X)[0]) == 2


@pytest.mark.thorough(except_for=["explicit"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_arguments_that_share_buffers_with_parameters(mesh):
    step = jstep.minimize(loss_fn, OPTIMIZER)
    for state in (create(mesh), step(create(mesh), X, None)[0]):
        with pytest.raises(ValueError, match="'params/w' and the step's argument '1/w' share one buffer"):
            step(state, X, state.params)
    state = create(mesh)
    kept, _ = jstep.minimize(loss_fn, OPTIMIZER, donate=False)(state, X, state.params)
    assert jstep.global_step(kept) == 1
