"""Adan: adaptive Nesterov momentum."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import average, corrections
from jstep.optimizers.age import bias_correction
from jstep.optimizers.arguments import adam_hyper, beta, decay_flags, decay_hyper, decays
from jstep.optimizers.leafwise import Hyper, leafwise


def adan(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.98,
    beta2: ScalarOrSchedule = 0.92,
    beta3: ScalarOrSchedule = 0.99,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Adan: p −= lr·(m̂ + β2·d̂)/(√n̂ + ε), then p /= 1 + lr·weight_decay; m, d, n average g, Δ, (g + β2·Δ)².

    Δ is g minus the previous g, and 0 at the first update of a slot; m, d and n decay by β1, β2 and β3 and are
    bias-corrected.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the average of gradients, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the average of differences, in [0, 1). A schedule enters the correction as β2(step)^t.
        beta3: The decay of the second moment, in [0, 1). A schedule enters the correction as β3(step)^t.
        epsilon: Added to √n̂, ≥ 0.
        weight_decay: Decoupled, proximal weight decay; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m`, `d`, `v` (n) and `previous` (the previous gradient), initially 0, and the
        scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adan(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm" (2022); the results match the authors' code
    and timm. `optax.adan` 0.2.8 uses 1 − β2 in place of β2.
    """
    return leafwise(
        adan_rule,
        slots={"m": 0.0, "d": 0.0, "v": 0.0, "previous": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon)
        | {"beta3": beta("beta3", beta3)}
        | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=adan_corrections,
        aged=True,
        sparse=False,
    )


def adan_corrections(h: Hyper) -> Hyper:
    """The bias corrections of m, d and n, and whether this is the first update."""
    return corrections(h) | {"unbias3": 1 / bias_correction(h["beta3"], h["age"]), "first": h["age"] == 1}


def adan_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update, averages and gradient."""
    old = slots["previous"]
    m, d = average(slots["m"], g, h["beta1"]), average(slots["d"], difference(g, old, h), h["beta2"])
    n = average(slots["v"], jnp.square(g + h["beta2"] * difference(g, old, h)), h["beta3"])
    u = h["unbias1"] * m + h["beta2"] * h["unbias2"] * d
    update = -h["learning_rate"] * u / (jnp.sqrt(h["unbias3"] * n) + h["epsilon"])
    if decays(h):
        shrink = h["learning_rate"] * h["weight_decay"]
        update = (update - shrink * p) / (1 + shrink)
    return update, {"m": m, "d": d, "v": n, "previous": g}


def difference(g: Array, old: Array, h: Hyper) -> Array:
    """The change of the gradient; 0 at the first update."""
    return jnp.where(h["first"], jnp.zeros_like(g), g - old)
