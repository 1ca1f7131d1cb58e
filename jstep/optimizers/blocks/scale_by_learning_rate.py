"""The learning rate as the last element of a chain."""

from __future__ import annotations

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.arguments import rate
from jstep.optimizers.leafwise import Hyper, leafwise


def scale_by_learning_rate(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Scale by the negative learning rate: −lr·u, where u is the update from the previous element.

    Args:
        learning_rate: The step size lr ≥ 0.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: It is negative.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.75

    Source: `optax.scale_by_learning_rate`.
    """
    return leafwise(scale_by_learning_rate_rule, hyper={"learning_rate": rate(learning_rate)})


def scale_by_learning_rate_rule(
    g: Array, p: Array, slots: dict[str, Array], h: Hyper
) -> tuple[Array, dict[str, Array]]:
    """A leaf's update."""
    return -h["learning_rate"] * g, {}
