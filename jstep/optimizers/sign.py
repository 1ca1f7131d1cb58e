"""Optimizers that use the sign of the gradient or of a momentum: Lion, Signum, Rprop."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers import rules
from jstep.optimizers.hyperparameters import as_hyperparameter, constant
from jstep.optimizers.rules import BETA, MEAN, MEAN_IN_ORDER, POSITIVE, Decay, Result, Values


@makes_optimizer()
def lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Lion: p −= lr·(sign(β1·m + (1−β1)·g) + weight_decay·p); then m = β2·m + (1−β2)·g.

    Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same
    factor.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Example:
        >>> import jstep
        >>> optimizer = jstep.lion(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.75

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023); the results match
    `optax.lion`.
    """
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
    hyper |= {"weight_decay": Decay(weight_decay, weight_decay_mask)}
    return rules.from_direction("lion", lion_direction, {"m": MEAN_IN_ORDER}, hyper)


@makes_optimizer()
def scale_by_lion(beta1: ScalarOrSchedule = 0.9, beta2: ScalarOrSchedule = 0.99) -> Optimizer:
    """Lion's direction: sign(β1·m + (1−β1)·g); then m = β2·m + (1−β2)·g.

    Args:
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).

    Returns:
        An element of a chain with the slot `m` (initially 0).

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.75

    Source: Chen et al. (2023); `optax.scale_by_lion`.
    """
    return rules.from_update(
        "scale_by_lion", lion_direction, {"m": MEAN_IN_ORDER}, {"beta1": beta1, "beta2": beta2}
    )


def lion_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The sign of an average that gives the gradient more weight than the stored average does."""
    return jnp.sign(rules.average(s.m, g, h.beta1)), {"m": rules.average(s.m, g, h.beta2)}


@makes_optimizer()
def signum(learning_rate: ScalarOrSchedule = 1e-3, beta: ScalarOrSchedule = 0.9) -> Optimizer:
    """Signum: m = β·m + (1−β)·g; p −= lr·sign(m).

    Args:
        learning_rate: The step size lr ≥ 0.
        beta: The decay of m, in [0, 1); 0 is signSGD.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Example:
        >>> import jstep
        >>> optimizer = jstep.signum(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018);
    `optax.signum`.
    """
    hyper = {"learning_rate": learning_rate, "beta": as_hyperparameter("beta", beta, **BETA)}
    return rules.from_direction("signum", signum_direction, {"m": MEAN}, hyper)


def signum_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    m = rules.average(s.m, g, h.beta)
    return jnp.sign(m), {"m": m}


@makes_optimizer()
def rprop(
    learning_rate: float = 1e-2,
    eta_minus: ScalarOrSchedule = 0.5,
    eta_plus: ScalarOrSchedule = 1.2,
    min_step_size: ScalarOrSchedule = 1e-6,
    max_step_size: ScalarOrSchedule = 50.0,
) -> Optimizer:
    """Rprop: η *= eta_plus where g keeps its sign, eta_minus where it turns; p −= η·sign(g).

    Where the sign turns, g is set to 0. The optimizer is meant for full-batch gradients.

    Args:
        learning_rate: The initial step size η, > 0, a constant.
        eta_minus: The factor on η when the gradient changes its sign, in (0, 1).
        eta_plus: The factor on η when the gradient keeps its sign, > 1.
        min_step_size: The smallest η, ≥ 0.
        max_step_size: The largest η, ≥ 0.

    Returns:
        An `Optimizer` with the slots `step_size` (η, initially learning_rate) and `previous` (the
        last g, initially 0).

    Example:
        >>> import jstep
        >>> optimizer = jstep.rprop(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning"
    (1993); the results match `torch.optim.Rprop`.
    """
    size = constant("learning_rate", learning_rate, **POSITIVE)
    hyper = {
        "learning_rate": size,
        "eta_minus": eta_minus,
        "eta_plus": eta_plus,
        "min_step_size": min_step_size,
    }
    hyper |= {"max_step_size": max_step_size}
    return rules.from_update("rprop", rprop_update, {"step_size": size, "previous": 0.0}, hyper)


def rprop_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    turn = jnp.sign(g) * jnp.sign(s.previous)
    ones = jnp.ones_like(g)
    factor = jnp.where(turn > 0, h.eta_plus * ones, jnp.where(turn < 0, h.eta_minus * ones, ones))
    size = jnp.clip(s.step_size * factor, h.min_step_size, h.max_step_size)
    g = jnp.where(turn < 0, jnp.zeros_like(g), g)
    return -size * jnp.sign(g), {"step_size": size, "previous": g}
