"""Optimizers with one norm per leaf: LAMB, LARS and NovoGrad."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.differentiate.clipping import compute_norm
from jstep.optimizers import rules
from jstep.optimizers.adam import M_V, adam_direction, corrections
from jstep.optimizers.chains import element
from jstep.optimizers.hyperparameters import Hyper
from jstep.optimizers.leaf_values import mask
from jstep.optimizers.rules import MEAN, Decay, Result, Slot, Values
from jstep.optimizers.updates import map_updates
from jstep.slots.indexed_slices import map_table
from jstep.slots.matching import match_gradients


@makes_optimizer()
def lamb(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LAMB: r = m̂/(√v̂ + ε) + weight_decay·p; p −= lr·r·‖p‖/‖r‖, or lr·r if a norm is 0.

    Norms are those of a leaf; m̂ and v̂ are defined as in Adam.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Weight decay ≥ 0, part of the direction r.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and `start_step`. Layers that are
        stacked in one leaf share one norm.

    Example:
        >>> import jstep
        >>> optimizer = jstep.lamb(0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        1.5

    Source: You et al., "Large Batch Optimization for Deep Learning" (2019); the results match
    `optax.lamb`.
    """
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    return rules.from_update("lamb", lamb_update, M_V, hyper, prepare=corrections)


def lamb_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    u, new = adam_direction(g, p, s, h)
    return scale_by_ratio(p, rules.add_decay(u, p, h), -h.learning_rate), new


@makes_optimizer()
def lars(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.9,
    *,
    use_nesterov: bool = False,
    trust_coefficient: ScalarOrSchedule = 1e-3,
    epsilon: ScalarOrSchedule = 0.0,
    trust_ratio_mask: VarList = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LARS: g += weight_decay·p; a = momentum·a + lr·g·trust_coefficient·‖p‖/(‖g‖ + ε); p −= a.

    With Nesterov p −= (the last term of a) + momentum·a. Norms are those of a leaf. If one is 0,
    the ratio is 1.

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of a that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.
        trust_coefficient: The step length at lr = 1, relative to the leaf's norm; ≥ 0.
        epsilon: Added to ‖g‖, ≥ 0.
        trust_ratio_mask: The leaves with a trust ratio, as a `var_list`; None for all.
        weight_decay: Coupled weight decay ≥ 0, added to the gradient as weight_decay·p.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0).

    Example:
        >>> import jstep
        >>> optimizer = jstep.lars(1.0, trust_coefficient=0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        1.5

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017); the
    results match `optax.lars`.
    """
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "momentum": momentum}
    hyper |= {"trust_coefficient": trust_coefficient, "epsilon": epsilon}
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    flags = {"trusts": mask("trust_ratio_mask", trust_ratio_mask)}
    is_ahead = as_bool(use_nesterov, "use_nesterov")

    def update(g: Array, p: Array, s: Values, h: Values) -> Result:
        kept = h.momentum * s.momentum
        lr = h.learning_rate
        g = rules.add_decay(g, p, h)
        g = scale_by_ratio(p, g, lr, h.trust_coefficient, h.epsilon) if h.trusts else lr * g
        a = kept + g
        return -(g + h.momentum * a if is_ahead else a), {"momentum": a}

    return rules.from_update("lars", update, {"momentum": MEAN}, hyper, flags=flags)


@makes_optimizer()
def novograd(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.25,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """NovoGrad: v averages ‖g‖²; m = β1·m + g/(√v + ε) + weight_decay·p; p −= lr·m.

    Each leaf has one v. At the first update of a slot v = ‖g‖².

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The fraction of m that is kept, in [0, 1).
        beta2: The decay of the squared norm, in [0, 1).
        epsilon: Added to √v, ≥ 0.
        weight_decay: Weight decay ≥ 0, part of the direction.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.novograd(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019);
    the results match `optax.novograd`.
    """
    slots = {"m": MEAN, "v": Slot(shape=lambda path, leaf: ())}
    hyper: dict[str, Any] = {
        "learning_rate": learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    return rules.from_update("novograd", novograd_update, slots, hyper, prepare=share_of_old)


def novograd_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    v = rules.average(s.v, jnp.sum(g * g), h.kept)
    m = h.beta1 * s.m + rules.add_decay(g / (jnp.sqrt(v) + h.epsilon), p, h)
    return -h.learning_rate * m, {"m": m, "v": v}


def share_of_old(h: Values) -> dict[str, Any]:
    """The weight of the old squared norm, which is 0 for a new slot."""
    return {"kept": jnp.where(h.age == 1, 0.0, h.beta2)}


@makes_optimizer()
def scale_by_trust_ratio() -> Optimizer:
    """Trust ratio: u·‖p‖/‖u‖ for each leaf, or u if a norm is 0.

    u is the update from the previous element.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(epsilon=1e-6),
        ...     jstep.scale_by_trust_ratio(),
        ...     jstep.scale_by_learning_rate(0.25),
        ... )
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        1.5

    Source: You et al. (2019); `optax.scale_by_trust_ratio`.
    """

    def scaled(u: Array, p: Array) -> Any:
        dtype = trees.compute_dtype(p.dtype)
        return map_table(lambda u: scale_by_ratio(p.astype(dtype), u.astype(dtype)), u)

    def update(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        match_gradients(updates, params)
        return map_updates(scaled, params, updates, jax.tree.leaves(params))

    return element(update, {})


def scale_by_ratio(
    p: Array, u: Array, rate: Any = 1.0, coefficient: Any = 1.0, epsilon: Any = 0.0
) -> Array:
    """Return rate·ratio·u, where ratio = coefficient·‖p‖/(‖u‖ + epsilon), or 1 if a norm is 0."""
    norm_p = compute_norm([p])
    norm_u = compute_norm([u])
    is_nonzero = (norm_p > 0) & (norm_u > 0)
    divisor = jnp.where(is_nonzero, norm_u + epsilon, jnp.ones_like(norm_u))
    return rate * jnp.where(is_nonzero, coefficient * norm_p / divisor, 1.0) * u
