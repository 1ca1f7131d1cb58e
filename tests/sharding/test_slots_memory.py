"""Slots in host memory: training is bitwise identical to that with slots in device memory."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from layouts import COLUMNS_AND_ROWS, assert_close, data, init, loss_fn

import jstep

KINDS = {
    "explicit": (AxisType.Explicit,) * 2,
    "auto": (AxisType.Auto,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
OPTIMIZERS = {
    "averages": lambda: jstep.with_moving_average(
        jstep.lookahead(jstep.adam(0.01)), jstep.ExponentialMovingAverage(0.9)
    ),
    "guards": lambda: jstep.dynamic_loss_scale(jstep.skip_nonfinite(jstep.adam(0.01))),
    "masters": lambda: jstep.master_weights(jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(0.01))),
    "labels": lambda: jstep.partition(
        {"m": jstep.muon(0.01), "rest": jstep.scope("x", jstep.adagrad(0.1))},
        lambda path, leaf: "m" if leaf.ndim == 2 else "rest",
    ),
}


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS[kind])


def create(mesh, optimizer, **options):
    specs = jstep.fsdp_specs(jax.eval_shape(init), mesh, min_size=64)
    return jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=specs, **options)


def memories(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.thorough(except_for=["explicit-guards"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_memory_does_not_change_results(name, kind, host_memory):
    mesh, optimizer = mesh_of(kind), OPTIMIZERS[name]()
    batch = jstep.shard_batch(data(), mesh)
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm"))
    results = []
    for options in ({}, {"slots_memory": "device"}, {"slots_memory": "pinned_host"}):
        state = create(mesh, optimizer, **options)
        before = jax.tree.map(lambda leaf: leaf.sharding, state)
        for _ in range(2):
            old = state
            state, metrics = step(state, *batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
        results.append(jax.device_get((state, metrics)))
    assert memories(state.slots) == {"pinned_host"}
    assert memories(state.params) == {"device"}
    for other in results[:2]:
        jax.tree.map(np.testing.assert_array_equal, other, results[2])


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [None, "pinned_host"])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_updates_keep_shardings(kind, memory, request):
    """This includes shardings over Auto axes of a mixed mesh, which array types do not show."""
    if memory:
        request.getfixturevalue("host_memory")
    optimizer = OPTIMIZERS["labels"]()
    state = jstep.TrainState.create(
        init, optimizer, mesh=mesh_of(kind), param_specs=COLUMNS_AND_ROWS, slot_axis="data", slots_memory=memory
    )
    single = jstep.TrainState.create(init(), optimizer)
    new = jstep.apply_gradients(state, state.params, optimizer)
    assert jax.tree.map(lambda leaf: leaf.sharding, new) == jax.tree.map(lambda leaf: leaf.sharding, state)
    assert_close(new.params, jstep.apply_gradients(single, single.params, optimizer).params)
