"""Gradient descent."""

from __future__ import annotations

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def gradient_descent(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Gradient descent: p −= lr · g.

    Args:
        learning_rate: The step size lr ≥ 0.

    Returns:
        An `Optimizer` without slots. A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.5

    Source: `tf.train.GradientDescentOptimizer`.
    """
    return leafwise(
        gradient_descent_rule,
        slots={},
        hyper={"learning_rate": checked("learning_rate", learning_rate, low=0)},
    )


def gradient_descent_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update."""
    return -h["learning_rate"] * g, {}
