"""Optax transformations as optimizers of jstep."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from against_optax import assert_close, run_jstep, run_optax
from jax.sharding import PartitionSpec as P

import jstep

MASK = {"w": True, "c": False, "b": True, "k": False}
LABELS = {"w": "a", "c": "a", "b": "b", "k": "b"}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "scheduled momentum": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "prodigy": optax.contrib.prodigy(1.0),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "noisy": optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "muon": optax.contrib.muon(1e-2),
    "lbfgs": optax.lbfgs(1e-2, linesearch=None),
    "several": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, LABELS),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.thorough(except_for=["masked"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matches_optax(name: str) -> None:
    assert_close(run_jstep(jstep.from_optax(TRANSFORMATIONS[name])).params, run_optax(TRANSFORMATIONS[name]))


def test_slots_and_hyperparameters() -> None:
    optimizer = jstep.from_optax(optax.adam(1e-2), {"learning_rate": 1e-2, "b": jstep.constant(2.0)}, name="theirs")
    state = jstep.TrainState.create({"w": jnp.ones(2, jnp.bfloat16), "n": jnp.array(1), "x": None}, optimizer)
    assert sorted(state.slots) == ["theirs/0/count", "theirs/0/mu", "theirs/0/nu"]
    assert jstep.get_slot_names(state) == ["theirs/0/mu", "theirs/0/nu"]
    assert state.slots["theirs/0/mu"]["w"].dtype == jnp.float32
    assert state.slots["theirs/0/mu"]["n"] is None
    assert {name: float(value) for name, value in optimizer.hyperparameters(3).items()} == {
        "learning_rate": pytest.approx(1e-2), "b": 2.0,
    }  # fmt: skip
    by_function = jstep.from_optax(optax.sgd(0.1), lambda step: {"learning_rate": 0.1 * (step + 1)})
    assert float(by_function.hyperparameters(1)["learning_rate"]) == pytest.approx(0.2)
    step = jstep.minimize(lambda p: jnp.sum(p["w"].astype(jnp.float32)), optimizer)
    _, metrics = step(state)
    assert float(metrics["learning_rate"]) == pytest.approx(1e-2)


def test_missing_and_sparse_gradients() -> None:
    optimizer = jstep.from_optax(optax.chain(optax.adam(0.1), optax.add_decayed_weights(0.1)))
    params = {"table": jnp.ones((4, 2)), "still": jnp.ones(2)}
    rows = jstep.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]), (4, 2))
    state = jstep.TrainState.create(params, optimizer)
    new = jstep.apply_gradients(state, {"table": rows, "still": None}, optimizer)
    dense = jstep.apply_gradients(state, {"table": rows.to_dense(), "still": None}, optimizer)
    np.testing.assert_array_equal(new.params["table"], dense.params["table"])
    np.testing.assert_array_equal(new.params["still"], params["still"])
    np.testing.assert_array_equal(new.slots["optax/0/0/mu"]["still"], 0.0)
    with pytest.raises(ValueError, match="No gradients provided"):
        jstep.apply_gradients(state, {"table": None, "still": None}, optimizer)


def test_composition_and_donation() -> None:
    optimizer = jstep.skip_nonfinite(
        jstep.with_moving_average(
            jstep.partition(
                {"a": jstep.from_optax(optax.contrib.prodigy()), "b": jstep.adam(0.1)},
                lambda path, leaf: "a" if path == "w" else "b",
            ),
            jstep.ExponentialMovingAverage(0.9),
        )
    )
    state = jstep.TrainState.create({"w": jnp.ones(3), "b": jnp.ones(2)}, optimizer)
    step = jstep.minimize(lambda p, x: x * (jnp.sum(p["w"] ** 2) + jnp.sum(p["b"])), optimizer)
    state, _ = step(state, jnp.float32(1.0))
    before = jax.tree.map(jnp.copy, state)
    state, _ = step(state, jnp.float32(jnp.nan))
    assert int(state.slots["a/optax/count"]) == int(before.slots["a/optax/count"]) == 1
    np.testing.assert_array_equal(state.params["w"], before.params["w"])
    np.testing.assert_array_equal(state.slots["a/optax/exp_avg"]["w"], before.slots["a/optax/exp_avg"]["w"])


def test_moments_are_sharded_like_their_parameters() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    optimizer = jstep.from_optax(optax.adam(0.1))
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    state = jstep.TrainState.create(
        params, optimizer, mesh=mesh, param_specs=[("w", P("data", "model"))], slot_axis="data"
    )
    for _ in range(2):
        assert state.slots["optax/0/mu"]["w"].sharding.spec == P("data", "model")
        assert state.slots["optax/0/nu"]["b"].sharding.spec == P("data")
        assert state.slots["optax/0/count"].sharding.spec == P()
        state, _ = jstep.minimize(lambda p: jnp.sum(p["w"]) + jnp.sum(p["b"]), optimizer)(state)


def test_the_error_for_hyperparameters_that_optax_holds_names_their_slot():
    injected = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.5))
    optimizer = jstep.partition({"net": jstep.from_optax(injected)}, lambda path, leaf: "net")
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    for name in ("learning_rate", "net/learning_rate"):
        with pytest.raises(KeyError, match="inject_hyperparams") as error:
            jstep.set_hyperparameter(state, name, 0.25)
        (slot,) = [path for path in state.slots if path.endswith("hyperparams/learning_rate")]
        assert f"state.replace(slots={{**state.slots, {slot!r}: jnp.full_like(state.slots[{slot!r}], value)}})" in str(
            error.value
        )
    with pytest.raises(KeyError, match="it holds none"):
        jstep.set_hyperparameter(state, "other/learning_rate", 0.25)
    with pytest.raises(KeyError, match="it holds none"):
        jstep.set_hyperparameter(state, "rate", 0.25)
