"""Transformations of gradients as elements of a chain: noise, normalization, moments, directions."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.placement import as_key
from jstep.core.selection import VarList
from jstep.core.trees import (
    Array,
    IndexedSlices,
    Optimizer,
    Params,
    ScalarOrSchedule,
    Step,
    Updates,
    combined,
    is_slices,
    on_table,
    within,
)
from jstep.differentiate.clipping import global_norm
from jstep.optimizers.hyperparameters import (
    Flag,
    Hyper,
    UnitAxes,
    check_axes,
    checked,
    leaf_numbers,
    mask,
    own_leaves,
    unit_axes_of,
)
from jstep.optimizers.leafwise import RULE, LeafSlots, element, leafwise, map_updates

# Transformations of gradients as elements of a chain: noise, centralization, normalization.

EPSILON = 1e-6


def add_noise(eta: ScalarOrSchedule, gamma: ScalarOrSchedule, key: Any) -> Optimizer:
    """Gradient noise: g += σ·z, z standard normal, σ² = η/(1 + N)^γ at the step N.

    Args:
        eta: The variance η ≥ 0 at step 0.
        gamma: The exponent γ ≥ 0 by which the variance decreases; 0.55 is usual.
        key: A PRNG key. The noise is a function of the key, the step and the leaf, so it is the same in a resumed run
            and with every sharding.

    Returns:
        An `Optimizer` without slots, to be chained before an optimizer; its hyperparameters are `noise_eta` and
        `noise_gamma`. Leaves without a gradient get no noise; sparse gradients become dense.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.add_noise(0.01, 0.55, jax.random.key(0)), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(10_000)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.ones(10_000)}, optimizer)
        >>> print(f"{state.params['w'].mean():.2f} ± {state.params['w'].std():.2f}")
        -1.00 ± 0.10

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015);
    `optax.add_noise`, which splits and stores its key.
    """
    key = as_key(key, "key")

    def noisy(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        real = trees.default_float()
        steps = jnp.asarray(step).astype(real) + 1
        sigma = jnp.sqrt(jnp.asarray(h["noise_eta"], real) * steps ** -jnp.asarray(h["noise_gamma"], real))
        of_step = jax.random.fold_in(key, step)
        return map_updates(lambda g, i: _noisy(g, sigma, of_step, i), params, updates, leaf_numbers(params))

    hyper = {"noise_eta": checked("eta", eta, low=0), "noise_gamma": checked("gamma", gamma, low=0)}
    return element(noisy, hyper)


def _noisy(g: Any, sigma: Array, key: Array, i: int) -> Array:
    g = g.to_dense() if is_slices(g) else jnp.asarray(g)
    dtype = trees.compute_dtype(g.dtype)
    noise = jax.random.normal(jax.random.fold_in(key, i), g.shape, dtype)
    return g.astype(dtype) + sigma.astype(dtype) * noise


def centralize_gradients(axes: UnitAxes = None) -> Optimizer:
    """Gradient centralization: g −= mean(g) over the axes that feed one output, for leaves of two axes or more.

    Args:
        axes: The axes to average over: a tuple for all leaves that have them, or `(path, leaf) -> tuple`. None means
            all but the first, which suits kernels of shape (out, in, …); for kernels (…, in, out), as in Flax, use
            `lambda path, leaf: tuple(range(leaf.ndim - 1))`.

    Returns:
        An `Optimizer` without slots and hyperparameters, to be chained before an optimizer. If axes is None, leaves
        with fewer than two axes stay unchanged; averages over the first axis make sparse gradients dense.

    Raises:
        ValueError: A leaf has no such axis.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.centralize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros((1, 2))}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.array([[1.0, 3.0]])}, optimizer).params["w"])
        [[ 1. -1.]]

    Source: Yong et al., "Gradient Centralization" (2020); `optax.centralize`.
    """
    check_axes(axes)

    def centralize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        def of_leaf(g: Any, leaf: tuple[str, Any]) -> Any:
            return _centred(g, unit_axes_of(axes, *leaf, lambda shape: tuple(range(1, len(shape)))))

        return map_updates(of_leaf, params, updates, own_leaves(params))

    return element(centralize, {})


def _centred(g: Any, over: tuple[int, ...]) -> Any:
    def centred(g: Array) -> Array:
        wide = g.astype(trees.compute_dtype(g.dtype))
        return wide - jnp.mean(wide, axis=over, keepdims=True) if over else wide

    mixes = is_slices(g) and any(axis % len(g.dense_shape) == 0 for axis in over)
    return centred(g.to_dense()) if mixes else on_table(centred, g)


def normalize_gradients(scale: ScalarOrSchedule = 1.0, per_leaf: bool = False) -> Optimizer:
    """Normalization: g ·= scale / (‖g‖ + 0.000001), where ‖g‖ is the norm of all leaves together.

    Args:
        scale: The norm of the result, > 0.
        per_leaf: Whether to normalize each leaf by its own norm.

    Returns:
        An `Optimizer` without slots, to be chained before an optimizer; its hyperparameter is `gradient_norm`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.normalize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer)
        >>> params = jstep.apply_gradients(state, {"w": jnp.array([30.0, -40.0])}, optimizer).params
        >>> print(*(f"{x:.4f}" for x in params["w"]))
        -0.6000 0.8000

    Source: `optax.normalize_by_update_norm`.
    """
    each = as_bool(per_leaf, "per_leaf")

    def normalize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        norm = None if each else global_norm(updates)
        return jax.tree.map(lambda g: _normalized(g, norm, h["gradient_norm"]), updates, is_leaf=is_slices)

    return element(normalize, {"gradient_norm": checked("scale", scale, low=0, above=True)})


def _normalized(g: Array | IndexedSlices, norm: Array | None, scale: Array) -> Array | IndexedSlices:
    if isinstance(g, IndexedSlices):
        rows = combined(g)
        values = _normalized(rows.values, norm, scale)
        return within(dataclasses.replace(rows, values=values))
    dtype = trees.compute_dtype(g.dtype)
    by = scale / ((global_norm(g) if norm is None else norm).astype(dtype) + EPSILON)
    return g.astype(dtype) * by.astype(dtype)


# Optimizers from the equation of one leaf: `from_direction` and `from_update`.
#
# A direction is a function of the gradient, the parameter, the slots and the hyperparameters, all by attribute. It
# returns u and the new slots; the parameter becomes p − learning_rate·(u + weight_decay·p). Lion:
#
#     def lion_direction(g, p, s, h):
#         return jnp.sign(average(s.m, g, h.beta1)), {"m": average(s.m, g, h.beta2)}
#
#     def lion(learning_rate=1e-4, beta1=0.9, beta2=0.99):
#         hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
#         return from_direction("lion", lion_direction, {"m": MEAN}, hyper)
#
# Weight decay is the hyperparameter `weight_decay` with `flags=decay_mask(weight_decay_mask)`. Bias correction needs
# the age of the slots, h.age, which exists only if there is a `prepare`: a function that computes once, for all leaves,
# what h has in addition. With `prepare=correction` a direction multiplies its average by h.unbias:
#
#     def correction(h):
#         return {"unbias": 1 / bias_correction(h.beta1, h.age)}
#
# Everything else is done for all optimizers: ranges (`BOUNDS`, by the name of the hyperparameter), sign, learning rate,
# decay and its mask, schedules and `held` values, None and integer leaves, sparse gradients, dtypes, ages, and the
# order in which XLA overwrites slots. A name that is not in `BOUNDS` has no range, and `beta` is only ≥ 0 there: pass
# `checked("beta", beta, **BETA)` for another one. An equation of another form, such as that of FTRL, is a rule for
# `from_update`: what it returns is added to the parameter or, without a learning rate, is the gradient of the next
# element of a chain.

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
