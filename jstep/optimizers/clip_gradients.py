"""Gradient clipping as an element of a chain: in the four ways of TF, or per unit by the norm of the parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import shown
from jstep.core.indexed_slices import on_table
from jstep.core.slot_roles import CLIP
from jstep.core.trees import Array, Number, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.differentiate import clipping
from jstep.optimizers.hyperparameters import Hyper, checked
from jstep.optimizers.leaf_values import UnitAxes, own_leaves, unit_axes
from jstep.optimizers.leafwise import element, map_updates


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
