"""Optimizers that compute the parameter from sums of gradients: FTRL-Proximal and MADGRAD."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.placement import compute_first, in_order
from jstep.core.trees import Array, Number, Optimizer, ScalarOrSchedule
from jstep.optimizers.directions import BETA, RATE, Result, Values, from_update, positive
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import COPY, SLOW


def ftrl(
    learning_rate: ScalarOrSchedule,
    learning_rate_power: ScalarOrSchedule = -0.5,
    initial_accumulator_value: Number = 0.1,
    l1_regularization_strength: ScalarOrSchedule = 0.0,
    l2_regularization_strength: ScalarOrSchedule = 0.0,
    l2_shrinkage_regularization_strength: ScalarOrSchedule = 0.0,
    beta: ScalarOrSchedule = 0.0,
) -> Optimizer:
    """FTRL-Proximal: per-coordinate learning rates with exact sparsity.

    a' = a + g²; linear += g + 2·shrinkage·p − (a'^−power − a^−power)/lr · p;
    p = (sign(linear)·l1 − linear) / (a'^−power/lr + 2·(l2 + β/(2·lr))) where |linear| > l1, else 0.

    Args:
        learning_rate: The step size lr > 0. When a schedule returns 0, the parameters stay unchanged.
        learning_rate_power: The exponent ≤ 0 of the accumulated squares in the rate: −0.5 as in Adagrad, 0 for a
            constant rate.
        initial_accumulator_value: The initial value of the accumulator, ≥ 0.
        l1_regularization_strength: The l1 penalty ≥ 0, which makes weights with |linear| ≤ l1 exactly 0.
        l2_regularization_strength: The l2 penalty ≥ 0, which favors small weights.
        l2_shrinkage_regularization_strength: An l2 penalty ≥ 0 that is added to the gradient but not to the
            accumulator.
        beta: The paper's β ≥ 0, which lowers the learning rates of the first steps.

    Returns:
        An `Optimizer` with the slots `accum` and `linear` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.ftrl(0.5, l1_regularization_strength=2.0)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.0

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013), algorithm 1;
    `tf.train.FtrlOptimizer`.
    """
    # What the parameters are computed from at each step is a part of them, not a step size: its errors would be theirs.
    slots = {"accum": checked("initial_accumulator_value", initial_accumulator_value, **RATE), "linear": SLOW}
    hyper = {
        "learning_rate": positive("learning_rate", learning_rate),
        "learning_rate_power": learning_rate_power,
        "l1_regularization_strength": l1_regularization_strength,
        "l2_regularization_strength": l2_regularization_strength,
        "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
        "beta": beta,
    }
    return from_update("ftrl", ftrl_update, slots, hyper, by_rows=True)


def ftrl_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update to the minimum of the regularized linear model."""
    lr, power, l1 = h.learning_rate, h.learning_rate_power, h.l1_regularization_strength
    moves = lr > 0
    lr = jnp.where(moves, lr, jnp.ones_like(p, shape=()))

    def rate_power(a: Array) -> Array:
        return jnp.sqrt(a) if isinstance(power, float) and power == -0.5 else jnp.power(a, -power)

    old = s.accum
    shrunk = g + 2 * h.l2_shrinkage_regularization_strength * p
    linear = s.linear + shrunk - (rate_power(old + g * g) - rate_power(old)) / lr * p
    linear = jnp.where(moves, linear, s.linear)
    # Three kernels share these slots: `linear` first, then `accum`, then the parameter from both. Otherwise
    # XLA computes them from the old slots in another order and copies the slots that it has to overwrite.
    linear, old, g = compute_first(linear, old, g)
    (accum,) = in_order(linear, jnp.where(moves, old + g * g, old))
    quadratic = rate_power(accum) / lr + 2 * (h.l2_regularization_strength + h.beta / (2 * lr))
    outweighs = jnp.abs(linear) > l1
    new_p = jnp.where(outweighs, (jnp.sign(linear) * l1 - linear) / quadratic, jnp.zeros_like(p))
    return jnp.where(moves, new_p - p, jnp.zeros_like(p)), {"accum": accum, "linear": linear}


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
    # The parameters are computed from the sum of squares: it is not declared, as in FTRL.
    slots = {"s": SLOW, "grad_sum_sq": 0.0, "initial": COPY}
    hyper = {
        "learning_rate": learning_rate,
        "momentum": checked("momentum", momentum, **BETA),
        "weight_decay": weight_decay,
        "epsilon": epsilon,
    }
    # Momentum also moves rows without a gradient.
    return from_update("madgrad", madgrad_update, slots, hyper, prepare=madgrad_weight)


def madgrad_weight(h: Values) -> dict[str, Any]:
    """λ, the weight of this step's gradients."""
    return {"weight": (h.learning_rate + h.epsilon) * jnp.sqrt(h.age.astype(jnp.result_type(float)))}


def madgrad_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update towards z."""
    g = g if isinstance(h.weight_decay, float) and h.weight_decay == 0.0 else g + h.weight_decay * p
    total, total_square = s.s + h.weight * g, s.grad_sum_sq + h.weight * (g * g)
    root = jnp.cbrt(total_square) + h.epsilon
    # With ε = 0, a parameter whose gradient has always been 0 stays unchanged.
    moved = jnp.where(root > 0, total / jnp.where(root > 0, root, jnp.ones_like(root)), jnp.zeros_like(total))
    z = s.initial - moved
    return (1 - h.momentum) * (z - p), {"s": total, "grad_sum_sq": total_square, "initial": s.initial}
