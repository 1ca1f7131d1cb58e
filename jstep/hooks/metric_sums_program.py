"""The program of the sums of metrics: what it accumulates over steps, on the device, in one small array."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.hooks.numbers import is_number, is_numeric
from jstep.optimizers import hyperparameters
from jstep.training.looped import TracedStep

# For M metrics the array holds M sums, M corrections (the rounding errors), M counts, and the watched columns. Each sum
# is stored in two floats, so that a mean is as accurate as one of float64.

LOSS, GRAD_NORM = "loss", "grad_norm"
SEEN, BAD, VALUE, GRADIENT, SKIPS = range(5)
"""The watched columns, after those of the metrics: the number of steps; the first bad step, counted from 0, or −1, and
its loss; the first step that applied a gradient whose norm is not finite, or −1; the number of consecutive skipped
steps at the end. After them, for each limit of skipped steps, the step at which it was reached, or −1."""
WATCHED = 5
_SEVERAL = -1


class Sums(NamedTuple):
    """The accumulated numbers, on the device.

    Attributes:
        array: The sums since the last cut, in one array.
        skips: The number of consecutive skipped steps, which a cut does not reset.
    """

    array: Any
    skips: Any


class Rows(NamedTuple):
    """The numbers of some steps.

    Attributes:
        high: The values, [steps, metrics].
        low: What the values exceed `high` by, because one float cannot represent a large integer; None for zeros.
        known: Whether a step has the metric, as its shape may change; None for all.
        finite: Whether a loss of several numbers is finite, [steps]; None for any other loss.
        value: One of its numbers that is not, [steps], or None.
    """

    high: Any
    low: Any = None
    known: Any = None
    finite: Any = None
    value: Any = None


class Columns(NamedTuple):
    """The numbers among the metrics of a step that are accumulated.

    Attributes:
        names: The metrics, in order.
        loss: The index of the loss; −1 for a loss of several numbers per step, which has no sum; None without a loss.
        skip: The index of the metric that is 1 if an update was skipped, or None.
        gradient: The index of the norm of the gradients, or None.
        limits: The numbers of consecutive skipped steps to report.
        dtype: The dtype of the sums.
    """

    names: tuple[str, ...]
    loss: int | None
    skip: int | None
    gradient: int | None
    limits: tuple[int, ...]
    dtype: str

    def empty(self) -> np.ndarray[Any, Any]:
        """The array before the first step."""
        array = np.zeros(3 * len(self.names) + WATCHED + len(self.limits), self.dtype)
        watched = array[3 * len(self.names) :]
        watched[[BAD, GRADIENT]], watched[WATCHED:] = -1, -1
        return array

    def row(self, metrics: Mapping[str, Any]) -> Rows:
        """The numbers of one step, whose metrics are as expected."""
        is_split = any(_is_split(metrics[name].dtype, self.dtype) for name in self.names)
        row: Rows = jax.tree.map(lambda column: column[0], self.rows([metrics]))
        return row._replace(low=row.low if is_split else None, known=None)

    def rows(self, calls: Sequence[Mapping[str, Any]]) -> Rows:
        """The numbers of calls of one step each, whose metrics may change their shapes from call to call."""
        columns = [_column([call[name] for call in calls], self.dtype) for name in self.names]
        nothing = jnp.zeros((len(calls), 0), self.dtype)
        high, low, known = (
            (jnp.stack(part, axis=1) for part in zip(*columns, strict=True))
            if columns
            else (nothing, nothing, nothing.astype(bool))
        )
        finite, value = zip(*map(self._loss, calls), strict=True)
        several = (jnp.stack(finite), jnp.stack(value)) if self.loss == _SEVERAL else (None, None)
        return Rows(high, low, known, *several)

    def _loss(self, metrics: Mapping[str, Any]) -> tuple[Any, Any]:
        if self.loss != _SEVERAL:
            return None, None
        loss = metrics[LOSS]
        finite = jnp.isfinite(loss)
        return finite.all(), jnp.real(jnp.where(finite, 0, loss).sum()).astype(self.dtype)

    def add(self, sums: Sums, rows: Rows, count: Any) -> Sums:
        """The sums after the first `count` rows."""
        high, m = rows.high, len(self.names)
        steps = len(high)
        counts = jnp.arange(steps, dtype=np.int32) < count
        known = jnp.ones(high.shape, bool) if rows.known is None else rows.known
        skipped = high[:, self.skip] == 1 if self.skip is not None else jnp.zeros(steps, bool)
        used = known & counts[:, None] & (jnp.isfinite(high) | ~skipped[:, None])
        x, error = _total(jnp.where(used, high, 0), 0 if rows.low is None else jnp.where(used, rows.low, 0))
        total, lost = _two_sum(sums.array[:m], x)
        finite, value = jnp.ones(steps, bool), jnp.zeros(steps, high.dtype)
        if self.loss == _SEVERAL:
            finite, value = rows.finite, rows.value
        elif self.loss is not None:
            finite, value = jnp.isfinite(high[:, self.loss]) | ~known[:, self.loss], high[:, self.loss]
        bad_gradient = jnp.zeros(steps, bool)
        if self.gradient is not None:
            bad_gradient = is_bad(jnp.isfinite(high[:, self.gradient]) | ~known[:, self.gradient], skipped) & counts
        watched, skips = self._watch(
            sums.array[3 * m :], sums.skips, is_bad(finite, skipped) & counts, value, skipped, bad_gradient, count
        )
        array = [
            total,
            sums.array[m : 2 * m] + (lost + error),
            sums.array[2 * m : 3 * m] + jnp.sum(used, axis=0).astype(high.dtype),
            watched,
        ]
        return Sums(jnp.concatenate(array), skips)

    def _watch(
        self, watched: Any, before: Any, bad: Any, value: Any, skipped: Any, bad_gradient: Any, count: Any
    ) -> tuple[Any, Any]:
        """The watched columns, and the number of consecutive skipped steps, after the first `count` steps."""
        dtype, steps = watched.dtype, jnp.arange(len(bad), dtype=np.int32)

        def first(column: Any, where: Any) -> Any:
            at = watched[SEEN] + jnp.argmax(where).astype(dtype)
            return jnp.where((column < 0) & where.any(), at, column)

        last_made = jax.lax.cummax(jnp.where(skipped, jnp.int32(-1), steps))
        in_a_row = jnp.where(last_made < 0, before + steps + 1, steps - last_made)
        skips = in_a_row[count - 1]
        is_first = (watched[BAD] < 0) & bad.any()
        new = [
            watched[SEEN] + count.astype(dtype),
            first(watched[BAD], bad),
            jnp.where(is_first, value[jnp.argmax(bad)], watched[VALUE]),
            first(watched[GRADIENT], bad_gradient),
            skips.astype(dtype),
        ]
        over = [
            first(watched[WATCHED + i], (in_a_row >= limit) & (steps < count)) for i, limit in enumerate(self.limits)
        ]
        return jnp.stack([*new, *over]), skips


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Chooses what a program accumulates, from the trace of its step.

    Attributes:
        limits: As in `Columns`.
    """

    limits: tuple[int, ...] = ()

    def __call__(self, one: TracedStep) -> Columns:
        """Return the columns for this trace."""
        return columns_of(one.metrics, one.constants.skipped, self.limits)


