"""Hyperparameters held in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def state_of(optimizer, **kwargs):
    return jstep.TrainState.create({"w": jnp.array([1.0, 2.0])}, optimizer, **kwargs)


def loss_fn(params):
    return jnp.sum(params["w"])


def test_get_and_set_without_recompilation(compilations):
    optimizer = jstep.gradient_descent(jstep.held("learning_rate", 0.5))
    state = state_of(optimizer)
    assert state.slots["held/learning_rate"].dtype == jnp.float32
    assert "learning_rate" not in optimizer.hyperparameters(0)
    step = jstep.minimize(loss_fn, optimizer)
    state, _ = step(state)
    np.testing.assert_allclose(state.params["w"], [0.5, 1.5])
    with compilations() as seen:
        state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
        state, _ = step(state)
        state = jstep.set_hyperparameter(state, "learning_rate", np.float64(0.125))
        state, _ = step(state)
    assert seen == []
    np.testing.assert_allclose(state.params["w"], [0.125, 1.125])
    assert jstep.get_hyperparameter(state, "learning_rate") == 0.125
    assert isinstance(jstep.get_hyperparameter(state, "learning_rate"), float)


def test_held_values_are_accepted_wherever_schedules_are():
    optimizer = jstep.chain(
        jstep.clip_gradients(by_global_norm=jstep.held("clip", 10.0)),
        jstep.scope(jstep.adam(jstep.held("rate", 0.1), beta2=jstep.held("b2", 0.99)), "deep"),
        jstep.decay_weights(jstep.held("decay", 0.0)),
        jstep.scale_updates({"*": jstep.held("factor", 1.0)}),
    )
    state = state_of(optimizer)
    assert {name for name in state.slots if "held" in name} == {
        "deep/held/b2", "deep/held/rate", "held/clip", "held/decay", "held/factor",
    }  # fmt: skip
    plain = jstep.adam(0.1, beta2=0.99)
    a = jstep.apply_gradients(state, {"w": jnp.ones(2)}, optimizer)
    b = jstep.apply_gradients(state_of(plain), {"w": jnp.ones(2)}, plain)
    np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-5)
    frozen = jstep.set_hyperparameter(a, "factor", 0)
    again = jstep.apply_gradients(frozen, {"w": jnp.ones(2)}, optimizer)
    np.testing.assert_array_equal(again.params["w"], a.params["w"])
    assert jstep.get_hyperparameter(again, "deep/rate") == pytest.approx(0.1)


def test_names_of_other_arguments_raise():
    with pytest.raises(
        ValueError,
        match=r"learning_rate=held\('weight_decay', …\): .* use held\('learning_rate', …\)",
    ):
        jstep.adamw(jstep.held("weight_decay", 0.1))
    jstep.adamw(
        jstep.held("weight_decay", 0.1), weight_decay=jstep.held("learning_rate", 0.1)
    )  # each name appears once


def test_held_values_of_a_population_are_arrays():
    optimizer = jstep.scope(jstep.adam(jstep.held("rate", 0.5)), "net")
    population = jax.vmap(lambda w: jstep.TrainState.create({"w": w}, optimizer))(jnp.ones((4, 2)))
    np.testing.assert_array_equal(jstep.get_hyperparameter(population, "net/rate"), np.full(4, 0.5))
    assert jstep.get_slot_names(population) == ["net/m", "net/v"]
    rates = jnp.array([0.0, 0.1, 0.2, 0.3])
    step = jax.jit(
        jax.vmap(lambda state: jstep.apply_gradients(state, {"w": jnp.ones(2)}, optimizer))
    )
    moved = step(jstep.set_hyperparameter(population, "net/rate", rates))
    np.testing.assert_allclose(1 - moved.params["w"][:, 0], rates, atol=1e-6)
    one = jstep.set_hyperparameter(moved, "net/rate", 0.25)
    assert one.slots["net/held/rate"].shape == (4,)
    step(one)
    assert step._cache_size() == 1
    with pytest.raises(
        ValueError,
        match=r"must be a scalar or an array of shape \(4,\), got shape \(3,\)",
    ):
        jstep.set_hyperparameter(population, "net/rate", jnp.ones(3))
    with pytest.raises(ValueError, match="finite"):
        jstep.set_hyperparameter(population, "net/rate", rates.at[2].set(jnp.nan))


@pytest.mark.parametrize(
    ("saved_with", "restored_with"), [(True, True), (False, True), (True, False)]
)
def test_a_held_value_is_a_float64_under_x64_and_converted_at_a_restore(
    saved_with, restored_with, tmp_path
):
    optimizer = jstep.partition(
        {"a": jstep.sgd(jstep.held("learning_rate", 0.1))}, lambda path, leaf: "a"
    )

    def fresh():
        return (
            state_of(optimizer)
            if not stacked
            else jax.vmap(lambda w: jstep.TrainState.create(w, optimizer))(many)
        )

    for stacked in (False, True):
        many = {"w": jnp.ones((3, 2), jnp.float32)}
        with jax.enable_x64(saved_with), jstep.Saver(tmp_path / str(stacked)) as saver:
            state = jstep.set_hyperparameter(fresh(), "a/learning_rate", 1 / 3)
            saver.save(
                state.replace(params=jax.tree.map(lambda w: w.astype(jnp.float32), state.params))
            )
        with jax.enable_x64(restored_with), jstep.Saver(tmp_path / str(stacked)) as saver:
            target = fresh()
            target = target.replace(
                params=jax.tree.map(lambda w: w.astype(jnp.float32), target.params)
            )
            restored = saver.restore(target)
            value = restored.slots["a/held/learning_rate"]
            assert value.dtype == (jnp.float64 if restored_with else jnp.float32)
            exact = 1 / 3 if saved_with and restored_with else float(np.float32(1 / 3))
            assert np.all(jstep.get_hyperparameter(restored, "a/learning_rate") == exact)
            restored = jstep.set_hyperparameter(restored, "a/learning_rate", 1e-3)
            assert restored.slots["a/held/learning_rate"].dtype == value.dtype


def test_a_held_rate_trains_as_a_constant_under_x64():
    with jax.enable_x64(True):
        ends = []
        for rate in (1e-3, jstep.held("learning_rate", 1e-3)):
            optimizer = jstep.adamw(rate)
            step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
            state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
            state, _ = jstep.scan_steps(step)(state, jnp.ones((50, 3)))
            ends.append(state.params["w"])
        np.testing.assert_allclose(*ends, rtol=1e-13)


def test_a_step_reads_and_sets_a_held_value():
    optimizer = jstep.adamw(jstep.held("learning_rate", 0.5))
    update = jstep.minimize(loss_fn, optimizer, jit=False)

    def step(state):
        state, metrics = update(state)
        rate = jstep.get_hyperparameter(state, "learning_rate")
        return jstep.set_hyperparameter(state, "learning_rate", 0.5 * rate), metrics | {
            "next": rate
        }

    state, metrics = jstep.TrainStep(step)(state_of(optimizer))
    assert (metrics["next"], jstep.get_hyperparameter(state, "learning_rate")) == (0.5, 0.25)
    several = jax.vmap(lambda w: jstep.TrainState.create({"w": w}, optimizer))(jnp.ones((3, 2)))
    rates = jax.vmap(lambda state: jstep.get_hyperparameter(state, "learning_rate"))(several)
    assert rates.shape == (3,)
    with pytest.raises(KeyError, match="holds no such hyperparameter"):
        jax.jit(lambda state: jstep.get_hyperparameter(state, "rate"))(state)
