"""Optax transformations as optimizers of jstep."""

import jax
import jax.numpy as jnp
import optax
import pytest
from against_optax import assert_close, run_jstep, run_optax
from jax.sharding import PartitionSpec as P

import jstep

MASK = {"w": True, "c": False, "b": True, "k": False}
LABELS = {"w": "a", "c": "a", "b": "b", "k": "b"}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "scheduled momentum": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
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
