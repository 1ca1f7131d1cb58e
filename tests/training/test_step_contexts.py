"""Steps inside the contexts that callers set: meshes, guards, keys, checks."""

import contextlib
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
HOW = {"mesh": EXPLICIT, "slot_axis": "data"}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def make(optimizer: jstep.Optimizer = OPTIMIZER, **how: Any) -> jstep.TrainState:
    return jstep.TrainState.create({"w": FIRST, "b": np.zeros(2, np.float32)}, optimizer, **how)


def trained(
    state: jstep.TrainState,
    optimizer: jstep.Optimizer = OPTIMIZER,
    *,
    loss: Any = loss_fn,
    by_hand: bool = True,
    **kwargs: Any,
) -> Any:
    """Steps: one alone, two in a call, and one by hand."""
    step = jstep.minimize(loss, optimizer, metrics="grad_norm", **kwargs)
    state, metrics = step(state, ROWS)
    state, metrics = jstep.scan_steps(step)(state, np.stack([ROWS, ROWS]))
    if not by_hand:
        return jax.device_get((state, metrics))
    _, grads = jstep.compute_gradients(loss_fn)(state.params, ROWS)
    grads, _ = jstep.clip_by_global_norm(grads, 100.0)
    return jax.device_get(jstep.apply_gradients(state, grads, optimizer)), jax.device_get(metrics)


WANT = trained(make())


@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO], ids=["explicit", "auto"])
@pytest.mark.parametrize("how", [{}, HOW], ids=["one device", "a mesh"])
def test_a_mesh_that_is_set(mesh: Any, how: Any) -> None:
    with jax.set_mesh(mesh):
        got = trained(make(**how))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, WANT)


