"""Muon's iteration distributed over a mesh: work is not duplicated, and values do not change."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jstep

N, SHAPE = 16, (64, 128)
IDEAL = N * 5 * (2 * 2 * SHAPE[0] ** 2 * SHAPE[1] + 2 * SHAPE[0] ** 3) / 8
"""FLOPs of the iteration's matrix products, divided by 8 devices."""

ONE, TWO = ((8,), ("data",)), ((4, 2), ("data", "model"))
LAYOUTS = {
    "replicated": (ONE, (None, None)),
    "rows": (ONE, ("data", None)),
    "columns": (ONE, (None, "data")),
    "both": (TWO, ("data", "model")),
}


def mesh_of(layout, types=AxisType.Auto):
    (shape, names), _ = layout
    return jax.make_mesh(shape, names, axis_types=(types,) * len(names))


def separate():
    return {f"w{i}": weights(i, SHAPE) for i in range(N)}


def weights(i, shape):
    numbers = jnp.arange(np.prod(shape), dtype=jnp.float32) + i
    return 0.02 * jnp.sin(numbers * numbers).reshape(shape)


def stacked():
    return {"layers": weights(0, (N, *SHAPE))}


def loss_fn(params, x):
    return sum(jnp.sum(jnp.sin(leaf * jnp.mean(x))) for leaf in jax.tree.leaves(params))


def state_of(make, optimizer, layout, types=AxisType.Auto, **options):
    split = layout[1]
    spec = P(None, *split) if make is stacked else P(*split)
    specs = [("*", spec)] if any(split) else None
    return jstep.TrainState.create(
        make, optimizer, mesh=mesh_of(layout, types), param_specs=specs, **options
    )


def compiled(step, state):
    program = step.lower(state, jnp.ones(8)).compile()
    found = re.findall(
        r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", program.as_text()
    )
    return program.cost_analysis()["flops"], collections.Counter(found)


def params_after(make, layout, types, optimizer, **options):
    state = state_of(make, optimizer, layout, types, **options)
    new, _ = jstep.minimize(loss_fn, optimizer)(state, jnp.ones(8))
    return jax.device_get(new.params)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), got, want)


def check_each_matrix_is_computed_once(layout, make, types):
    optimizer, undistributed = jstep.muon(1e-2), jstep.muon(1e-2, distribute=False)
    flops, collectives = compiled(
        jstep.minimize(loss_fn, optimizer), state_of(make, optimizer, layout, types)
    )
    assert flops < 1.3 * IDEAL
    assert sum(collectives.values()) <= 12
    assert_same(*(params_after(make, layout, types, one) for one in (optimizer, undistributed)))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [separate, stacked])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_matrix_is_computed_once(name, make):
    check_each_matrix_is_computed_once(LAYOUTS[name], make, AxisType.Auto)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["replicated", "rows", "both"])
def test_distribution_on_explicit_axes(name):
    check_each_matrix_is_computed_once(LAYOUTS[name], separate, AxisType.Explicit)


@pytest.mark.thorough
def test_distribution_under_zero1():
    optimizer = jstep.muon(1e-2)
    state = state_of(separate, optimizer, LAYOUTS["replicated"], slot_axis="data")
    flops, collectives = compiled(jstep.minimize(loss_fn, optimizer), state)
    assert flops < 1.3 * IDEAL
    # Each parameter is gathered once, as under any ZeRO-1.
    assert sum(collectives.values()) <= N + 12


def test_sharded_stacks_are_not_moved():
    optimizer = jstep.muon(1e-2)
    state = jstep.TrainState.create(
        lambda: {"experts": weights(0, (N, *SHAPE))}, optimizer, mesh=mesh_of(LAYOUTS["rows"]),
        param_specs=[("experts", P("data"))],
    )  # fmt: skip
    flops, collectives = compiled(jstep.minimize(loss_fn, optimizer), state)
    assert flops < 1.3 * IDEAL
    assert set(collectives) <= {"all-reduce"}  # for the loss


@pytest.mark.thorough
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("sizes", "spec", "options"),
    [
        ([16], P("model"), {}),
        ([12], P("data", None, "model"), {}),
        ([12], P(), {"slot_axis": "data"}),
    ],
)
def test_partly_sharded_stacks_use_all_devices(sizes, spec, options, types):
    flops, new = {}, {}
    for distribute in (True, False):
        optimizer = jstep.muon(1e-2, distribute=distribute)
        state = jstep.TrainState.create(
            lambda: {f"w{i}": weights(i, (n, *SHAPE)) for i, n in enumerate(sizes)}, optimizer,
            mesh=mesh_of((TWO, ()), types), param_specs=[("*", spec)], **options,
        )  # fmt: skip
        flops[distribute], collectives = compiled(jstep.minimize(loss_fn, optimizer), state)
        new[distribute] = jax.device_get(
            jstep.minimize(loss_fn, optimizer)(state, jnp.ones(8))[0].params
        )
        assert sum(collectives.values()) <= 12
    rounds = -(-sum(sizes) // 8)
    assert flops[True] < 1.2 * rounds * 8 / N * IDEAL
    assert_same(new[True], new[False])
