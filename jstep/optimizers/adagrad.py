"""Optimizers that divide by a root of squared gradients: Adagrad, RMSProp, Adadelta."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.placement import compute_first
from jstep.core.trees import Array, Number, Optimizer, ScalarOrSchedule
from jstep.optimizers.directions import Result, Values, average, from_direction, from_update, positive
from jstep.optimizers.leafwise import MEAN, SQUARE, Slot


def adagrad(learning_rate: ScalarOrSchedule, initial_accumulator_value: Number = 0.1) -> Optimizer:
    """Adagrad: a += g²; p −= lr · g / √a.

    Args:
        learning_rate: The step size lr ≥ 0.
        initial_accumulator_value: The initial value of the accumulator, > 0.

    Returns:
        An `Optimizer` with the slot `accumulator`. A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adagrad(0.5, initial_accumulator_value=3.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.75

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (2011); `tf.train.AdagradOptimizer`.
    """
    first = positive("initial_accumulator_value", initial_accumulator_value)
    slots = {"accumulator": Slot(first, holds="square")}
    return from_update("adagrad", adagrad_update, slots, {"learning_rate": learning_rate}, by_rows=True)


def adagrad_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update by the sum of all squares."""
    a = s.accumulator + g * g
    return -h.learning_rate * g / jnp.sqrt(a), {"accumulator": a}


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: ScalarOrSchedule = 0.9,
    momentum: ScalarOrSchedule = 0.0,
    epsilon: ScalarOrSchedule = 1e-10,
    centered: bool = False,
) -> Optimizer:
    """RMSProp: r = decay·r + (1−decay)·g²; mom = momentum·mom + lr·g/√(r + ε); p −= mom.

    Centered, it also keeps mg = decay·mg + (1−decay)·g and divides by √(r − mg² + ε).

    Args:
        learning_rate: The step size lr ≥ 0.
        decay: The decay of the averages, in [0, 1].
        momentum: The fraction of the old update that is kept, in [0, 1].
        epsilon: Added under the root, ≥ 0.
        centered: Whether to divide by an estimate of the variance instead of the second moment.

    Returns:
        An `Optimizer` with the slots `rms` (initially 1), `momentum` (0) and, centered, `mg` (0). A sparse
        gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.rmsprop(0.5, decay=0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton, Coursera lecture 6.5 (2012); Graves, "Generating Sequences With Recurrent
    Neural Networks" (2013), for the centered form; `tf.train.RMSPropOptimizer`. If rounding makes the
    variance negative, it is set to 0; TF returns NaN.
    """
    is_centered = as_bool(centered, "centered")
    # A variance is the small difference of two averages, so their errors would be its own: they are not declared.
    slots = {"rms": Slot(1.0, holds=None if is_centered else "square"), "momentum": MEAN}
    slots |= {"mg": Slot()} if is_centered else {}
    hyper = {"learning_rate": learning_rate, "decay": decay, "momentum": momentum, "epsilon": epsilon}
    return from_update("rmsprop", rmsprop_update, slots, hyper, by_rows=True)


def rmsprop_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update by an average of squares, or of the variance if there is a slot for the mean."""
    r = h.decay * s.rms + (1 - h.decay) * (g * g)
    new = {"rms": r}
    variance = r
    if "mg" in s:
        new["mg"] = h.decay * s.mg + (1 - h.decay) * g
        variance = jnp.maximum(r - new["mg"] * new["mg"], 0.0)
    new["momentum"] = h.momentum * s.momentum + h.learning_rate * g / jnp.sqrt(variance + h.epsilon)
    return -new["momentum"], new


def scale_by_rms(decay: ScalarOrSchedule = 0.9, epsilon: ScalarOrSchedule = 1e-8) -> Optimizer:
    """RMSProp's direction: g / √(r + ε), r = decay·r + (1−decay)·g².

    Args:
        decay: The decay of the average, in [0, 1].
        epsilon: Added under the root, ≥ 0.

    Returns:
        An element of a chain with the slot `rms` (initially 0; that of `rmsprop` is initially 1, as in TF).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_rms(0.75), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton (2012); `optax.scale_by_rms`.
    """
    hyper = {"decay": decay, "epsilon": epsilon}
    return from_update("scale_by_rms", rms_direction, {"rms": SQUARE}, hyper, by_rows=True)


def rms_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The gradient over the root of an average of squares."""
    rms = average(s.rms, g * g, h.decay)
    return g / jnp.sqrt(rms + h.epsilon), {"rms": rms}


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
    slots = {"accum_update": SQUARE, "accum": SQUARE}
    hyper = {"learning_rate": learning_rate, "rho": rho, "epsilon": epsilon}
    return from_direction("adadelta", adadelta_direction, slots, hyper, by_rows=True)


def adadelta_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The direction, which has the unit of the parameter."""

    def direction(e: Array, x: Array, g: Array) -> Array:
        return g * jnp.sqrt(x + h.epsilon) / jnp.sqrt(e + h.epsilon)

    # On CPUs e is computed first, and the direction twice, for the parameter and for x, instead of being stored.
    e, x, g = compute_first(average(s.accum, g * g, h.rho), s.accum_update, g)
    d = direction(e, x, g)
    e, x, g = compute_first(e, x, g)
    return d, {"accum": e, "accum_update": average(x, jnp.square(direction(e, x, g)), h.rho)}
