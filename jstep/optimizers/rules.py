"""Optimizers from the equation of one leaf: `from_direction` and `from_update`.

A direction is a function of the gradient, the parameter, the slots and the hyperparameters, all by attribute. It
returns u and the new slots; the parameter becomes p − learning_rate·(u + weight_decay·p). Lion:

    def lion_direction(g, p, s, h):
        return jnp.sign(average(s.m, g, h.beta1)), {"m": average(s.m, g, h.beta2)}

    def lion(learning_rate=1e-4, beta1=0.9, beta2=0.99):
        hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
        return from_direction("lion", lion_direction, {"m": MEAN}, hyper)

Weight decay is the hyperparameter `weight_decay`, a `Masked(weight_decay, weight_decay_mask)` where the mask is an
argument. Bias correction needs the age of the slots, h.age, which exists only if there is a `prepare`: a function
that computes once, for all leaves, what h has in addition. With `prepare=correction` a direction multiplies its
average by h.unbias:

    def correction(h):
        return {"unbias": 1 / bias_correction(h.beta1, h.age)}

Everything else is done for all optimizers: ranges (`BOUNDS`, by the name of the hyperparameter), sign, learning rate,
decay and its mask, schedules and `held` values, None and integer leaves, sparse gradients, dtypes, ages, and the
order in which XLA overwrites slots. A name that is not in `BOUNDS` has no range, and `beta` is only ≥ 0 there: pass
`checked("beta", beta, **BETA)` for another one. An equation of another form, such as that of FTRL, is a rule for
`from_update`: what it returns is added to the parameter or, without a learning rate, is the gradient of the next
element of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import shown
from jstep.core.selection import VarList
from jstep.core.slot_roles import BLOCK
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule
from jstep.optimizers.hyperparameters import checked
from jstep.optimizers.leaf_values import Flag, decay_mask
from jstep.optimizers.leafwise import DECAYED, Prepare, Result, Rule, Values, leafwise
from jstep.optimizers.nested import with_init


@makes_optimizer(4)
def from_direction(
    name: str,
    direction: Rule,
    slots: Mapping[str, Any],
    hyper: Mapping[str, Any],
    *,
    prepare: Prepare | None = None,
    by_rows: bool = False,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """An optimizer from the direction of one leaf: p −= learning_rate·(u + weight_decay·p), u = direction(g, p, s, h).

    It is `leafwise` with the sign, the learning rate, weight decay and its mask, and the ranges of hyperparameters done
    as in jstep's own optimizers. The values of the slots s and of the hyperparameters h are attributes.

    Args:
        name: The optimizer's name, which run cards show.
        direction: `direction(g, p, s, h) -> (u, new slots)`, all floating arrays of one dtype. Slots that are not
            returned stay unchanged.
        slots: Name of each slot → its initial value or a `Slot`.
        hyper: Name of each hyperparameter → a number, an array, a schedule or `held`; one of them is `learning_rate`.
            With a `weight_decay`, parameters decay. A name that jstep's optimizers use has their range: a `beta1` is in
            [0, 1).
        prepare: `prepare(h)` returns values to add to h, computed once for all leaves. With it, the optimizer keeps the
            age of its slots: h.age is 1 at their first update, for bias corrections.
        by_rows: Whether the direction may be computed for the rows of a sparse gradient only, leaving the others
            unchanged. Otherwise sparse gradients are converted to dense ones.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer`.

    Raises:
        AttributeError: The direction, or `prepare`, reads a value that does not exist; the error lists those that do.
        TypeError: A hyperparameter is not a number, an array or a schedule; or the direction does not return two
            values.
        ValueError: A hyperparameter is out of its range, or there is a `weight_decay_mask` without a weight_decay.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def direction(g, p, s, h):
        ...     m = h.beta1 * s.m + (1 - h.beta1) * g
        ...     return jnp.sign(m), {"m": m}
        >>> def signed_average(learning_rate, beta1=0.9):
        ...     hyper = {"learning_rate": learning_rate, "beta1": beta1}
        ...     return jstep.from_direction("signed_average", direction, {"m": 0.0}, hyper)
        >>> optimizer = signed_average(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5
    """
    decay = hyper.get("weight_decay")
    if weight_decay_mask is not None and decay is None:
        raise ValueError(
            f"weight_decay_mask={shown(weight_decay_mask)}: must be None without a weight_decay; add one to hyper"
        )
    if decay is not None and not isinstance(decay, Masked):
        hyper = {**hyper, "weight_decay": Masked(decay, weight_decay_mask)}

    def rule(g: Array, p: Array, s: Values, h: Values) -> Result:
        u, new = direction(g, p, s, h)
        return -h.learning_rate * (with_decay(u, p, h) if "weight_decay" in h else u), new

    return from_update(name, rule, slots, hyper, prepare=prepare, by_rows=by_rows)


def from_update(
    name: str,
    rule: Rule,
    slots: Mapping[str, Any] | Callable[[Params], Mapping[str, Any]],
    hyper: Mapping[str, Any],
    *,
    flags: Mapping[str, Flag] | None = None,
    prepare: Prepare | None = None,
    sums: Sums | None = None,
    by_rows: bool = False,
) -> Optimizer:
    """An optimizer whose rule returns the update of a leaf.

    Args:
        name: The optimizer's name, which run cards show.
        rule: `rule(g, p, s, h)`, all floating arrays of one dtype.
        slots: Name of each slot → its initial value, a `Slot` or a `Scalar`; or a function from params to these. A slot
            comes after those that are computed from its old value.
        hyper: Name of each hyperparameter → a number, an array, a schedule or `held`, to be checked by `BOUNDS`. A
            `weight_decay` is `Masked`.
        flags: Name → a static value of each leaf, in h: see `masks`.
        prepare: `prepare(h)` returns values to add to h, computed once for all leaves. With it, the optimizer keeps the
            age of its slots: h.age is 1 at their first update.
        sums: Scalars that depend on all leaves.
        by_rows: Whether the rule may be applied to the rows of a sparse gradient only, leaving the others unchanged.
    """
    given = {} if callable(slots) else slots
    decay = hyper.get("weight_decay")
    if isinstance(decay, Masked):
        hyper = {**hyper, "weight_decay": decay.weight_decay}
        flags = {DECAYED: decay_mask("weight_decay_mask", decay.mask), **(flags or {})}
    scalars = {name: slot.initial for name, slot in given.items() if isinstance(slot, Scalar)}

    def of_leaf(g: Array, p: Array, s: Values, h: Values) -> Result:
        return rule(g, p, s, h)

    of_leaf.__name__ = f"{name}{RULE}"
    made = leafwise(
        of_leaf,
        hyper=in_bounds(hyper),
        slots=slots if callable(slots) else {name: slot for name, slot in given.items() if name not in scalars},
        scalars=scalars,
        flags=flags,
        prepare=prepare,
        measure=sums and sums.measure,
        conclude=sums and sums.conclude,
        aged=prepare is not None,
        sparse=by_rows,
    )
    return made if "learning_rate" in hyper else with_init(made, order=BLOCK)


class Scalar(NamedTuple):
    """A slot with one value for all parameters, in float32; `prepare` and `Sums` return its new values."""

    initial: Any = 0.0


class Masked(NamedTuple):
    """A weight decay, and the leaves to which it applies.

    Attributes:
        weight_decay: The hyperparameter.
        mask: The argument `weight_decay_mask`.
    """

    weight_decay: ScalarOrSchedule
    mask: VarList


class Sums(NamedTuple):
    """Scalars that depend on all leaves.

    Attributes:
        measure: `measure(g, p, s, h)` returns scalars by name, which are summed over the leaves.
        conclude: `conclude(h)` returns values to add to h, from the sums in h.
    """

    measure: Callable[[Array, Array, Values, Values], dict[str, Any]]
    conclude: Prepare


def in_bounds(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Check hyperparameters by `BOUNDS`."""
    return {name: checked(name, value, **BOUNDS.get(name, {})) for name, value in hyper.items()}


def positive(name: str, value: Any) -> Any:
    """A hyperparameter > 0 whose range in `BOUNDS` includes 0."""
    return checked(name, value, **POSITIVE)


def decays(h: Values) -> bool:
    """Whether this leaf decays; False only if it is known while tracing that it does not."""
    return bool(h.decayed) and not is_zero(h.weight_decay)


def with_decay(u: Array, p: Array, h: Values) -> Array:
    """The direction u + weight_decay · p if this leaf decays, else u."""
    return u + h.weight_decay * p if decays(h) else u


def average(old: Array, new: Array, beta: Any) -> Array:
    """An exponential moving average: β·old + (1−β)·new."""
    return beta * old + (1 - beta) * new


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, computed without cancellation for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)


def is_zero(value: Any) -> bool:
    """Whether a hyperparameter is the constant 0."""
    return isinstance(value, float) and value == 0.0


RATE: dict[str, Any] = {"low": 0}
"""A number ≥ 0."""

POSITIVE: dict[str, Any] = {"low": 0, "above": True}

SHARE: dict[str, Any] = {"low": 0, "high": 1}

BETA: dict[str, Any] = {"low": 0, "high": 1, "below": True}
"""The decay of a bias-corrected average, in [0, 1)."""

BOUNDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "epsilon", "epsilon_root", "epsilon_scale"), RATE),
    **dict.fromkeys(("alpha", "momentum_decay", "trust_coefficient", "decay_rate", "weight_lr_power"), RATE),
    **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength", "beta"), RATE),
    **dict.fromkeys(("l2_shrinkage_regularization_strength", "min_step_size", "max_step_size"), RATE),
    **dict.fromkeys(("clip_threshold", "d0", "d_coef", "radius"), POSITIVE),
    **dict.fromkeys(("momentum", "dampening", "decay", "rho"), SHARE),
    **dict.fromkeys(("beta1", "beta2", "beta3", "shampoo_beta"), BETA),
    "eta_minus": {"low": 0, "high": 1, "above": True, "below": True},
    "eta_plus": {"low": 1, "above": True},
    "growth_rate": {"low": 1},
    "learning_rate_power": {"high": 0},
    "threshold": {"low": 4},
}
"""Name of a hyperparameter → its range. One with another range is checked by its optimizer."""

RULE = "_rule"
"""The end of the name under which the program of a step calls the rule of an optimizer: `adam_rule`."""
