"""Adam, its old (AdamW, Adamax, NAdam, RAdam) and new variants (AdaBelief to ADOPT), Adafactor."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_bool, as_int
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers import rules
from jstep.optimizers.hyperparameters import as_hyperparameter
from jstep.optimizers.rules import (
    BETA,
    MEAN,
    MEAN_IN_ORDER,
    SLOW,
    SQUARE,
    Decay,
    Result,
    Slot,
    Values,
)

# Adam and its classic variants: AdamW, Adamax, NAdam, RAdam.

M_V = {"m": MEAN, "v": SQUARE}


@makes_optimizer()
def adam(
    learning_rate: ScalarOrSchedule = 0.001,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adam: m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; p −= lr·√(1−β2^t)/(1−β1^t) · m/(√v + ε).

    t = step + 1 − start_step is the age of the slots. With a schedule, β^t is β(step)^t.

    This is TensorFlow's Adam. PyTorch's and Optax's is `adamw(…, weight_decay=0.0)`, which adds ε
    after the bias correction.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v, ≥ 0: the paper's "epsilon hat".

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and `start_step`. With a sparse
        gradient, all rows of m and v decay, as in TF.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adam(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"].round(4))
        0.5

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), before section 2.1;
    `tf.train.AdamOptimizer`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return rules.from_update("adam", adam_update, M_V, hyper, prepare=negative_rate)


def adam_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The paper's efficient form, with both bias corrections in the rate."""
    m = rules.average(s.m, g, h.beta1)
    v = rules.average(s.v, g * g, h.beta2)
    return h.signed_rate * m / (jnp.sqrt(v) + h.epsilon), {"m": m, "v": v}


def negative_rate(h: Values) -> dict[str, Any]:
    root = jnp.sqrt(rules.bias_correction(h.beta2, h.age))
    correction = root / rules.bias_correction(h.beta1, h.age)
    return {"signed_rate": -h.learning_rate * correction}


@makes_optimizer()
def adamw(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 1e-2,
    weight_decay_mask: VarList = None,
    *,
    amsgrad: bool = False,
) -> Optimizer:
    """AdamW: m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; p −= lr·(m̂/(√v̂ + ε) + weight_decay·p).

    m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t), where t = step + 1 − start_step is the age of the slots.
    `adam` adds ε before the correction.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Decoupled weight decay ≥ 0. `decay_weights` makes it independent of lr.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.
        amsgrad: Whether to divide by the largest v so far, as torch does.

    Returns:
        An `Optimizer` with the slots `m`, `v` (and, with amsgrad, `v_max`), initially 0, and
        `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adamw(0.5, weight_decay=0.1, weight_decay_mask=["*kernel"])
        >>> state = jstep.TrainState.create({"kernel": 1.0, "bias": 1.0}, optimizer)
        >>> grads = {"kernel": 3.0, "bias": 3.0}
        >>> params = jstep.apply_gradients(state, grads, optimizer).params
        >>> print(f"{params['kernel']:.3f} {params['bias']:.3f}")
        0.450 0.500

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017); the results match
    `torch.optim.AdamW`, and `optax.adamw` except for AMSGrad.
    """
    slots = {"m": MEAN, "v": SQUARE} | ({"v_max": SQUARE} if as_bool(amsgrad, "amsgrad") else {})
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    return rules.from_direction("adamw", adam_direction, slots, hyper, prepare=corrections)


@makes_optimizer()
def scale_by_adam(
    beta1: ScalarOrSchedule = 0.9, beta2: ScalarOrSchedule = 0.999, epsilon: ScalarOrSchedule = 1e-8
) -> Optimizer:
    """Adam's direction: m̂ / (√v̂ + ε), m̂ = m/(1−β1^t), v̂ = v/(1−β2^t).

    t is the age of the slots.

    Args:
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v̂, ≥ 0.

    Returns:
        An element of a chain with the slots `m` and `v` (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(),
        ...     jstep.add_weight_decay(0.1, ["*kernel"]),
        ...     jstep.scale_by_learning_rate(0.5),
        ... )
        >>> state = jstep.TrainState.create({"kernel": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"kernel": 3.0}, optimizer)
        >>> print(f"{state.params['kernel']:.2f}")
        0.45

    Source: Kingma and Ba (2014); `optax.scale_by_adam`.
    """
    hyper = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return rules.from_update("scale_by_adam", adam_direction, M_V, hyper, prepare=corrections)


