"""Optimizers from the equation of one leaf: `from_direction` and `from_update`.

A direction is a function of the gradient, the parameter, the slots and the hyperparameters, all by attribute. It
returns u and the new slots; the parameter becomes p − learning_rate·(u + weight_decay·p). Lion:

    def lion_direction(g, p, s, h):
        return jnp.sign(average(s.m, g, h.beta1)), {"m": average(s.m, g, h.beta2)}

    def lion(learning_rate=1e-4, beta1=0.9, beta2=0.99):
        hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
        return from_direction("lion", lion_direction, {"m": MEAN}, hyper)

Weight decay is the hyperparameter `weight_decay` with `flags=decay_mask(weight_decay_mask)`. Bias correction needs the
age of the slots, h.age, which exists only if there is a `prepare`: a function that computes once, for all leaves, what
h has in addition. With `prepare=correction` a direction multiplies its average by h.unbias:

    def correction(h):
        return {"unbias": 1 / bias_correction(h.beta1, h.age)}

Everything else is done for all optimizers: ranges (`BOUNDS`, by the name of the hyperparameter), sign, learning rate,
decay and its mask, schedules and `held` values, None and integer leaves, sparse gradients, dtypes, ages, and the order
in which XLA overwrites slots. A name that is not in `BOUNDS` has no range, and `beta` is only ≥ 0 there: pass
`checked("beta", beta, **BETA)` for another one.
An equation of another form, such as that of FTRL, is a rule for `from_update`: what it returns is added to the
parameter or, without a learning rate, is the gradient of the next element of a chain.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params
from jstep.optimizers.hyper import Hyper, checked
from jstep.optimizers.leafwise import RULE, LeafSlots, leafwise
from jstep.optimizers.masks import Flag, mask

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

DECAYED = "decayed"
"""The flag for whether weight decay applies to a leaf."""

MISSING = {
    "age": "; h.age exists if there is a prepare=",
    DECAYED: "; a weight_decay needs flags=decay_mask(weight_decay_mask)",
    "learning_rate": "; from_direction multiplies by it: add it to hyper",
}
"""Name of an attribute of h → what an optimizer without it has to do."""


class Values(types.SimpleNamespace):
    """Slots, or hyperparameters with what else is known at a step, as attributes."""

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __getattr__(self, name: str) -> Any:
        """Report an attribute that does not exist."""
        found = f"{name}: must be one of {sorted(vars(self))}"
        raise AttributeError(found + MISSING.get(name, ""), name=name, obj=self)

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


Result: TypeAlias = tuple[Array, dict[str, Any]]
"""A direction or an update, and the new slots by name; slots that are not returned stay unchanged."""
Rule: TypeAlias = Callable[[Array, Array, Values, Values], Result]
Prepare: TypeAlias = Callable[[Values], dict[str, Any]]


class Scalar(NamedTuple):
    """A slot with one value for all parameters, in float32; `prepare` and `Sums` return its new values."""

    initial: Any = 0.0


class Sums(NamedTuple):
    """Scalars that depend on all leaves.

    Attributes:
        measure: `measure(g, p, s, h)` returns scalars by name, which are summed over the leaves.
        conclude: `conclude(h)` returns values to add to h, from the sums in h.
    """

    measure: Callable[[Array, Array, Values, Values], dict[str, Any]]
    conclude: Prepare


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
        hyper: Name of each hyperparameter → a number, an array, a schedule or `held`, to be checked by `BOUNDS`.
        flags: Name → a static value of each leaf, in h: see `masks`.
        prepare: `prepare(h)` returns values to add to h, computed once for all leaves. With it, the optimizer keeps the
            age of its slots: h.age is 1 at their first update.
        sums: Scalars that depend on all leaves.
        by_rows: Whether the rule may be applied to the rows of a sparse gradient only, leaving the others unchanged.
    """
    given = {} if callable(slots) else slots
    scalars = {name: slot.initial for name, slot in given.items() if isinstance(slot, Scalar)}

    def of_leaf(g: Array, p: Array, slots: LeafSlots, h: Hyper) -> Result:
        return rule(g, p, Values(**slots), Values(**h))

    def measured(g: Array, p: Array, slots: LeafSlots, h: Hyper) -> Hyper:
        return sums.measure(g, p, Values(**slots), Values(**h)) if sums else {}

    of_leaf.__name__ = f"{name}{RULE}"
    return leafwise(
        of_leaf,
        hyper=in_bounds(hyper),
        slots=slots if callable(slots) else {name: slot for name, slot in given.items() if name not in scalars},
        scalars=scalars,
        flags=flags,
        prepare=prepare and _of_values(prepare),
        measure=measured if sums else None,
        conclude=sums and _of_values(sums.conclude),
        aged=prepare is not None,
        sparse=by_rows,
    )


def from_direction(
    name: str,
    direction: Rule,
    slots: Mapping[str, Any],
    hyper: Mapping[str, Any],
    *,
    flags: Mapping[str, Flag] | None = None,
    prepare: Prepare | None = None,
    by_rows: bool = False,
) -> Optimizer:
    """An optimizer with the update −learning_rate·(direction + weight_decay·p).

    Args:
        name: The optimizer's name, which run cards show.
        direction: `direction(g, p, s, h) -> (u, new slots)`.
        slots: As for `from_update`.
        hyper: As for `from_update`, with a learning_rate. With a weight_decay, flags need those of `decay_mask`.
        flags: As for `from_update`.
        prepare: As for `from_update`.
        by_rows: As for `from_update`.
    """
    decays = "weight_decay" in hyper

    def rule(g: Array, p: Array, s: Values, h: Values) -> Result:
        u, new = direction(g, p, s, h)
        return -h.learning_rate * (with_decay(u, p, h) if decays else u), new

    return from_update(name, rule, slots, hyper, flags=flags, prepare=prepare, by_rows=by_rows)


def _of_values(fn: Prepare) -> Callable[[Hyper], Hyper]:
    return lambda h: fn(Values(**h))


def in_bounds(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Check hyperparameters by `BOUNDS`."""
    return {name: checked(name, value, **BOUNDS.get(name, {})) for name, value in hyper.items()}


def positive(name: str, value: Any) -> Any:
    """A hyperparameter > 0 whose range in `BOUNDS` includes 0."""
    return checked(name, value, **POSITIVE)


def decay_mask(weight_decay_mask: VarList) -> dict[str, Flag]:
    """The flag for the leaves to which weight decay applies."""
    return {DECAYED: mask("weight_decay_mask", weight_decay_mask)}


def decays(h: Values) -> bool:
    """Whether this leaf decays; False only if it is known while tracing that it does not."""
    return bool(h.decayed) and not (isinstance(h.weight_decay, float) and h.weight_decay == 0.0)


def with_decay(u: Array, p: Array, h: Values) -> Array:
    """The direction u + weight_decay · p if this leaf decays, else u."""
    return u + h.weight_decay * p if decays(h) else u


def average(old: Array, new: Array, beta: Any) -> Array:
    """An exponential moving average: β·old + (1−β)·new."""
    return beta * old + (1 - beta) * new
