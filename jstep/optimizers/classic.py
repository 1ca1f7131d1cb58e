"""Classic optimizers: gradient descent, momentum, Adagrad, RMSProp, Adadelta, FTRL, MADGRAD."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.placement import compute_first, run_in_order
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Number, Optimizer, ScalarOrSchedule
from jstep.optimizers import rules
from jstep.optimizers.hyperparameters import as_hyperparameter
from jstep.optimizers.rules import (
    MEAN,
    MEAN_IN_ORDER,
    SLOW,
    SQUARE,
    Decay,
    Result,
    Rule,
    Slot,
    Values,
)

# Gradient descent and momentum: Polyak's heavy ball and Nesterov's variant, as in TF and as in
# PyTorch.


@makes_optimizer()
def gradient_descent(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Gradient descent: p −= lr · g.

    Args:
        learning_rate: The step size lr ≥ 0.

    Returns:
        An `Optimizer` without slots. A sparse gradient updates only its own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.5

    Source: `tf.train.GradientDescentOptimizer`.
    """
    hyper = {"learning_rate": learning_rate}
    return rules.from_direction(
        "gradient_descent", lambda g, p, s, h: (g, {}), {}, hyper, by_rows=True
    )


@makes_optimizer()
def momentum(
    learning_rate: ScalarOrSchedule, momentum: ScalarOrSchedule, use_nesterov: bool = False
) -> Optimizer:
    """Momentum: a = momentum·a + g; p −= lr·a, or with Nesterov p −= lr·(g + momentum·a).

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of a that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0). A sparse gradient updates only its
        own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.momentum(0.5, 0.9)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": 1.0}, optimizer)
        >>> print(state.params["w"], state.slots["momentum"]["w"])
        -0.45 1.9

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning"
    (2013); `tf.train.MomentumOptimizer`.
    """
    hyper = {"learning_rate": learning_rate, "momentum": momentum}
    return rules.from_direction(
        "momentum", _direction(use_nesterov), {"momentum": MEAN}, hyper, by_rows=True
    )


@makes_optimizer()
def trace(momentum: ScalarOrSchedule, *, use_nesterov: bool = False) -> Optimizer:
    """Momentum: a = momentum·a + g; the direction is a, or with Nesterov g + momentum·a.

    Args:
        momentum: The fraction of a that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.

    Returns:
        An element of a chain with the slot `momentum` (initially 0). A sparse gradient updates only
        its own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.trace(0.9), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 2.0}, optimizer).params["w"])
        0.5

    Source: `optax.trace`.
    """
    direction = _direction(use_nesterov)
    return rules.from_update(
        "trace", direction, {"momentum": MEAN}, {"momentum": momentum}, by_rows=True
    )


def _direction(use_nesterov: bool) -> Rule:
    """The direction of the heavy ball is its buffer a; Nesterov's is one step ahead of it."""
    is_ahead = as_bool(use_nesterov, "use_nesterov")

    def direction(g: Array, p: Array, s: Values, h: Values) -> Result:
        a = h.momentum * s.momentum + g
        return (g + h.momentum * a if is_ahead else a), {"momentum": a}

    return direction


@makes_optimizer()
def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.0,
    dampening: ScalarOrSchedule = 0.0,
    *,
    use_nesterov: bool = False,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """SGD: g += weight_decay·p; a = momentum·a + (1 − dampening)·g; p −= lr·a.

    With Nesterov p −= lr·(g + momentum·a). At the first update of a slot a = g, whatever the
    dampening.

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of a that is kept, in [0, 1].
        dampening: The fraction of g that is left out of a, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum, which requires momentum and no dampening.
        weight_decay: Weight decay ≥ 0, added to the gradient as weight_decay·p.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0) unless momentum is the number 0, and
        with dampening `start_step`. Without weight decay a sparse gradient updates only its own
        rows.

    Raises:
        ValueError: Nesterov momentum is combined with dampening or zero momentum.

    Example:
        >>> import jstep
        >>> optimizer = jstep.sgd(0.5, weight_decay=0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.25

    Source: `torch.optim.SGD`, whose results it matches. For TF's variant, see `momentum`.
    """
    use_nesterov = as_bool(use_nesterov, "use_nesterov")
    numbers = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
    }
    hyper = rules.as_hyperparameters(numbers)
    keeps, damped, decays = (
        not rules.is_zero(hyper[name]) for name in ("momentum", "dampening", "weight_decay")
    )
    if use_nesterov and (damped or not keeps):
        raise ValueError(
            "use_nesterov=True: must have a momentum > 0 and dampening=0, "
            f"got {momentum=} and {dampening=}"
        )
    rule = sgd_nesterov_update if use_nesterov else sgd_update
    slots = {"momentum": MEAN} if keeps else {}
    hyper["weight_decay"] = Decay(weight_decay, weight_decay_mask)
    slots = {"momentum": MEAN_IN_ORDER} if use_nesterov else slots
    prepare = share_of_gradient if keeps and damped else None
    return rules.from_update("sgd", rule, slots, hyper, prepare=prepare, by_rows=not decays)


