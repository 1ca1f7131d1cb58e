"""AdaBelief."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average, corrections, direction
from jstep.optimizers.arguments import adam_hyper
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def adabelief(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-16,
    epsilon_root: ScalarOrSchedule = 1e-16,
) -> Optimizer:
    """AdaBelief: m averages g; s = β2·s + (1−β2)·(g − m)² + epsilon_root; p −= lr·m̂/(√ŝ + ε).

    m̂ = m/(1−β1^t) and ŝ = s/(1−β2^t), where t is the age of the slots. Steps are large where gradients are as expected.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √ŝ, ≥ 0.
        epsilon_root: Added to s at each step, ≥ 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (s) (initially 0) and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adabelief(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.722

    Source: Zhuang et al., "AdaBelief Optimizer" (2020); the results match `optax.adabelief`.
    """
    return leafwise(
        adabelief_rule,
        slots={"v": 0.0, "m": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon)
        | {"epsilon_root": checked("epsilon_root", epsilon_root, low=0)},
        prepare=corrections,
        aged=True,
        sparse=False,
    )


def adabelief_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m = average(slots["m"], g, h["beta1"])
    v = average(slots["v"], jnp.square(g - m), h["beta2"]) + h["epsilon_root"]
    return -h["learning_rate"] * direction(m, v, h), {"m": m, "v": v}
