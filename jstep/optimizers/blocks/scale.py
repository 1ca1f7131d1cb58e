"""A constant or scheduled factor as an element of a chain."""

from __future__ import annotations

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def scale(factor: ScalarOrSchedule) -> Optimizer:
    """Scale: factor·u, where u is the update from the previous element.

    Args:
        factor: Any finite number. The sign is not changed: use a negative factor for updates to be added to parameters.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: It is not finite.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale(-0.5))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: `optax.scale`, and `optax.scale_by_schedule`.
    """
    return leafwise(scale_rule, hyper={"factor": checked("factor", factor)})


def scale_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update."""
    return h["factor"] * g, {}
