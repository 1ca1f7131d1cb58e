"""Hyperball recipes with `verify_resume`, `plan`, `cost`, held rates, master weights and labels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jax.random.normal(jax.random.key(0), (8, 6)), "v": jax.random.normal(jax.random.key(1), (3, 6, 6))}


def muonh(*more: jstep.Optimizer) -> jstep.Optimizer:
    return jstep.chain(jstep.trace(0.95, use_nesterov=True), jstep.orthogonalize(scale=None), *more)


def labelled(one: jstep.Optimizer) -> jstep.Optimizer:
    return jstep.partition({"a": one, "a/b": jstep.madgrad(0.01)}, lambda path, leaf: "a" if leaf.ndim == 3 else "a/b")


CHAINS: dict[str, Any] = {
    "AdamH": lambda: jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(jstep.held("rate", 0.02))),
    "NorMuonH": lambda: muonh(jstep.normalize_neurons(), jstep.on_hyperball(jstep.linear_warmup(0.02, 3))),
    "masters": lambda: jstep.master_weights(muonh(jstep.normalize_neurons(over="short"), jstep.on_hyperball(0.02, 4))),
    "labels": lambda: jstep.scope("s", labelled(muonh(jstep.on_hyperball(0.02)))),
    "twice": lambda: jstep.chain(
        jstep.scope("one", jstep.normalize_neurons()),
        jstep.scope("two", jstep.normalize_neurons(over="short")),
        jstep.on_hyperball(0.1),
    ),
}


def loss(params: Any, x: Any) -> Any:
    h = x @ params["w"]
    for i in range(3):
        h = jnp.tanh(h @ params["v"][i])
    return jnp.mean(h * h)


@pytest.mark.thorough(except_for=["labels"])
@pytest.mark.parametrize("name", CHAINS)
def test_recipes_with_verify_resume_plan_and_cost(name: str) -> None:
    optimizer = CHAINS[name]()
    low = name == "masters"
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS) if low else PARAMS
    train_step = jstep.minimize(loss, optimizer)
    data = [(jnp.full((4, 8), i, params["w"].dtype),) for i in range(1, 7)]
    assert jstep.verify_resume(lambda: jstep.TrainState.create(params, optimizer), train_step, data, 3, 6).ok
    state = jstep.TrainState.create(params, optimizer)
    assert jstep.cost(train_step, state, *data[0]).flops > 0
    assert ("rate" in str(jstep.plan(optimizer, 6))) == (
        name != "AdamH"
    )  # a held rate is in the state, not in the plan
    for one in data:
        state, metrics = train_step(state, *one)
    new = state.slots["master"] if low else state.params
    assert np.isfinite(metrics["loss"])
    radius = 4.0 if low else jnp.linalg.norm(PARAMS["v"], axis=(-2, -1))
    np.testing.assert_allclose(jnp.linalg.norm(new["v"], axis=(-2, -1)), radius, rtol=2e-6)
    if name == "AdamH":
        state = jstep.set_hyperparameter(state, "rate", 0.0)
        before = np.array(state.params["w"])
        state, _ = train_step(state, *data[0])
        np.testing.assert_array_equal(state.params["w"], before)
