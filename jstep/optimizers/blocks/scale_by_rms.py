"""RMSProp's direction as an element of a chain."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def scale_by_rms(decay: ScalarOrSchedule = 0.9, epsilon: ScalarOrSchedule = 1e-8) -> Optimizer:
    """RMSProp's direction: g / √(r + ε), r = decay·r + (1−decay)·g².

    Args:
        decay: The decay of the average, in [0, 1].
        epsilon: Added under the root, ≥ 0.

    Returns:
        An element of a chain with the slot `rms` (initially 0; that of `rmsprop` is initially 1, as in TF).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_rms(0.75), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton (2012); `optax.scale_by_rms`.
    """
    return leafwise(
        scale_by_rms_rule,
        slots={"rms": 0.0},
        hyper={"decay": checked("decay", decay, low=0, high=1), "epsilon": checked("epsilon", epsilon, low=0)},
    )


def scale_by_rms_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction and second moment."""
    rms = average(slots["rms"], g * g, h["decay"])
    return g / jnp.sqrt(rms + h["epsilon"]), {"rms": rms}
