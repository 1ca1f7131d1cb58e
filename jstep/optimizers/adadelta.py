"""Adadelta."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.execution_order import compute_first
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import rate
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def adadelta(
    learning_rate: ScalarOrSchedule = 0.001,
    rho: ScalarOrSchedule = 0.95,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adadelta: e averages g²; d = g·√(x + ε)/√(e + ε); x averages d²; p −= lr·d.

    Args:
        learning_rate: The step size lr ≥ 0; the paper has none, which corresponds to 1.
        rho: The decay of both averages, in [0, 1].
        epsilon: Added under the roots, ≥ 0.

    Returns:
        An `Optimizer` with the slots `accum` (e) and `accum_update` (x), initially 0, named as in TensorFlow. A sparse
        gradient updates only its own rows. Checkpoints with the names of jstep 0.2, `accumulator` and
        `accumulator_update`, are restored into them.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adadelta(1.0, epsilon=1e-2)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.558

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012); `tf.train.AdadeltaOptimizer`.
    """
    return leafwise(
        adadelta_rule,
        slots={"accum_update": 0.0, "accum": 0.0},
        hyper={
            "learning_rate": rate(learning_rate),
            "rho": checked("rho", rho, low=0, high=1),
            "epsilon": checked("epsilon", epsilon, low=0),
        },
    )


def adadelta_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and averages."""
    # On CPUs e is computed first, and the direction twice, for the parameter and for x, instead of being stored.
    e, x, g = compute_first(average(slots["accum"], g * g, h["rho"]), slots["accum_update"], g)
    u = -h["learning_rate"] * step(g, x, e, h)
    e, x, g = compute_first(e, x, g)
    return u, {"accum": e, "accum_update": average(x, jnp.square(step(g, x, e, h)), h["rho"])}


def step(g: Array, x: Array, e: Array, h: Hyper) -> Array:
    """The direction, which has the unit of the parameter."""
    return g * jnp.sqrt(x + h["epsilon"]) / jnp.sqrt(e + h["epsilon"])
