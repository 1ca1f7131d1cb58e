"""NovoGrad."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import adam_hyper, decay_flags, decay_hyper, with_decay
from jstep.optimizers.leafwise import Hyper, Slot, leafwise


def novograd(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.25,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """NovoGrad: v averages ‖g‖²; m = β1·m + g/(√v + ε) + weight_decay·p; p −= lr·m; one v for each leaf.

    At the first update of a slot v = ‖g‖².

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The fraction of the old direction that is kept, in [0, 1).
        beta2: The decay of the squared norm, in [0, 1).
        epsilon: Added to √v, ≥ 0.
        weight_decay: Weight decay ≥ 0, part of the direction and so multiplied by lr.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0; v has one scalar per leaf) and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.novograd(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019); the results match
    `optax.novograd`.
    """
    return leafwise(
        novograd_rule,
        slots={"m": 0.0, "v": Slot(shape=lambda path, leaf: ())},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon) | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=share_of_old,
        aged=True,
        sparse=False,
    )


def share_of_old(h: Hyper) -> Hyper:
    """The weight of the old squared norm, which is 0 for a new slot."""
    return {"kept": jnp.where(h["age"] == 1, 0.0, h["beta2"])}


def novograd_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update, direction and squared norm."""
    v = average(slots["v"], jnp.sum(g * g), h["kept"])
    m = h["beta1"] * slots["m"] + with_decay(g / (jnp.sqrt(v) + h["epsilon"]), p, h)
    return -h["learning_rate"] * m, {"m": m, "v": v}
