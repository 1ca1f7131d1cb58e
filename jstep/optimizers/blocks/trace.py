"""Momentum as an element of a chain."""

from __future__ import annotations

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def trace(momentum: ScalarOrSchedule, use_nesterov: bool = False) -> Optimizer:
    """Momentum: a = momentum·a + g; the direction is a, or with Nesterov g + momentum·a.

    Args:
        momentum: The fraction of the old direction that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An element of a chain with the slot `momentum` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.trace(0.9), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(2.0)}, optimizer).params["w"])
        0.5

    Source: `optax.trace`.
    """
    return leafwise(
        nesterov_rule if as_bool(use_nesterov, "use_nesterov") else trace_rule,
        slots={"momentum": 0.0},
        hyper={"momentum": checked("momentum", momentum, low=0, high=1)},
    )


def trace_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction and buffer."""
    a = h["momentum"] * slots["momentum"] + g
    return a, {"momentum": a}


def nesterov_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction with Nesterov momentum, and its buffer."""
    a = h["momentum"] * slots["momentum"] + g
    return g + h["momentum"] * a, {"momentum": a}
