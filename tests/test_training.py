"""The step: compiled, donated, counted; its metrics, its keys, its model state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def fresh(optimizer: jstep.Optimizer, **kwargs: Any) -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones(3), "b": 0.5}, optimizer, **kwargs)


def close(a: Any, b: Any, rtol: float = 1e-6) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7)


def test_minimize_is_compute_then_apply() -> None:
    optimizer = jstep.adam(0.1)
    state, metrics = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)
    loss, grads = jstep.compute_gradients(loss_fn)(fresh(optimizer).params, X, Y)
    close(state, jstep.apply_gradients(fresh(optimizer), grads, optimizer), 1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    pure, again = jstep.minimize(loss_fn, optimizer, jit=False)(fresh(optimizer), X, Y)
    close(pure, state, 1e-5)
    assert again.keys() == metrics.keys()


def test_the_first_minute() -> None:
    """What a newcomer types."""
    optimizer = jstep.adam(jstep.exponential_decay(0.1, 100, 0.9, staircase=True))
    state = fresh(optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)
    first = None
    for _ in range(200):
        state, metrics = train_step(state, X, Y)
        first = metrics["loss"] if first is None else first
    assert jstep.global_step(state) == 200
    assert float(metrics["loss"]) < 1e-3 * float(first)


def test_apply_gradients_is_pure() -> None:
    optimizer = jstep.momentum(0.1, 0.9)
    state = fresh(optimizer)
    grads = {"w": jnp.ones(3), "b": jnp.float32(1)}
    one, two = (jstep.apply_gradients(state, grads, optimizer) for _ in range(2))
    close(one, two)
    np.testing.assert_array_equal(state.params["w"], 1.0)
    assert jstep.global_step(state) == 0


# One clock.


def test_everything_reads_the_step_before_the_update() -> None:
    """At N → N+1: the schedule sees N, the metrics report that value, the state counts N + 1."""
    schedule = jstep.piecewise_constant([6], [1.0, 0.25])
    optimizer = jstep.gradient_descent(schedule)
    step = jstep.minimize(lambda p: jnp.sum(p["w"]) + p["b"], optimizer)
    state = fresh(optimizer, global_step=6)
    state, metrics = step(state)
    assert float(metrics["learning_rate"]) == 1.0
    np.testing.assert_array_equal(state.params["w"], 0.0)
    assert jstep.global_step(state) == 7
    state, metrics = step(state)
    assert float(metrics["learning_rate"]) == 0.25
    np.testing.assert_array_equal(state.params["w"], -0.25)


def test_a_step_that_is_not_counted_leaves_the_clock() -> None:
    optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 1, 0.5))
    step = jstep.minimize(loss_fn, optimizer, increment_global_step=False)
    state = fresh(optimizer)
    for _ in range(3):
        state, metrics = step(state, X, Y)
        np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)
    assert jstep.global_step(state) == 0
    grads = {"w": jnp.ones(3), "b": jnp.float32(1)}
    assert jstep.global_step(jstep.apply_gradients(state, grads, optimizer, increment_global_step=False)) == 0


def test_skipped_updates_advance_the_step_but_not_the_age() -> None:
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    good, bad = ({"w": jnp.full(3, g), "b": jnp.float32(1)} for g in (0.5, np.nan))

    def run(grads: Any) -> jstep.TrainState:
        state = fresh(optimizer)
        for g in grads:
            state = jstep.apply_gradients(state, g, optimizer)
        return state

    skipped, plain = run([bad, good, bad, bad, good]), run([good, good])
    close(skipped.params, plain.params)
    close([skipped.slots[k] for k in "mv"], [plain.slots[k] for k in "mv"])
    assert jstep.global_step(skipped) == 5
    assert int(skipped.slots["start_step"]) == 3
    inf = jstep.apply_gradients(plain, {"w": jnp.array([0.0, jnp.inf, 0.0]), "b": None}, optimizer)
    close(inf.params, plain.params)


def test_interrupted_runs_continue_bit_for_bit() -> None:
    optimizer = jstep.with_moving_average(
        jstep.adam(jstep.cosine_decay(0.1, 50)), jstep.ExponentialMovingAverage(0.9, True, True)
    )

    def noisy(params: Any, x: jax.Array, y: jax.Array, *, rng: jax.Array) -> jax.Array:
        return loss_fn(params, x + 0.1 * jax.random.normal(rng, x.shape), y)

    step = jstep.minimize(noisy, optimizer, rng=jax.random.key(0))
    straight = fresh(optimizer)
    for _ in range(6):
        straight, _ = step(straight, X, Y)
    broken = fresh(optimizer)
    for _ in range(3):
        broken, _ = step(broken, X, Y)
    broken = jax.tree.map(jnp.asarray, jax.device_get(broken))
    for _ in range(3):
        broken, _ = step(broken, X, Y)
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(broken), strict=True):
        np.testing.assert_array_equal(a, b)


# Metrics.


def test_metrics_hold_the_loss_and_every_hyperparameter() -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=0.5), jstep.adam(0.1))
    for jit in (True, False):
        _, metrics = jstep.minimize(loss_fn, optimizer, jit=jit)(fresh(optimizer), X, Y)
        assert sorted(metrics) == ["beta1", "beta2", "clip_by_global_norm", "epsilon", "learning_rate", "loss"]
        assert all(isinstance(value, jax.Array) and value.shape == () for value in metrics.values())
        np.testing.assert_allclose([metrics[k] for k in ("beta1", "clip_by_global_norm")], [0.9, 0.5], rtol=1e-6)


def test_norms_on_request() -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=0.5), jstep.gradient_descent(2.0))
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm", "param_norm"))
    _, grads = jstep.compute_gradients(loss_fn)(fresh(optimizer).params, X, Y)
    state, metrics = step(fresh(optimizer), X, Y)
    np.testing.assert_allclose(metrics["grad_norm"], jstep.global_norm(grads), rtol=1e-5)  # raw: before the clip
    np.testing.assert_allclose(metrics["update_norm"], 1.0, rtol=1e-5)  # as added
    np.testing.assert_allclose(metrics["param_norm"], jstep.global_norm(state.params), rtol=1e-5)  # the new ones


def test_norms_leave_integers_and_missing_gradients_out() -> None:
    optimizer = jstep.gradient_descent(1.0)
    params = {"w": jnp.array([3.0]), "n": jnp.array([100]), "k": jax.random.key(0), "f": jnp.array([4.0])}
    state = jstep.TrainState.create(params, optimizer)
    step = jstep.minimize(
        lambda p: jnp.sum(p["w"] * p["f"]), optimizer, var_list=["w"], metrics=("grad_norm", "param_norm")
    )
    state, metrics = step(state)
    assert float(metrics["grad_norm"]) == 4.0
    np.testing.assert_allclose(metrics["param_norm"], np.hypot(-1.0, 4.0), rtol=1e-6)


def test_aux_joins_the_metrics() -> None:
    optimizer = jstep.gradient_descent(0.1)

    def mapping(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return loss_fn(params, x, y), {"accuracy": jnp.float32(0.5), "logits": x}

    def other(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return loss_fn(params, x, y), (x, 3)

    _, metrics = jstep.minimize(mapping, optimizer, has_aux=True)(fresh(optimizer), X, Y)
    assert sorted(metrics) == ["accuracy", "learning_rate", "logits", "loss"]
    assert metrics["logits"].shape == X.shape
    _, metrics = jstep.minimize(other, optimizer, has_aux=True)(fresh(optimizer), X, Y)
    assert sorted(metrics) == ["aux", "learning_rate", "loss"]
    assert int(metrics["aux"][1]) == 3


# Variables and model state.


def test_var_list_leaves_the_rest_as_it_is() -> None:
    optimizer = jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9))
    state, _ = jstep.minimize(loss_fn, optimizer, var_list=["w"])(fresh(optimizer), X, Y)
    assert float(state.params["b"]) == 0.5
    assert float(state.slots["m"]["b"]) == 0.0
    assert np.all(np.asarray(state.params["w"]) != 1.0)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_model_state_passes_through(has_aux: bool, n: int) -> None:
    optimizer = jstep.gradient_descent(0.1)

    def loss(params: Any, model_state: Any, x: jax.Array, y: jax.Array) -> Any:
        new = {"mean": 0.5 * model_state["mean"] + 0.5 * jnp.mean(x), "batches": model_state["batches"] + 1}
        value = loss_fn(params, x, y) + 0.0 * model_state["mean"]
        return value, ((new, {"seen": jnp.int32(x.shape[0])}) if has_aux else new)

    state = fresh(optimizer, model_state={"mean": 0.0, "batches": 0})
    step = jstep.minimize(loss, optimizer, has_model_state=True, has_aux=has_aux, num_microbatches=n)
    plain = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)[0]
    state, metrics = step(state, X, Y)
    close(state.params, plain.params, 1e-5)
    mean = 0.0
    for part in np.split(np.asarray(X), n):
        mean = 0.5 * mean + 0.5 * part.mean()
    np.testing.assert_allclose(state.slots["model_state"]["mean"], mean, rtol=1e-5)
    assert int(state.slots["model_state"]["batches"]) == n
    if has_aux:
        assert int(metrics["seen"]) == 8
    state, _ = step(state, X, Y)
    assert int(state.slots["model_state"]["batches"]) == 2 * n


def test_model_state_keeps_its_dtypes() -> None:
    def loss(params: Any, model_state: Any, x: jax.Array) -> Any:
        return jnp.sum(params["w"]) + 0.0 * params["b"], model_state.astype(jnp.float32) + 0.5

    optimizer = jstep.gradient_descent(0.1)
    state = fresh(optimizer, model_state=jnp.zeros(2, jnp.bfloat16))
    state, _ = jstep.minimize(loss, optimizer, has_model_state=True)(state, X)
    assert state.slots["model_state"].dtype == jnp.bfloat16


# Keys.


def test_rng_is_a_function_of_the_step() -> None:
    key, optimizer = jax.random.key(7), jstep.gradient_descent(0.0)

    def loss(params: Any, *, rng: jax.Array) -> Any:
        return jnp.sum(params["w"]) + params["b"], {"draw": jax.random.uniform(rng)}

    step = jstep.minimize(loss, optimizer, has_aux=True, rng=key)
    state = fresh(optimizer, global_step=3)
    for n in (3, 4):
        state, metrics = step(state)
        assert float(metrics["draw"]) == float(jax.random.uniform(jax.random.fold_in(key, n)))


def test_rng_of_a_microbatch() -> None:
    key, optimizer = jax.random.key(7), jstep.gradient_descent(0.0)

    def loss(params: Any, x: jax.Array, *, rng: jax.Array) -> Any:
        return jnp.sum(params["w"]) * jnp.mean(x), {"draw": jax.random.uniform(rng)}

    step = jstep.minimize(loss, optimizer, has_aux=True, rng=key, num_microbatches=2)
    _, metrics = step(fresh(optimizer, global_step=3), X)
    draws = [jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 3), i)) for i in range(2)]
    np.testing.assert_allclose(metrics["draw"], np.mean(draws), rtol=1e-6)


# Microbatches.


def test_microbatches_are_one_update() -> None:
    optimizer = jstep.adam(0.1)
    whole, one = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)
    parts, many = jstep.minimize(loss_fn, optimizer, num_microbatches=4)(fresh(optimizer), X, Y)
    close(parts.params, whole.params, 1e-4)
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    assert jstep.global_step(parts) == 1


# Compiling and donating.


def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_norm=1.0), jstep.rmsprop(jstep.linear_warmup(0.1, 10)))
    traces = []

    def loss(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        traces.append(1)
        return loss_fn(params, *batch) + 0 * jax.random.uniform(rng), (model_state, {"n": 1})

    step = jstep.minimize(
        loss, optimizer, has_aux=True, has_model_state=True, rng=jax.random.key(0), metrics=("grad_norm",)
    )
    many = jstep.scan_steps(step)
    state = fresh(optimizer, model_state={"mean": 0.0, "count": 0, "list": [1.0]})
    batch, stack = (X, Y), (jnp.stack([X, X]), jnp.stack([Y, Y]))
    state, _ = step(state, batch)
    state, _ = many(state, stack)
    before = len(traces)
    with compilations() as seen:
        for _ in range(2):
            state, _ = step(state, batch)
            state, _ = many(state, stack)
    assert seen == []
    assert len(traces) == before
    assert jstep.global_step(state) == 9


def test_the_state_is_donated_unless_told() -> None:
    optimizer = jstep.adam(0.1)
    state = fresh(optimizer)
    new, _ = jstep.minimize(loss_fn, optimizer)(state, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    kept = fresh(optimizer)
    jstep.minimize(loss_fn, optimizer, donate=False)(kept, X, Y)
    jstep.minimize(loss_fn, optimizer, jit=False)(kept, X, Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


def test_a_donated_state_used_again_is_explained() -> None:
    optimizer = jstep.adam(0.1)
    state, step = fresh(optimizer), jstep.minimize(loss_fn, optimizer)
    step(state, X, Y)
    with pytest.raises(RuntimeError, match=r"donated.*donate=False"):
        step(state, X, Y)


def test_lowering_and_tracing() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    shapes = jax.eval_shape(lambda: fresh(optimizer))
    compiled = step.lower(shapes, X, Y).compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    assert step.eval_shape(shapes, X, Y)[0].params["w"].shape == (3,)
    assert "minimize" not in repr(step) or "TrainStep" in repr(step)


def test_a_step_inside_other_transformations() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    state, _ = jax.jit(step)(fresh(optimizer), X, Y)
    close(state.params, step(fresh(optimizer), X, Y)[0].params, 1e-5)
    several = jax.vmap(lambda w: jstep.TrainState.create({"w": w, "b": 0.5}, optimizer))(jnp.eye(3))
    states, metrics = jax.vmap(step, in_axes=(0, None, None))(several, X, Y)
    np.testing.assert_array_equal(states.global_step, [1, 1, 1])
    assert metrics["loss"].shape == (3,)


# scan_steps.


def stacked(k: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(k, 8, 3)), jnp.float32)
    return x, x @ jnp.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize("jit", [True, False])
def test_scan_steps_is_k_steps(jit: bool) -> None:
    optimizer = jstep.adam(jstep.exponential_decay(0.1, 3, 0.5))
    step = jstep.minimize(loss_fn, optimizer, jit=jit)
    xs, ys = stacked(4)
    state, rates = fresh(optimizer), []
    for x, y in zip(xs, ys, strict=True):
        state, metrics = step(state, x, y)
        rates.append(float(metrics["learning_rate"]))
    scanned, all_metrics = jstep.scan_steps(step)(fresh(optimizer), xs, ys)
    close(scanned, state, 1e-4)
    np.testing.assert_allclose(all_metrics["learning_rate"], rates, rtol=1e-6)
    assert all(value.shape == (4,) for value in all_metrics.values())
    assert sorted(all_metrics) == sorted(metrics)


def test_scan_steps_donates_and_takes_trees() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda p, batch: loss_fn(p, *batch), optimizer)
    state = fresh(optimizer)
    new, _ = jstep.scan_steps(step)(state, stacked(3))
    assert jstep.global_step(new) == 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_scan_steps_without_args() -> None:
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2) + p["b"] ** 2, optimizer)
    state, metrics = jstep.scan_steps(step, length=5)(fresh(optimizer))
    assert jstep.global_step(state) == 5
    assert metrics["loss"].shape == (5,)


# Composition.


def test_partition_gives_each_label_its_own_optimizer() -> None:
    optimizer = jstep.partition(
        {"fast": jstep.gradient_descent(1.0), "slow": jstep.momentum(0.1, 0.9)},
        lambda path, leaf: "fast" if leaf.ndim else "slow",
    )
    state = fresh(optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.ones(3), "b": jnp.float32(1)}, optimizer)
    np.testing.assert_allclose(state.params["w"], 0.0)
    np.testing.assert_allclose(state.params["b"], 0.4, rtol=1e-6)
    assert jstep.get_slot_names(state) == ["slow/momentum"]
    assert jstep.get_slot(state, "slow/momentum", "w") is None
    only = jstep.apply_gradients(state, {"w": jnp.ones(3), "b": None}, optimizer)
    assert float(only.params["b"]) == float(state.params["b"])


def test_a_chain_passes_updates_on() -> None:
    """Momentum, then a clip of what momentum made: the elements act in order."""
    first = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.gradient_descent(2.0))
    last = jstep.chain(jstep.gradient_descent(2.0), jstep.clip_gradients(by_value=1.0))
    grads = {"w": jnp.full(3, 5.0), "b": jnp.float32(0.25)}
    a, b = (jstep.apply_gradients(fresh(o), grads, o).params for o in (first, last))
    np.testing.assert_allclose(a["w"], 1 - 2.0)
    np.testing.assert_allclose(b["w"], 1 - 1.0)
    np.testing.assert_allclose([a["b"], b["b"]], [0.0, 0.0])


def test_nested_names() -> None:
    optimizer = jstep.chain(
        jstep.scope("outer", jstep.chain(jstep.scope("inner", jstep.adam(0.1)))),
        jstep.scope("second", jstep.momentum(1.0, 0.5)),
    )
    state = fresh(optimizer)
    assert jstep.get_slot_names(state) == ["outer/inner/m", "outer/inner/v", "second/momentum"]
    assert "outer/inner/start_step" in state.slots
    assert "outer/inner/beta1" in optimizer.hyperparameters(0)
    jstep.minimize(loss_fn, optimizer)(state, X, Y)


def test_an_optimizer_of_ones_own() -> None:
    def update(updates: Any, slots: Any, params: Any, step: Any) -> Any:
        count = jax.tree.map(lambda c: c + 1, slots["count"])
        return jax.tree.map(lambda g: -jnp.sign(g), updates), {"count": count}

    mine = jstep.Optimizer(
        lambda params, global_step=0: {"count": jax.tree.map(jnp.zeros_like, params)},
        update,
        lambda step: {"mine": 1.0},
    )
    optimizer = jstep.with_moving_average(
        jstep.chain(jstep.clip_gradients(by_norm=1.0), mine), jstep.ExponentialMovingAverage(0.5)
    )
    state, metrics = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)
    assert float(state.slots["count"]["b"]) == 1.0
    assert float(metrics["mine"]) == 1.0
    assert set(np.abs(np.asarray(state.params["w"]) - 1)) == {1.0}


def test_scanned_calls_of_different_lengths_have_metrics_of_their_own_length() -> None:
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda p, x: jnp.sum((p["w"] - x) ** 2), optimizer)
    many = jstep.scan_steps(step)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    for k in (3, 5, 3):
        state, metrics = many(state, jnp.ones((k, 2)))
        assert {value.shape for value in metrics.values()} == {(k,)}
    assert many.constant_metrics == {"learning_rate", "beta1", "beta2", "epsilon"}
