"""Optax transformations that need the loss, or what no step can give them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jstep

START = {"x": jnp.float32(-1.0), "y": jnp.float32(2.0)}
X = jnp.ones(4)


def loss_fn(params: Any, x: Any) -> Any:
    x, y = jnp.mean(x) * params["x"].astype(jnp.float32), params["y"].astype(jnp.float32)
    return (1 - x) ** 2 + 10 * (y - x**2) ** 2


@pytest.mark.thorough(except_for=["transformation2-'value'"])
@pytest.mark.parametrize(
    ("transformation", "missing"),
    [
        (optax.lbfgs(), "'value', 'grad', and 'value_fn'"),
        (optax.polyak_sgd(), "'value'"),
        (optax.chain(optax.adam(1.0), optax.contrib.reduce_on_plateau()), "'value'"),
    ],
)
def test_missing_arguments_are_named(transformation: Any, missing: str) -> None:
    grads = {"x": jnp.float32(1.0), "y": jnp.float32(1.0)}
    inner = jstep.from_optax(transformation)
    for optimizer in (inner, jstep.skip_nonfinite(jstep.scope("s", inner))):
        state = jstep.TrainState.create(START, optimizer)
        with pytest.raises(TypeError, match=missing) as caught:
            jstep.apply_gradients(state, grads, optimizer)
        assert any("train with jstep.minimize" in note for note in caught.value.__notes__)
    value_and_grad = jax.value_and_grad(lambda params: loss_fn(params, X))
    context = jstep.Context(jnp.float32(50.0), value_and_grad)
    state = jstep.TrainState.create(START, inner)
    moved = jstep.apply_gradients(state, value_and_grad(START)[1], inner, context=context)
    assert float(moved.params["x"]) != float(START["x"])


# What `dpsgd` makes of its deprecated argument `seed`.
PRIVATE = optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.5, jax.random.key(0)), optax.scale_by_learning_rate(0.1)
)
PRIVATE_ADVICE = r"needs the gradient of each example.*jax\.vmap\(jax\.grad"


@pytest.mark.parametrize("transformation", [PRIVATE, optax.multi_transform({"a": PRIVATE}, "a")])
def test_a_transformation_of_the_gradients_of_examples_is_rejected_by_create(transformation: Any) -> None:
    """A leaf with an axis would train on wrong numbers: the axis is taken for the examples."""
    with pytest.raises(TypeError, match=f"^transformation: .*{PRIVATE_ADVICE}"):
        jstep.TrainState.create({"w": jnp.ones(4)}, jstep.from_optax(transformation))
