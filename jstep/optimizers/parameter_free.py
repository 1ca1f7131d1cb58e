"""Optimizers without a schedule or learning rate to tune: schedule-free optimizers and Prodigy."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.meshes import supports_meshes
from jstep.core.placement import compute_first, move_to_devices
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, P, ScalarOrSchedule
from jstep.optimizers import rules
from jstep.optimizers.hyperparameters import as_hyperparameter, constant
from jstep.optimizers.rules import (
    COPY,
    MEAN_IN_ORDER,
    SLOW,
    SQUARE,
    Decay,
    Result,
    Scalar,
    Slot,
    Values,
)
from jstep.state.slots import find_slot, master_params, slot_values
from jstep.state.train_state import TrainState

# Prodigy: Adam with an automatically estimated learning rate.


@makes_optimizer()
def prodigy(
    learning_rate: ScalarOrSchedule = 1.0,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    beta3: ScalarOrSchedule | None = None,
    *,
    epsilon: ScalarOrSchedule = 1e-8,
    d0: ScalarOrSchedule = 1e-6,
    d_coef: ScalarOrSchedule = 1.0,
    growth_rate: ScalarOrSchedule = math.inf,
    bias_correction: bool = False,
    safeguard_warmup: bool = False,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Prodigy: p −= d·lr·(m/(√v + d'·ε) + weight_decay·p).

    d' is the new estimate of the distance to the solution.
    m averages d·g, v averages (d·g)², s = β3·s + (d/d0)·d·lr·g, n = β3·n + (d/d0)·d·lr·⟨g, p0 − p⟩,
    both over all leaves; then d' = max(d, d_coef·n/‖s‖₁), and at most d·growth_rate.

    Args:
        learning_rate: A factor lr ≥ 0 on the estimated rate: 1, or a schedule that decreases
            from 1. A step with 0 changes nothing.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        beta3: The decay of the sums, in [0, 1); None for √β2.
        epsilon: Added to √v, multiplied by d; ≥ 0.
        d0: The initial estimate, > 0.
        d_coef: A factor on the estimate, > 0.
        growth_rate: The largest factor by which the estimate grows in one step, ≥ 1.
        bias_correction: Whether to multiply the rate by √(1−β2^t)/(1−β1^t); t is the age of the
            slots.
        safeguard_warmup: Whether to omit lr from s, for a learning rate with warmup.
        weight_decay: Decoupled weight decay, multiplied by d·lr; ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m`, `v`, `s` (initially 0) and `p0` (a copy of the
        parameters), and the scalars `d`, `d_max`, `d_numerator` and `start_step`. In a `partition`,
        each label has a separate estimate.

    Example:
        >>> import jstep
        >>> optimizer = jstep.prodigy(d0=0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(30):
        ...     state = jstep.apply_gradients(state, {"w": 2 * state.params["w"]}, optimizer)
        >>> print(f'{state.slots["d"]:.2f}')
        0.25

    Source: Mishchenko and Defazio, "Prodigy" (2023); the results match the authors' `prodigyopt`.
    """
    first = as_hyperparameter("d0", d0, **rules.POSITIVE)
    hyper = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "d0": first,
    }
    hyper |= {"d_coef": d_coef, "weight_decay": Decay(weight_decay, weight_decay_mask)}
    if beta3 is not None:
        hyper["beta3"] = beta3
    if not (isinstance(growth_rate, float) and growth_rate == math.inf):
        hyper["growth_rate"] = growth_rate
    corrected = as_bool(bias_correction, "bias_correction")
    guarded = as_bool(safeguard_warmup, "safeguard_warmup")
    slots = {"m": MEAN_IN_ORDER, "v": SQUARE, "s": SLOW, "p0": COPY}
    scalars = {"d": Scalar(first), "d_max": Scalar(first), "d_numerator": Scalar()}
    prepare = functools.partial(decay_sizes, corrected=corrected, guarded=guarded)
    return rules.from_update(
        "prodigy",
        prodigy_update,
        slots | scalars,
        hyper,
        prepare=prepare,
        measure=progress,
        conclude=estimate,
    )


def decay_sizes(h: Values, corrected: bool, guarded: bool) -> dict[str, Any]:
    lr = h.learning_rate
    d = h.d
    root = math.sqrt if isinstance(h.beta2, float) else jnp.sqrt
    beta3 = h.beta3 if "beta3" in h else root(h.beta2)
    size = d * lr
    if corrected:
        size = (
            size
            * jnp.sqrt(rules.bias_correction(h.beta2, h.age))
            / rules.bias_correction(h.beta1, h.age)
        )
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
    }


def new_s(g: Array, s: Values, h: Values) -> Array:
    return h.s_old * s.s + h.s_new * g


