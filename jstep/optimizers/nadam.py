"""NAdam: Adam with Nesterov momentum."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import moments
from jstep.optimizers.age import bias_correction
from jstep.optimizers.arguments import adam_hyper, decay_flags, decay_hyper, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def nadam(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    momentum_decay: ScalarOrSchedule | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """NAdam: p −= lr·((β1·m/(1−β1^(t+1)) + (1−β1)·g/(1−β1^t))/(√v̂ + ε) + weight_decay·p), m and v as in Adam.

    With a momentum_decay ψ the momentum grows: μ_t = β1·(1 − 0.96^(tψ)/2), P_t = μ_1·…·μ_t, and the numerator of the
    first fraction is μ_{t+1}·m/(1 − P_{t+1}) + (1 − μ_t)·g/(1 − P_t). t is the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.
        momentum_decay: ψ ≥ 0, or None for constant momentum; torch's default is 0.004, Keras's is 1.0.
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0), the scalar `start_step` and, with momentum_decay, the
        scalar `mu_product` (P, initially 1).

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.nadam(0.19)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.2f}')
        0.72

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (2016). Four algorithms have this name; this is
    `optax.nadamw`, and with momentum_decay `torch.optim.NAdam(decoupled_weight_decay=True)`.
    """
    hyper = adam_hyper(learning_rate, beta1, beta2, epsilon) | decay_hyper(weight_decay)
    if momentum_decay is not None:
        hyper["momentum_decay"] = checked("momentum_decay", momentum_decay, low=0)
    return leafwise(
        nadam_rule,
        slots={"m": 0.0, "v": 0.0},
        scalars={} if momentum_decay is None else {"mu_product": 1.0},
        hyper=hyper,
        flags=decay_flags(weight_decay_mask),
        prepare=shares if momentum_decay is None else growing_shares,
        aged=True,
        sparse=False,
    )


def shares(h: Hyper) -> Hyper:
    """The weights of m and g in the direction, and the bias correction of v."""
    beta1, age = h["beta1"], h["age"]
    return {
        "of_m": beta1 / bias_correction(beta1, age + 1),
        "of_g": (1 - beta1) / bias_correction(beta1, age),
        "unbias2": 1 / bias_correction(h["beta2"], age),
    }


def growing_shares(h: Hyper) -> Hyper:
    """The weights and correction of `shares` for a momentum that grows with the age, and the product of momenta."""
    age = h["age"].astype(jnp.result_type(h["mu_product"]))

    def mu(t: Array) -> Array:
        return h["beta1"] * (1 - 0.5 * jnp.power(0.96, t * h["momentum_decay"]))

    now, later = mu(age), mu(age + 1)
    product = h["mu_product"] * now
    return {
        "mu_product": product,
        "of_m": later / (1 - product * later),
        "of_g": (1 - now) / (1 - product),
        "unbias2": 1 / bias_correction(h["beta2"], h["age"]),
    }


def nadam_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, v = moments(g, slots, h)
    u = (h["of_m"] * m + h["of_g"] * g) / (jnp.sqrt(h["unbias2"] * v) + h["epsilon"])
    return -h["learning_rate"] * with_decay(u, p, h), {"m": m, "v": v}
