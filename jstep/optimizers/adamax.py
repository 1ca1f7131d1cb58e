"""Adamax."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average, corrections
from jstep.optimizers.arguments import adam_hyper
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def adamax(
    learning_rate: ScalarOrSchedule = 2e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adamax: m averages g; u = max(β2·u, |g| + ε); p −= lr·m̂/u, m̂ = m/(1−β1^t), t the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the largest gradient u, in [0, 1).
        epsilon: Added to |g|, > 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (u), initially 0, and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adamax(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), section 7.1; the results match
    `optax.adamax` and `torch.optim.Adamax`. Keras adds ε to u.
    """
    hyper = adam_hyper(learning_rate, beta1, beta2, epsilon) | {
        "epsilon": checked("epsilon", epsilon, low=0, above=True)
    }
    return leafwise(adamax_rule, slots={"m": 0.0, "v": 0.0}, hyper=hyper, prepare=corrections, aged=True, sparse=False)


def adamax_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update, average and infinity norm."""
    m, u = average(slots["m"], g, h["beta1"]), jnp.maximum(h["beta2"] * slots["v"], jnp.abs(g) + h["epsilon"])
    return -h["learning_rate"] * h["unbias1"] * m / u, {"m": m, "v": u}
