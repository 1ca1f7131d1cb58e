"""Transformations of Optax do not see leaves without a gradient: their numbers are those with these as constants."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

RANDOM = np.random.default_rng(0)
PARAMS = {
    "lora_a": jnp.asarray(RANDOM.normal(size=(4, 2)), jnp.float32),
    "lora_b": jnp.zeros((2, 10)),
    "base": jnp.asarray(RANDOM.normal(size=(4, 10)), jnp.float32),
}
TRAINED = ("lora_a", "lora_b")
X, Y = jnp.ones((1, 4)), jnp.ones((1, 10))


def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((x @ params["base"] + x @ params["lora_a"] @ params["lora_b"] - y) ** 2)


def closed_over(params: Any, x: Any, y: Any) -> jax.Array:
    return loss_fn({**params, "base": PARAMS["base"]}, x, y)


def trained(params: Any, loss: Callable[..., Any], optimizer: Any, **options: Any) -> tuple[list[float], Any]:
    state, step = jstep.TrainState.create(params, optimizer), jstep.minimize(loss, optimizer, **options)
    losses = []
    for _ in range(5):
        state, metrics = step(state, X, Y)
        losses.append(float(metrics["loss"]))
    return losses, state


def by_optax(transformation: Any) -> list[float]:
    params, losses = {name: PARAMS[name] for name in TRAINED}, []
    kept = transformation.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(5):
            loss, grads = jax.value_and_grad(closed_over)(params, X, Y)
            losses.append(float(loss))
            extra = {"value": loss, "grad": grads, "value_fn": lambda p: closed_over(p, X, Y)}
            updates, kept = optax.with_extra_args_support(transformation).update(grads, kept, params, **extra)
            params = optax.apply_updates(params, updates)
    return losses


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "lbfgs": optax.lbfgs,
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "chain": lambda: optax.chain(optax.contrib.reduce_on_plateau(patience=1), optax.clip(100.0), optax.lbfgs()),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["var_list", "partition", "labels"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_frozen_leaf_is_a_constant(name: str, how: str) -> None:
    make = TRANSFORMATIONS[name]
    wanted, state = trained({name: PARAMS[name] for name in TRAINED}, closed_over, make())
    if how == "var_list":
        found, frozen = trained(PARAMS, loss_fn, make(), var_list="lora_*")
    elif how == "labels":
        tree = {"lora_a": "a", "lora_b": "a", "base": None}
        found, frozen = trained(PARAMS, loss_fn, jstep.partition({"a": make()}, tree))
    else:
        found, frozen = trained(
            PARAMS, loss_fn, jstep.partition({"a": make()}, lambda path, leaf: "a" if path in TRAINED else None)
        )
    assert found == wanted
    for leaf in TRAINED:
        np.testing.assert_array_equal(frozen.params[leaf], state.params[leaf])
    np.testing.assert_array_equal(frozen.params["base"], PARAMS["base"])
    np.testing.assert_allclose(found, by_optax(make()), rtol=1e-4)
