"""Stochastic gradient descent with momentum, dampening and weight decay."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.execution_order import compute_first
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.arguments import decay_flags, decay_hyper, rate, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


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
    hyper = {
        "learning_rate": rate(learning_rate),
        "momentum": checked("momentum", momentum, low=0, high=1),
        "dampening": checked("dampening", dampening, low=0, high=1),
    } | decay_hyper(weight_decay)
    keeps, damped, decays = (not _is_zero(hyper[name]) for name in ("momentum", "dampening", "weight_decay"))
    if use_nesterov and (damped or not keeps):
        raise ValueError(
            f"use_nesterov=True: requires a momentum > 0 and a dampening of 0, got momentum={momentum} and "
            f"dampening={dampening}; omit dampening and set a momentum such as 0.9"
        )
    rule = nesterov_rule if use_nesterov else heavy_rule if keeps else plain_rule
    return leafwise(
        rule,
        slots={"momentum": 0.0} if keeps else {},
        hyper=hyper,
        flags=decay_flags(weight_decay_mask),
        prepare=share_of_gradient if keeps and damped else None,
        aged=keeps and damped,
        sparse=not decays,
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, float) and value == 0.0


def share_of_gradient(h: Hyper) -> Hyper:
    """The weight of the gradient in the buffer: 1 at the first update, 1 − dampening later."""
    return {"share": jnp.where(h["age"] == 1, 1.0, 1 - h["dampening"])}


def plain_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update without momentum."""
    return -h["learning_rate"] * with_decay(g, p, h), {}


def heavy_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update along the buffer."""
    a = buffer(with_decay(g, p, h), slots, h)
    return -h["learning_rate"] * a, {"momentum": a}


def nesterov_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update along the gradient and the new buffer."""
    a = buffer(with_decay(g, p, h), slots, h)
    # The buffer is computed first; otherwise XLA would compute the parameter from a copy of the old buffer.
    a, g, p = compute_first(a, g, p)
    return -h["learning_rate"] * (with_decay(g, p, h) + h["momentum"] * a), {"momentum": a}


def buffer(g: Array, slots: dict[str, Array], h: Hyper) -> Array:
    """The new momentum buffer."""
    return h["momentum"] * slots["momentum"] + (h["share"] * g if "share" in h else g)
