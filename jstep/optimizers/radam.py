"""RAdam: rectified Adam."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import corrections, moments
from jstep.optimizers.age import bias_correction
from jstep.optimizers.arguments import adam_hyper, decay_flags, decay_hyper, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def radam(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    threshold: ScalarOrSchedule = 5.0,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """RAdam: p −= lr·(r·m̂/(√v̂ + ε) + weight_decay·p) where ρ_t ≥ threshold, lr·(m̂ + weight_decay·p) before.

    ρ∞ = 2/(1−β2) − 1, ρ_t = ρ∞ − 2t·β2^t/(1−β2^t), r = √[(ρ_t−4)(ρ_t−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ_t)], where t is the age
    of the slots. Until v has averaged enough gradients, the step is a momentum step.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t. Up to
            0.6, steps are never rectified.
        epsilon: Added to √v̂, ≥ 0.
        threshold: The smallest ρ_t at which steps are rectified, ≥ 4.
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.radam(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.2f}')
        0.25

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2019); the results match
    `optax.radam`. torch uses ρ_t > 5, and adds ε to √v before the bias correction.
    """
    return leafwise(
        radam_rule,
        slots={"m": 0.0, "v": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon)
        | {"threshold": checked("threshold", threshold, low=4)}
        | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=rectification,
        aged=True,
        sparse=False,
    )


def rectification(h: Hyper) -> Hyper:
    """Whether to rectify, the factor r, and the bias corrections."""
    beta2, age = h["beta2"], h["age"]
    seen = bias_correction(beta2, age)
    longest = 2 / (1 - beta2) - 1
    rho = longest - 2 * age.astype(seen.dtype) * (1 - seen) / seen
    rectified = (rho >= h["threshold"]) & (longest > 4)
    # Without rectification the radicand may be negative, and its NaN would leak into derivatives even if discarded.
    safe, top = jnp.where(rectified, rho, 5.0), jnp.where(longest > 4, longest, 5.0)
    r = jnp.sqrt((safe - 4) * (safe - 2) * top / ((top - 4) * (top - 2) * safe))
    return corrections(h) | {"r": r, "rectified": rectified}


def radam_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, v = moments(g, slots, h)
    factor = h["r"] / (jnp.sqrt(h["unbias2"] * v) + h["epsilon"])
    u = h["unbias1"] * m * jnp.where(h["rectified"], factor, jnp.ones_like(factor))
    return -h["learning_rate"] * with_decay(u, p, h), {"m": m, "v": v}
