"""Clipping as an element of a chain."""

from typing import Any

from jstep import clipping
from jstep.core.types import Number, Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers.hyper import checked, report, values_at


def clip_gradients(
    *,
    by_value: tuple[ScalarOrSchedule, ScalarOrSchedule] | ScalarOrSchedule | None = None,
    by_norm: ScalarOrSchedule | None = None,
    by_average_norm: ScalarOrSchedule | None = None,
    by_global_norm: ScalarOrSchedule | None = None,
) -> Optimizer:
    """Clips what passes through a `chain`; exactly one argument says how.

    Args:
        by_value: `(min, max)`, or c > 0 for `(-c, c)`.
        by_norm: The largest L2 norm of each leaf, > 0.
        by_average_norm: The largest L2 norm of each leaf over its number of elements, > 0.
        by_global_norm: The largest L2 norm of all leaves together, > 0.

    Returns:
        An `Optimizer` without slots; its hyperparameters are named `clip_by_…` after the argument
        (`clip_by_value_min` and `clip_by_value_max`).

    Raises:
        TypeError: An argument is no number and no schedule.
        ValueError: Not exactly one argument is given, or it is out of its range.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": 3.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(50.0)}, optimizer).params["w"])
        2.0

    Source: `tf.clip_by_value`, `tf.clip_by_norm`, `tf.clip_by_average_norm`, `tf.clip_by_global_norm`.
    """
    given: dict[str, Any] = {
        name: value
        for name, value in {
            "by_value": by_value,
            "by_norm": by_norm,
            "by_average_norm": by_average_norm,
            "by_global_norm": by_global_norm,
        }.items()
        if value is not None
    }
    if len(given) != 1:
        raise ValueError(
            f"clip_gradients takes exactly one of by_value, by_norm, by_average_norm and by_global_norm, got "
            f"{sorted(given) or 'none'}; chain several elements to clip in several ways"
        )
    ((how, limit),) = given.items()
    hyper = _value_bounds(limit) if how == "by_value" else {f"clip_{how}": checked(how, limit, low=0, above=True)}

    def clip(updates: Updates, values: dict[str, Any]) -> Updates:
        if how == "by_value":
            high = values["clip_by_value_max"]
            return clipping.clip_by_value(updates, values.get("clip_by_value_min", -high), high)
        if how == "by_global_norm":
            return clipping.clip_by_global_norm(updates, values["clip_by_global_norm"])[0]
        if how == "by_norm":
            return clipping.clip_by_norm(updates, values["clip_by_norm"])
        return clipping.clip_by_average_norm(updates, values["clip_by_average_norm"])

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        return clip(updates, values_at(hyper, step)), {}

    def hyperparameters(step: Step, /) -> dict[str, Any]:
        values = report(hyper)(step)
        if how == "by_value" and "clip_by_value_min" not in values:
            return {"clip_by_value_min": -values["clip_by_value_max"], **values}
        return values

    return Optimizer(lambda params, global_step=0: {}, update, hyperparameters)


def _value_bounds(limit: tuple[ScalarOrSchedule, ScalarOrSchedule] | Number | Any) -> dict[str, Any]:
    if not isinstance(limit, tuple | list):
        return {"clip_by_value_max": checked("by_value", limit, low=0, above=True)}
    if len(limit) != 2:
        raise ValueError(f"by_value={limit!r}: must be (min, max), or c for (-c, c)")
    low, high = checked("by_value[0]", limit[0]), checked("by_value[1]", limit[1])
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValueError(f"by_value={limit!r}: min is larger than max")
    return {"clip_by_value_min": low, "clip_by_value_max": high}
