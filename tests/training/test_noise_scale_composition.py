"""The gradient noise scale: position of the wrapper."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jstep

PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
MEASURING = lambda: jstep.with_noise_scale(jstep.gradient_descent(1.0))  # noqa: E731
SGD = lambda: jstep.gradient_descent(1.0)  # noqa: E731
MISPLACED: dict[str, Callable[[], jstep.Optimizer]] = {
    "label": lambda: jstep.partition({"a": MEASURING(), "b": SGD()}, lambda path, leaf: path),
    "only-label": lambda: jstep.partition({"a": MEASURING()}, lambda path, leaf: "a"),
    "behind": lambda: jstep.chain(jstep.add_weight_decay(0.1), MEASURING()),
    "before": lambda: jstep.chain(MEASURING(), jstep.decay_weights(0.1)),
    "deep": lambda: jstep.dynamic_loss_scale(
        jstep.scope("s", jstep.partition({"a": jstep.master_weights(MEASURING())}, lambda path, leaf: "a"))
    ),
}


def loss_fn(params: Any, x: Any) -> Any:
    return params["a"] * jnp.mean(x) + params["b"]


@pytest.mark.parametrize("place", MISPLACED)
def test_misplaced_wrapper_raises(place: str) -> None:
    optimizer = MISPLACED[place]()
    state = jstep.TrainState.create(PARAMS, optimizer)
    for metrics in ((), ("noise_scale",)):
        step = jstep.minimize(loss_fn, optimizer, num_microbatches=2, metrics=metrics)
        with pytest.raises(ValueError, match=r"with_noise_scale: must wrap the whole .*noise/gradient_noise'"):
            step(state, jnp.ones(2))


def test_loss_scale_must_be_outermost() -> None:
    optimizer = jstep.with_noise_scale(jstep.dynamic_loss_scale(SGD()))
    step = jstep.minimize(loss_fn, optimizer, num_microbatches=2, metrics=("noise_scale",))
    with pytest.raises(ValueError, match="dynamic_loss_scale: must be outermost"):
        step(jstep.TrainState.create(PARAMS, optimizer), jnp.ones(2))


def test_aux_metric_of_the_same_name_is_refused() -> None:
    optimizer = MEASURING()
    step = jstep.minimize(
        lambda params, x: (loss_fn(params, x), {"noise_scale": 1.0}),
        optimizer,
        has_aux=True,
        num_microbatches=2,
        metrics=("noise_scale",),
    )
    with pytest.raises(ValueError, match="both have 'noise_scale'"):
        step(jstep.TrainState.create(PARAMS, optimizer), jnp.ones(2))
