"""Lion's direction as an element of a chain."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import beta
from jstep.optimizers.leafwise import Hyper, leafwise


def scale_by_lion(beta1: ScalarOrSchedule = 0.9, beta2: ScalarOrSchedule = 0.99) -> Optimizer:
    """Lion's direction: sign(β1·m + (1−β1)·g); then m = β2·m + (1−β2)·g.

    Args:
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).

    Returns:
        An element of a chain with the slot `m` (initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.75

    Source: Chen et al. (2023); `optax.scale_by_lion`.
    """
    return leafwise(
        scale_by_lion_rule,
        slots={"m": 0.0},
        hyper={"beta1": beta("beta1", beta1), "beta2": beta("beta2", beta2)},
        sparse=False,
    )


def scale_by_lion_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction and average."""
    m = slots["m"]
    return jnp.sign(average(m, g, h["beta1"])), {"m": average(m, g, h["beta2"])}