def columns_of(metrics: Mapping[str, Any], skip: str | None, limits: tuple[int, ...] = ()) -> Columns:
    """Choose the columns for metrics, given as arrays or their types.

    Args:
        metrics: The metrics that a step computes.
        skip: The name of the metric that is 1 if an update was skipped, or None.
        limits: As in `Columns`.
    """
    index = {name: i for i, name in enumerate([name for name, value in metrics.items() if is_number(value)])}
    loss = index.get(LOSS, _SEVERAL if LOSS in metrics and is_numeric(metrics[LOSS]) else None)
    values = [value for name, value in metrics.items() if name in index or name == LOSS]
    wide = any(value.dtype.itemsize > 4 for value in values if is_numeric(value))
    dtype = "float64" if wide else "float32"
    return Columns(tuple(index), loss, index.get(skip or ""), index.get(GRAD_NORM), limits, dtype)


@functools.cache
def program(columns: Columns, names: tuple[str, ...]) -> Callable[..., Any]:
    """Compile `add(sums, calls, count) -> sums`, for calls of one step that does not accumulate by itself.

    `calls` are the values of the metrics `names` of some calls, of which the first `count` count; the others are
    padding.
    """

    def add(sums: Sums, calls: list[list[Any]], count: Any) -> Sums:
        return columns.add(sums, columns.rows([dict(zip(names, values, strict=True)) for values in calls]), count)

    return jax.jit(add)


def _column(values: list[Any], dtype: Any) -> tuple[Any, Any, Any]:
    """The values of one metric as two floats each, and which of them are numbers."""
    known = [x.size == 1 for x in values]
    numbers = [jax.lax.reshape(x, (1,)) if one else jnp.zeros(1, x.dtype) for x, one in zip(values, known, strict=True)]
    if len({x.dtype for x in numbers}) == 1:
        numbers = [jax.lax.concatenate(numbers, 0)]
    high, low = (jnp.concatenate(half) for half in zip(*(_parts(x, dtype) for x in numbers), strict=True))
    return high, low, np.array(known)


def _is_split(dtype: Any, into: Any) -> bool:
    """Whether one float may not represent a value, a large integer."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and dtype.itemsize >= np.dtype(into).itemsize


def _parts(x: Any, dtype: Any) -> tuple[Any, Any]:
    """Split values into sums of two floats."""
    low = x & 0xFFF if _is_split(x.dtype, dtype) else jnp.zeros_like(x)
    return (x - low if _is_split(x.dtype, dtype) else x).astype(dtype), low.astype(dtype)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum a + b, and its rounding error (Knuth)."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def _total(high: Any, low: Any) -> tuple[Any, Any]:
    """The sum over the steps, as two floats."""
    low = jnp.broadcast_to(low, high.shape).astype(high.dtype)
    if len(high) == 1:
        return high[0], low[0]

    def both(a: Any, b: Any) -> tuple[Any, Any]:
        s, lost = _two_sum(a[0], b[0])
        return s, a[1] + b[1] + lost

    zero = jnp.zeros((), high.dtype)
    x, error = jax.lax.reduce((high, low), (zero, zero), both, (0,))
    return x, error


SKIPPED = hyperparameters.SKIPPED
"""The metric by which a custom step reports that its whole update was skipped: 1 or 0."""


def skip_metric_of(train_step: Any) -> str | None:
    """The name of the metric that is 1 if the whole update was skipped, or None."""
    name = getattr(train_step, "skip_metric", SKIPPED)
    return name if isinstance(name, str) else None


def is_bad(finite: Any, skipped: Any) -> Any:
    """Return which steps applied an update whose loss, or gradient, is not finite, for NumPy or JAX arrays.

    Args:
        finite: Whether each loss, or gradient, is finite.
        skipped: Whether the whole update of each step was skipped.
    """
    return ~(finite | skipped)
