"""RMSProp."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, LeafSlots, leafwise


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: ScalarOrSchedule = 0.9,
    momentum: ScalarOrSchedule = 0.0,
    epsilon: ScalarOrSchedule = 1e-10,
    centered: bool = False,
) -> Optimizer:
    """RMSProp: r = decay·r + (1−decay)·g²; mom = momentum·mom + lr·g/√(r + ε); p −= mom.

    Centered, it also keeps mg = decay·mg + (1−decay)·g and divides by √(r − mg² + ε).

    Args:
        learning_rate: The step size lr ≥ 0.
        decay: The decay of the averages, in [0, 1].
        momentum: The fraction of the old update that is kept, in [0, 1].
        epsilon: Added under the root, ≥ 0.
        centered: Whether to divide by an estimate of the variance instead of the second moment.

    Returns:
        An `Optimizer` with the slots `rms` (initially 1), `momentum` (0) and, centered, `mg` (0). A sparse
        gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.rmsprop(0.5, decay=0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton, Coursera lecture 6.5 (2012); Graves, "Generating Sequences With Recurrent
    Neural Networks" (2013), for the centered form; `tf.train.RMSPropOptimizer`. If rounding makes the
    variance negative, it is set to 0; TF returns NaN.
    """
    return leafwise(
        functools.partial(rmsprop_rule, centered=as_bool(centered, "centered")),
        slots={"rms": 1.0, "momentum": 0.0} | ({"mg": 0.0} if centered else {}),
        hyper={
            "learning_rate": checked("learning_rate", learning_rate, low=0),
            "decay": checked("decay", decay, low=0, high=1),
            "momentum": checked("momentum", momentum, low=0, high=1),
            "epsilon": checked("epsilon", epsilon, low=0),
        },
    )


def rmsprop_rule(g: Array, p: Array, slots: LeafSlots, h: Hyper, *, centered: bool) -> tuple[Array, LeafSlots]:
    """A leaf's update and averages."""
    r = h["decay"] * slots["rms"] + (1 - h["decay"]) * (g * g)
    new = {"rms": r}
    variance = r
    if centered:
        new["mg"] = h["decay"] * slots["mg"] + (1 - h["decay"]) * g
        variance = jnp.maximum(r - new["mg"] * new["mg"], 0.0)
    new["momentum"] = h["momentum"] * slots["momentum"] + h["learning_rate"] * g / jnp.sqrt(variance + h["epsilon"])
    return -new["momentum"], new
