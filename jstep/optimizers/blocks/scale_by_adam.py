"""Adam's direction as an element of a chain."""

from __future__ import annotations

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import corrections, direction, moments
from jstep.optimizers.arguments import moments_hyper
from jstep.optimizers.leafwise import Hyper, leafwise


def scale_by_adam(
    beta1: ScalarOrSchedule = 0.9, beta2: ScalarOrSchedule = 0.999, epsilon: ScalarOrSchedule = 1e-8
) -> Optimizer:
    """Adam's direction: m̂ / (√v̂ + ε), m̂ = m/(1−β1^t), v̂ = v/(1−β2^t), where t is the age of the slots.

    Args:
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.

    Returns:
        An element of a chain with the slots `m` and `v` (initially 0) and the scalar `start_step`.

    Example:
        AdamW:

        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(), jstep.add_weight_decay(0.1, ["*kernel"]), jstep.scale_by_learning_rate(0.5)
        ... )
        >>> state = jstep.TrainState.create({"kernel": 1.0}, optimizer)
        >>> print(f"{jstep.apply_gradients(state, {'kernel': jnp.float32(3.0)}, optimizer).params['kernel']:.2f}")
        0.45

    Source: Kingma and Ba (2014); `optax.scale_by_adam`.
    """
    return leafwise(
        scale_by_adam_rule,
        slots={"m": 0.0, "v": 0.0},
        hyper=moments_hyper(beta1, beta2, epsilon),
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def scale_by_adam_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction and moments."""
    m, v = moments(g, slots, h)
    return direction(m, v, h), {"m": m, "v": v}
