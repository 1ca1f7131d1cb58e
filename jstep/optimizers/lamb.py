"""LAMB: Adam with layer-wise trust ratios."""

from __future__ import annotations

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import corrections, direction, moments
from jstep.optimizers.arguments import adam_hyper, decay_flags, decay_hyper, with_decay
from jstep.optimizers.leafwise import Hyper, leafwise
from jstep.optimizers.trust_ratio import scale_by_ratio


def lamb(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LAMB: r = m̂/(√v̂ + ε) + weight_decay·p; p −= lr·r·‖p‖/‖r‖, norms by leaf; lr·r where a norm is 0.

    m̂ and v̂ are those of Adam.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Weight decay ≥ 0, added to the direction before its norm is taken.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`. If a leaf stacks several
        layers, they share one norm: keep layers in separate leaves.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lamb(0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019); the results
    match `optax.lamb`. timm also clips by the global norm; Keras decays outside the norm.
    """
    return leafwise(
        lamb_rule,
        slots={"m": 0.0, "v": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon) | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def lamb_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, v = moments(g, slots, h)
    r = with_decay(direction(m, v, h), p, h)
    return scale_by_ratio(p, r, -h["learning_rate"]), {"m": m, "v": v}
