"""A loss scale must wrap the whole optimizer; anywhere else it is rejected."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
SGD = lambda: jstep.gradient_descent(1.0)  # noqa: E731
SCALED = lambda: jstep.dynamic_loss_scale(SGD(), initial=4.0)  # noqa: E731
REJECTED: dict[str, Callable[[], jstep.Optimizer]] = {
    "label": lambda: jstep.partition({"a": SCALED(), "b": SGD()}, lambda path, leaf: path),
    "behind": lambda: jstep.chain(jstep.add_weight_decay(0.1), SCALED()),
    "before": lambda: jstep.chain(SCALED(), jstep.decay_weights(0.1)),
    "deep": lambda: jstep.skip_nonfinite(
        jstep.scope("s", jstep.partition({"a": jstep.master_weights(SCALED())}, lambda path, leaf: "a"))
    ),
    "every": lambda: jstep.update_every(2, SCALED()),
    "twice": lambda: jstep.dynamic_loss_scale(jstep.scope("s", SCALED())),
}
ACCEPTED: dict[str, Callable[[], jstep.Optimizer]] = {
    "alone": SCALED,
    "scope": lambda: jstep.scope("s", SCALED()),
    "guard": lambda: jstep.skip_nonfinite(SCALED()),
    "masters": lambda: jstep.master_weights(SCALED()),
    "lookahead": lambda: jstep.lookahead(SCALED()),
    "all": lambda: jstep.scope("s", jstep.skip_nonfinite(jstep.scope("t", jstep.master_weights(SCALED())))),
}


def loss_fn(params: Any, x: Any) -> Any:
    return params["a"] * x + params["b"]


@pytest.mark.parametrize("case", REJECTED)
def test_loss_scales_inside_are_rejected(case: str) -> None:
    optimizer = REJECTED[case]()
    state = jstep.TrainState.create(PARAMS, optimizer)
    step = jstep.minimize(loss_fn, optimizer)
    with pytest.raises(ValueError, match=r"dynamic_loss_scale: must be outermost, got .*loss_scale'.*around the whole"):
        step(state, jnp.float32(1.0))
    with pytest.raises(ValueError, match="must be outermost"):
        jstep.apply_gradients(state, PARAMS, optimizer)


@pytest.mark.thorough(except_for=["all"])
@pytest.mark.parametrize("case", ACCEPTED)
def test_some_wrappers_may_be_around_a_loss_scale(case: str) -> None:
    optimizer = ACCEPTED[case]()
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm",))
    state, metrics = step(jstep.TrainState.create(PARAMS, optimizer), jnp.float32(0.5))
    np.testing.assert_allclose([state.params["a"], state.params["b"]], [0.5, 1.0])
    assert next(float(value) for name, value in metrics.items() if name.endswith("loss_scale")) == 4
    np.testing.assert_allclose(metrics["grad_norm"], 1.25**0.5, rtol=1e-6)
    state, metrics = step(state, jnp.float32(jnp.inf))
    assert float(metrics["skipped"]) == 1
    np.testing.assert_allclose([state.params["a"], state.params["b"]], [0.5, 1.0])
