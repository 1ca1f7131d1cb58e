"""Gradient descent and momentum: Polyak's heavy ball and Nesterov's variant, as in TF and as in PyTorch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.placement import compute_first
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.directions import (
    Result,
    Rule,
    Values,
    decay_mask,
    from_direction,
    from_update,
    in_bounds,
    with_decay,
)
from jstep.optimizers.leafwise import MEAN


def gradient_descent(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Gradient descent: p −= lr · g.

    Args:
        learning_rate: The step size lr ≥ 0.

    Returns:
        An `Optimizer` without slots. A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.5

    Source: `tf.train.GradientDescentOptimizer`.
    """
    hyper = {"learning_rate": learning_rate}
    return from_direction("gradient_descent", lambda g, p, s, h: (g, {}), {}, hyper, by_rows=True)


def momentum(learning_rate: ScalarOrSchedule, momentum: ScalarOrSchedule, use_nesterov: bool = False) -> Optimizer:
    """Momentum: a = momentum·a + g; p −= lr·a, or with Nesterov p −= lr·(g + momentum·a).

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of the old direction that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.momentum(0.5, 0.9)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], state.slots["momentum"]["w"])
        -0.45 1.9

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013);
    `tf.train.MomentumOptimizer`.
    """
    hyper = {"learning_rate": learning_rate, "momentum": momentum}
    return from_direction("momentum", _direction(use_nesterov), {"momentum": MEAN}, hyper, by_rows=True)


def trace(momentum: ScalarOrSchedule, use_nesterov: bool = False) -> Optimizer:
    """Momentum: a = momentum·a + g; the direction is a, or with Nesterov g + momentum·a.

    Args:
        momentum: The fraction of the old direction that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An element of a chain with the slot `momentum` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.trace(0.9), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(2.0)}, optimizer).params["w"])
        0.5

    Source: `optax.trace`.
    """
    return from_update("trace", _direction(use_nesterov), {"momentum": MEAN}, {"momentum": momentum}, by_rows=True)


def _direction(use_nesterov: bool) -> Rule:
    return nesterov_direction if as_bool(use_nesterov, "use_nesterov") else momentum_direction


def momentum_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The heavy ball's direction a, which is its buffer."""
    a = h.momentum * s.momentum + g
    return a, {"momentum": a}


def nesterov_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Nesterov's direction, one step ahead of the buffer a."""
    a = h.momentum * s.momentum + g
    return g + h.momentum * a, {"momentum": a}


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.0,
    dampening: ScalarOrSchedule = 0.0,
    use_nesterov: bool = False,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """SGD: g += weight_decay·p; a = momentum·a + (1 − dampening)·g; p −= lr·a, or lr·(g + momentum·a) with Nesterov.

    At the first update of a slot a = g, whatever the dampening. Weight decay is coupled: it is part of the gradient.

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of the old direction that is kept, in [0, 1].
        dampening: The fraction of the gradient that is left out of the direction, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum, which requires momentum and no dampening.
        weight_decay: Weight decay ≥ 0, added to the gradient as weight_decay·p.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0) unless momentum is the number 0, and with dampening the
        scalar `start_step`. Without weight decay a sparse gradient updates only its own rows.

    Raises:
        ValueError: An argument is out of its range, the mask matches nothing, or Nesterov momentum is combined with
            dampening or zero momentum.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.sgd(0.5, weight_decay=0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.25

    Source: `torch.optim.SGD`, whose results it matches. For TF's variant, see `momentum`.
    """
    use_nesterov = as_bool(use_nesterov, "use_nesterov")
    hyper = in_bounds(
        {"learning_rate": learning_rate, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    )
    keeps, damped, decays = (not _is_zero(hyper[name]) for name in ("momentum", "dampening", "weight_decay"))
    if use_nesterov and (damped or not keeps):
        raise ValueError(
            f"use_nesterov=True: requires a momentum > 0 and a dampening of 0, got momentum={momentum} and "
            f"dampening={dampening}; omit dampening and set a momentum such as 0.9"
        )
    return from_update(
        "sgd",
        sgd_nesterov_update if use_nesterov else sgd_momentum_update if keeps else sgd_update,
        {"momentum": MEAN} if keeps else {},
        hyper,
        flags=decay_mask(weight_decay_mask),
        prepare=share_of_gradient if keeps and damped else None,
        by_rows=not decays,
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, float) and value == 0.0


def share_of_gradient(h: Values) -> dict[str, Any]:
    """The weight of the gradient in the buffer: 1 at the first update, 1 − dampening later."""
    return {"share": jnp.where(h.age == 1, 1.0, 1 - h.dampening)}


def sgd_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update without momentum."""
    return -h.learning_rate * with_decay(g, p, h), {}


def sgd_momentum_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update along the buffer."""
    a = buffer(with_decay(g, p, h), s, h)
    return -h.learning_rate * a, {"momentum": a}


def sgd_nesterov_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update along the gradient and the new buffer."""
    a = buffer(with_decay(g, p, h), s, h)
    # The buffer is computed first; otherwise XLA would compute the parameter from a copy of the old buffer.
    a, g, p = compute_first(a, g, p)
    return -h.learning_rate * (with_decay(g, p, h) + h.momentum * a), {"momentum": a}


def buffer(g: Array, s: Values, h: Values) -> Array:
    """The new momentum buffer."""
    return h.momentum * s.momentum + (h.share * g if "share" in h else g)
