"""Steps under the caller's JAX contexts: meshes, transfer guards, PRNG settings, and debug
checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jstep

ROWS = np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)
FIRST = np.ones((4, 2), np.float32)
KEY = jax.random.key(0)
EXPLICIT = jax.make_mesh((8,), ("data",))
OPTIMIZER = jstep.adam(jstep.exponential_decay(0.1, 10, 0.5))
CONSTANT = jstep.momentum(0.1, 0.9)
ON_MESH = {"mesh": EXPLICIT, "slot_axis": "data"}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def make(optimizer: jstep.Optimizer = OPTIMIZER, **placement: Any) -> jstep.TrainState:
    return jstep.TrainState.create(
        {"w": FIRST, "b": np.zeros(2, np.float32)}, optimizer, **placement
    )


def train(state: jstep.TrainState, optimizer: jstep.Optimizer) -> Any:
    """Run a single step and two scanned steps."""
    step = jstep.minimize(loss_fn, optimizer, metrics="grad_norm")
    state, _ = step(state, ROWS)
    return jax.device_get(jstep.scan_steps(step)(state, np.stack([ROWS, ROWS])))


@pytest.mark.thorough
def test_step_inside_and_outside_an_explicit_mesh(compilations: Any) -> None:
    step = jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=2, donate=False)
    batch = jstep.shard_batch(np.concatenate([ROWS, ROWS]), EXPLICIT)
    state, _ = step(make(**ON_MESH), batch)
    with jax.set_mesh(EXPLICIT):
        state, _ = step(state, batch)
        sharded = jstep.shard_state(make(), EXPLICIT, [("w", P())], slot_axis="data")
        created = jstep.TrainState.create(
            lambda: {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, OPTIMIZER, **ON_MESH
        )
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
def test_transfer_guard_allows_states_and_numpy_batches(
    optimizer: jstep.Optimizer, placement: Any
) -> None:
    with jax.transfer_guard("disallow"):
        state = make(optimizer, **placement)
        state, metrics = train(
            jstep.shard_state(state, EXPLICIT) if placement else state, optimizer
        )
        keyed = jstep.minimize(lambda p, x, rng: loss_fn(p, x), optimizer, rng=KEY)
        keyed(make(optimizer, **placement), ROWS)
    assert int(state.global_step) == 3
    assert float(metrics["learning_rate"][0]) > 0


@pytest.mark.thorough(except_for=["a mesh"])
@pytest.mark.parametrize("placement", [{}, {"mesh": EXPLICIT}], ids=["one device", "a mesh"])
def test_what_is_set_or_changes_after_some_calls_counts_at_the_next(placement: Any) -> None:
    """Most of a call is known from the one before; what may differ is asked each time."""
    step, apart = (
        jstep.minimize(loss_fn, OPTIMIZER),
        jstep.minimize(loss_fn, OPTIMIZER, donate=False),
    )
    state, expected = make(**placement), make(**placement)
    for n in range(3):
        state, expected = step(state, n * ROWS)[0], apart(expected, n * ROWS)[0]
    with jax.transfer_guard("disallow"):
        state, expected = step(state, ROWS)[0], apart(expected, ROWS)[0]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        step(state, np.full_like(ROWS, np.nan))
    for rows in (ROWS[:4], jnp.asarray(ROWS), ROWS):
        state, expected = step(state, rows)[0], apart(expected, rows)[0]
    with pytest.raises(TypeError, match=r"@|dot|matmul|unsupported"):
        step(state, {"x": ROWS})
    with pytest.raises(OverflowError, match="64-bit types are off"):
        step(state, np.full((8, 4), 2**40))
    before, (state, _) = state, step(state, ROWS)
    with pytest.raises(RuntimeError, match="was donated to an earlier step"):
        step(before, ROWS)
    assert state == apart(expected, ROWS)[0]
    other = make() if placement else make(mesh=EXPLICIT)
    assert jstep.global_step(step(step(other, ROWS)[0], ROWS)[0]) == 2
    assert state == apart(expected, ROWS)[0]


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
    with (
        jax.debug_infs(True),
        pytest.raises(
            FloatingPointError,
            match=r"\(inf\) encountered in log",
        ),
    ):
        step(state, 0 * ones)
    assert not state.params["w"].is_deleted()
