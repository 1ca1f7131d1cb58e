"""Lion."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import beta, decay_flags, decay_hyper, low_dtype, rate, with_decay
from jstep.optimizers.leafwise import Hyper, Slot, leafwise


def lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
    m_dtype: Any = None,
) -> Optimizer:
    """Lion: p −= lr·(sign(β1·m + (1−β1)·g) + weight_decay·p); then m = β2·m + (1−β2)·g.

    Every coordinate moves by lr. Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by
    the same factor.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.
        m_dtype: The dtype of m, such as `jnp.bfloat16`; at least float32 by default.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lion(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.75

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023); the results match `optax.lion`.
    """
    return leafwise(
        lion_rule,
        slots={"m": Slot(dtype=low_dtype("m_dtype", m_dtype))},
        hyper={"learning_rate": rate(learning_rate), "beta1": beta("beta1", beta1), "beta2": beta("beta2", beta2)}
        | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        sparse=False,
    )


def lion_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and average."""
    m = slots["m"]
    u = -h["learning_rate"] * with_decay(jnp.sign(average(m, g, h["beta1"])), p, h)
    return u, {"m": average(m, g, h["beta2"])}