def adam_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The direction m̂ / (√v̂ + ε), with the largest v so far if there is such a slot."""
    m = rules.average(s.m, g, h.beta1)
    v = rules.average(s.v, g * g, h.beta2)
    new = {"m": m, "v": v}
    if "v_max" in s:
        v = new["v_max"] = jnp.maximum(s.v_max, v)
    return unbiased_direction(m, v, h), new


def corrections(h: Values) -> dict[str, Any]:
    """The bias corrections, and both combined for `unbiased_direction`, with its ε."""
    first = rules.bias_correction(h.beta1, h.age)
    second = rules.bias_correction(h.beta2, h.age)
    root = jnp.sqrt(second)
    return {
        "unbias1": 1 / first,
        "unbias2": 1 / second,
        "unbias": root / first,
        "epsilon_hat": root * h.epsilon,
    }


def unbiased_direction(m: Array, v: Array, h: Values) -> Array:
    """The direction m̂ / (√v̂ + ε), bias-corrected once for all elements."""
    return h.unbias * m / (jnp.sqrt(v) + h.epsilon_hat)


@makes_optimizer()
def adamax(
    learning_rate: ScalarOrSchedule = 2e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adamax: m averages g; u = max(β2·u, |g| + ε); p −= lr·m̂/u, m̂ = m/(1−β1^t).

    t is the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of u, in [0, 1).
        epsilon: Added to |g|, > 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (u), initially 0, and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adamax(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), section 7.1; the
    results match `optax.adamax` and `torch.optim.Adamax`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
    hyper |= {"epsilon": rules.positive("epsilon", epsilon)}
    return rules.from_update("adamax", adamax_update, M_V, hyper, prepare=corrections)


def adamax_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = rules.average(s.m, g, h.beta1)
    u = jnp.maximum(h.beta2 * s.v, jnp.abs(g) + h.epsilon)
    return -h.learning_rate * h.unbias1 * m / u, {"m": m, "v": u}


@makes_optimizer()
def nadam(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    momentum_decay: ScalarOrSchedule | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """NAdam: p −= lr·((β1·m/(1−β1^(t+1)) + (1−β1)·g/(1−β1^t))/(√v̂ + ε) + weight_decay·p).

    m and v are defined as in Adam; t is the age of the slots. With a momentum_decay ψ the momentum
    grows: μ_t = β1·(1 − 0.96^(tψ)/2), P_t = μ_1·…·μ_t, and the numerator of the first fraction is
    μ_{t+1}·m/(1 − P_{t+1}) + (1 − μ_t)·g/(1 − P_t).

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v̂, ≥ 0.
        momentum_decay: ψ ≥ 0, or None for constant momentum; torch's default is 0.004, Keras's is
            1.0.
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0), the scalar `start_step` and, with
        momentum_decay, the scalar `mu_product` (P, initially 1).

    Example:
        >>> import jstep
        >>> optimizer = jstep.nadam(0.19)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.2f}')
        0.72

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (2016); this is `optax.nadamw`, and
    with momentum_decay `torch.optim.NAdam(decoupled_weight_decay=True)`.
    """
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    if momentum_decay is None:
        return rules.from_direction("nadam", nadam_direction, M_V, hyper, prepare=nadam_weights)
    slots = M_V | {"mu_product": rules.Scalar(1.0)}
    hyper = hyper | {"momentum_decay": momentum_decay}
    return rules.from_direction(
        "nadam", nadam_direction, slots, hyper, prepare=growing_nadam_weights
    )


def nadam_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = rules.average(s.m, g, h.beta1)
    v = rules.average(s.v, g * g, h.beta2)
    numerator = h.weight_m * m + h.weight_g * g
    return numerator / (jnp.sqrt(h.unbias2 * v) + h.epsilon), {"m": m, "v": v}


def nadam_weights(h: Values) -> dict[str, Any]:
    return {
        "weight_m": h.beta1 / rules.bias_correction(h.beta1, h.age + 1),
        "weight_g": (1 - h.beta1) / rules.bias_correction(h.beta1, h.age),
        "unbias2": 1 / rules.bias_correction(h.beta2, h.age),
    }


def growing_nadam_weights(h: Values) -> dict[str, Any]:
    age = h.age.astype(jnp.result_type(h.mu_product))

    def mu(t: Array) -> Array:
        return h.beta1 * (1 - 0.5 * jnp.power(0.96, t * h.momentum_decay))

    current = mu(age)
    following = mu(age + 1)
    product = h.mu_product * current
    return {
        "mu_product": product,
        "weight_m": following / (1 - product * following),
        "weight_g": (1 - current) / (1 - product),
        "unbias2": 1 / rules.bias_correction(h.beta2, h.age),
    }


@makes_optimizer()
def radam(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    threshold: ScalarOrSchedule = 5.0,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """RAdam: p −= lr·(r·m̂/(√v̂ + ε) + weight_decay·p) where ρ_t ≥ threshold.

    Before, p −= lr·(m̂ + weight_decay·p). ρ∞ = 2/(1−β2) − 1, ρ_t = ρ∞ − 2t·β2^t/(1−β2^t),
    r = √[(ρ_t−4)(ρ_t−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ_t)], where t is the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1). Up to 0.6, steps are never rectified.
        epsilon: Added to √v̂, ≥ 0.
        threshold: The smallest ρ_t at which steps are rectified, ≥ 4.
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.radam(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.2f}')
        0.25

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2019); the
    results match `optax.radam`.
    """
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"threshold": threshold, "weight_decay": Decay(weight_decay, weight_decay_mask)}
    return rules.from_direction("radam", radam_direction, M_V, hyper, prepare=rectification)


def radam_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The rectified direction or, in the first steps, m̂."""
    m = rules.average(s.m, g, h.beta1)
    v = rules.average(s.v, g * g, h.beta2)
    factor = h.r / (jnp.sqrt(h.unbias2 * v) + h.epsilon)
    return h.unbias1 * m * jnp.where(h.rectified, factor, jnp.ones_like(factor)), {"m": m, "v": v}


