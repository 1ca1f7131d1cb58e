"""AdamW."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import corrections, direction, moments
from jstep.optimizers.arguments import adam_hyper, decay_flags, decay_hyper, low_dtype, with_decay
from jstep.optimizers.leafwise import Hyper, Slot, leafwise


def adamw(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 1e-2,
    weight_decay_mask: VarList = None,
    *,
    amsgrad: bool = False,
    m_dtype: Any = None,
) -> Optimizer:
    """AdamW: m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; p −= lr·(m̂/(√v̂ + ε) + weight_decay·p).

    m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t), where t = step + 1 − start_step is the age of the slots. ε is added to √v̂, as
    in the paper; `adam` uses TF's "epsilon hat" form, which differs where ε matters.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: The weight decay ≥ 0, decoupled from the gradient and multiplied by lr. For a decay that does not
            depend on the learning rate, put `decay_weights` after the optimizer.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.
        amsgrad: Whether to divide by the largest v so far, kept in the slot `v_max`, as torch does.
        m_dtype: The dtype of m, such as `jnp.bfloat16`; at least float32 by default.

    Returns:
        An `Optimizer` with the slots `m`, `v` (and `v_max`), initially 0, and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adamw(0.5, weight_decay=0.1, weight_decay_mask=["*kernel"])
        >>> state = jstep.TrainState.create({"kernel": 1.0, "bias": 1.0}, optimizer)
        >>> grads = {"kernel": jnp.float32(3.0), "bias": jnp.float32(3.0)}
        >>> params = jstep.apply_gradients(state, grads, optimizer).params
        >>> print(f"{params['kernel']:.3f} {params['bias']:.3f}")
        0.450 0.500

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017); the results match
    `torch.optim.AdamW`, and `optax.adamw` except for AMSGrad.
    """
    amsgrad, m_dtype = as_bool(amsgrad, "amsgrad"), low_dtype("m_dtype", m_dtype)
    return leafwise(
        adamw_rule,
        slots={"m": Slot(dtype=m_dtype), "v": 0.0} | ({"v_max": 0.0} if amsgrad else {}),
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon) | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def adamw_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, v = moments(g, slots, h)
    new = {"m": m, "v": v}
    if "v_max" in slots:
        v = new["v_max"] = jnp.maximum(slots["v_max"], v)
    return -h["learning_rate"] * with_decay(direction(m, v, h), p, h), new