def test_an_explicit_mesh_that_is_set_and_left(compilations: Any) -> None:
    step = jstep.minimize(loss_fn, OPTIMIZER, num_microbatches=2, donate=False)
    batch = jstep.shard_batch(np.concatenate([ROWS, ROWS]), EXPLICIT)
    state, _ = step(make(**HOW), batch)
    with jax.set_mesh(EXPLICIT):
        state, _ = step(state, batch)
        laid = jstep.shard_state(make(), EXPLICIT, [("w", P())], slot_axis="data")
        made = jstep.TrainState.create(lambda: {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, OPTIMIZER, **HOW)
        for other in (laid, made):
            assert jax.tree.leaves(step(other, batch)[0].params)[0].sharding.mesh == EXPLICIT
        jstep.increment_global_step(state)
    assert jstep.global_step(step(state, batch)[0]) == 3
    with compilations() as seen:
        step(state, batch)
    assert not seen


def test_arrays_on_explicit_axes_while_their_mesh_is_set_or_not() -> None:
    batch = jax.device_put(ROWS, NamedSharding(EXPLICIT, P("data")))
    params = jax.device_put({"w": FIRST, "b": np.zeros(2, np.float32)}, NamedSharding(EXPLICIT, P()))
    step = jstep.minimize(loss_fn, OPTIMIZER)
    state, _ = step(make(**HOW), batch)
    state, _ = step(state, batch)
    other = jstep.TrainState.create(params, OPTIMIZER)
    with jax.set_mesh(EXPLICIT):
        for _ in range(2):
            other, _ = step(other, batch)
        keyed = jstep.minimize(lambda p, x, rng: loss_fn(p, x), OPTIMIZER, rng=jax.random.key(1))
        keyed(other, batch)
    np.testing.assert_allclose(np.asarray(state.params["w"]), np.asarray(params["w"]) - 0.2, atol=0.1)


def test_what_looks_at_a_step_takes_what_it_takes() -> None:
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(loss_fn, optimizer, num_microbatches=2)
    shape = jax.ShapeDtypeStruct((16, 4), np.float32, sharding=NamedSharding(EXPLICIT, P("data")))
    batch = jax.device_put(np.concatenate([ROWS, ROWS]), shape.sharding)
    state = make(optimizer, **HOW)
    assert step.eval_shape(state, batch)[1]["loss"].shape == ()
    assert step.trace(state, batch) is not None
    assert jstep.find_nonfinite(loss_fn, state.params, batch) is None
    with jax.set_mesh(EXPLICIT):
        assert step.eval_shape(state, shape)[1]["loss"].shape == ()
        assert step.lower(jax.eval_shape(lambda: make(optimizer)), shape) is not None
        assert jstep.cost(step, state, shape).devices == 8
        assert jstep.find_nonfinite(step, state, batch) is None
        _, grads = jstep.compute_gradients(loss_fn)(state.params, batch)
        jstep.apply_gradients(state, grads, optimizer)
        jstep.minimize(loss_fn, optimizer, jit=False)(state, batch)


def test_numbers_and_keys_made_while_a_mesh_is_set() -> None:
    with jax.set_mesh(EXPLICIT):
        rate, key, shift = jnp.float32(0.1), jax.random.key(0), jnp.ones(2)
        optimizer = jstep.chain(
            jstep.add_noise(rate, rate, key),
            jstep.clip_gradients(by_global_norm=rate),
            jstep.adamw(jstep.cosine_decay(rate, 10), weight_decay=rate),
        )
        state, _ = jstep.minimize(loss_fn, optimizer)(make(optimizer=optimizer), ROWS)
        jstep.minimize(lambda p, x: loss_fn({**p, "b": p["b"] + shift}, x), OPTIMIZER)(make(), ROWS)
    assert int(jstep.minimize(loss_fn, optimizer)(state, ROWS)[0].global_step) == 2  # and outside


def test_what_takes_a_state_eagerly_while_a_mesh_is_set() -> None:
    ema = jstep.ExponentialMovingAverage(0.9, num_updates=True)
    optimizer = jstep.schedule_free_adamw(jstep.linear_warmup(0.1, 3))
    with jax.set_mesh(EXPLICIT):
        state, _ = jstep.minimize(loss_fn, optimizer)(make(optimizer=optimizer), ROWS)
        step, params = state.global_step, state.params
        assert float(optimizer.hyperparameters(step)["learning_rate"]) == float(jstep.linear_warmup(0.1, 3)(step))
        ema.apply(ema.init(params), params, num_updates=step)
        jstep.schedule_free_params(state)
        jstep.apply_updates(params, jstep.gradients(lambda p: jnp.sum(p["w"] ** 2), params))


@pytest.mark.parametrize("optimizer", [OPTIMIZER, CONSTANT], ids=["a schedule", "constants"])
@pytest.mark.parametrize("how", [{}, HOW], ids=["one device", "a mesh"])
def test_a_transfer_guard_lets_states_and_numpy_batches_pass(optimizer: jstep.Optimizer, how: Any) -> None:
    with jax.transfer_guard("disallow"):
        state = make(optimizer, **how)
        state, metrics = trained(jstep.shard_state(state, EXPLICIT) if how else state, optimizer, by_hand=False)
        keyed = jstep.minimize(lambda p, x, rng: loss_fn(p, x), optimizer, rng=KEY)
        keyed(make(optimizer, **how), ROWS)
    assert int(state.global_step) == 3
    assert float(metrics["learning_rate"][0]) > 0


def test_the_users_functions_see_the_guard() -> None:
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


CONTEXTS = {
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "x64": lambda: jax.enable_x64(True),
    "nans": lambda: jax.debug_nans(True),
    "leaks": lambda: jax.checking_leaks(),
    "no jit": lambda: jax.disable_jit(),
    "precision": lambda: jax.default_matmul_precision("float32"),
    "device": lambda: jax.default_device(jax.devices()[1]),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("how", [{}, HOW], ids=["one device", "a mesh"])
def test_other_contexts(name: str, how: Any) -> None:
    def noisy(params: Any, x: Any, rng: Any) -> jax.Array:
        return loss_fn(params, x + 0 * jax.random.normal(rng, x.shape, x.dtype))

    context: contextlib.AbstractContextManager[Any] = CONTEXTS[name]()
    with context:
        got = trained(make(**how), loss=noisy, num_microbatches=2, rng=KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), got, WANT)


def test_the_loop_on_a_mesh_passes_a_transfer_guard() -> None:
    """The last of several stacked metrics are of the mesh and, the constants among them, of one device."""
    step = jstep.minimize(loss_fn, OPTIMIZER)
    state, rows, hooks = make(**HOW), NamedSharding(AUTO, P("data")), [jstep.NanLossHook()]
    with jax.transfer_guard("disallow"):
        state = jstep.train(
            step, state, lambda n: ROWS, 4, steps_per_call=2, batch_sharding=rows, hooks=hooks, progress=False
        )
    assert jstep.global_step(state) == 4


def test_a_nan_is_found_although_steps_donate() -> None:
    """JAX computes the step again, operation by operation, of the arguments: they must be there still."""
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: jnp.sum(jnp.log(params["w"] * x)), optimizer)
    before = jstep.TrainState.create({"w": np.ones(2, np.float32)}, optimizer)
    ones = np.ones(2, np.float32)
    state, _ = step(before, ones)
    assert before.params["w"].is_deleted()
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"is donated. Set jax_debug_nans .* jstep.find_nonfinite"):
            step(state, -ones)
        with pytest.raises(RuntimeError, match="was donated to an earlier step"):
            step(before, ones)
        state, _ = step(jstep.TrainState.create({"w": ones}, optimizer), ones)
        with pytest.raises(FloatingPointError, match="encountered in log"):
            step(state, -ones)
    assert not state.params["w"].is_deleted()


@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO, None], ids=["explicit", "auto", "that of the context"])
def test_a_loss_may_map_over_shards(mesh: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def squares(w: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.sum((rows @ w) ** 2), "data")

        over = {} if mesh is None else {"mesh": mesh}
        return jax.shard_map(squares, in_specs=(P(), P("data")), out_specs=P(), **over)(params["w"], x)

    step = jstep.minimize(loss, CONSTANT)
    of_state = mesh or EXPLICIT
    batch = jstep.shard_batch(ROWS, of_state)
    _, metrics = step(make(CONSTANT, mesh=of_state, slot_axis="data"), batch)
    np.testing.assert_allclose(metrics["loss"], np.sum((ROWS @ FIRST) ** 2), rtol=1e-6)