def progress(g: Array, p: Array, s: Values, h: Values) -> dict[str, Array]:
    """A leaf's terms of the sums ⟨g, p0 − p⟩ and ‖s‖₁."""
    return {"ahead": jnp.sum(g * (s.p0 - p)), "length": jnp.sum(jnp.abs(new_s(g, s, h)))}


def estimate(h: Values) -> dict[str, Any]:
    d = h.d
    highest = h.d_max
    length = h.length
    numerator = h.s_old * h.d_numerator + h.n_new * h.ahead
    # The estimate stays unchanged as long as all gradients have been 0, and at a rate of 0.
    learns = h.moves & (length > 0)
    candidate = h.d_coef * numerator / jnp.where(learns, length, jnp.ones_like(length))
    first = jnp.where(d == h.d0, jnp.maximum(d, candidate), d)
    top = jnp.maximum(highest, candidate)
    new = jnp.minimum(top, first * h.growth_rate) if "growth_rate" in h else top
    return {
        "d": jnp.where(learns, new, d),
        "d_max": jnp.where(learns, top, highest),
        "d_numerator": jnp.where(learns, numerator, h.d_numerator),
        "size": jnp.where(learns, h.size, jnp.zeros_like(h.size)),
    }


def prodigy_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = h.m_old * s.m + h.m_new * g
    v = h.v_old * s.v + h.v_new * (g * g)
    denominator = jnp.sqrt(v) + h.d * h.epsilon
    # With ε = 0, a parameter whose gradient has always been 0 stays unchanged.
    u = jnp.where(
        denominator > 0,
        m / jnp.where(denominator > 0, denominator, jnp.ones_like(m)),
        jnp.zeros_like(m),
    )
    return -h.size * rules.add_decay(u, p, h), {"m": m, "v": v, "s": new_s(g, s, h), "p0": s.p0}


# Schedule-free optimizers, which average iterates instead of decaying the learning rate.

SCALARS = ("weight_sum", "lr_max", "beta1")


@makes_optimizer()
def schedule_free_adamw(
    learning_rate: ScalarOrSchedule = 2.5e-3,
    beta1: float = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_lr_power: ScalarOrSchedule = 2.0,
    r: ScalarOrSchedule = 0.0,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Schedule-free AdamW: u = g/(√v̂ + ε) + weight_decay·y; z −= lr·u; y = (1−β1)·z + β1·x.

    The parameters are y; evaluate and deploy x, which is `schedule_free_params(state)`. x averages
    z: it moves towards z by c = w/Σw, w = t^r · (the highest rate so far)^weight_lr_power, where t
    is the age of the slots. The learning rate needs no decay; warm it up with
    `linear_warmup(lr, steps)`.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The weight of x in y, in (0, 1), a constant.
        beta2: The decay of v, the average of g², in [0, 1).
        epsilon: Added to √v̂, ≥ 0.
        weight_lr_power: The power of the highest rate in the weight of a step, ≥ 0.
        r: The power of the age in the weight of a step.
        weight_decay: Decoupled weight decay of y, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `z` (initially a copy of the parameters) and `v` (0), and the
        scalars `weight_sum`, `lr_max`, `beta1` and `start_step`. BatchNorm statistics belong to y.
        In bfloat16, wrap the optimizer in `master_weights`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.schedule_free_adamw(jstep.linear_warmup(0.5, 2))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": 3.0}, optimizer)
        >>> print(f'{state.params["w"]:.3f} {jstep.schedule_free_params(state)["w"]:.3f}')
        0.340 0.350

    Source: Defazio et al., "The Road Less Scheduled" (2024); the results match Facebook's
    `schedulefree` (`AdamWScheduleFree`).
    """
    beta1 = _beta1(beta1)
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {
        "weight_lr_power": weight_lr_power,
        "r": r,
        "weight_decay": Decay(weight_decay, weight_decay_mask),
    }
    slots = {"z": Slot("copy", holds="weight", in_order=True), "v": SQUARE} | _scalars(beta1)
    return rules.from_update(
        "schedule_free_adamw", adamw_update, slots, hyper, prepare=adamw_weights
    )


@makes_optimizer()
def schedule_free_sgd(
    learning_rate: ScalarOrSchedule = 1.0,
    beta1: float = 0.9,
    weight_lr_power: ScalarOrSchedule = 2.0,
    r: ScalarOrSchedule = 0.0,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Schedule-free SGD: u = g + weight_decay·y; z −= lr·u; x averages z; y = (1−β1)·z + β1·x.

    The parameters are y, x is `schedule_free_params(state)`: see `schedule_free_adamw`.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The weight of x in y, in (0, 1), a constant.
        weight_lr_power: As in `schedule_free_adamw`.
        r: As in `schedule_free_adamw`.
        weight_decay: As in `schedule_free_adamw`.
        weight_decay_mask: As in `schedule_free_adamw`.

    Returns:
        An `Optimizer` with the slot `z` (initially a copy of the parameters), and the scalars
        `weight_sum`, `lr_max`, `beta1` and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.schedule_free_sgd(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": 1.0}, optimizer)
        >>> print(state.params["w"], jstep.schedule_free_params(state)["w"])
        0.75 0.75

    Source: Defazio et al., "The Road Less Scheduled" (2024); Facebook's `schedulefree`
    (`SGDScheduleFree`).
    """
    beta1 = _beta1(beta1)
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "weight_lr_power": weight_lr_power,
        "r": r,
    }
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    slots = {"z": COPY} | _scalars(beta1)
    return rules.from_update("schedule_free_sgd", sgd_update, slots, hyper, prepare=weights)


