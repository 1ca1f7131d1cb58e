"""Chain elements that change gradients and updates: noise, norms, clips, scales, weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_bool, as_number, describe_type, format_value
from jstep.core.device_values import as_key
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Held, Number, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.differentiate import clipping
from jstep.optimizers import leaf_values
from jstep.optimizers.chains import drawing_element, element
from jstep.optimizers.draws import numbered_key
from jstep.optimizers.hyperparameters import Hyper, as_hyperparameter, constant
from jstep.optimizers.leaf_values import Flag, UnitAxes
from jstep.optimizers.rules import (
    Result,
    Values,
    from_direction,
    from_update,
    is_zero,
    replace_init,
)
from jstep.optimizers.updates import map_updates
from jstep.slots.indexed_slices import (
    IndexedSlices,
    combine_rows,
    is_slices,
    map_table,
    trim_slices,
)

# Gradients: noise, centralization, normalization, clips.

EPSILON = 1e-6


@makes_optimizer()
def add_noise(eta: ScalarOrSchedule, gamma: ScalarOrSchedule, key: Any) -> Optimizer:
    """Gradient noise: g += σ·z, z standard normal, σ² = η/(1 + N)^γ at the step N.

    Args:
        eta: The variance η ≥ 0 at step 0.
        gamma: The exponent γ ≥ 0 by which the variance decreases; 0.55 is usual.
        key: A PRNG key. The noise depends on the key, the step, the number of the update within the
            step and the leaf only.

    Returns:
        An element of a chain with the hyperparameters `noise_eta` and `noise_gamma`, and two scalar
        slots, `drawn/step` and `drawn/count`, which count the updates of a step. Leaves without a
        gradient get no noise; sparse gradients become dense.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> noise = jstep.add_noise(0.01, 0.55, jax.random.key(0))
        >>> optimizer = jstep.chain(noise, jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(10_000)}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.ones(10_000)}, optimizer)
        >>> print(f"{state.params['w'].mean():.2f} ± {state.params['w'].std():.2f}")
        -1.00 ± 0.10

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks"
    (2015); `optax.add_noise`.
    """
    key = as_key(key, "key")

    def noisy(updates: Updates, params: Params, step: Step, h: Hyper, number: Array) -> Updates:
        real = trees.default_float()
        steps = jnp.asarray(step).astype(real) + 1
        sigma = jnp.sqrt(
            jnp.asarray(h["noise_eta"], real) * steps ** -jnp.asarray(h["noise_gamma"], real)
        )
        step_key = jax.random.fold_in(key, step)

        def noisy_leaf(g: Any, leaf_number: int) -> Array:
            g = g.to_dense() if is_slices(g) else jnp.asarray(g)
            dtype = trees.compute_dtype(g.dtype)
            leaf_key = numbered_key(jax.random.fold_in(step_key, leaf_number), number)
            noise = jax.random.normal(leaf_key, g.shape, dtype)
            return g.astype(dtype) + sigma.astype(dtype) * noise

        return map_updates(noisy_leaf, params, updates, leaf_values.leaf_numbers(params))

    hyper = {"noise_eta": as_hyperparameter("eta", eta, low=0)}
    hyper |= {"noise_gamma": as_hyperparameter("gamma", gamma, low=0)}
    return drawing_element(noisy, hyper)


@makes_optimizer()
def centralize_gradients(axes: UnitAxes = None) -> Optimizer:
    """Gradient centralization: g −= mean(g) over the axes that feed one output.

    It is for leaves of two axes or more.

    Args:
        axes: The axes to average over: a tuple for all leaves that have them, or
            `(path, leaf) -> tuple`. None means all but the first, for kernels (out, in, …);
            for (…, in, out), as in Flax, use `lambda path, leaf: tuple(range(leaf.ndim - 1))`.

    Returns:
        An element of a chain without slots. If axes is None, leaves with fewer than two axes stay
        unchanged; averages over the first axis make sparse gradients dense.

    Raises:
        ValueError: A leaf has no such axis.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.centralize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros((1, 2))}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.array([[1.0, 3.0]])}, optimizer)
        >>> print(state.params["w"])
        [[ 1. -1.]]

    Source: Yong et al., "Gradient Centralization" (2020); `optax.centralize`.
    """
    axes_of = leaf_values.unit_axes(axes, lambda shape: tuple(range(1, len(shape))))

    def centralize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        def centered_leaf(g: Any, leaf: tuple[str, Any]) -> Any:
            axes = axes_of(*leaf)

            def centered(g: Array) -> Array:
                wide = g.astype(trees.compute_dtype(g.dtype))
                return wide - jnp.mean(wide, axis=axes, keepdims=True) if axes else wide

            mixes_rows = is_slices(g) and any(axis % len(g.dense_shape) == 0 for axis in axes)
            return centered(g.to_dense()) if mixes_rows else map_table(centered, g)

        return map_updates(centered_leaf, params, updates, leaf_values.own_leaves(params))

    return element(centralize, {})


@makes_optimizer()
def normalize_gradients(scale: ScalarOrSchedule = 1.0, *, per_leaf: bool = False) -> Optimizer:
    """Normalization: g ·= scale / (‖g‖ + 0.000001), where ‖g‖ is the norm of all leaves together.

    Args:
        scale: The norm of the result, > 0.
        per_leaf: Whether to normalize each leaf by its own norm.

    Returns:
        An element of a chain without slots, with the hyperparameter `gradient_norm`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.normalize_gradients(), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer)
        >>> params = jstep.apply_gradients(state, {"w": jnp.array([30.0, -40.0])}, optimizer).params
        >>> print(*(f"{x:.4f}" for x in params["w"]))
        -0.6000 0.8000

    Source: `optax.normalize_by_update_norm`.
    """
    is_per_leaf = as_bool(per_leaf, "per_leaf")

    def normalize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        norm = None if is_per_leaf else clipping.global_norm(updates)
        return jax.tree.map(
            lambda g: _normalized(g, norm, h["gradient_norm"]), updates, is_leaf=is_slices
        )

    return element(
        normalize, {"gradient_norm": as_hyperparameter("scale", scale, low=0, above=True)}
    )


def _normalized(
    g: Array | IndexedSlices, norm: Array | None, scale: Array
) -> Array | IndexedSlices:
    if isinstance(g, IndexedSlices):
        rows = combine_rows(g)
        values = _normalized(rows.values, norm, scale)
        return trim_slices(dataclasses.replace(rows, values=values))
    dtype = trees.compute_dtype(g.dtype)
    if norm is None:  # its own
        norm = clipping.global_norm(g)
    factor = scale / (norm.astype(dtype) + EPSILON)
    return g.astype(dtype) * factor.astype(dtype)


@makes_optimizer()
def clip_gradients(
    *,
    by_value: tuple[ScalarOrSchedule, ScalarOrSchedule] | ScalarOrSchedule | None = None,
    by_norm: ScalarOrSchedule | None = None,
    by_average_norm: ScalarOrSchedule | None = None,
    by_global_norm: ScalarOrSchedule | None = None,
    adaptive: ScalarOrSchedule | None = None,
    axes: UnitAxes = None,
) -> Optimizer:
    """Clip the gradients in a `chain`, in the way given by exactly one argument.

    Args:
        by_value: `(min, max)`, or c > 0 for `(-c, c)`.
        by_norm: The largest L2 norm of each leaf, > 0.
        by_average_norm: The largest L2 norm of each leaf divided by its number of elements, > 0.
        by_global_norm: The largest L2 norm of all leaves together, > 0.
        adaptive: The largest ratio of a unit's gradient norm to its parameter norm (at least
            0.001), > 0; 0.01 is usual. A unit consists of the weights that feed one output.
        axes: With adaptive, the axes that a unit spans: a tuple for all leaves, or
            `(path, leaf) -> tuple`. None assumes kernels (…, in, out): all axes if at most one is
            longer than 1, the first of 2 or 3 axes, all but the last of 4 or more.

    Returns:
        An element of a chain without slots; its hyperparameters are named `clip_by_…` after the
        argument (`clip_by_value_min` and `clip_by_value_max`).

    Raises:
        ValueError: Not exactly one argument is given, or it is out of range.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": 3.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 50.0}, optimizer).params["w"])
        2.0

    Source: `tf.clip_by_value` and the like; for adaptive, Brock et al., "High-Performance
    Large-Scale Image Recognition Without Normalization" (2021), and `optax.adaptive_grad_clip`.
    """
    ways = {"by_value": by_value, "by_norm": by_norm, "by_average_norm": by_average_norm}
    ways |= {"by_global_norm": by_global_norm, "adaptive": adaptive}
    limits: dict[str, Any] = {name: value for name, value in ways.items() if value is not None}
    if len(limits) != 1:
        raise ValueError(
            f"clip_gradients: must have exactly one of {', '.join(ways)}, "
            f"got {sorted(limits) or 'none'}"
        )
    ((how, limit),) = limits.items()
    if axes is not None and how != "adaptive":
        raise ValueError(
            f"axes={format_value(axes)}: only clip_gradients(adaptive=…) takes axes, got {how}"
        )
    axes_of = leaf_values.unit_axes(axes, _unit_axes)
    if how == "by_value":
        hyper = _value_bounds(limit)
    else:
        hyper = {f"clip_{how}": as_hyperparameter(how, limit, low=0, above=True)}

    def clip(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        if how == "by_value":
            high = h["clip_by_value_max"]
            return clipping.clip_values(updates, h.get("clip_by_value_min", -high), high)
        if how != "adaptive":
            norm = clipping.global_norm(updates) if how == "by_global_norm" else None
            norm_of = (
                clipping.average_norm
                if how == "by_average_norm"
                else lambda x, _: clipping.compute_norm([x])
            )
            return clipping.clip_norms(updates, h[f"clip_{how}"], f"clip_{how}", norm_of, norm)

        def clip_units(g: object, p: Array, leaf: tuple[str, Any]) -> Any:
            return map_table(lambda g: _clipped_units(g, p, h["clip_adaptive"], axes_of(*leaf)), g)

        return map_updates(
            clip_units, params, updates, jax.tree.leaves(params), leaf_values.own_leaves(params)
        )

    return element(clip, hyper)


def _value_bounds(
    limit: tuple[ScalarOrSchedule, ScalarOrSchedule] | Number | Any,
) -> dict[str, Any]:
    if not isinstance(limit, tuple | list):
        high = as_hyperparameter("by_value", limit, low=0, above=True)
        if isinstance(high, Held):  # one slot, whose negative is the minimum
            return {"clip_by_value_max": high}
        return {"clip_by_value_max": high, "clip_by_value_min": _negative(high)}
    if len(limit) != 2:
        raise ValueError(f"by_value={limit!r}: must be (min, max), or c for (-c, c)")
    low = as_hyperparameter("by_value[0]", limit[0])
    high = as_hyperparameter("by_value[1]", limit[1])
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValueError(f"by_value={limit!r}: must be (min, max) with min ≤ max")
    return {"clip_by_value_min": low, "clip_by_value_max": high}


def _negative(value: Any) -> Any:
    if callable(value):
        return lambda step: -value(step)
    return -value


def _unit_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    if sum(size > 1 for size in shape) <= 1:
        return tuple(range(len(shape)))
    if len(shape) <= 3:
        return (0,)
    return tuple(range(len(shape) - 1))


def _clipped_units(g: Array, p: Array, ratio: object, axes: tuple[int, ...]) -> Array:
    """Adaptive clipping: g · ratio·max(‖p‖, 0.001)/‖g‖ for units where this reduces ‖g‖."""
    dtype = trees.compute_dtype(g.dtype)
    wide = g.astype(dtype)
    limit = jnp.asarray(ratio).astype(dtype)
    limit = limit * jnp.maximum(clipping.compute_norm([p], axes), MIN_PARAMETER_NORM)
    norm = clipping.compute_norm([wide], axes)
    # As in the other clipping modes, a norm that is not finite makes the clipped values NaN.
    factor = jnp.where(
        jnp.isfinite(norm),
        limit / jnp.maximum(norm, MIN_GRADIENT_NORM),
        jnp.full_like(norm, jnp.nan),
    )
    return jnp.where(norm <= limit, wide, wide * factor)


MIN_PARAMETER_NORM = 1e-3

MIN_GRADIENT_NORM = 1e-6


# Scales: a factor, the learning rate, or factors by path.

PREFIX = "scale"


@makes_optimizer(1)
def scale(factor: ScalarOrSchedule) -> Optimizer:
    """Scale: factor·u, where u is the update from the previous element.

    Args:
        factor: A finite number, negative if the updates are to be added to parameters.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale(-0.5))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        1.5

    Source: `optax.scale`, and `optax.scale_by_schedule`.
    """
    optimizer = from_update(
        "scale", lambda g, p, s, h: (h.factor * g, {}), {}, {"factor": factor}, by_rows=True
    )
    is_negative = isinstance(factor, int | float | np.number) and factor < 0
    return replace_init(optimizer, negates=is_negative)


@makes_optimizer()
def scale_by_learning_rate(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Scale by the negative learning rate: −lr·u, where u is the update from the previous element.

    Args:
        learning_rate: The step size lr ≥ 0.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(
        ...     jstep.clip_gradients(by_value=1.0), jstep.scale_by_learning_rate(0.25)
        ... )
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        1.75

    Source: `optax.scale_by_learning_rate`.
    """
    hyper = {"learning_rate": learning_rate}
    return from_direction(
        "scale_by_learning_rate", lambda g, p, s, h: (g, {}), {}, hyper, by_rows=True
    )


