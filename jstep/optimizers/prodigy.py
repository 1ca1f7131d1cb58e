"""Prodigy: Adam with an automatically estimated learning rate."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers import age as ages
from jstep.optimizers.directions import POSITIVE, Result, Scalar, Sums, Values, decay_mask, from_update, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import COPY, MEAN, SLOW, SQUARE


def prodigy(
    learning_rate: ScalarOrSchedule = 1.0,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    beta3: ScalarOrSchedule | None = None,
    epsilon: ScalarOrSchedule = 1e-8,
    d0: ScalarOrSchedule = 1e-6,
    d_coef: ScalarOrSchedule = 1.0,
    growth_rate: ScalarOrSchedule = math.inf,
    bias_correction: bool = False,
    safeguard_warmup: bool = False,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Prodigy: p −= d·lr·(m/(√v + d'·ε) + weight_decay·p), d' the new estimate of the distance to the solution.

    m averages d·g, v averages (d·g)², s = β3·s + (d/d0)·d·lr·g, n = β3·n + (d/d0)·d·lr·⟨g, p0 − p⟩, both over all
    leaves; then d' = max(d, d_coef·n/‖s‖₁), and at most d·growth_rate.

    Args:
        learning_rate: A factor lr ≥ 0 on the estimated rate: 1, or a schedule that falls from 1. At a step where it is
            0, nothing changes.
        beta1: The decay of the first moment, in [0, 1).
        beta2: The decay of the second moment, in [0, 1).
        beta3: The decay of the sums, in [0, 1); None for √β2.
        epsilon: Added to √v, multiplied by d; ≥ 0.
        d0: The initial estimate, > 0.
        d_coef: A factor on the estimate, > 0.
        growth_rate: The largest factor by which the estimate may grow in one step, ≥ 1; usually infinite.
        bias_correction: Whether to multiply the rate by √(1−β2^t)/(1−β1^t), where t is the age of the slots.
        safeguard_warmup: Whether to omit lr from s, for a learning rate with warmup.
        weight_decay: Decoupled weight decay, multiplied by d·lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m`, `v`, `s` (initially 0) and `p0` (a copy of the parameters), and the scalars
        `d`, `d_max`, `d_numerator` and `start_step`. In a `partition`, each label has a separate estimate.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.prodigy(d0=0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(30):
        ...     state = jstep.apply_gradients(state, {"w": 2 * state.params["w"]}, optimizer)
        >>> print(f'{state.slots["d"]:.2f}')
        0.25

    Source: Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner" (2023); the results
    match the authors' `prodigyopt`. `optax.contrib.prodigy` always corrects the bias.
    """
    first = checked("d0", d0, **POSITIVE)
    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "d0": first,
        "d_coef": d_coef,
        "weight_decay": weight_decay,
    }
    if beta3 is not None:
        hyper["beta3"] = beta3
    if not (isinstance(growth_rate, float) and growth_rate == math.inf):
        hyper["growth_rate"] = growth_rate
    corrected, guarded = as_bool(bias_correction, "bias_correction"), as_bool(safeguard_warmup, "safeguard_warmup")
    slots = {"m": MEAN, "v": SQUARE, "s": SLOW, "p0": COPY}
    scalars = {"d": Scalar(first), "d_max": Scalar(first), "d_numerator": Scalar()}
    return from_update(
        "prodigy",
        prodigy_update,
        slots | scalars,
        hyper,
        flags=decay_mask(weight_decay_mask),
        prepare=lambda h: decayed_sizes(h, corrected, guarded),
        sums=Sums(progress, estimate),
    )


def decayed_sizes(h: Values, corrected: bool, guarded: bool) -> dict[str, Any]:
    """The values shared by all leaves: the rate, and the weights of old and new values in each average."""
    lr, d = h.learning_rate, h.d
    beta3 = h.beta3 if "beta3" in h else _root(h.beta2)
    size = d * lr
    if corrected:
        age = h.age
        size = size * jnp.sqrt(ages.bias_correction(h.beta2, age)) / ages.bias_correction(h.beta1, age)
    moves = jnp.asarray(lr > 0)

    def old(share: Any) -> Array:
        return jnp.where(moves, share, 1.0)

    def new(share: Any) -> Array:
        return jnp.where(moves, share, 0.0)

    return {
        "size": size,
        "moves": moves,
        "m_old": old(h.beta1),
        "m_new": new((1 - h.beta1) * d),
        "v_old": old(h.beta2),
        "v_new": new((1 - h.beta2) * d * d),
        "s_old": old(beta3),
        "s_new": new(d / h.d0 * (d if guarded else size)),
        "n_new": d / h.d0 * size,
        "n_old": old(beta3),
    }


def _root(x: Any) -> Any:
    return math.sqrt(x) if isinstance(x, float) else jnp.sqrt(x)


def new_s(g: Array, s: Values, h: Values) -> Array:
    """The weighted sum of gradients."""
    return h.s_old * s.s + h.s_new * g


def progress(g: Array, p: Array, s: Values, h: Values) -> dict[str, Array]:
    """A leaf's terms of the sums ⟨g, p0 − p⟩ and ‖s‖₁."""
    return {"ahead": jnp.sum(g * (s.p0 - p)), "length": jnp.sum(jnp.abs(new_s(g, s, h)))}


def estimate(h: Values) -> dict[str, Any]:
    """The new estimate of the distance."""
    d, highest, length = h.d, h.d_max, h.length
    numerator = h.n_old * h.d_numerator + h.n_new * h.ahead
    # The estimate stays unchanged as long as all gradients have been 0, and at a rate of 0.
    learns = h.moves & (length > 0)
    found = h.d_coef * numerator / jnp.where(learns, length, jnp.ones_like(length))
    first = jnp.where(d == h.d0, jnp.maximum(d, found), d)
    top = jnp.maximum(highest, found)
    new = jnp.minimum(top, first * h.growth_rate) if "growth_rate" in h else top
    return {
        "d": jnp.where(learns, new, d),
        "d_max": jnp.where(learns, top, highest),
        "d_numerator": jnp.where(learns, numerator, h.d_numerator),
        "size": jnp.where(learns, h.size, jnp.zeros_like(h.size)),
    }


def prodigy_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update with the size and d of this step."""
    m = h.m_old * s.m + h.m_new * g
    v = h.v_old * s.v + h.v_new * (g * g)
    denominator = jnp.sqrt(v) + h.d * h.epsilon
    # With ε = 0, a parameter whose gradient has always been 0 stays unchanged.
    u = jnp.where(denominator > 0, m / jnp.where(denominator > 0, denominator, jnp.ones_like(m)), jnp.zeros_like(m))
    return -h.size * with_decay(u, p, h), {"m": m, "v": v, "s": new_s(g, s, h), "p0": s.p0}
