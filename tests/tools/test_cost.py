"""What a step takes, before it runs: operations, memory, what moves between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jstep

SIDE, ROWS, LAYERS = 64, 32, 3
OPTIMIZER = jstep.momentum(0.1, 0.9)
PRODUCTS = 6 * ROWS * LAYERS * SIDE * SIDE
"""Of a step: a product of matrices for each layer, and two for its gradients, but for that of the batch."""


def scanned(params, x):
    return (jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["w"])[0] ** 2).mean()


def plain(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def state():
    return jstep.TrainState.create({"w": jnp.ones((LAYERS, SIDE, SIDE))}, OPTIMIZER)


STEP, SCANNED = (jstep.minimize(loss, OPTIMIZER) for loss in (plain, scanned))
BATCH = jnp.ones((ROWS, SIDE))


@pytest.fixture(scope="module")
def alone():
    """Of the plain step on one device."""
    return jstep.cost(STEP, jax.eval_shape(state), BATCH)


def test_operations_count_loops_as_often_as_they_run(alone):
    flops = alone.flops
    assert 0.85 * PRODUCTS < flops < 1.25 * PRODUCTS
    assert jstep.cost(SCANNED, state(), BATCH).flops == pytest.approx(flops, rel=0.15)
    many = jstep.cost(jstep.scan_steps(STEP), state(), jnp.stack([BATCH] * 5))
    assert many.flops == pytest.approx(5 * flops, rel=0.05)
    parts = jstep.cost(jstep.minimize(plain, OPTIMIZER, num_microbatches=4), state(), BATCH)
    assert parts.flops == pytest.approx(flops, rel=0.15)


def test_shapes_will_do_and_nothing_runs(alone):
    cost = jstep.cost(STEP, jax.eval_shape(state), jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32))
    one = 4 * LAYERS * SIDE * SIDE
    assert (cost.params_bytes, cost.slots_bytes) == (one, one)
    assert cost.argument_bytes == pytest.approx(2 * one + 4 * ROWS * SIDE, abs=64)
    assert cost.alias_bytes >= 2 * one
    assert cost.peak_bytes == cost.argument_bytes + cost.output_bytes - cost.alias_bytes + cost.temp_bytes
    assert cost.collectives == {}
    assert cost.compile_seconds > 0
    alive = state()
    of_arrays = jstep.cost(STEP, alive, BATCH)
    assert not alive.params["w"].is_deleted()
    assert of_arrays.flops == alone.flops


def test_a_step_of_ones_own_and_a_loop_of_unknown_length():
    def step(state, x):
        params = jax.lax.while_loop(lambda p: p["w"].sum() < x, lambda p: {"w": p["w"] + 1}, state.params)
        return state.replace(params=params), {"loss": x}

    cost = jstep.cost(step, state(), jnp.float32(3))
    assert cost.loops_unknown == 1
    assert cost.alias_bytes == 0
    assert "1 loops of unknown length" in str(cost)


def test_a_loop_on_shards():
    mesh = jax.make_mesh((8,), ("data",))
    spec = PartitionSpec("data")
    loop = jax.shard_map(
        lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    x = jax.ShapeDtypeStruct((8 * SIDE, SIDE), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    cost = jstep.cost(lambda state, x: (state, loop(x)), state(), x)
    assert cost.flops == pytest.approx(10 * 2 * SIDE**3, rel=0.05)


def test_on_a_mesh(alone):
    mesh = jax.make_mesh((8,), ("data",))
    rows = jstep.shard_batch(np.ones((ROWS, SIDE), np.float32), mesh)
    replicated = jstep.shard_state(state(), mesh, PartitionSpec())
    cost = jstep.cost(SCANNED, replicated, rows)
    assert cost.devices == 8
    assert cost.params_bytes == alone.params_bytes
    assert cost.flops < 0.5 * alone.flops
    reduced = cost.collectives["all-reduce"]
    assert reduced.number >= LAYERS
    assert reduced.bytes >= cost.params_bytes
    assert "all-reduce" in str(cost)
    split = jstep.shard_state(state(), mesh, PartitionSpec(None, None, "data"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split)
    cost = jstep.cost(STEP, shapes, rows)
    assert cost.params_bytes * 8 == alone.params_bytes
    assert cost.slots_bytes * 8 == alone.slots_bytes
    assert cost.alias_bytes >= cost.params_bytes
    assert max(map(len, str(cost).splitlines())) <= 100


def test_it_says_where_it_does_not_fit(alone):
    text = str(jstep.Cost(**{**vars(alone), "memory_bytes": 1000, "devices": 4}))
    assert "of 1000 B: it does not fit" in text
    assert text.startswith("a step on each of 4 devices")


def test_bad_arguments():
    with pytest.raises(TypeError, match="train_step=3: must be a function"):
        jstep.cost(3, state())
    with pytest.raises(TypeError, match="state: must be a TrainState"):
        jstep.cost(STEP, {}, BATCH)


def test_slots_on_the_host_are_counted_apart():
    mesh = jax.make_mesh((8,), ("data",))
    batch = jstep.shard_batch(BATCH, mesh)

    def where(**how):
        return jstep.shard_state(state(), mesh, [("w", PartitionSpec(None, "data"))], **how)

    there, here = (jstep.cost(STEP, where(**how), batch) for how in ({}, {"slots_memory": "pinned_host"}))
    slot = 4 * LAYERS * SIDE * SIDE // 8
    assert (there.host_bytes, there.slots_bytes) == (0, slot)
    assert (here.host_bytes, here.slots_bytes, here.params_bytes) == (slot, 0, slot)
    assert there.argument_bytes - here.argument_bytes == slot
    assert here.peak_bytes == here.argument_bytes + here.output_bytes - here.alias_bytes + here.temp_bytes
    assert "on the host" in str(here)
    assert "on the host" not in str(there)
    shapes, _ = STEP.eval_shape(where(slots_memory="pinned_host"), batch)
    assert jstep.cost(STEP, shapes, batch).host_bytes == slot
    undonated = jstep.cost(STEP.__wrapped__, where(slots_memory="pinned_host"), batch)
    assert (undonated.host_bytes, undonated.alias_bytes) == (slot, 0)
