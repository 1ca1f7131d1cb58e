"""Yogi."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average, corrections, direction
from jstep.optimizers.arguments import adam_hyper
from jstep.optimizers.leafwise import Hyper, leafwise


def yogi(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-3,
) -> Optimizer:
    """Yogi: m averages g; v −= (1−β2)·sign(v − g²)·g²; p −= lr·m̂/(√v̂ + ε).

    m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t), where t is the age of the slots. v decreases no faster than it can increase.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 1e-6), and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.yogi(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Zaheer et al., "Adaptive Methods for Nonconvex Optimization" (2018); the results match `optax.yogi`.
    """
    return leafwise(
        yogi_rule,
        slots={"m": 1e-6, "v": 1e-6},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon),
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def yogi_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, square = average(slots["m"], g, h["beta1"]), g * g
    v = slots["v"] - (1 - h["beta2"]) * jnp.sign(slots["v"] - square) * square
    return -h["learning_rate"] * direction(m, v, h), {"m": m, "v": v}