def share_of_gradient(h: Values) -> dict[str, Any]:
    """The weight of the gradient in the buffer: 1 at the first update, 1 − dampening later."""
    return {"share": jnp.where(h.age == 1, 1.0, 1 - h.dampening)}


def sgd_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    if "momentum" not in s:
        return -h.learning_rate * rules.add_decay(g, p, h), {}
    g = rules.add_decay(g, p, h)
    a = h.momentum * s.momentum + (h.share * g if "share" in h else g)
    return -h.learning_rate * a, {"momentum": a}


def sgd_nesterov_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    a = h.momentum * s.momentum + rules.add_decay(g, p, h)
    # The buffer is computed first; otherwise XLA would compute the parameter from a copy of the old
    # buffer.
    a, g, p = compute_first(a, g, p)
    return -h.learning_rate * (rules.add_decay(g, p, h) + h.momentum * a), {"momentum": a}


# Optimizers that divide by a root of squared gradients: Adagrad, RMSProp, Adadelta.


@makes_optimizer()
def adagrad(learning_rate: ScalarOrSchedule, initial_accumulator_value: Number = 0.1) -> Optimizer:
    """Adagrad: a += g²; p −= lr · g / √a.

    Args:
        learning_rate: The step size lr ≥ 0.
        initial_accumulator_value: The initial value of the accumulator, > 0.

    Returns:
        An `Optimizer` with the slot `accumulator`. A sparse gradient updates only its own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adagrad(0.5, initial_accumulator_value=3.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.75

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (2011);
    `tf.train.AdagradOptimizer`.
    """
    first = rules.positive("initial_accumulator_value", initial_accumulator_value)
    slots = {"accumulator": Slot(first, holds="square")}
    return rules.from_update(
        "adagrad", adagrad_update, slots, {"learning_rate": learning_rate}, by_rows=True
    )


def adagrad_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    a = s.accumulator + g * g
    return -h.learning_rate * g / jnp.sqrt(a), {"accumulator": a}


