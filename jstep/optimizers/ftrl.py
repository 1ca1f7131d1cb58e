"""FTRL-Proximal: follow the regularized leader."""

from __future__ import annotations

import jax.numpy as jnp

from jstep.core.execution_order import compute_first, in_order
from jstep.core.types import Array, Number, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise


def ftrl(
    learning_rate: ScalarOrSchedule,
    learning_rate_power: ScalarOrSchedule = -0.5,
    initial_accumulator_value: Number = 0.1,
    l1_regularization_strength: ScalarOrSchedule = 0.0,
    l2_regularization_strength: ScalarOrSchedule = 0.0,
    l2_shrinkage_regularization_strength: ScalarOrSchedule = 0.0,
    beta: ScalarOrSchedule = 0.0,
) -> Optimizer:
    """FTRL-Proximal: per-coordinate learning rates with exact sparsity.

    a' = a + g²; linear += g + 2·shrinkage·p − (a'^−power − a^−power)/lr · p;
    p = (sign(linear)·l1 − linear) / (a'^−power/lr + 2·(l2 + β/(2·lr))) where |linear| > l1, else 0.

    Args:
        learning_rate: The step size lr > 0. When a schedule returns 0, the parameters stay unchanged.
        learning_rate_power: The exponent ≤ 0 of the accumulated squares in the rate: −0.5 as in Adagrad, 0 for a
            constant rate.
        initial_accumulator_value: The initial value of the accumulator, ≥ 0.
        l1_regularization_strength: The l1 penalty ≥ 0, which makes weights with |linear| ≤ l1 exactly 0.
        l2_regularization_strength: The l2 penalty ≥ 0, which favors small weights.
        l2_shrinkage_regularization_strength: An l2 penalty ≥ 0 that is added to the gradient but not to the
            accumulator.
        beta: The paper's β ≥ 0, which lowers the learning rates of the first steps.

    Returns:
        An `Optimizer` with the slots `accum` and `linear` (initially 0). A sparse gradient updates only its own rows.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.ftrl(0.5, l1_regularization_strength=2.0)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.0

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013), algorithm 1;
    `tf.train.FtrlOptimizer`.
    """
    return leafwise(
        ftrl_rule,
        slots={
            "accum": checked("initial_accumulator_value", initial_accumulator_value, low=0),
            "linear": 0.0,
        },
        hyper={
            "learning_rate": checked("learning_rate", learning_rate, low=0, above=True),
            "learning_rate_power": checked("learning_rate_power", learning_rate_power, high=0),
            "l1_regularization_strength": checked("l1_regularization_strength", l1_regularization_strength, low=0),
            "l2_regularization_strength": checked("l2_regularization_strength", l2_regularization_strength, low=0),
            "l2_shrinkage_regularization_strength": checked(
                "l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength, low=0
            ),
            "beta": checked("beta", beta, low=0),
        },
    )


def ftrl_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update, accumulator and linear term."""
    lr, power, l1 = h["learning_rate"], h["learning_rate_power"], h["l1_regularization_strength"]
    moves = lr > 0
    lr = jnp.where(moves, lr, jnp.ones_like(p, shape=()))

    def rate_power(a: Array) -> Array:
        return jnp.sqrt(a) if isinstance(power, float) and power == -0.5 else jnp.power(a, -power)

    old = slots["accum"]
    shrunk = g + 2 * h["l2_shrinkage_regularization_strength"] * p
    linear = slots["linear"] + shrunk - (rate_power(old + g * g) - rate_power(old)) / lr * p
    linear = jnp.where(moves, linear, slots["linear"])
    # Three kernels share these slots: `linear` first, then `accum`, then the parameter from both. Otherwise
    # XLA computes them from the old slots in another order and copies the slots that it has to overwrite.
    linear, old, g = compute_first(linear, old, g)
    (accum,) = in_order(linear, old + g * g)
    quadratic = rate_power(accum) / lr + 2 * (h["l2_regularization_strength"] + h["beta"] / (2 * lr))
    outweighs = jnp.abs(linear) > l1
    new_p = jnp.where(outweighs, (jnp.sign(linear) * l1 - linear) / quadratic, jnp.zeros_like(p))
    return jnp.where(moves, new_p - p, jnp.zeros_like(p)), {"accum": accum, "linear": linear}
