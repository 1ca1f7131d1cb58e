"""Slots in host memory: training is bitwise identical to that with slots in device memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType
from layouts import COLUMNS_AND_ROWS, assert_close, data, init, loss_fn, shardings
from optimizer_table import TABLE

import jstep
from jstep.core.placement import is_on_host
from jstep.optimizers import host_slots

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
    "masters": lambda: jstep.master_weights(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adamw(0.01))
    ),
    "labels": lambda: jstep.partition(
        {"m": jstep.muon(0.01), "rest": jstep.scope(jstep.adagrad(0.1), "x")},
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


def trained(step, state, batch):
    """Take two steps, which donate the states and keep their shardings."""
    before = shardings(state)
    for _ in range(2):
        old = state
        state, metrics = step(state, *batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert shardings(state) == before
    return state, metrics


@pytest.mark.thorough(except_for=["explicit-guards"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_memory_does_not_change_results(name, kind, host_memory):
    mesh, optimizer = mesh_of(kind), OPTIMIZERS[name]()
    batch = jstep.shard_batch(data(), mesh)
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm"))
    results = []
    for options in ({}, {"slots_memory": "pinned_host"}):
        state, metrics = trained(step, create(mesh, optimizer, **options), batch)
        results.append(jax.device_get((state, metrics)))
    assert memories(state.slots) == {"pinned_host"}
    assert memories(state.params) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [None, "pinned_host"])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_updates_keep_shardings(kind, memory, request):
    """This includes shardings over Auto axes of a mixed mesh, which array types do not show."""
    if memory:
        request.getfixturevalue("host_memory")
    optimizer = OPTIMIZERS["labels"]()
    state = jstep.TrainState.create(
        init,
        optimizer,
        mesh=mesh_of(kind),
        param_specs=COLUMNS_AND_ROWS,
        slot_axis="data",
        slots_memory=memory,
    )
    single = jstep.TrainState.create(init(), optimizer)
    new = jstep.apply_gradients(state, state.params, optimizer, scaled=True)
    assert shardings(new) == shardings(state)
    assert_close(
        new.params, jstep.apply_gradients(single, single.params, optimizer, scaled=True).params
    )


# Slots in host memory, updated leaf by leaf as on TPUs, tested on CPUs.


@pytest.fixture
def in_loops(monkeypatch, host_memory):
    """Update leaf by leaf on a CPU as on TPUs; a CPU needs no loops, since its memory is host
    memory."""
    monkeypatch.setattr(
        host_slots,
        "is_worth_loops",
        lambda state: any(map(is_on_host, jax.tree.leaves(state.slots))),
    )


def init_of_groups():
    numbers = jnp.sin(jnp.arange(6.0 * 12 * 12) ** 2).reshape(6, 12, 12) * 0.3
    return {
        "blocks": numbers,
        "f": jnp.zeros(8),
        "half": numbers[0, :, :8],
        "scale": jnp.ones(()),
        "x": numbers[1],
    }


def loss_fn_of_groups(params, x, y):
    x = x @ params["x"]
    for i in range(6):
        x = jnp.tanh(x @ params["blocks"][i])
    return jnp.mean((params["scale"] * (x @ params["half"] + params["f"][None]) - y) ** 2)


def create_of_groups(optimizer, kind="auto", **options):
    mesh = mesh_of(kind)
    specs = [("blocks", jax.P(None, "data")), ("x", jax.P("data"))]
    state = jstep.TrainState.create(
        init_of_groups, optimizer, mesh=mesh, param_specs=specs, **options
    )
    random = np.random.default_rng(0)
    batch = (
        random.normal(size=(16, 12)).astype(np.float32),
        random.normal(size=(16, 8)).astype(np.float32),
    )
    return state, jstep.shard_batch(batch, mesh)


def host_loops(jaxpr, outside=True):
    """Return the names of loops over host arrays, and the bytes transferred to the device outside
    of them."""
    names, transferred = [], 0
    for eqn in jaxpr.eqns:
        is_loop = eqn.primitive.name in ("while", "scan")
        carries = is_loop and any(v.aval.memory_space == jax.memory.Space.Host for v in eqn.invars)
        names += [eqn.primitive.name] * carries
        if outside and eqn.primitive.name == "device_put":
            spaces = [getattr(v.aval, "memory_space", None) for v in (*eqn.invars, *eqn.outvars)]
            if spaces == [jax.memory.Space.Host, jax.memory.Space.Device]:
                transferred += eqn.invars[0].aval.size * eqn.invars[0].aval.dtype.itemsize
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr)
        ):
            if isinstance(inner, core.ClosedJaxpr):
                more, bytes_ = host_loops(inner.jaxpr, outside and not carries)
                names, transferred = names + more, transferred + bytes_
    return names, transferred


ALL_AT_ONCE = {"from_optax", "soap"}
"""Optimizers that need all of some slots on the devices at once."""


@pytest.mark.thorough(except_for=["adam"])
@pytest.mark.parametrize("name", TABLE)
def test_updates_in_loops_match(name, in_loops):
    optimizer = TABLE[name].make(0.01)
    step = jstep.minimize(loss_fn_of_groups, optimizer, metrics=("update_norm",))
    kind = list(KINDS)[list(TABLE).index(name) % 2]
    results = []
    for options in ({}, {"slots_memory": "pinned_host"}):
        state, batch = create_of_groups(optimizer, kind, **options)
        if options:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.slots) if leaf.ndim)
            loops, transferred = host_loops(step.trace(state, *batch).jaxpr.jaxpr)
            if name not in ALL_AT_ONCE:
                assert bool(loops) == bool(size)
                assert transferred <= size / 16
        state, metrics = trained(step, state, batch)
        results.append(jax.device_get((state.params, state.slots, metrics)))
    assert_close(*results, atol=1e-6)


@pytest.mark.thorough
def test_rows_of_tables_and_leaves_without_gradients(in_loops):
    optimizer = jstep.with_moving_average(jstep.adagrad(0.1), jstep.ExponentialMovingAverage(0.9))

    def loss(params, ids, y):
        return jnp.mean((jstep.lookup(params["x"], ids).sum(-1) - y) ** 2)

    step = jstep.minimize(loss, optimizer, var_list=["x"])
    results = []
    for options in ({}, {"slots_memory": "pinned_host"}):
        state, _ = create_of_groups(optimizer, **options)
        state, _ = step(state, jnp.array([1, 5, 1]), jnp.ones(3))
        results.append(jax.device_get((state.params, state.slots)))
    assert_close(*results, atol=1e-6)
