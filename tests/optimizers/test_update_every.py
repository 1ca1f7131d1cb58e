"""`update_every`: when it updates, what it keeps at other steps, and how it composes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close

import jstep

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}


def gradients(n, scale=1.0):
    rng = np.random.default_rng(n)
    return {
        "a": jnp.asarray(scale * rng.normal(size=2), jnp.float32),
        "b": jnp.asarray(scale * rng.normal(size=(1, 1)), jnp.float32),
    }


def run(optimizer, all_gradients, params=PARAMS, start=0):
    """Return all states, including the initial one."""
    states = [jstep.TrainState.create(params, optimizer, start)]
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for grads in all_gradients:
        states.append(step(states[-1], grads))
    return states


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def without_start_steps(slots):
    return {name: tree for name, tree in slots.items() if not name.endswith("start_step")}


@pytest.mark.thorough(except_for=["2-0"])
@pytest.mark.parametrize(("k", "phase"), [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)])
def test_updates_equal_a_run_on_the_due_gradients_alone(k, phase):
    rate = jstep.constant(0.1)
    grads = [gradients(n) for n in range(8)]
    due = [n for n in range(8) if (n - phase) % k == k - 1]
    states = run(jstep.update_every(jstep.adam(rate), k, phase=phase), grads)
    reference = run(jstep.adam(rate), [grads[n] for n in due])
    done = 0
    for n, (before, after) in enumerate(itertools.pairwise(states)):
        done += n in due
        assert_close(after.params, reference[done].params)
        assert_close(without_start_steps(after.slots), without_start_steps(reference[done].slots))
        assert after.slots["start_step"] == n + 1 - done
        if n not in due:
            assert_same(after.params, before.params)


def test_schedules_are_read_at_the_global_step():
    optimizer = jstep.update_every(jstep.gradient_descent(lambda step: step), 2)
    states = run(optimizer, [{"w": jnp.float32(1.0)}] * 4, {"w": 0.0})
    assert [float(state.params["w"]) for state in states] == [0.0, 0.0, -1.0, -1.0, -4.0]
    assert optimizer.hyperparameters(jnp.int32(3))["learning_rate"] == 3.0


@pytest.mark.thorough(except_for=["adam"])
@pytest.mark.parametrize("inner", [jstep.adam, lambda rate: jstep.skip_nonfinite(jstep.adam(rate))])
def test_nan_gradients_of_other_steps_are_ignored(inner):
    optimizer = jstep.update_every(inner(0.1), 2)
    nan = gradients(0, np.nan)
    clean = run(optimizer, [gradients(0), gradients(1), gradients(2), gradients(3)])
    assert_same(run(optimizer, [nan, gradients(1), nan, gradients(3)])[-1], clean[-1])


def test_accumulated_gradients_are_averaged():
    grads = [gradients(n) for n in range(6)]
    mean = [jax.tree.map(lambda *g: sum(g) / 3, *grads[i : i + 3]) for i in (0, 3)]
    optimizer = jstep.update_every(jstep.momentum(0.1, 0.9), 3, accumulate=True)
    states = run(optimizer, grads)
    reference = run(jstep.momentum(0.1, 0.9), mean)
    for n, state in enumerate(states):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            state.params,
            reference[n // 3].params,
        )
        assert all(count == n % 3 for count in jax.tree.leaves(state.slots["gradient_count"]))


def test_an_accumulated_nan_affects_one_update():
    optimizer = jstep.skip_nonfinite(
        jstep.update_every(jstep.gradient_descent(0.5), 2, accumulate=True)
    )
    inside = jstep.update_every(
        jstep.skip_nonfinite(jstep.gradient_descent(0.5)), 2, accumulate=True
    )
    grads = [{"w": jnp.float32(g)} for g in (np.nan, 2.0, 4.0, 2.0)]
    # The outer guard excludes the first gradient from the mean; the inner one skips the update with
    # the mean.
    assert [float(s.params["w"]) for s in run(optimizer, grads, {"w": 0.0})] == [
        0.0,
        0.0,
        -1.0,
        -1.0,
        -2.5,
    ]
    assert [float(s.params["w"]) for s in run(inside, grads, {"w": 0.0})] == [
        0.0,
        0.0,
        0.0,
        0.0,
        -1.5,
    ]


def test_a_leaf_without_a_gradient_keeps_its_sum():
    optimizer = jstep.update_every(jstep.gradient_descent(1.0), 2, accumulate=True)
    one, both = {"a": jnp.float32(1.0), "b": None}, {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}
    states = run(optimizer, [both, one, one, both], {"a": 0.0, "b": 0.0})
    assert [float(state.params["a"]) for state in states] == [0.0, 0.0, -2.0, -2.0, -4.0]
    assert [float(state.params["b"]) for state in states] == [0.0, 0.0, 0.0, 0.0, -4.0]
    assert states[2].slots["gradient_sum"]["b"] == 4.0


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_label_without_gradients_skips_the_step(accumulate):
    optimizer = jstep.partition(
        {
            "x": jstep.update_every(jstep.adam(0.1), 2, accumulate=accumulate),
            "x/y": jstep.adam(0.1),
        },
        lambda path, leaf: "x" if path == "a" else "x/y",
    )
    no_a = [gradients(n) | {"a": None} for n in range(2)]
    states = run(optimizer, [*no_a, gradients(2), gradients(3)])
    assert_same(states[2].params["a"], PARAMS["a"])
    assert states[2].slots["x/start_step"] == 2
    assert states[2].slots["x/y/start_step"] == 0
    assert states[4].slots["x/start_step"] == 3
    with pytest.raises(ValueError, match="No gradients"):
        run(jstep.update_every(jstep.adam(), 2, accumulate=accumulate), [{"a": None, "b": None}])


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("compiled", [False, True])
def test_accumulated_rows_that_no_gradient_names_stay(compiled):
    optimizer = jstep.update_every(
        jstep.chain(jstep.clip_gradients(by_norm=1e6), jstep.momentum(1.0, 0.5)), 2, accumulate=True
    )
    step = lambda state, grad: jstep.apply_gradients(state, {"t": grad}, optimizer)  # noqa: E731
    step = jax.jit(step) if compiled else step
    state, seen = jstep.TrainState.create({"t": jnp.zeros((4, 1))}, optimizer), []
    for ids in ([0, 2], [2, 2], [], [], [3, 3], [0], [1, 1]):
        state = step(
            state, jstep.IndexedSlices(jnp.ones((len(ids), 1)), jnp.array(ids, jnp.int32), (4, 1))
        )
        seen.append(state.params["t"].ravel().tolist())
    one = [-0.5, 0.0, -1.5, 0.0]  # means of two gradients; rows 0 and 2
    assert seen == [
        [0.0] * 4, one, one, one, one, [-1.25, 0.0, -1.5, -1.0], [-1.25, 0.0, -1.5, -1.0],
    ]  # fmt: skip
    assert np.signbit(state.slots["gradient_sum"]["t"].ravel()).tolist() == [
        True,
        False,
        True,
        True,
    ]
    state = step(state, jnp.zeros((4, 1)))  # a dense gradient names all rows
    assert state.params["t"].ravel().tolist() == [-1.625, -1.0, -2.25, -1.5]


@pytest.mark.thorough
@pytest.mark.parametrize("types", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_rows_are_accumulated_on_a_mesh(types):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    optimizer = jstep.update_every(jstep.momentum(1.0, 0.5), 2, accumulate=True)
    step = jstep.minimize(lambda p, ids: jnp.mean(jstep.lookup(p["t"], ids) ** 2), optimizer)
    runs = []
    for sharded in (False, True):
        state = jstep.TrainState.create({"t": jnp.ones((16, 4))}, optimizer)
        state = jstep.shard_state(state, mesh, {"t": jax.P("data")}) if sharded else state
        for seed in range(4):
            ids = np.random.default_rng(seed).integers(0, 16, 8)
            state, _ = step(state, jstep.shard_batch(ids, mesh) if sharded else ids)
        runs.append(jax.device_get((state.params, state.slots)))
    assert_close(*runs)


def test_low_precision_is_accumulated_in_float32():
    optimizer = jstep.update_every(jstep.gradient_descent(1.0), 256, accumulate=True)
    state = jstep.TrainState.create({"w": jnp.bfloat16(0.0)}, optimizer)
    grads = {"w": jnp.full(256, 1.0, jnp.bfloat16)}
    step = jax.jit(
        lambda state: jax.lax.scan(
            lambda s, g: (jstep.apply_gradients(s, g, optimizer), None), state, grads
        )[0]
    )
    assert state.slots["gradient_sum"]["w"].dtype == jnp.float32
    assert step(state).params["w"] == -1.0


def test_skipped_steps_inside_a_guard_do_not_age():
    optimizer = jstep.skip_nonfinite(jstep.update_every(jstep.adam(0.1), 2))
    grads = [gradients(0), gradients(1, np.nan), gradients(2), gradients(3), gradients(4)]
    state = run(optimizer, grads)[-1]
    assert_close(state.params, run(jstep.adam(0.1), [gradients(3)])[-1].params)
    assert (state.slots["start_step"], state.slots["last_finite_step"]) == (4, 5)


def test_a_guard_inside_skips_only_updates_that_are_due():
    optimizer = jstep.update_every(jstep.skip_nonfinite(jstep.gradient_descent(0.1)), 2)
    step = jstep.minimize(lambda params, x: params["w"] * x, optimizer)
    state, skipped = jstep.TrainState.create({"w": 1.0}, optimizer), []
    for _ in range(2):
        state, metrics = step(state, jnp.float32(jnp.nan))
        skipped.append(float(metrics["skipped"]))
    assert skipped == [0.0, 1.0]