def _beta1(value: float) -> float:
    return constant("beta1", value, low=0, high=1, above=True, below=True)


def _scalars(beta1: float) -> dict[str, Any]:
    return {"weight_sum": Scalar(), "lr_max": Scalar(), "beta1": Scalar(beta1)}


def weights(h: Values) -> dict[str, Any]:
    lr = h.learning_rate
    age = h.age.astype(h.lr_max.dtype)
    highest = jnp.maximum(h.lr_max, lr)
    weight = jnp.power(age, h.r) * jnp.power(highest, h.weight_lr_power)
    total = h.weight_sum + weight
    # As long as all rates have been 0, there is nothing to average.
    c = jnp.where(
        total > 0, weight / jnp.where(total > 0, total, jnp.ones_like(total)), jnp.zeros_like(total)
    )
    # y' = (1−c)·y + c·z + lr·(β1·(1−c) − 1)·u, expressed in terms of the new z' = z − lr·u.
    return {
        "lr_max": highest,
        "weight_sum": total,
        "c": c,
        "weight_u": lr * (1 - c) * (1 - h.beta1),
    }


def adamw_weights(h: Values) -> dict[str, Any]:
    return weights(h) | {"unbias2": 1 / rules.bias_correction(h.beta2, h.age)}


def sgd_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    u = rules.add_decay(g, p, h)
    z = s.z - h.learning_rate * u
    return h.c * (z - p) - h.weight_u * u, {"z": z}


def adamw_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    # The direction is computed twice, for z and for y, instead of being stored: z first, then y
    # from the new z.
    v, g, p = compute_first(rules.average(s.v, g * g, h.beta2), g, p)
    z = s.z - h.learning_rate * adamw_direction(g, v, p, h)
    z, v, g, p = compute_first(z, v, g, p)
    return h.c * (z - p) - h.weight_u * adamw_direction(g, v, p, h), {"z": z, "v": v}


def adamw_direction(g: Array, v: Array, p: Array, h: Values) -> Array:
    return rules.add_decay(g / (jnp.sqrt(h.unbias2 * v) + h.epsilon), p, h)


@supports_meshes("state.params")
def schedule_free_params(state: TrainState[P], name: str | None = None) -> P:
    """The parameters x = (y − (1−β1)·z)/β1 of a schedule-free optimizer, for evaluation.

    Args:
        state: A `TrainState` with such an optimizer. In `master_weights` or `compact`, y is the
            master copy.
        name: The name of the slot, such as `"embed/z"`, if there are several; None for the only
            one.

    Returns:
        A tree like params, with their dtypes; leaves of other optimizers are unchanged.

    Raises:
        ValueError: The state has no such slot `z`, or several; the error lists their names.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.schedule_free_sgd())
        >>> print(jstep.schedule_free_params(state)["w"])
        1.0

    Source: Facebook's `optimizer.eval()`.
    """
    hint = (
        "Slots of schedule-free optimizers are created by schedule_free_adamw and "
        "schedule_free_sgd."
    )

    def has_scalars(slot: str) -> bool:
        return all(
            trees.is_array(state.slots.get(slot.removesuffix("z") + other)) for other in SCALARS
        )

    prefix = find_slot(state, "z" if name is None else name, hint, has_scalars).removesuffix("z")
    leaves, treedef = trees.flatten(state.params)

    def x_of(leaf: Any, y: Any, z: Any) -> Any:
        if z is None:
            return leaf
        dtype = trees.compute_dtype(y.dtype)
        y, z, beta1 = (
            x.astype(dtype) for x in (y, move_to_devices(z), state.slots[prefix + "beta1"])
        )
        # If z equals y, as it does initially, x equals both. No Python numbers are used: transfers
        # may be guarded.
        return (z + (y - z) / beta1).astype(leaf.dtype)

    zs = treedef.flatten_up_to(slot_values(state, prefix + "z"))
    return treedef.unflatten(list(map(x_of, leaves, jax.tree.leaves(master_params(state)), zs)))
