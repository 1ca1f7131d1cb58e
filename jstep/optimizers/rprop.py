"""Rprop: resilient backpropagation."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked, constant
from jstep.optimizers.leafwise import Hyper, leafwise


def rprop(
    learning_rate: float = 1e-2,
    eta_minus: ScalarOrSchedule = 0.5,
    eta_plus: ScalarOrSchedule = 1.2,
    min_step_size: ScalarOrSchedule = 1e-6,
    max_step_size: ScalarOrSchedule = 50.0,
) -> Optimizer:
    """Rprop: η *= eta_plus where g keeps its sign, η *= eta_minus and g = 0 where it turns; p −= η·sign(g).

    It uses only the signs of gradients, so it is meant for full-batch gradients.

    Args:
        learning_rate: The initial step size η, > 0; fixed when the optimizer is created.
        eta_minus: The factor on η when the gradient changes its sign, in (0, 1).
        eta_plus: The factor on η when the gradient keeps its sign, > 1.
        min_step_size: The smallest η, ≥ 0.
        max_step_size: The largest η, ≥ 0.

    Returns:
        An `Optimizer` with the slots `step_size` (η, initially learning_rate) and `previous` (the last g, initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.rprop(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning" (1993); the results
    match `torch.optim.Rprop`. `optax.rprop` returns the update of the previous step.
    """
    return leafwise(
        rprop_rule,
        slots={"step_size": constant("learning_rate", learning_rate, low=0, above=True), "previous": 0.0},
        hyper={
            "learning_rate": constant("learning_rate", learning_rate, low=0, above=True),
            "eta_minus": checked("eta_minus", eta_minus, low=0, high=1, above=True, below=True),
            "eta_plus": checked("eta_plus", eta_plus, low=1, above=True),
            "min_step_size": checked("min_step_size", min_step_size, low=0),
            "max_step_size": checked("max_step_size", max_step_size, low=0),
        },
        sparse=False,
    )


def rprop_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update, step sizes and gradient."""
    turn = jnp.sign(g) * jnp.sign(slots["previous"])
    one = jnp.ones_like(g)
    factor = jnp.where(turn > 0, h["eta_plus"] * one, jnp.where(turn < 0, h["eta_minus"] * one, one))
    size = jnp.clip(slots["step_size"] * factor, h["min_step_size"], h["max_step_size"])
    g = jnp.where(turn < 0, jnp.zeros_like(g), g)
    u = -size * jnp.sign(g)
    return u, {"step_size": size, "previous": g}