@makes_optimizer(1)
def scale_updates(
    factors: Mapping[str, ScalarOrSchedule] | Callable[[str, Any], float],
) -> Optimizer:
    """Scaling: u ← factor·u, chained after an optimizer whose updates are u.

    Weight decay in u is scaled, too.

    Args:
        factors: Path or glob → a number ≥ 0, an array, a schedule or `held`; the first match
            applies, and updates of leaves without a match are unchanged. Or a function
            `(path, leaf) -> number`.

    Returns:
        An `Optimizer` without slots, whose hyperparameters are `scale/glob`. Sparse updates stay
        sparse.

    Raises:
        ValueError: A factor is out of range, or a glob matches nothing.

    Example:
        >>> import jstep
        >>> halving = jstep.scale_updates({"embed*": 0.5})
        >>> optimizer = jstep.chain(jstep.gradient_descent(1.0), halving)
        >>> state = jstep.TrainState.create({"embed": 1.0, "head": 1.0}, optimizer)
        >>> grads = {"embed": 1.0, "head": 1.0}
        >>> params = jstep.apply_gradients(state, grads, optimizer).params
        >>> print(params["embed"], params["head"])
        0.5 0.0

    Source: layer-wise rates as in Bao et al., "BEiT" (2021); groups of parameters in other
    frameworks.
    """
    if callable(factors) and not isinstance(factors, Mapping | Held):
        factor_fn = factors
        hyper: dict[str, Any] = {}

        def leaf_factor(path: str, leaf: Any) -> float:
            return constant(f"factors({path!r}, …)", factor_fn(path, leaf), low=0)

        factor = leaf_values.leaf_flag(leaf_factor)
    elif isinstance(factors, Mapping):
        factor = leaf_values.first_match("factors", factors)
        hyper = _glob_hyperparameters(PREFIX, "factors", factors)
    else:
        raise TypeError(
            f"factors={format_value(factors)}: must be a mapping or function, "
            f"got {describe_type(factors)}"
        )
    return from_update(
        "scale_updates", scale_update, {}, hyper, flags={"factor": factor}, by_rows=True
    )


