"""Parameters put into a state whose rule computes them from its slots: FTRL, and rules with an origin."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

RULES = {
    "ftrl": lambda: jstep.ftrl(1e-3, l1_regularization_strength=0.1, l2_regularization_strength=0.01, beta=0.5),
    "ftrl, rate falls": lambda: jstep.ftrl(jstep.exponential_decay(1e-2, 3, 0.5)),
    "ftrl, held rate": lambda: jstep.ftrl(jstep.held("learning_rate", 1e-3)),
    "madgrad": lambda: jstep.madgrad(1e-3),
    "optax madgrad": lambda: jstep.from_optax(optax.contrib.madgrad(1e-3)),
    "optax cocob": lambda: jstep.from_optax(optax.contrib.cocob(alpha=1e4)),
}
WRAPPERS: dict[str, Any] = {
    "plain": lambda rule: rule,
    "masters": jstep.master_weights,
    "compact": lambda rule: jstep.compact(rule, min_size=0),
    "partition": lambda rule: jstep.partition(
        {"a": rule, "b": jstep.sgd(1e-3)}, lambda path, leaf: "a" if path == "w" else "b"
    ),
    "lookahead": jstep.lookahead,
    "average": lambda rule: jstep.with_moving_average(rule, jstep.ExponentialMovingAverage(0.999)),
    "chain": lambda rule: jstep.chain(jstep.clip_gradients(by_global_norm=1.0), rule),
}
EVERY = [(rule, wrapper) for rule in RULES for wrapper in WRAPPERS]
QUICK = ["ftrl-compact"]


def params_of(value: float, dtype: Any = jnp.float32) -> Any:
    return {"b": jnp.full((3,), value, dtype), "w": jnp.full((64, 2), value, dtype)}


def trained(optimizer: Any, state: jstep.TrainState, steps: int) -> jstep.TrainState:
    def loss_fn(params: Any) -> jax.Array:
        return 0.1 * sum(jnp.sum(jnp.square(params[name].astype(jnp.float32) - 0.3)) for name in ("w", "b"))

    step = jstep.minimize(loss_fn, optimizer, donate=False)
    for _ in range(steps):
        state, _ = step(state)
    return state


@pytest.mark.thorough(except_for=QUICK)
@pytest.mark.parametrize(("rule", "wrapper"), EVERY, ids=[f"{rule}-{wrapper}" for rule, wrapper in EVERY])
def test_the_next_update_starts_at_what_was_put(rule: str, wrapper: str) -> None:
    optimizer = WRAPPERS[wrapper](RULES[rule]())
    for steps in (0, 5):
        state = trained(optimizer, jstep.TrainState.create(params_of(1.0), optimizer), steps)
        for value in (100.0, -3.0, 0.0):
            put = trained(optimizer, state.with_params(params_of(value)), 1)
            np.testing.assert_allclose(put.params["w"], value, atol=0.11, rtol=1e-3)


def test_ftrl_takes_a_proximal_step_from_what_was_put() -> None:
    """`p' = shrink(p·Q − g, l1)/Q` with the new Q, as for a `linear` of which p is the minimum."""
    lr, l1, l2, beta, g = 0.1, 0.05, 0.2, 0.3, np.float32(2.0)
    optimizer = jstep.ftrl(lr, l1_regularization_strength=l1, l2_regularization_strength=l2, beta=beta)
    state = jstep.TrainState.create({"w": 1.0}, optimizer).with_params({"w": 3.0})
    after = jstep.apply_gradients(state, {"w": g}, optimizer)
    quadratic = np.sqrt(0.1 + g * g) / lr + 2 * (l2 + beta / (2 * lr))
    np.testing.assert_allclose(after.params["w"], 3.0 - g / quadratic, rtol=1e-6)
    np.testing.assert_allclose(after.slots["accum"]["w"], 0.1 + g * g, rtol=1e-6)


@pytest.mark.thorough(except_for=["madgrad"])
@pytest.mark.parametrize("rule", ["ftrl", "madgrad"])
def test_replaced_parameters_are_a_warning(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    state = jstep.TrainState.create(params_of(1.0), RULES[rule]())
    state.replace(params=params_of(2.0))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'accum'" in record.getMessage() or "'initial'" in record.getMessage()
