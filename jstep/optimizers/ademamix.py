"""AdEMAMix: Adam with a second, slow average."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import average, corrections
from jstep.optimizers.arguments import adam_hyper, beta, decay_flags, decay_hyper, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def ademamix(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    beta3: ScalarOrSchedule = 0.9999,
    alpha: ScalarOrSchedule = 5.0,
    epsilon: ScalarOrSchedule = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """AdEMAMix: m1, m2 average g by β1, β3, v averages g² by β2; p −= lr·((m̂1 + α·m2)/(√v̂ + ε) + weight_decay·p).

    m̂1 and v̂ are bias-corrected; m2 is not, because it should fill slowly. β3 and α are usually warmed up over the
    whole run: see `ademamix_beta3` and `ademamix_alpha`.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the fast average, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        beta3: The decay of the slow average, in [0, 1).
        alpha: The weight of the slow average, ≥ 0.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m1`, `m2` and `v` (initially 0) and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.ademamix(
        ...     0.25, beta3=jstep.ademamix_beta3(0.9, 0.9999, 1000), alpha=jstep.ademamix_alpha(5.0, 1000)
        ... )
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.4f}')
        0.7499

    Source: Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024); the results match
    `optax.contrib.ademamix`, with v in float32 whatever the dtype of the parameters.
    """
    return leafwise(
        ademamix_rule,
        slots={"m1": 0.0, "m2": 0.0, "v": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon)
        | {"beta3": beta("beta3", beta3), "alpha": checked("alpha", alpha, low=0)}
        | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask),
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def ademamix_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and averages."""
    m1, m2 = average(slots["m1"], g, h["beta1"]), average(slots["m2"], g, h["beta3"])
    v = average(slots["v"], g * g, h["beta2"])
    u = (h["unbias1"] * m1 + h["alpha"] * m2) / (jnp.sqrt(h["unbias2"] * v) + h["epsilon"])
    return -h["learning_rate"] * with_decay(u, p, h), {"m1": m1, "m2": m2, "v": v}