def _glob_hyperparameters(prefix: str, argument: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    checked = {
        glob: as_hyperparameter(f"{argument}[{glob!r}]", x, low=0) for glob, x in numbers.items()
    }
    return {f"{prefix}/{glob}": x for glob, x in checked.items()}


def scale_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    if h.factor is None:
        return u, {}
    # The glob of a hyperparameter, or the number that a function returned.
    factor = h[f"{PREFIX}/{h.factor}"] if isinstance(h.factor, str) else h.factor
    return factor * u, {}


# Weight decay: with the learning rate, or independent of it.

DecayRates: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]

DECAY = "decay"
"""The flag for a leaf's decay: the hyperparameter's name and a factor, or None."""


@makes_optimizer()
def add_weight_decay(
    weight_decay: DecayRates,
    weight_decay_mask: VarList | Mapping[str, float] = None,
    *,
    mask: VarList | Mapping[str, float] = None,
) -> Optimizer:
    """Add weight decay: u + weight_decay·p, where u is the update from the previous element.

    After `scale_by_adam` the decay is decoupled as in AdamW; before a `trace` it is coupled as in
    SGD.

    Args:
        weight_decay: The decay ≥ 0, or path or glob → decay: the first match applies, and leaves
            without a match do not decay.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all. Or path or glob → a
            factor ≥ 0, such as `mup(...).decays`; 1 without a match.
        mask: `weight_decay_mask` under the name that `optax.add_decayed_weights` gives it; only one
            may be given.

    Returns:
        An element of a chain without slots. Its hyperparameter is `weight_decay`, or
        `weight_decay/glob` for each entry of a mapping.

    Raises:
        ValueError: A number is negative, or an entry matches nothing.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.add_weight_decay(0.5), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        1.5

    Source: `optax.add_decayed_weights`.
    """
    hyper, flags = decay_arguments(
        "weight_decay", weight_decay, **_given_mask(weight_decay_mask, mask)
    )
    # Rows without a gradient decay, too.
    by_rows = all(map(is_zero, hyper.values()))
    return from_update(
        "add_weight_decay", add_decay_update, {}, hyper, flags=flags, by_rows=by_rows
    )


