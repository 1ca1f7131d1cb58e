"""Signum: the sign of momentum."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import rate
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def signum(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta: ScalarOrSchedule = 0.9,
) -> Optimizer:
    """Signum: m = β·m + (1−β)·g; p −= lr·sign(m).

    Args:
        learning_rate: The step size lr ≥ 0.
        beta: The decay of m, in [0, 1); 0 is signSGD.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.signum(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018); `optax.signum`.
    """
    return leafwise(
        signum_rule,
        slots={"m": 0.0},
        hyper={"learning_rate": rate(learning_rate), "beta": checked("beta", beta, low=0, high=1, below=True)},
        sparse=False,
    )


def signum_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and average."""
    m = average(slots["m"], g, h["beta"])
    return -h["learning_rate"] * jnp.sign(m), {"m": m}
