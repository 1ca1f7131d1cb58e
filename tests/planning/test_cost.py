"""`cost`: FLOPs and memory of a step, before it runs."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import jstep
from jstep.core.jaxprs import is_annotated
from jstep.planning.cost import _parse_too_large, device_peak

SIDE, ROWS, LAYERS = 64, 32, 3
OPTIMIZER = jstep.momentum(0.1, 0.9)
PRODUCTS = 6 * ROWS * LAYERS * SIDE * SIDE
"""FLOPs of a step: one matrix product per layer, and two for its gradients, except that of the
batch."""


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
    assert (
        cost.peak_bytes
        == cost.argument_bytes + cost.output_bytes - cost.alias_bytes + cost.temp_bytes
    )
    assert cost.compile_seconds > 0
    concrete = state()
    concrete_cost = jstep.cost(STEP, concrete, BATCH)
    assert not concrete.params["w"].is_deleted()
    assert concrete_cost.flops == single_device.flops


def test_custom_step_with_a_loop_of_unknown_length():
    def step(state, x):
        params = jax.lax.while_loop(
            lambda p: p["w"].sum() < x, lambda p: {"w": p["w"] + 1}, state.params
        )
        return state.replace(params=params), {"loss": x}

    cost = jstep.cost(step, state(), jnp.float32(3))
    assert cost.loops_unknown == 1
    assert cost.alias_bytes == 0
    assert "1 loops of unknown length" in str(cost)


FACTORIZATIONS = {
    "eigh": (lambda a: jnp.linalg.eigh(a)[1], 9),
    "qr": (lambda a: jnp.linalg.qr(a)[1], 8 / 3),
    "cholesky": (lambda a: jnp.linalg.cholesky(a), 1 / 3),
    "lu": (lambda a: jnp.linalg.solve(a, a), 2 / 3 + 2),  # with two triangular solves
    "svd": (lambda a: jnp.linalg.svd(a)[0], 26),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_factorizations_are_counted(name):
    factorize, cubes = FACTORIZATIONS[name]

    def step(state, x):
        products = jnp.stack([x.T @ x] * 3)
        factors = jax.lax.map(factorize, products) if name == "eigh" else factorize(products)
        return state.replace(params={"w": state.params["w"] + factors}), {"loss": x.sum()}

    without = jstep.cost(step_without, state(), BATCH)
    found = jstep.cost(step, state(), BATCH)
    expected = 3 * cubes * SIDE**3
    assert expected <= found.flops - without.flops <= 3 * expected  # with pivots, masks and signs
    assert name in found.estimated
    assert f"estimated for {', '.join(found.estimated)}" in str(found)


def step_without(state, x):
    products = jnp.stack([x.T @ x] * 3)
    return state.replace(params={"w": state.params["w"] + products}), {"loss": x.sum()}


def test_callbacks_are_named():
    def step(state, x):
        y = jax.pure_callback(lambda x: x, x, x)
        jax.debug.print("{}", y.sum())
        return state, {"loss": y.sum()}

    found = jstep.cost(step, state(), BATCH)
    assert "pure_callback" in found.uncounted
    assert f"not counted: {', '.join(found.uncounted)}" in str(found)
    assert jstep.cost(step_without, state(), BATCH).uncounted == ()


def test_a_solver_with_a_loop_has_a_loop_of_unknown_length():
    def step(state, x):
        a = x.T @ x
        y, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, x[0])
        return state, {"loss": y.sum()}

    assert jstep.cost(step, state(), BATCH).loops_unknown >= 1


def test_soap_is_not_free():
    optimizer = jstep.soap(1e-2)
    step = jstep.minimize(lambda params, x: jnp.sum(jnp.square(x @ params["w"])), optimizer)
    made = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.ones((64, 64))}, optimizer))
    assert jstep.cost(step, made, jnp.ones((8, 64))).estimated


def test_cost_on_a_mesh(single_device):
    mesh = jax.make_mesh((8,), ("data",))
    rows = jstep.shard_batch(np.ones((ROWS, SIDE), np.float32), mesh)
    replicated = jstep.shard_state(state(), mesh, PartitionSpec())
    cost = jstep.cost(SCANNED, replicated, rows)
    assert cost.devices == 8
    assert cost.params_bytes == single_device.params_bytes
    assert cost.flops < 0.5 * single_device.flops
    split = jstep.shard_state(state(), mesh, PartitionSpec(None, None, "data"))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split
    )
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
        jstep.cost(STEP, create(**options), batch)
        for options in ({}, {"slots_memory": "pinned_host"})
    )
    slot = 4 * LAYERS * SIDE * SIDE // 8
    assert (on_device.host_bytes, on_device.slots_bytes) == (0, slot)
    assert (on_host.host_bytes, on_host.slots_bytes, on_host.params_bytes) == (slot, 0, slot)
    assert on_device.argument_bytes - on_host.argument_bytes == slot
    assert (
        on_host.peak_bytes
        == on_host.argument_bytes + on_host.output_bytes - on_host.alias_bytes + on_host.temp_bytes
    )
    assert "on the host" in str(on_host)
    assert "on the host" not in str(on_device)
    shapes, _ = STEP.eval_shape(create(slots_memory="pinned_host"), batch)
    assert jstep.cost(STEP, shapes, batch).host_bytes == slot
    undonated = jstep.cost(STEP.__wrapped__, create(slots_memory="pinned_host"), batch)
    assert (undonated.host_bytes, undonated.alias_bytes) == (slot, 0)


# Cost of a step that does not fit into memory; values that the compiler does not report are None.

OPTIMIZER_OF_FAILURES = jstep.adam(0.01)
STEP_OF_FAILURES = jstep.minimize(
    lambda params, x: jnp.sum((x @ params["w"]) ** 2), OPTIMIZER_OF_FAILURES
)
OLD = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, "
    "the total memory required for HLO temporaries (16.62G) exceeds "
    "available HBM (15.75G)."
)
NEW = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: "
    "Ran out of memory on HBM, the total memory required (512.5M) "
    "exceeds available HBM (256.0M). HLO module: jit_f.\nSee "
    "https://openxla.org/xla/errors/error_1000 for more."
)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (OLD, (int(16.62 * 2**30), int(15.75 * 2**30))),
        (NEW, (int(512.5 * 2**20), 256 * 2**20)),
        ("INTERNAL: no", None),
    ],
    ids=["old", "new", "other"],
)
def test_memory_is_parsed_from_the_error(text, needed):
    assert _parse_too_large(jax.errors.JaxRuntimeError(text)) == needed


class FailingStep:
    """A step whose compilation fails."""

    def __init__(self, step, text):
        self.step, self.text = step, text

    def __call__(self, state, *args):
        return self.step(state, *args)

    def trace(self, state, *args):
        return self.step.trace(state, *args)

    def lower(self, state, *args):
        return self

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.text)


def example_inputs():
    state = jax.eval_shape(
        lambda: jstep.TrainState.create({"w": jnp.zeros((16, 8))}, OPTIMIZER_OF_FAILURES)
    )
    return state, jax.ShapeDtypeStruct((4, 16), jnp.float32)


def test_out_of_memory_returns_a_cost():
    cost = jstep.cost(FailingStep(STEP_OF_FAILURES, OLD), *example_inputs())
    assert cost.fits is False
    assert (cost.peak_bytes, cost.memory_bytes) == (int(16.62 * 2**30), int(15.75 * 2**30))
    assert cost.params_bytes == 4 * 16 * 8
    assert cost.slots_bytes == 2 * 4 * 16 * 8 + 4
    assert cost.flops >= 2 * 2 * 4 * 16 * 8
    assert "16.6 GiB of 15.75 GiB: it does not fit" in str(cost)
    assert "None" not in str(cost)
    unknown = [
        field.name for field in dataclasses.fields(cost) if getattr(cost, field.name) is None
    ]
    assert set(unknown) >= {"bytes_accessed", "temp_bytes", "output_bytes", "alias_bytes"}


def test_other_compiler_errors_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="the compiler broke"):
        jstep.cost(FailingStep(STEP_OF_FAILURES, "INTERNAL: the compiler broke"), *example_inputs())


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "warns"), [(P("data"), True), (P(), False)], ids=str)
@pytest.mark.parametrize("is_constrained", [False, True])
def test_warning_about_a_possible_reason(spec, warns, is_constrained):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    def loss(params, tokens):
        x = params["w"][tokens]
        x = jax.lax.with_sharding_constraint(x, rows) if is_constrained else x
        return jnp.sum(x**2)

    state = jstep.TrainState.create(
        lambda: {"w": jnp.zeros((16, 8))}, OPTIMIZER_OF_FAILURES, mesh=mesh, param_specs=spec
    )
    tokens = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=rows)
    cost = jstep.cost(FailingStep(jstep.minimize(loss, OPTIMIZER_OF_FAILURES), OLD), state, tokens)
    assert bool(cost.warnings) == (warns and not is_constrained)
    if cost.warnings:
        assert (
            'with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))'
            in cost.warnings[0]
        )
        assert "warning: parameters are split" in str(cost)


# Warnings in the cost of a step.

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
OPTIMIZER_OF_WARNINGS = jstep.adam(1e-3)


def mlp():
    return {"a": jnp.zeros((64, 32)), "b": jnp.zeros((32,)), "x": jnp.zeros((32, 64))}


def regression(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["a"] + params["b"][None]) @ params["x"] - y) ** 2)


def on_rows(params, x, y):
    """The constraint that the warning suggests."""
    return regression(
        params, jax.lax.with_sharding_constraint(x, jax.NamedSharding(MESH, jax.P("data"))), y
    )


STEP_OF_WARNINGS = jstep.minimize(regression, OPTIMIZER_OF_WARNINGS)


def state_of_warnings(mesh=MESH, specs=None):
    return jstep.TrainState.create(mlp, OPTIMIZER_OF_WARNINGS, mesh=mesh, param_specs=specs)


PAIRS = jstep.shard_batch([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, MESH)


def test_a_state_and_a_batch_on_two_meshes_are_jaxs_error_with_a_remedy():
    batch = jax.device_put([np.ones((64, 64), np.float32)] * 2, jax.devices()[-1])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        jstep.cost(
            STEP_OF_WARNINGS,
            state_of_warnings(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])),
            *batch,
        )
    assert "Put" in "".join(caught.value.__notes__)


def test_is_annotated_finds_constraints_of_the_loss():
    def traced(loss):
        step = jstep.minimize(loss, OPTIMIZER_OF_WARNINGS, num_microbatches=2)
        return step.trace(state_of_warnings(), *PAIRS).jaxpr

    # The constraint for microbatches is not one of the loss.
    assert not is_annotated(traced(regression))
    assert is_annotated(traced(on_rows))


def test_undonated_state_warns():
    def only_metrics(state, x, y):
        return {"loss": regression(state.params, x, y)}

    (found,) = jstep.cost(
        jstep.minimize(regression, OPTIMIZER_OF_WARNINGS, donate=False), state_of_warnings(), *PAIRS
    ).warnings
    total = 3 * 4 * (64 * 32 + 32 + 32 * 64) + 8
    assert found.startswith(
        f"{total / 1024:.3g} KiB of the state is not donated, so that the old and the new state"
    )
    assert "jax.jit(step, donate_argnums=0)" in found
    for step in (
        STEP_OF_WARNINGS,
        jax.jit(STEP_OF_WARNINGS.__wrapped__, donate_argnums=0),
        only_metrics,
    ):
        assert jstep.cost(step, state_of_warnings(), *PAIRS).warnings == ()


@pytest.mark.thorough
def test_batch_outside_the_mesh_warns():
    """Its program differs from that of a run with a sharded batch."""
    x, y = np.ones((64, 64), np.float32), jnp.ones((64, 64))
    for batch in ((x, y), jax.eval_shape(lambda: (x, y))):
        (found,) = jstep.cost(STEP_OF_WARNINGS, state_of_warnings(), *batch).warnings
        assert found.startswith(
            "the batch is not on the mesh of the state, so each of its 8 devices gets all of it"
        )
        assert "jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))" in found
    for arguments in (
        (state_of_warnings(), *jstep.shard_batch((x, y), MESH)),
        (state_of_warnings(), x, PAIRS[1]),
    ):
        assert jstep.cost(STEP_OF_WARNINGS, *arguments).warnings == ()
    assert (
        jstep.cost(
            STEP_OF_WARNINGS, state_of_warnings(jax.make_mesh((1,), ("data",))), x, y
        ).warnings
        == ()
    )


def test_a_block_between_devices_warns():
    mesh = jax.make_mesh((8,), ("data",))
    for block, spec, warns in (
        (128, jax.P(None, "data"), 1),
        (32, jax.P(None, "data"), 0),
        (128, jax.P("data"), 0),
    ):
        optimizer = jstep.compact(jstep.adam(), block=block)
        params = {"w": jnp.ones((128, 256)), "small": jnp.ones(4)}
        state = jstep.TrainState.create(
            params, optimizer, mesh=mesh, param_specs={"w": spec, "small": jax.P()}
        )
        step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)
        found = jstep.cost(
            step, state, jstep.shard_batch(np.ones((8, 128), np.float32), mesh)
        ).warnings
        assert len(found) == warns
        assert all(
            line.startswith("blocks of slots are split between devices (m/w and 1 more)")
            for line in found
        )


# Peak device memory, from the compiler's memory analysis.

MB = 10**6


def report(device, host=(0, 0, 0, 0), **others):
    names = ("argument", "output", "alias", "temp")
    sizes = {f"{name}_size_in_bytes": int(n * MB) for name, n in zip(names, device, strict=True)}
    sizes |= {
        f"host_{name}_size_in_bytes": int(n * MB) for name, n in zip(names, host, strict=True)
    }
    return SimpleNamespace(**sizes, **{name: int(n * MB) for name, n in others.items()})


# Reports of the TPU compiler for v5e:2x4, libtpu 0.0.42 and 0.0.50.
REPORTS = {
    "large": (report((403.18, 402.65, 402.65, 134.41), peak_memory_in_bytes=537.40), 537.40),
    "small, mostly in VMEM": (report((50.86, 50.33, 50.33, 0), peak_memory_in_bytes=122.69), 50.86),
    "temporaries counted twice": (
        report((163.62, 163.6, 163.6, 731.49), peak_memory_in_bytes=667.8),
        667.8,
    ),
    "slots on the host": (
        report(
            (134.74, 134.22, 134.22, 268.95),
            (268.44, 268.44, 268.44, 0),
            peak_memory_in_bytes=604.51,
        ),
        336.07,
    ),
    "only written to the host": (
        report((3000, 3000, 3000, 3000), (0, 3000, 0, 0), peak_memory_in_bytes=9000),
        6000,
    ),
    "temporaries on the host": (
        report(
            (134.74, 134.22, 134.22, 472.25),
            (268.44, 268.44, 268.44, 268.44),
            peak_memory_in_bytes=738.74,
        ),
        470.3,
    ),
    "allocation reported": (
        report(
            (163.62, 163.6, 163.6, 731.49),
            peak_memory_in_bytes=667.8,
            total_allocation_bytes=680.99,
        ),
        680.99,
    ),
    "no peak reported": (report((10, 10, 4, 3)), 19),
}


@pytest.mark.parametrize("name", REPORTS)
def test_peak_from_compiler_reports(name):
    memory, want = REPORTS[name]
    assert device_peak(memory) == pytest.approx(want * MB, abs=MB / 10)


@pytest.mark.parametrize(
    "memory", [None, SimpleNamespace(), SimpleNamespace(argument_size_in_bytes=1)]
)
def test_unknown_peak(memory):
    assert device_peak(memory) is None


def test_peak_of_a_compiled_program():
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    assert device_peak(double.lower(x).compile().memory_analysis()) == 2**20