def add_decay_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    decay = leaf_decay(h)
    return (u if decay is None else u + decay * p), {}


@makes_optimizer()
def decay_weights(
    weight_decay: DecayRates,
    weight_decay_mask: VarList | Mapping[str, float] = None,
    *,
    mask: VarList | Mapping[str, float] = None,
    cautious: bool = False,
) -> Optimizer:
    """Weight decay independent of the learning rate: u −= wd·p.

    Chain it after an optimizer whose updates are u.

    Args:
        weight_decay: The fraction wd ≥ 0 of each weight that an update removes, or path or glob →
            fraction: the first match applies, and leaves without a match do not decay.
        weight_decay_mask: As in `add_weight_decay`.
        mask: As in `add_weight_decay`.
        cautious: Whether to decay an element only if its update, too, moves it towards zero:
            u·p < 0.

    Returns:
        An `Optimizer` without slots. Its hyperparameter is `decoupled_weight_decay`, or
        `decoupled_weight_decay/glob` for each entry of a mapping. Leaves without a gradient do not
        decay; sparse updates become dense.

    Raises:
        ValueError: `weight_decay` is out of range, or an entry of the mask matches nothing.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.gradient_descent(0.5), jstep.decay_weights(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.25

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017); "Cautious Weight
    Decay" (2025).
    """
    is_cautious = as_bool(cautious, "cautious")

    def decayed(u: Array, p: Array, s: Values, h: Values) -> Result:
        decay = leaf_decay(h)
        if decay is None:
            return u, {}
        if is_cautious:  # only elements that the update moves towards zero
            decay = decay * (((u < 0) & (p > 0)) | ((u > 0) & (p < 0))).astype(p.dtype)
        return u - decay * p, {}

    masks = _given_mask(weight_decay_mask, mask)
    hyper, flags = decay_arguments("decoupled_weight_decay", weight_decay, **masks)
    return from_update("decay_weights", decayed, {}, hyper, flags=flags)


