"""Transformations of gradients as elements of a chain: noise, centralization, normalization."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_bool, shown
from jstep.core.device_values import as_key
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices, on_table, within
from jstep.core.slot_roles import BLOCK, CLIP
from jstep.core.trees import Array, Number, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.differentiate import clipping
from jstep.optimizers.chain import element
from jstep.optimizers.hyperparameters import Hyper, checked
from jstep.optimizers.leaf_values import UnitAxes, leaf_numbers, own_leaves, unit_axes
from jstep.optimizers.updates import map_updates

EPSILON = 1e-6


@makes_optimizer()
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

        def of_leaf(g: Any, i: int) -> Array:
            g = g.to_dense() if is_slices(g) else jnp.asarray(g)
            dtype = trees.compute_dtype(g.dtype)
            noise = jax.random.normal(jax.random.fold_in(of_step, i), g.shape, dtype)
            return g.astype(dtype) + sigma.astype(dtype) * noise

        return map_updates(of_leaf, params, updates, leaf_numbers(params))

    hyper = {"noise_eta": checked("eta", eta, low=0), "noise_gamma": checked("gamma", gamma, low=0)}
    return element(noisy, hyper, BLOCK)


@makes_optimizer()
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
    axes_of = unit_axes(axes, lambda shape: tuple(range(1, len(shape))))

    def centralize(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        def of_leaf(g: Any, leaf: tuple[str, Any]) -> Any:
            over = axes_of(*leaf)

            def centred(g: Array) -> Array:
                wide = g.astype(trees.compute_dtype(g.dtype))
                return wide - jnp.mean(wide, axis=over, keepdims=True) if over else wide

            mixes = is_slices(g) and any(axis % len(g.dense_shape) == 0 for axis in over)
            return centred(g.to_dense()) if mixes else on_table(centred, g)

        return map_updates(of_leaf, params, updates, own_leaves(params))

    return element(centralize, {}, BLOCK)


@makes_optimizer()
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
        norm = None if each else clipping.global_norm(updates)
        return jax.tree.map(lambda g: _normalized(g, norm, h["gradient_norm"]), updates, is_leaf=is_slices)

    return element(normalize, {"gradient_norm": checked("scale", scale, low=0, above=True)}, BLOCK)


def _normalized(g: Array | IndexedSlices, norm: Array | None, scale: Array) -> Array | IndexedSlices:
    if isinstance(g, IndexedSlices):
        rows = combined(g)
        values = _normalized(rows.values, norm, scale)
        return within(dataclasses.replace(rows, values=values))
    dtype = trees.compute_dtype(g.dtype)
    by = scale / ((clipping.global_norm(g) if norm is None else norm).astype(dtype) + EPSILON)
    return g.astype(dtype) * by.astype(dtype)


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
        adaptive: The largest ratio of a unit's gradient norm to its parameter norm (at least 0.001), > 0; 0.01 is
            usual. A unit consists of the weights that feed one output.
        axes: With adaptive, the axes that a unit spans: a tuple for all leaves, or `(path, leaf) -> tuple`. None
            assumes kernels (…, in, out): all axes if at most one is longer than 1, the first of 2 or 3 axes, all but
            the last of 4 or more.

    Returns:
        An `Optimizer` without slots; its hyperparameters are named `clip_by_…` after the argument
        (`clip_by_value_min` and `clip_by_value_max`).

    Raises:
        ValueError: Not exactly one argument is given, or it is out of its range.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": 3.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(50.0)}, optimizer).params["w"])
        2.0

    Source: `tf.clip_by_value`, `tf.clip_by_norm`, `tf.clip_by_average_norm`, `tf.clip_by_global_norm`;
    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization" (2021), and
    `optax.adaptive_grad_clip`, for adaptive.
    """
    ways = {"by_value": by_value, "by_norm": by_norm, "by_average_norm": by_average_norm}
    ways |= {"by_global_norm": by_global_norm, "adaptive": adaptive}
    given: dict[str, Any] = {name: value for name, value in ways.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"clip_gradients takes exactly one of by_value, by_norm, by_average_norm, by_global_norm and adaptive, got "
            f"{sorted(given) or 'none'}; chain several elements to clip in several ways"
        )
    ((how, limit),) = given.items()
    if axes is not None and how != "adaptive":
        raise ValueError(f"axes={shown(axes)}: only clip_gradients(adaptive=…) takes axes, got {how}")
    axes_of = unit_axes(axes, _unit_axes)
    hyper = _value_bounds(limit) if how == "by_value" else {f"clip_{how}": checked(how, limit, low=0, above=True)}

    def clip(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        if how == "by_value":
            high = h["clip_by_value_max"]
            return clipping.clip_by_value(updates, h.get("clip_by_value_min", -high), high)
        if how == "by_global_norm":
            return clipping.clip_by_global_norm(updates, h["clip_by_global_norm"])[0]
        if how == "by_norm":
            return clipping.clip_by_norm(updates, h["clip_by_norm"])
        if how == "by_average_norm":
            return clipping.clip_by_average_norm(updates, h["clip_by_average_norm"])

        def by_unit(g: Any, p: Array, leaf: tuple[str, Any]) -> Any:
            return on_table(lambda g: _clipped_units(g, p, h["clip_adaptive"], axes_of(*leaf)), g)

        return map_updates(by_unit, params, updates, jax.tree.leaves(params), own_leaves(params))

    made = element(clip, hyper, CLIP)
    if how != "by_value" or "clip_by_value_min" in hyper:
        return made

    def with_both_bounds(step: Step, /) -> dict[str, Any]:
        values = made.hyperparameters(step)
        return {"clip_by_value_min": -values["clip_by_value_max"], **values} if values else values

    return made._replace(hyperparameters=with_both_bounds)


def _value_bounds(limit: tuple[ScalarOrSchedule, ScalarOrSchedule] | Number | Any) -> dict[str, Any]:
    if not isinstance(limit, tuple | list):
        return {"clip_by_value_max": checked("by_value", limit, low=0, above=True)}
    if len(limit) != 2:
        raise ValueError(f"by_value={limit!r}: must be (min, max), or c for (-c, c)")
    low, high = checked("by_value[0]", limit[0]), checked("by_value[1]", limit[1])
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValueError(f"by_value={limit!r}: min is larger than max")
    return {"clip_by_value_min": low, "clip_by_value_max": high}


def _unit_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    if sum(size > 1 for size in shape) <= 1:
        return tuple(range(len(shape)))
    return (0,) if len(shape) <= 3 else tuple(range(len(shape) - 1))


def _clipped_units(g: Array, p: Array, ratio: Any, over: tuple[int, ...]) -> Array:
    """Adaptive clipping: g · ratio·max(‖p‖, 0.001)/‖g‖ for units where ‖g‖ exceeds ratio·max(‖p‖, 0.001)."""
    dtype = trees.compute_dtype(g.dtype)
    wide = g.astype(dtype)
    limit = jnp.asarray(ratio).astype(dtype) * jnp.maximum(_norm(p.astype(dtype), over), LEAST_PARAMETER_NORM)
    norm = _norm(wide, over)
    # As in the other clipping modes, a norm that is not finite makes the clipped values NaN.
    by = jnp.where(jnp.isfinite(norm), limit / jnp.maximum(norm, LEAST_GRADIENT_NORM), jnp.full_like(norm, jnp.nan))
    return jnp.where(norm <= limit, wide, wide * by)


def _norm(x: Array, axes: tuple[int, ...]) -> Array:
    # Scaled by the largest element, whose square might overflow.
    most = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    safe = jnp.where((most > 0) & jnp.isfinite(most), most, jnp.ones_like(most))
    return jnp.sqrt(jnp.sum(jnp.square(x / safe), axis=axes, keepdims=True)) * safe


LEAST_PARAMETER_NORM = 1e-3

LEAST_GRADIENT_NORM = 1e-6