def rectification(h: Values) -> dict[str, Any]:
    seen = rules.bias_correction(h.beta2, h.age)
    longest = 2 / (1 - h.beta2) - 1
    rho = longest - 2 * h.age.astype(seen.dtype) * (1 - seen) / seen
    rectified = (rho >= h.threshold) & (longest > 4)
    # Without rectification the radicand may be negative, and its NaN would leak into derivatives
    # even if discarded.
    safe = jnp.where(rectified, rho, 5.0)
    top = jnp.where(longest > 4, longest, 5.0)
    r = jnp.sqrt((safe - 4) * (safe - 2) * top / ((top - 4) * (top - 2) * safe))
    return corrections(h) | {"r": r, "rectified": rectified}


# Newer variants of Adam: AdaBelief, Yogi, AdEMAMix, Adan, ADOPT.


@makes_optimizer()
def adabelief(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-16,
    epsilon_root: ScalarOrSchedule = 1e-16,
) -> Optimizer:
    """AdaBelief: m averages g; s = β2·s + (1−β2)·(g − m)² + epsilon_root; p −= lr·m̂/(√ŝ + ε).

    m̂ = m/(1−β1^t) and ŝ = s/(1−β2^t), where t is the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of s, in [0, 1).
        epsilon: Added to √ŝ, ≥ 0.
        epsilon_root: Added to s at each step, ≥ 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (s) (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adabelief(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.722

    Source: Zhuang et al., "AdaBelief Optimizer" (2020); the results match `optax.adabelief`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    hyper |= {"epsilon_root": epsilon_root}
    slots = {"v": SQUARE, "m": MEAN_IN_ORDER}  # v is computed from the old m
    return rules.from_direction("adabelief", adabelief_direction, slots, hyper, prepare=corrections)


def adabelief_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = rules.average(s.m, g, h.beta1)
    v = rules.average(s.v, jnp.square(g - m), h.beta2) + h.epsilon_root
    return unbiased_direction(m, v, h), {"m": m, "v": v}


@makes_optimizer()
def yogi(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-3,
) -> Optimizer:
    """Yogi: m averages g; v −= (1−β2)·sign(v − g²)·g²; p −= lr·m̂/(√v̂ + ε).

    m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t), where t is the age of the slots.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v̂, ≥ 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 1e-6), and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.yogi(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Zaheer et al., "Adaptive Methods for Nonconvex Optimization" (2018); the results match
    `optax.yogi`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    slots = {"m": Slot(1e-6, holds="mean"), "v": Slot(1e-6, holds="square")}
    return rules.from_direction("yogi", yogi_direction, slots, hyper, prepare=corrections)


def yogi_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = rules.average(s.m, g, h.beta1)
    square = g * g
    v = s.v - (1 - h.beta2) * jnp.sign(s.v - square) * square
    return unbiased_direction(m, v, h), {"m": m, "v": v}


@makes_optimizer()
def ademamix(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    beta3: ScalarOrSchedule = 0.9999,
    alpha: ScalarOrSchedule = 5.0,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """AdEMAMix: p −= lr·((m̂1 + α·m2)/(√v̂ + ε) + weight_decay·p).

    m1 and m2 average g by β1 and β3, v averages g² by β2. m̂1 and v̂ are bias-corrected; m2 is not.
    Warm up β3 and α over the whole run with `ademamix_beta3` and `ademamix_alpha`.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the fast average, in [0, 1).
        beta2: The decay of v, in [0, 1).
        beta3: The decay of the slow average, in [0, 1).
        alpha: The weight of the slow average, ≥ 0.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m1`, `m2` and `v` (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.ademamix(
        ...     0.25,
        ...     beta3=jstep.ademamix_beta3(0.9, 0.9999, 1000),
        ...     alpha=jstep.ademamix_alpha(5.0, 1000),
        ... )
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.4f}')
        0.7499

    Source: Pagliardini et al., "The AdEMAMix Optimizer" (2024); the results match
    `optax.contrib.ademamix`.
    """
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {
        "beta3": beta3,
        "alpha": alpha,
        "weight_decay": Decay(weight_decay, weight_decay_mask),
    }
    slots = {"m1": MEAN, "m2": SLOW, "v": SQUARE}
    return rules.from_direction("ademamix", ademamix_direction, slots, hyper, prepare=corrections)


def ademamix_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    m1 = rules.average(s.m1, g, h.beta1)
    m2 = rules.average(s.m2, g, h.beta3)
    v = rules.average(s.v, g * g, h.beta2)
    u = (h.unbias1 * m1 + h.alpha * m2) / (jnp.sqrt(h.unbias2 * v) + h.epsilon)
    return u, {"m1": m1, "m2": m2, "v": v}


@makes_optimizer()
def adan(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.98,
    beta2: ScalarOrSchedule = 0.92,
    beta3: ScalarOrSchedule = 0.99,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Adan: p −= lr·(m̂ + β2·d̂)/(√n̂ + ε), then p /= 1 + lr·weight_decay.

    m, d and n average g, Δ and (g + β2·Δ)², decay by β1, β2 and β3 and are bias-corrected. Δ is g
    minus the previous g, and 0 at the first update of a slot.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of d, in [0, 1).
        beta3: The decay of n, in [0, 1).
        epsilon: Added to √n̂, ≥ 0.
        weight_decay: Decoupled, proximal weight decay; ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m`, `d`, `v` (n) and `previous` (the previous gradient),
        initially 0, and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adan(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm" (2022); the results match the
    authors' code and timm.
    """
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"beta3": beta3, "weight_decay": Decay(weight_decay, weight_decay_mask)}
    slots = {"m": MEAN, "d": MEAN, "v": SQUARE, "previous": Slot(in_order=True)}
    return rules.from_update("adan", adan_update, slots, hyper, prepare=adan_corrections)


def adan_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update with proximal weight decay; the gradient's change is 0 at the first update."""
    change = jnp.where(h.first, jnp.zeros_like(g), g - s.previous)
    m = rules.average(s.m, g, h.beta1)
    d = rules.average(s.d, change, h.beta2)
    n = rules.average(s.v, jnp.square(g + h.beta2 * change), h.beta3)
    u = h.unbias1 * m + h.beta2 * h.unbias2 * d
    update = -h.learning_rate * u / (jnp.sqrt(h.unbias3 * n) + h.epsilon)
    if rules.decays(h):
        shrink = h.learning_rate * h.weight_decay
        update = (update - shrink * p) / (1 + shrink)
    return update, {"m": m, "d": d, "v": n, "previous": g}


def adan_corrections(h: Values) -> dict[str, Any]:
    return corrections(h) | {
        "unbias3": 1 / rules.bias_correction(h.beta3, h.age),
        "first": h.age == 1,
    }


@makes_optimizer()
def adopt(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.9999,
    epsilon: ScalarOrSchedule = 1e-6,
) -> Optimizer:
    """ADOPT: u = clip(g/max(√v, ε), ±(t−1)^¼); m averages u; p −= lr·m; then v averages g².

    u is computed from the old v; t is the age of the slots. The first update of a slot sets v = g²
    and leaves the parameters unchanged.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: The lower bound of the divisor √v, > 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adopt(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        1.000

    Source: Taniguchi et al., "ADOPT" (2024); the results match `optax.contrib.adopt`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
    hyper |= {"epsilon": rules.positive("epsilon", epsilon)}
    slots = {"m": MEAN_IN_ORDER, "v": SQUARE}
    return rules.from_direction("adopt", adopt_direction, slots, hyper, prepare=adopt_weights)


def adopt_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The average of gradients that are divided by the old v."""
    u = jnp.clip(g / jnp.maximum(jnp.sqrt(s.v), h.epsilon), -h.bound, h.bound)
    m = h.kept_m * s.m + h.new_m * u
    return h.moves * m, {"m": m, "v": h.kept_v * s.v + h.new_v * (g * g)}


def adopt_weights(h: Values) -> dict[str, Any]:
    first = h.age == 1
    age = h.age.astype(jnp.result_type(float))
    return {
        "bound": jnp.power(age - 1, 0.25),
        "kept_m": jnp.where(first, 1.0, h.beta1),
        "new_m": jnp.where(first, 0.0, 1 - h.beta1),
        "kept_v": jnp.where(first, 0.0, h.beta2),
        "new_v": jnp.where(first, 1.0, 1 - h.beta2),
        "moves": jnp.where(first, 0.0, 1.0),
    }


# Adafactor: factored second moments.

HIGHEST_RELATIVE = 1e-2
"""The upper bound of relative step sizes without a learning_rate."""


@makes_optimizer()
def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    decay_rate: ScalarOrSchedule = 0.8,
    *,
    epsilon: ScalarOrSchedule = 1e-30,
    epsilon_scale: ScalarOrSchedule = 1e-3,
    clip_threshold: ScalarOrSchedule | None = 1.0,
    momentum: ScalarOrSchedule | None = None,
    scale_parameter: bool = True,
    relative_step: bool = False,
    min_dim_size_to_factor: int = 128,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Adafactor: p −= lr·(max(epsilon_scale, rms(p))·u + weight_decay·p), where u is g/√v, clipped.

    To clip is to divide u by max(1, rms(u)/clip_threshold). v averages g² + ε with
    β = 1 − t^(−decay_rate), where t is the age of the slots. If the two largest axes of a leaf have
    min_dim_size_to_factor elements or more, only averages R of the row means and C of the column
    means are stored, and v = R·C/mean(R).

    Args:
        learning_rate: The step size lr ≥ 0; None for 1, or for 0.01 with relative_step.
        decay_rate: How fast β approaches 1, ≥ 0.
        epsilon: Added to g², > 0.
        epsilon_scale: The smallest scale of a parameter, ≥ 0.
        clip_threshold: The largest root mean square of u in a leaf, > 0; None for no bound.
        momentum: The decay of an average of the updates, in [0, 1); None for no momentum.
        scale_parameter: Whether steps are scaled by max(epsilon_scale, rms(p)).
        relative_step: Whether the step size is min(lr, 1/√t).
        min_dim_size_to_factor: The smallest size of the two largest axes of a factored leaf.
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `v_row` (without the largest axis) and `v_col` (without the
        second) for factored leaves, `v` for the others, `m` with momentum, and `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adafactor(0.5)
        >>> state = jstep.TrainState.create({"w": jnp.ones((256, 128))}, optimizer)
        >>> v_row, v_col = state.slots["v_row"]["w"], state.slots["v_col"]["w"]
        >>> print(v_row.shape, v_col.shape, state.slots["v"]["w"])
        (128,) (256,) None

    Source: Shazeer and Stern, "Adafactor" (2018); the results match `optax.adafactor`, except that
    its weight decay is not multiplied by the learning rate.
    """
    min_size = as_int(min_dim_size_to_factor, "min_dim_size_to_factor", at_least=1)
    hyper: dict[str, Any] = {
        "decay_rate": decay_rate,
        "epsilon": rules.positive("epsilon", epsilon),
    }
    hyper |= {
        "epsilon_scale": epsilon_scale,
        "weight_decay": Decay(weight_decay, weight_decay_mask),
    }
    optional = {"learning_rate": learning_rate, "clip_threshold": clip_threshold}
    if momentum is not None:
        optional |= {"momentum": as_hyperparameter("momentum", momentum, **BETA)}
    hyper |= {name: value for name, value in optional.items() if value is not None}
    relative = as_bool(relative_step, "relative_step")
    scales = as_bool(scale_parameter, "scale_parameter")

    def reduced(path: str, leaf: Any, which: int) -> tuple[int, ...] | None:
        """The shape of a leaf without one of its two factored axes."""
        axes = factored_axes(np.shape(leaf), min_size)
        if axes is None:
            return None
        return tuple(np.delete(np.shape(leaf), axes[which]).tolist())

    def whole(path: str, leaf: Any) -> tuple[int, ...] | None:
        return np.shape(leaf) if factored_axes(np.shape(leaf), min_size) is None else None

    def prepare(h: Values) -> dict[str, Any]:
        if "learning_rate" in h:
            lr = h.learning_rate
        else:
            lr = HIGHEST_RELATIVE if relative else 1.0
        age = h.age.astype(jnp.result_type(float))
        return {
            "beta": 1 - jnp.power(age, -h.decay_rate),
            "step_size": jnp.minimum(lr, 1 / jnp.sqrt(age)) if relative else lr,
            "decay_size": lr,
            "scales": scales,
        }

    slots = {
        "v_row": Slot(shape=functools.partial(reduced, which=1), keeps="rows"),
        "v_col": Slot(shape=functools.partial(reduced, which=0), keeps="columns"),
        "v": Slot(shape=whole, holds="square"),
    } | ({} if momentum is None else {"m": MEAN})
    optimizer = rules.from_update("adafactor", adafactor_update, slots, hyper, prepare=prepare)
    return rules.replace_init(optimizer, finished=True)  # also without a learning_rate


def factored_axes(shape: tuple[int, ...], min_size: int) -> tuple[int, int] | None:
    """The second largest and the largest axis; None if one has fewer than `min_size` elements."""
    if len(shape) < 2:
        return None
    second, largest = (int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
    return (second, largest) if shape[second] >= min_size else None


def adafactor_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    square = g * g + h.epsilon
    new = {}
    if s.v is None:
        axes = factored_axes(p.shape, 1)
        assert axes is not None
        second, largest = axes
        row = new["v_row"] = rules.average(s.v_row, jnp.mean(square, largest), h.beta)
        col = new["v_col"] = rules.average(s.v_col, jnp.mean(square, second), h.beta)
        mean = jnp.mean(row, second - 1 if second > largest else second, keepdims=True)
        u = (
            g
            * jnp.expand_dims(1 / jnp.sqrt(row / mean), largest)
            * jnp.expand_dims(1 / jnp.sqrt(col), second)
        )
    else:
        v = new["v"] = rules.average(s.v, square, h.beta)
        u = g / jnp.sqrt(v)
    size = h.step_size
    if "clip_threshold" in h:
        size = size / jnp.maximum(1.0, root_mean_square(u) / h.clip_threshold)
    if h.scales:
        size = size * jnp.maximum(h.epsilon_scale, root_mean_square(p))
    u = size * u
    if "momentum" in h:
        u = new["m"] = rules.average(s.m, u, h.momentum)
    return -(u + h.decay_size * h.weight_decay * p if rules.decays(h) else u), new


def root_mean_square(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x) / max(1, math.prod(x.shape)))