def _given_mask(weight_decay_mask: Any, mask: Any) -> dict[str, Any]:
    """The mask, and the name under which it was given."""
    if weight_decay_mask is not None and mask is not None:
        raise TypeError(
            "weight_decay_mask, mask: must not both be given, as they are two names of one argument"
        )
    if mask is not None:
        return {"mask": mask, "argument": "mask"}
    return {"mask": weight_decay_mask}


def decay_arguments(
    name: str, weight_decay: Any, mask: Any, argument: str = "weight_decay_mask"
) -> tuple[dict[str, Any], dict[str, Flag]]:
    """Return the hyperparameters and the flag of a weight decay.

    `weight_decay` may map paths or globs to values; the mask may map them to factors ≥ 0.
    """
    if isinstance(weight_decay, Mapping):
        which: Flag | None = leaf_values.first_match("weight_decay", weight_decay)
        hyper = _glob_hyperparameters(name, "weight_decay", weight_decay)
    else:
        which = None
        hyper = {name: as_hyperparameter("weight_decay", weight_decay, low=0)}
    factors = _factors(mask, argument)
    if factors:
        scales = leaf_values.first_match(argument, factors)
    else:
        scales = leaf_values.mask(argument, mask, warns=True)

    def factor_of(chosen: Any) -> float:
        if factors is None:
            return float(chosen)  # whether the mask chooses the leaf
        if chosen is None:
            return 1.0  # no glob matches
        return factors[chosen]

    def decay(params: Params) -> list[Any]:
        chosen = scales(params)
        globs = [""] * len(chosen) if which is None else which(params)
        decays: list[Any] = []
        for glob, factor in zip(globs, map(factor_of, chosen), strict=True):
            if glob is None or factor == 0:
                decays.append(None)
            else:
                decays.append((name if which is None else f"{name}/{glob}", factor))
        return decays

    return hyper, {DECAY: decay}


def leaf_decay(h: Values) -> Any:
    """The decay of this leaf; None if tracing shows that the leaf does not decay."""
    if h.decay is None:
        return None
    name, factor = h.decay
    if is_zero(h[name]):
        return None
    return h[name] if factor == 1 else factor * h[name]


def _factors(mask: VarList, argument: str) -> dict[str, float] | None:
    """Return path or glob → factor, or None for another form of mask."""
    if not isinstance(mask, Mapping) or not mask or not all(isinstance(glob, str) for glob in mask):
        return None
    if not all(
        isinstance(x, int | float | np.number) and not isinstance(x, bool) for x in mask.values()
    ):
        return None
    return {glob: as_number(x, f"{argument}[{glob!r}]", low=0) for glob, x in mask.items()}