@makes_optimizer()
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
        momentum: The fraction of mom that is kept, in [0, 1].
        epsilon: Added under the root, ≥ 0.
        centered: Whether to divide by the standard deviation.

    Returns:
        An `Optimizer` with the slots `rms` (initially 1), `momentum` (0) and, centered, `mg` (0). A
        sparse gradient updates only its own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.rmsprop(0.5, decay=0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton, Coursera lecture 6.5 (2012); `tf.train.RMSPropOptimizer`. A
    variance that rounding makes negative is set to 0.
    """
    slots = rms_slots(1.0, as_bool(centered, "centered"), momentum=MEAN)
    hyper = {
        "learning_rate": learning_rate,
        "decay": decay,
        "momentum": momentum,
        "epsilon": epsilon,
    }
    return rules.from_update("rmsprop", rmsprop_update, slots, hyper, by_rows=True)


def rmsprop_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Divide by an average of squares, or of the variance if there is a slot for the mean."""
    variance, new = variance_of(g, s, h.decay)
    new["momentum"] = h.momentum * s.momentum + h.learning_rate * g / jnp.sqrt(variance + h.epsilon)
    return -new["momentum"], new


@makes_optimizer()
def scale_by_rms(
    decay: ScalarOrSchedule = 0.9,
    epsilon: ScalarOrSchedule = 1e-8,
    *,
    centered: bool = False,
    epsilon_in_root: bool = True,
) -> Optimizer:
    """RMSProp's direction: g / √(r + ε), r = decay·r + (1−decay)·g²; torch's is g / (√r + ε).

    Centered, it also keeps mg = decay·mg + (1−decay)·g and takes r − mg² in place of r.

    Args:
        decay: The decay of the averages, in [0, 1].
        epsilon: Added under the root or to it, ≥ 0.
        centered: Whether to divide by the standard deviation.
        epsilon_in_root: Whether ε is added under the root, as in Optax and Keras, or to the root,
            as in torch.

    Returns:
        An element of a chain with the slot `rms` (initially 0; in `rmsprop` initially 1, as in TF)
        and, centered, `mg`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.scale_by_rms(0.75), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.5

    Source: Tieleman and Hinton (2012); `optax.scale_by_rms`, `optax.scale_by_stddev`,
    `torch.optim.RMSprop`.
    """
    is_centered = as_bool(centered, "centered")
    is_inside = as_bool(epsilon_in_root, "epsilon_in_root")

    def direction(g: Array, p: Array, s: Values, h: Values) -> Result:
        variance, new = variance_of(g, s, h.decay)
        divisor = jnp.sqrt(variance + h.epsilon) if is_inside else jnp.sqrt(variance) + h.epsilon
        return g / divisor, new

    hyper = {"decay": decay, "epsilon": epsilon}
    return rules.from_update(
        "scale_by_rms", direction, rms_slots(0.0, is_centered), hyper, by_rows=True
    )


def rms_slots(first: float, is_centered: bool, **others: Slot) -> dict[str, Any]:
    # No `holds`, so that `compact` keeps it in full precision: a variance is a small difference of
    # two averages, whose rounding errors would dominate it.
    slots = {"rms": Slot(first, holds=None if is_centered else "square"), **others}
    if is_centered:
        slots["mg"] = Slot()
    return slots


def variance_of(g: Array, s: Values, decay: Any) -> tuple[Array, dict[str, Any]]:
    new = {"rms": rules.average(s.rms, g * g, decay)}
    if "mg" not in s:
        return new["rms"], new
    new["mg"] = rules.average(s.mg, g, decay)
    return jnp.maximum(new["rms"] - new["mg"] * new["mg"], 0.0), new


@makes_optimizer()
def adadelta(
    learning_rate: ScalarOrSchedule = 0.001,
    rho: ScalarOrSchedule = 0.95,
    epsilon: ScalarOrSchedule = 1e-8,
) -> Optimizer:
    """Adadelta: e averages g²; d = g·√(x + ε)/√(e + ε); x averages d²; p −= lr·d.

    Args:
        learning_rate: The step size lr ≥ 0; the paper's is 1.
        rho: The decay of both averages, in [0, 1].
        epsilon: Added under the roots, ≥ 0.

    Returns:
        An `Optimizer` with the slots `accum` (e) and `accum_update` (x), initially 0. A sparse
        gradient updates only its own rows.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adadelta(1.0, epsilon=1e-2)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"]:.3f}')
        0.558

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012);
    `tf.train.AdadeltaOptimizer`.
    """
    slots = {"accum_update": Slot(holds="square", in_order=True), "accum": SQUARE}
    hyper = {"learning_rate": learning_rate, "rho": rho, "epsilon": epsilon}
    return rules.from_direction("adadelta", adadelta_direction, slots, hyper, by_rows=True)


def adadelta_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    def direction(e: Array, x: Array, g: Array) -> Array:
        return g * jnp.sqrt(x + h.epsilon) / jnp.sqrt(e + h.epsilon)

    # On CPUs e is computed first, and the direction twice, for the parameter and for x, instead of
    # being stored.
    e, x, g = compute_first(rules.average(s.accum, g * g, h.rho), s.accum_update, g)
    d = direction(e, x, g)
    e, x, g = compute_first(e, x, g)
    return d, {"accum": e, "accum_update": rules.average(x, jnp.square(direction(e, x, g)), h.rho)}


# Optimizers that compute the parameter from sums of gradients: FTRL-Proximal and MADGRAD.


@makes_optimizer()
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
        learning_rate: The step size lr > 0. When a schedule returns 0, the parameters stay
            unchanged.
        learning_rate_power: The exponent ≤ 0 of a in the rate: −0.5 as in Adagrad, 0 for a constant
            rate.
        initial_accumulator_value: The initial value of the accumulator, ≥ 0.
        l1_regularization_strength: The l1 penalty ≥ 0.
        l2_regularization_strength: The l2 penalty ≥ 0.
        l2_shrinkage_regularization_strength: An l2 penalty ≥ 0 in the gradient, but not in the
            accumulator.
        beta: The paper's β ≥ 0, which lowers the first learning rates.

    Returns:
        An `Optimizer` with the slots `accum` and `linear` (initially 0). A sparse gradient updates
        only its own rows. The parameters are computed from the slots: the first update forgets
        their initial values, and `state.with_params` is an error.

    Example:
        >>> import jstep
        >>> optimizer = jstep.ftrl(0.5, l1_regularization_strength=2.0)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.0

    Source: McMahan et al., "Ad Click Prediction" (2013), algorithm 1; `tf.train.FtrlOptimizer`.
    """
    first = as_hyperparameter(
        "initial_accumulator_value", initial_accumulator_value, **rules.NON_NEGATIVE
    )
    slots = {
        # No `holds`, so that `compact` keeps it in full precision: each step computes the
        # parameters from it.
        "accum": Slot(first, computes_params=True),
        "linear": Slot(holds="slow", in_order=True),
    }
    hyper = {
        "learning_rate": rules.positive("learning_rate", learning_rate),
        "learning_rate_power": learning_rate_power,
        "l1_regularization_strength": l1_regularization_strength,
        "l2_regularization_strength": l2_regularization_strength,
        "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
        "beta": beta,
    }
    return rules.from_update("ftrl", ftrl_update, slots, hyper, by_rows=True)


def ftrl_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update to the minimum of the regularized linear model."""
    lr = h.learning_rate
    power = h.learning_rate_power
    l1 = h.l1_regularization_strength
    moves = lr > 0
    lr = jnp.where(moves, lr, jnp.ones_like(p, shape=()))

    def rate_power(a: Array) -> Array:
        return jnp.sqrt(a) if isinstance(power, float) and power == -0.5 else jnp.power(a, -power)

    shrunk = g + 2 * h.l2_shrinkage_regularization_strength * p
    linear = s.linear + shrunk - (rate_power(s.accum + g * g) - rate_power(s.accum)) / lr * p
    linear = jnp.where(moves, linear, s.linear)
    # Three kernels share these slots: `linear` first, then `accum`, then the parameter from both.
    # Otherwise XLA computes them from the old slots in another order and copies the slots that it
    # has to overwrite.
    linear, old, g = compute_first(linear, s.accum, g)
    ((linear, accum),) = run_in_order((linear, jnp.where(moves, old + g * g, old)))
    quadratic = rate_power(accum) / lr + 2 * (h.l2_regularization_strength + h.beta / (2 * lr))
    outweighs = jnp.abs(linear) > l1
    new_p = jnp.where(outweighs, (jnp.sign(linear) * l1 - linear) / quadratic, jnp.zeros_like(p))
    return jnp.where(moves, new_p - p, jnp.zeros_like(p)), {"accum": accum, "linear": linear}


@makes_optimizer()
def madgrad(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.9,
    weight_decay: ScalarOrSchedule = 0.0,
    epsilon: ScalarOrSchedule = 1e-6,
) -> Optimizer:
    """MADGRAD: s += λ·g; G += λ·g²; z = p₀ − s/(∛G + ε); p = momentum·p + (1 − momentum)·z.

    λ = (lr + ε)·√t, where t is the age of the slots; p₀ are the initial parameters. Old gradients
    keep the learning rate of their step.

    Args:
        learning_rate: The step size lr ≥ 0, often larger than Adam's.
        momentum: The weight of the old p in the new one, in [0, 1).
        weight_decay: Coupled weight decay ≥ 0, added to g as weight_decay·p; 0 is recommended.
        epsilon: Added to lr and to ∛G, ≥ 0.

    Returns:
        An `Optimizer` with the slots `s` and `grad_sum_sq` (G), initially 0, `initial` (p₀, a copy
        of the parameters in float32 at least), and `start_step`.

    Example:
        >>> import jstep
        >>> optimizer = jstep.madgrad(0.125, momentum=0.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"]:.3f}')
        0.750

    Source: Defazio and Jelassi, "Adaptivity without Compromise" (2021); the results match the
    authors' code and `optax.contrib.madgrad`.
    """
    # The sum of squares has no `holds`, because the parameters are computed from it, as in FTRL.
    slots = {
        "s": SLOW,
        "grad_sum_sq": 0.0,
        "initial": Slot("copy", holds="weight", computes_params=True),
    }
    hyper = {
        "learning_rate": learning_rate,
        "momentum": as_hyperparameter("momentum", momentum, **rules.BETA),
    }
    hyper |= {"weight_decay": weight_decay, "epsilon": epsilon}
    # Momentum also moves rows without a gradient.
    return rules.from_update("madgrad", madgrad_update, slots, hyper, prepare=madgrad_weight)


def madgrad_weight(h: Values) -> dict[str, Any]:
    return {
        "weight": (h.learning_rate + h.epsilon) * jnp.sqrt(h.age.astype(jnp.result_type(float)))
    }


def madgrad_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    g = g if rules.is_zero(h.weight_decay) else g + h.weight_decay * p
    total = s.s + h.weight * g
    total_square = s.grad_sum_sq + h.weight * (g * g)
    root = jnp.cbrt(total_square) + h.epsilon
    # With ε = 0, a parameter whose gradient has always been 0 stays unchanged.
    moved = jnp.where(
        root > 0, total / jnp.where(root > 0, root, jnp.ones_like(root)), jnp.zeros_like(total)
    )
    z = s.initial - moved
    new = {"s": total, "grad_sum_sq": total_square, "initial": s.initial}
    return (1 - h.momentum) * (z - p), new
