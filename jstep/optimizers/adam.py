"""Adam."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.age import bias_correction
from jstep.optimizers.arguments import adam_hyper
from jstep.optimizers.leafwise import Hyper, leafwise


def adam(
    learning_rate: ScalarOrSchedule = 0.001,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adam: m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g²; p −= lr·√(1−β2^t)/(1−β1^t) · m/(√v + ε).

    t = step + 1 − start_step is the age of the slots, so that slots created at step 10 000 are bias-corrected as new.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v, ≥ 0. This is the paper's "epsilon hat"; its epsilon is larger by 1/√(1−β2^t).

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`. With a sparse gradient,
        all rows of m and v decay, as in TF.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adam(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"].round(4))
        0.5

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), before section 2.1;
    `tf.train.AdamOptimizer`. TF accumulates powers of β in float32; here they are computed from the step.
    """
    return leafwise(
        adam_rule,
        slots={"m": 0.0, "v": 0.0},
        hyper=adam_hyper(learning_rate, beta1, beta2, epsilon),
        prepare=prepare,
        aged=True,
        sparse=False,
    )


def adam_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and moments."""
    m, v = moments(g, slots, h)
    return h["signed_rate"] * m / (jnp.sqrt(v) + h["epsilon"]), {"m": m, "v": v}


def prepare(h: Hyper) -> Hyper:
    """The negative learning rate, multiplied by both bias corrections."""
    correction = jnp.sqrt(bias_correction(h["beta2"], h["age"])) / bias_correction(h["beta1"], h["age"])
    return {"signed_rate": -h["learning_rate"] * correction}


# Shared by the variants of Adam.


def moments(g: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, Array]:
    """The averages m of g and v of g², decayed by β1 and β2."""
    return average(slots["m"], g, h["beta1"]), average(slots["v"], g * g, h["beta2"])


def average(old: Array, new: Array, beta: Any) -> Array:
    """An exponential moving average: β·old + (1−β)·new."""
    return beta * old + (1 - beta) * new


def corrections(h: Hyper) -> Hyper:
    """The bias corrections 1/(1−β1^t) and 1/(1−β2^t), and both combined for `direction`, with its ε."""
    of_m, of_v = bias_correction(h["beta1"], h["age"]), bias_correction(h["beta2"], h["age"])
    root = jnp.sqrt(of_v)
    return {"unbias1": 1 / of_m, "unbias2": 1 / of_v, "unbias": root / of_m, "epsilon_hat": root * h["epsilon"]}


def direction(m: Array, v: Array, h: Hyper) -> Array:
    """The direction m̂ / (√v̂ + ε); the bias corrections are computed once for all elements."""
    return h["unbias"] * m / (jnp.sqrt(v) + h["epsilon_hat"])
