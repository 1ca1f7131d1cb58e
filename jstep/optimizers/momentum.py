"""Momentum: Polyak's heavy ball and Nesterov's variant."""

from __future__ import annotations

import functools

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, LeafSlots, leafwise


def momentum(learning_rate: ScalarOrSchedule, momentum: ScalarOrSchedule, use_nesterov: bool = False) -> Optimizer:
    """Momentum: a = momentum·a + g; p −= lr·a, or with Nesterov p −= lr·(g + momentum·a).

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of the old direction that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.momentum(0.5, 0.9)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], state.slots["momentum"]["w"])
        -0.45 1.9

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013);
    `tf.train.MomentumOptimizer`.
    """
    return leafwise(
        functools.partial(momentum_rule, use_nesterov=as_bool(use_nesterov, "use_nesterov")),
        slots={"momentum": 0.0},
        hyper={
            "learning_rate": checked("learning_rate", learning_rate, low=0),
            "momentum": checked("momentum", momentum, low=0, high=1),
        },
    )


def momentum_rule(g: Array, p: Array, slots: LeafSlots, h: Hyper, *, use_nesterov: bool) -> tuple[Array, LeafSlots]:
    """A leaf's update and direction."""
    a = h["momentum"] * slots["momentum"] + g
    direction = g + h["momentum"] * a if use_nesterov else a
    return -h["learning_rate"] * direction, {"momentum": a}
