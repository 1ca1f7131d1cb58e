"""Training steps with composed optimizers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from regression import X, Y, fresh, loss_fn

import jstep


def test_partition_gives_each_label_its_own_optimizer() -> None:
    optimizer = jstep.partition(
        {"fast": jstep.gradient_descent(1.0), "slow": jstep.momentum(0.1, 0.9)},
        lambda path, leaf: "fast" if leaf.ndim else "slow",
    )
    state = fresh(optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.ones(3), "b": jnp.float32(1)}, optimizer)
    np.testing.assert_allclose(state.params["w"], 0.0)
    np.testing.assert_allclose(state.params["b"], 0.4, rtol=1e-6)
    assert jstep.get_slot_names(state) == ["slow/momentum"]
    assert jstep.get_slot(state, "slow/momentum", "w") is None
    only = jstep.apply_gradients(state, {"w": jnp.ones(3), "b": None}, optimizer)
    assert float(only.params["b"]) == float(state.params["b"])


def test_custom_optimizer() -> None:
    def update(updates: Any, slots: Any, params: Any, step: Any) -> Any:
        count = jax.tree.map(lambda c: c + 1, slots["count"])
        return jax.tree.map(lambda g: -jnp.sign(g), updates), {"count": count}

    custom = jstep.Optimizer(
        lambda params, global_step=0: {"count": jax.tree.map(jnp.zeros_like, params)},
        update,
        lambda step: {"custom": 1.0},
    )
    optimizer = jstep.with_moving_average(
        jstep.chain(jstep.clip_gradients(by_norm=1.0), custom), jstep.ExponentialMovingAverage(0.5)
    )
    state, metrics = jstep.minimize(loss_fn, optimizer)(fresh(optimizer), X, Y)
    assert float(state.slots["count"]["b"]) == 1.0
    assert float(metrics["custom"]) == 1.0
    assert set(np.abs(np.asarray(state.params["w"]) - 1)) == {1.0}
