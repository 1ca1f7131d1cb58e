"""MADGRAD: dual averaging with momentum and an adaptive step."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.arguments import rate
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, Slot, leafwise


def madgrad(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.9,
    weight_decay: ScalarOrSchedule = 0.0,
    epsilon: ScalarOrSchedule = 1e-6,
) -> Optimizer:
    """MADGRAD: s += λ·g, G += λ·g² with λ = (lr + ε)·√t; z = p₀ − s/(∛G + ε); p = momentum·p + (1 − momentum)·z.

    p₀ are the initial parameters, t is the age of the slots. A learning rate schedule enters through λ: it weights
    gradients, and old gradients keep their weight.

    Args:
        learning_rate: The step size lr ≥ 0; it differs from Adam's and is often larger.
        momentum: The weight of the old p in the new one, in [0, 1).
        weight_decay: Coupled weight decay ≥ 0, added to g as weight_decay·p. The authors recommend 0.
        epsilon: Added to lr and to ∛G, ≥ 0.

    Returns:
        An `Optimizer` with the slots `s` and `grad_sum_sq` (G), initially 0, `initial` (p₀, a copy of the parameters
        in float32 at least), and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.madgrad(0.125, momentum=0.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Defazio and Jelassi, "Adaptivity without Compromise: A Momentumized, Adaptive, Dual Averaged Gradient Method
    for Stochastic Optimization" (2021); the results match the authors' code and `optax.contrib.madgrad`.
    """
    return leafwise(
        madgrad_rule,
        slots={"s": 0.0, "grad_sum_sq": 0.0, "initial": Slot("copy")},
        hyper={
            "learning_rate": rate(learning_rate),
            "momentum": checked("momentum", momentum, low=0, high=1, below=True),
            "weight_decay": checked("weight_decay", weight_decay, low=0),
            "epsilon": checked("epsilon", epsilon, low=0),
        },
        prepare=madgrad_weight,
        aged=True,
        # Momentum also moves rows without a gradient.
        sparse=False,
    )


def madgrad_weight(h: Hyper) -> Hyper:
    """λ, the weight of this step's gradients."""
    return {"weight": (h["learning_rate"] + h["epsilon"]) * jnp.sqrt(h["age"].astype(jnp.result_type(float)))}


def madgrad_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and sums."""
    wd = h["weight_decay"]
    g = g if isinstance(wd, float) and wd == 0.0 else g + wd * p
    s, total = slots["s"] + h["weight"] * g, slots["grad_sum_sq"] + h["weight"] * (g * g)
    root = jnp.cbrt(total) + h["epsilon"]
    # With ε = 0, a parameter whose gradient has always been 0 stays unchanged.
    moved = jnp.where(root > 0, s / jnp.where(root > 0, root, jnp.ones_like(root)), jnp.zeros_like(s))
    z = slots["initial"] - moved
    return (1 - h["momentum"]) * (z - p), {"s": s, "grad_sum_sq": total, "initial": slots["initial"]}
