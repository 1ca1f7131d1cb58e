"""Adagrad."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Number, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def adagrad(learning_rate: ScalarOrSchedule, initial_accumulator_value: Number = 0.1) -> Optimizer:
    """Adagrad: a += g²; p −= lr · g / √a.

    Args:
        learning_rate: The step size lr ≥ 0.
        initial_accumulator_value: The initial value of the accumulator, > 0.

    Returns:
        An `Optimizer` with the slot `accumulator`. A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adagrad(0.5, initial_accumulator_value=3.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.75

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (2011); `tf.train.AdagradOptimizer`.
    """
    return leafwise(
        adagrad_rule,
        slots={"accumulator": checked("initial_accumulator_value", initial_accumulator_value, low=0, above=True)},
        hyper={"learning_rate": checked("learning_rate", learning_rate, low=0)},
    )


def adagrad_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and accumulator."""
    a = slots["accumulator"] + g * g
    return -h["learning_rate"] * g / jnp.sqrt(a), {"accumulator": a}
