"""Newer variants of Adam: AdaBelief, Yogi, AdEMAMix, Adan, ADOPT."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import M_V, corrections, unbiased
from jstep.optimizers.age import bias_correction
from jstep.optimizers.directions import (
    Result,
    Values,
    average,
    decay_mask,
    decays,
    from_direction,
    from_update,
    positive,
)
from jstep.optimizers.leafwise import MEAN, SLOW, SQUARE, Slot


def adabelief(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-16,
    epsilon_root: ScalarOrSchedule = 1e-16,
) -> Optimizer:
    """AdaBelief: m averages g; s = β2·s + (1−β2)·(g − m)² + epsilon_root; p −= lr·m̂/(√ŝ + ε).

    m̂ = m/(1−β1^t) and ŝ = s/(1−β2^t), where t is the age of the slots. Steps are large where gradients are as expected.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √ŝ, ≥ 0.
        epsilon_root: Added to s at each step, ≥ 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (s) (initially 0) and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adabelief(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.722

    Source: Zhuang et al., "AdaBelief Optimizer" (2020); the results match `optax.adabelief`.
    """
    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "epsilon_root": epsilon_root,
    }
    # v is computed from the old m.
    return from_direction("adabelief", adabelief_direction, {"v": SQUARE, "m": MEAN}, hyper, prepare=corrections)


def adabelief_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Adam's direction with the variance of g around m."""
    m = average(s.m, g, h.beta1)
    v = average(s.v, jnp.square(g - m), h.beta2) + h.epsilon_root
    return unbiased(m, v, h), {"m": m, "v": v}


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
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return from_direction(
        "yogi",
        yogi_direction,
        {"m": Slot(1e-6, holds="mean"), "v": Slot(1e-6, holds="square")},
        hyper,
        prepare=corrections,
    )


def yogi_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Adam's direction with a v that changes by at most (1−β2)·g²."""
    m, square = average(s.m, g, h.beta1), g * g
    v = s.v - (1 - h.beta2) * jnp.sign(s.v - square) * square
    return unbiased(m, v, h), {"m": m, "v": v}


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
    """AdEMAMix: m1, m2 average g by β1, β3, v averages g² by β2; p −= lr·((m̂1 + α·m2)/(√v̂ + ε) + weight_decay·p).

    m̂1 and v̂ are bias-corrected; m2 is not, because it should fill slowly. β3 and α are usually warmed up over the
    whole run: see `ademamix_beta3` and `ademamix_alpha`.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the fast average, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        beta3: The decay of the slow average, in [0, 1).
        alpha: The weight of the slow average, ≥ 0.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m1`, `m2` and `v` (initially 0) and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.ademamix(
        ...     0.25, beta3=jstep.ademamix_beta3(0.9, 0.9999, 1000), alpha=jstep.ademamix_alpha(5.0, 1000)
        ... )
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.4f}')
        0.7499

    Source: Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024); the results match
    `optax.contrib.ademamix`, with v in float32 whatever the dtype of the parameters.
    """
    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "beta3": beta3,
        "alpha": alpha,
        "weight_decay": weight_decay,
    }
    slots, flags = {"m1": MEAN, "m2": SLOW, "v": SQUARE}, decay_mask(weight_decay_mask)
    return from_direction("ademamix", ademamix_direction, slots, hyper, flags=flags, prepare=corrections)


def ademamix_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Adam's direction with a second, slow average."""
    m1, m2, v = average(s.m1, g, h.beta1), average(s.m2, g, h.beta3), average(s.v, g * g, h.beta2)
    u = (h.unbias1 * m1 + h.alpha * m2) / (jnp.sqrt(h.unbias2 * v) + h.epsilon)
    return u, {"m1": m1, "m2": m2, "v": v}


def adan(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.98,
    beta2: ScalarOrSchedule = 0.92,
    beta3: ScalarOrSchedule = 0.99,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Adan: p −= lr·(m̂ + β2·d̂)/(√n̂ + ε), then p /= 1 + lr·weight_decay; m, d, n average g, Δ, (g + β2·Δ)².

    Δ is g minus the previous g, and 0 at the first update of a slot; m, d and n decay by β1, β2 and β3 and are
    bias-corrected.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the average of gradients, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the average of differences, in [0, 1). A schedule enters the correction as β2(step)^t.
        beta3: The decay of the second moment, in [0, 1). A schedule enters the correction as β3(step)^t.
        epsilon: Added to √n̂, ≥ 0.
        weight_decay: Decoupled, proximal weight decay; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m`, `d`, `v` (n) and `previous` (the previous gradient), initially 0, and the
        scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adan(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm" (2022); the results match the authors' code
    and timm. `optax.adan` 0.2.8 uses 1 − β2 in place of β2.
    """
    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "beta3": beta3,
        "weight_decay": weight_decay,
    }
    slots, flags = {"m": MEAN, "d": MEAN, "v": SQUARE, "previous": 0.0}, decay_mask(weight_decay_mask)
    return from_update("adan", adan_update, slots, hyper, flags=flags, prepare=adan_corrections)


def adan_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update with proximal weight decay; the change of the gradient is 0 at the first update."""
    change = jnp.where(h.first, jnp.zeros_like(g), g - s.previous)
    m, d = average(s.m, g, h.beta1), average(s.d, change, h.beta2)
    n = average(s.v, jnp.square(g + h.beta2 * change), h.beta3)
    u = h.unbias1 * m + h.beta2 * h.unbias2 * d
    update = -h.learning_rate * u / (jnp.sqrt(h.unbias3 * n) + h.epsilon)
    if decays(h):
        shrink = h.learning_rate * h.weight_decay
        update = (update - shrink * p) / (1 + shrink)
    return update, {"m": m, "d": d, "v": n, "previous": g}


def adan_corrections(h: Values) -> dict[str, Any]:
    """The bias corrections of m, d and n, and whether this is the first update."""
    return corrections(h) | {"unbias3": 1 / bias_correction(h.beta3, h.age), "first": h.age == 1}


def adopt(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.9999,
    epsilon: ScalarOrSchedule = 1e-6,
) -> Optimizer:
    """ADOPT: u = clip(g/max(√v, ε), ±(t−1)^¼) by the old v; m averages u; p −= lr·m; then v averages g².

    t is the age of the slots. The first update of a slot sets v = g² and leaves the parameters unchanged.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: The lower bound of the divisor √v, > 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adopt(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        1.000

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any β2 with the Optimal Rate" (2024); the results
    match `optax.contrib.adopt`.
    """
    hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": positive("epsilon", epsilon)}
    return from_direction("adopt", adopt_direction, M_V, hyper, prepare=adopt_weights)


def adopt_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The average of gradients that are divided by the old v."""
    u = jnp.clip(g / jnp.maximum(jnp.sqrt(s.v), h.epsilon), -h.bound, h.bound)
    m = h.kept_m * s.m + h.new_m * u
    return h.moves * m, {"m": m, "v": h.kept_v * s.v + h.new_v * (g * g)}


def adopt_weights(h: Values) -> dict[str, Any]:
    """The bound of u and the weights of the averages; at the first update v is g² and m stays unchanged."""
    first, age = h.age == 1, h.age.astype(jnp.result_type(float))
    return {
        "bound": jnp.power(age - 1, 0.25),
        "kept_m": jnp.where(first, 1.0, h.beta1),
        "new_m": jnp.where(first, 0.0, 1 - h.beta1),
        "kept_v": jnp.where(first, 0.0, h.beta2),
        "new_v": jnp.where(first, 1.0, 1 - h.beta2),
        "moves": jnp.where(first, 0.0, 1.0),
    }
