"""Totals as arrays, and ratios of totals.

Ratios are metrics that only some steps or microbatches have, or that weigh them. Counts of examples
are uint32, exact below 2³² − 1; sums of weights are floats of their precision.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jstep.core.checks import describe_type
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Array, is_array_or_number, is_key

FULL = 2**32 - 1
"""The total that stands for all that are too large for a uint32."""


def element_totals(condition: Array, weights: Array | None) -> Array:
    """The total of each element: its weight, or 1 without weights, if it is true; otherwise 0."""
    if weights is None:
        return condition.astype(jnp.uint32)
    if weights.dtype == jnp.bool_:
        return (condition & weights).astype(jnp.uint32)
    return jnp.where(condition, weights, jnp.zeros_like(weights))


def sum_where(condition: Array, weights: Array | None = None) -> Array:
    totals = element_totals(condition, weights)
    return jnp.sum(totals, dtype=totals.dtype)


def as_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    """Convert two totals to one dtype: counts become sums of weights if the other total is one."""
    dtype = second.dtype if first.dtype == jnp.uint32 else first.dtype
    return first.astype(dtype), second.astype(dtype)


def add_totals(first: Array, second: Array) -> Array:
    first, second = as_one_dtype(first, second)
    total = first + second
    if total.dtype != jnp.uint32:
        return total
    # A sum that has wrapped around is smaller than its parts.
    return jnp.where(total < first, jnp.full_like(total, FULL), total)


def read_total(total: Any) -> np.ndarray[Any, Any]:
    """Return totals as integers or float64; NaN for counts that are too large."""
    with internal_transfers():
        array = np.asarray(total)
    if array.dtype != np.uint32:
        return array.astype(np.float64)
    if (array < FULL).all():
        return array.astype(np.int64)
    return np.where(array == FULL, np.nan, array)


# Ratios.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanOf:
    """Result of `mean_of`: the sums of one step or batch, or of several."""

    total: Array
    count: Array


def mean_of(total: ArrayLike, count: ArrayLike) -> MeanOf:
    """A metric of a train step, shown as the sum of totals over that of counts since the last row.

    Log lines, summaries and the rows of `MetricsHook` and `History` show Σ total / Σ count over the
    steps since their last row, with and without `mean=True`, and omit it if Σ count is 0. The bar
    of a notebook and the record of a run keep the newest value.

    Args:
        total: A scalar, such as a sum of errors. It is ignored if the count is 0.
        count: A scalar, such as the number of tokens; 0 in a step that does not have the metric.

    Returns:
        A pytree of two floating-point scalars, also for `jstep.evaluator`. It cannot be the metric
        `loss`.

    Raises:
        TypeError: `total` or `count` is not a real scalar.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> def train_step(state, x):
        ...     penalized = state.global_step % 16 == 0
        ...     state = jstep.apply_gradients(state, {"w": x}, optimizer)
        ...     penalty = jstep.metrics.mean_of(jnp.where(penalized, x * x, 0.0), penalized)
        ...     return state, {"penalty": penalty}
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> history = jstep.History(every_n_steps=20)
        >>> batches = lambda step: jnp.float32(step)
        >>> state = jstep.train(train_step, state, batches, 20, hooks=[history])
        >>> history["penalty"]  # of the steps 0 and 16
        (array([20]), array([128.]))

    Source: `keras.metrics.Mean`, which is 0 if Σ count is 0.
    """
    numerator = _scalar(total, "total")
    denominator = _scalar(count, "count")
    return MeanOf(jnp.where(denominator == 0, jnp.zeros_like(numerator), numerator), denominator)


def _scalar(value: ArrayLike, name: str) -> Array:
    is_real = (
        is_array_or_number(value)
        and not is_key(value)
        and not np.ndim(value)
        and not np.iscomplexobj(value)
    )
    if not is_real:
        raise TypeError(
            f"mean_of: {name} must be a real scalar, got {describe_type(value)}; "
            "reduce it with jnp.sum"
        )
    array = jnp.asarray(value)
    return array.astype(jnp.float64 if array.dtype.itemsize > 4 else jnp.float32)
