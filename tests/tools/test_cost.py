"""`cost`: FLOPs and memory of a step, before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jstep

SIDE, ROWS, LAYERS = 64, 32, 3
OPTIMIZER = jstep.momentum(0.1, 0.9)
PRODUCTS = 6 * ROWS * LAYERS * SIDE * SIDE
"""FLOPs of a step: one matrix product per layer, and two for its gradients, except that of the batch."""


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
def single_device():
    """The cost of the plain step on one device."""
    return jstep.cost(STEP, jax.eval_shape(state), BATCH)


def test_flops_are_multiplied_by_trip_counts(single_device):
    flops = single_device.flops
    assert 0.85 * PRODUCTS < flops < 1.25 * PRODUCTS
    assert jstep.cost(SCANNED, state(), BATCH).flops == pytest.approx(flops, rel=0.15)
    many = jstep.cost(jstep.scan_steps(STEP), state(), jnp.stack([BATCH] * 5))
    assert many.flops == pytest.approx(5 * flops, rel=0.05)
    accumulated = jstep.cost(jstep.minimize(plain, OPTIMIZER, num_microbatches=4), state(), BATCH)
    assert accumulated.flops == pytest.approx(flops, rel=0.15)


def test_cost_from_shapes_does_not_run_the_step(single_device):
    cost = jstep.cost(STEP, jax.eval_shape(state), jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32))
    weight_bytes = 4 * LAYERS * SIDE * SIDE
    assert (cost.params_bytes, cost.slots_bytes) == (weight_bytes, weight_bytes)
    assert cost.argument_bytes == pytest.approx(2 * weight_bytes + 4 * ROWS * SIDE, abs=64)
    assert cost.alias_bytes >= 2 * weight_bytes
    assert cost.peak_bytes == cost.argument_bytes + cost.output_bytes - cost.alias_bytes + cost.temp_bytes
    assert cost.compile_seconds > 0
    concrete = state()
    concrete_cost = jstep.cost(STEP, concrete, BATCH)
    assert not concrete.params["w"].is_deleted()
    assert concrete_cost.flops == single_device.flops


def test_custom_step_with_a_loop_of_unknown_length():
    def step(state, x):
        params = jax.lax.while_loop(lambda p: p["w"].sum() < x, lambda p: {"w": p["w"] + 1}, state.params)
        return state.replace(params=params), {"loss": x}

    cost = jstep.cost(step, state(), jnp.float32(3))
    assert cost.loops_unknown == 1
    assert cost.alias_bytes == 0
    assert "1 loops of unknown length" in str(cost)


def test_cost_on_a_mesh(single_device):
    mesh = jax.make_mesh((8,), ("data",))
    rows = jstep.shard_batch(np.ones((ROWS, SIDE), np.float32), mesh)
    replicated = jstep.shard_state(state(), mesh, PartitionSpec())
    cost = jstep.cost(SCANNED, replicated, rows)
    assert cost.devices == 8
    assert cost.params_bytes == single_device.params_bytes
    assert cost.flops < 0.5 * single_device.flops
    split = jstep.shard_state(state(), mesh, PartitionSpec(None, None, "data"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split)
    cost = jstep.cost(STEP, shapes, rows)
    assert cost.params_bytes * 8 == single_device.params_bytes
    assert cost.slots_bytes * 8 == single_device.slots_bytes
    assert cost.alias_bytes >= cost.params_bytes
    assert max(map(len, str(cost).splitlines())) <= 100


@pytest.mark.thorough
def test_host_slots_are_counted_separately(host_memory):
    mesh = jax.make_mesh((8,), ("data",))
    batch = jstep.shard_batch(BATCH, mesh)

    def create(**options):
        return jstep.shard_state(state(), mesh, [("w", PartitionSpec(None, "data"))], **options)

    on_device, on_host = (
        jstep.cost(STEP, create(**options), batch) for options in ({}, {"slots_memory": "pinned_host"})
    )
    slot = 4 * LAYERS * SIDE * SIDE // 8
    assert (on_device.host_bytes, on_device.slots_bytes) == (0, slot)
    assert (on_host.host_bytes, on_host.slots_bytes, on_host.params_bytes) == (slot, 0, slot)
    assert on_device.argument_bytes - on_host.argument_bytes == slot
    assert (
        on_host.peak_bytes == on_host.argument_bytes + on_host.output_bytes - on_host.alias_bytes + on_host.temp_bytes
    )
    assert "on the host" in str(on_host)
    assert "on the host" not in str(on_device)
    shapes, _ = STEP.eval_shape(create(slots_memory="pinned_host"), batch)
    assert jstep.cost(STEP, shapes, batch).host_bytes == slot
    undonated = jstep.cost(STEP.__wrapped__, create(slots_memory="pinned_host"), batch)
    assert (undonated.host_bytes, undonated.alias_bytes) == (slot, 0)
