"""Steps under the caller's JAX contexts: meshes, transfer guards, PRNG settings, and debug checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

ROWS = np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)
FIRST = np.ones((4, 2), np.float32)
KEY = jax.random.key(0)
EXPLICIT = jax.make_mesh((8,), ("data",))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
OPTIMIZER = jstep.adam(jstep.exponential_decay(0.1, 10, 0.5))
CONSTANT = jstep.momentum(0.1, 0.9)
ON_MESH = {"mesh": EXPLICIT, "slot_axis": "data"}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def make(optimizer: jstep.Optimizer = OPTIMIZER, **placement: Any) -> jstep.TrainState:
    return jstep.TrainState.create({"w": FIRST, "b": np.zeros(2, np.float32)}, optimizer, **placement)


def train(state: jstep.TrainState, optimizer: jstep.Optimizer) -> Any:
    """Run a single step and two scanned steps."""
    step = jstep.minimize(loss_fn, optimizer, metrics="grad_norm")
    state, _ = step(state, ROWS)
    return jax.device_get(jstep.scan_steps(step)(state, np.stack([ROWS, ROWS])))


def test_step_inside_and_outside_an_explicit_mesh(compilations: Any) -> None:
    step = jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=2, donate=False)
    batch = jstep.shard_batch(np.concatenate([ROWS, ROWS]), EXPLICIT)
    state, _ = step(make(**ON_MESH), batch)
    with jax.set_mesh(EXPLICIT):
        state, _ = step(state, batch)
        sharded = jstep.shard_state(make(), EXPLICIT, [("w", P())], slot_axis="data")
        created = jstep.TrainState.create(lambda: {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, OPTIMIZER, **ON_MESH)
        for other in (sharded, created):
            assert jax.tree.leaves(step(other, batch)[0].params)[0].sharding.mesh == EXPLICIT
        jstep.increment_global_step(state)
    assert jstep.global_step(step(state, batch)[0]) == 3
    with compilations() as seen:
        step(state, batch)
    assert not seen


@pytest.mark.thorough(except_for=["a mesh-constants"])
@pytest.mark.parametrize("optimizer", [OPTIMIZER, CONSTANT], ids=["a schedule", "constants"])
@pytest.mark.parametrize("placement", [{}, ON_MESH], ids=["one device", "a mesh"])
def test_transfer_guard_allows_states_and_numpy_batches(optimizer: jstep.Optimizer, placement: Any) -> None:
    with jax.transfer_guard("disallow"):
        state = make(optimizer, **placement)
        state, metrics = train(jstep.shard_state(state, EXPLICIT) if placement else state, optimizer)
        keyed = jstep.minimize(lambda p, x, rng: loss_fn(p, x), optimizer, rng=KEY)
        keyed(make(optimizer, **placement), ROWS)
    assert int(state.global_step) == 3
    assert float(metrics["learning_rate"][0]) > 0


def test_transfer_guard_applies_to_user_functions() -> None:
    def transferring(params: Any, x: Any) -> jax.Array:
        with jax.ensure_compile_time_eval():
            return loss_fn(params, x) * jnp.asarray(np.float32(2)).item()

    step = jstep.minimize(transferring, OPTIMIZER)
    state = make()
    with jax.transfer_guard("disallow"), pytest.raises(RuntimeError, match="Disallowed"):
        step(state, ROWS)
    with jax.transfer_guard("disallow"), pytest.raises(RuntimeError, match="Disallowed"):
        jstep.TrainState.create(lambda: {"w": jnp.asarray(np.float32(2)) + 1}, OPTIMIZER)
    step(state, ROWS)


def test_loop_on_a_mesh_under_a_transfer_guard() -> None:
    """Stacked metrics are on the mesh, constants on one device."""
    step = jstep.minimize(loss_fn, OPTIMIZER)
    state, rows, hooks = make(**ON_MESH), NamedSharding(AUTO, P("data")), [jstep.NanLossHook()]
    with jax.transfer_guard("disallow"):
        state = jstep.train(
            step, state, lambda n: ROWS, 4, steps_per_call=2, batch_sharding=rows, hooks=hooks, progress=False
        )
    assert jstep.global_step(state) == 4


def test_debug_nans_with_donating_steps() -> None:
    """JAX runs the step again op by op, so its arguments must not be donated."""
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: jnp.sum(jnp.log(params["w"] * x)), optimizer)
    before = jstep.TrainState.create({"w": np.ones(2, np.float32)}, optimizer)
    ones = np.ones(2, np.float32)
    state, _ = step(before, ones)
    assert before.params["w"].is_deleted()
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="encountered in log"):
            step(state, -ones)
        assert not state.params["w"].is_deleted()
        with pytest.raises(RuntimeError, match="was donated to an earlier step"):
            step(before, ones)
        state, _ = step(jstep.TrainState.create({"w": ones}, optimizer), ones)
        with pytest.raises(FloatingPointError, match="encountered in log"):
            step(state, -ones)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in log"):
        step(state, 0 * ones)
    assert not state.params["w"].is_deleted()


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO, None], ids=["explicit", "auto", "current mesh"])
def test_loss_with_shard_map(mesh: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def squares(w: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.sum((rows @ w) ** 2), "data")

        kwargs = {} if mesh is None else {"mesh": mesh}
        return jax.shard_map(squares, in_specs=(P(), P("data")), out_specs=P(), **kwargs)(params["w"], x)

    step = jstep.minimize(loss, CONSTANT)
    state_mesh = mesh or EXPLICIT
    batch = jstep.shard_batch(ROWS, state_mesh)
    _, metrics = step(make(CONSTANT, mesh=state_mesh, slot_axis="data"), batch)
    np.testing.assert_allclose(metrics["loss"], np.sum((ROWS @ FIRST) ** 2), rtol=1e-6)
