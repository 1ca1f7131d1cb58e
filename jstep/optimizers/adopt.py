"""ADOPT: a variant of Adam that converges with any β2."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.arguments import adam_hyper
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def adopt(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.9999,
    epsilon: ScalarOrSchedule = 1e-6,
) -> Optimizer:
    """ADOPT: u = clip(g/max(√v, ε), ±(t−1)^¼) by the old v; m averages u; p −= lr·m; then v averages g².

    t is the age of the slots. The first update of a slot sets v = g² and leaves the parameters unchanged.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of m, in [0, 1).
        beta2: The decay of v, in [0, 1).
        epsilon: The lower bound of the divisor √v, > 0.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adopt(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        1.000

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any β2 with the Optimal Rate" (2024); the results
    match `optax.contrib.adopt`.
    """
    hyper = adam_hyper(learning_rate, beta1, beta2, epsilon) | {
        "epsilon": checked("epsilon", epsilon, low=0, above=True)
    }
    return leafwise(adopt_rule, slots={"m": 0.0, "v": 0.0}, hyper=hyper, prepare=shares, aged=True, sparse=False)


def shares(h: Hyper) -> Hyper:
    """The bound of u and the weights of the averages; at the first update v is g² and m stays unchanged."""
    first, age = h["age"] == 1, h["age"].astype(jnp.result_type(float))
    return {
        "bound": jnp.power(age - 1, 0.25),
        "kept_m": jnp.where(first, 1.0, h["beta1"]),
        "new_m": jnp.where(first, 0.0, 1 - h["beta1"]),
        "kept_v": jnp.where(first, 0.0, h["beta2"]),
        "new_v": jnp.where(first, 1.0, 1 - h["beta2"]),
        "moves": jnp.where(first, 0.0, 1.0),
    }


def adopt_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    u = jnp.clip(g / jnp.maximum(jnp.sqrt(slots["v"]), h["epsilon"]), -h["bound"], h["bound"])
    m = h["kept_m"] * slots["m"] + h["new_m"] * u
    v = h["kept_v"] * slots["v"] + h["new_v"] * (g * g)
    return -h["learning_rate"] * h["moves"] * m, {"m": m, "v": v}
