"""Sums of metrics on the device: the layout of their array, and how a program adds steps to it."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree
from jstep.metering.numbers import is_number, read_value, real_parts
from jstep.metrics.totals import MeanOf
from jstep.training.looped import TracedStep
from jstep.training.metrics import GRAD_NORM, losses_in


class DeviceSums(NamedTuple):
    """The sums since the last cut, and the number of consecutive skips, which a cut keeps."""

    array: Any
    skips: Any


class Watched(NamedTuple):
    """What is recorded of single steps.

    Indices of steps count from 0 at the last cut; they are −1 if there was none.

    Attributes:
        seen: The number of steps.
        bad_step: The first step whose loss is not finite, unless its update was skipped.
        bad_loss: The loss of that step.
        bad_gradient_step: The first step whose gradient norm is not finite, unless its update was
            skipped.
        skip_limit_step: The first step that reached the limit of consecutive skipped updates.
    """

    seen: Any
    bad_step: Any
    bad_loss: Any
    bad_gradient_step: Any
    skip_limit_step: Any


_NOTHING_WATCHED = Watched(
    seen=0, bad_step=-1, bad_loss=0, bad_gradient_step=-1, skip_limit_step=-1
)


class SumBlocks(NamedTuple):
    """The parts of the array of sums.

    Everything is in one array, because each array that a program returns costs a transfer. A sum is
    stored in two floats, `totals` and the rounding errors that `totals` lost, so that a mean is as
    accurate as one of float64. (An integer that one float cannot hold is rounded once, before it is
    added.)
    """

    totals: Any
    errors: Any
    counts: Any
    watched: Watched


class Columns(NamedTuple):
    """The metrics that have a column in the sums, and which of them are watched.

    There is one column for each of `names`, and then one for the count of each of `ratios`. A step
    contributes a row: these numbers, and last its loss. If it has several, or an array of them, the
    last number is finite exactly if all are.

    Attributes:
        names: The metrics; a `mean_of` contributes its total here.
        ratios: The indices in `names` that are a `mean_of`.
        losses: The metrics that are checked, numbers or arrays of any shape.
        skip_index: The index of the metric that is 1 if the update was skipped.
        gradient_index: The index of the gradient norm.
        limit: The number of consecutive skipped updates to report, if any.
        dtype: The dtype of the sums.
    """

    names: tuple[str, ...]
    ratios: tuple[int, ...]
    losses: tuple[str, ...]
    skip_index: int | None
    gradient_index: int | None
    limit: int | None
    dtype: str

    @property
    def width(self) -> int:
        return len(self.names) + len(self.ratios)

    @property
    def ratio_names(self) -> list[str]:
        return [self.names[i] for i in self.ratios]

    def split(self, array: Any) -> SumBlocks:
        """Split the sums into their parts, on the device or on the host."""
        m = self.width
        return SumBlocks(
            totals=array[:m],
            errors=array[m : 2 * m],
            counts=array[2 * m : 3 * m],
            watched=Watched(*(array[3 * m + i] for i in range(len(Watched._fields)))),
        )

    def zeros(self) -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros(3 * self.width), _NOTHING_WATCHED]).astype(self.dtype)

    def row(self, metrics: Mapping[str, Any]) -> Any:
        values: list[Any] = []
        for i, name in enumerate(self.names):
            values.append(metrics[name].total if i in self.ratios else metrics[name])
        for name in self.ratio_names:
            values.append(metrics[name].count)
        values.append(self._loss(metrics))
        return jnp.stack([value.astype(self.dtype) for value in values])

    def _loss(self, metrics: Mapping[str, Any]) -> Any:
        parts = real_parts(metrics[name] for name in self.losses)
        if not parts:
            return jnp.zeros((), self.dtype)
        if len(parts) == 1 and parts[0].ndim == 0:
            return parts[0]
        # The sum of finite losses may overflow. Without them, the sum is finite exactly if each
        # loss is.
        nonfinite_sums = [
            jnp.where(jnp.isfinite(part), jnp.zeros_like(part), part).sum() for part in parts
        ]
        total = nonfinite_sums[0].astype(self.dtype)
        for other in nonfinite_sums[1:]:
            total = total + other.astype(self.dtype)
        return total

    def add(self, sums: DeviceSums, rows: Any, num_steps: Any) -> DeviceSums:
        """Add the rows of the first `num_steps` steps; the others are padding."""
        numbers = rows[:, :-1]
        loss = rows[:, -1]
        blocks = self.split(sums.array)
        no_flags = jnp.zeros(len(rows), bool)
        is_step = jnp.arange(len(rows), dtype=np.int32) < num_steps
        skipped = no_flags
        if self.skip_index is not None:
            skipped = numbers[:, self.skip_index] == 1

        finite = jnp.isfinite(numbers)
        for count_column, total_column in enumerate(self.ratios, start=len(self.names)):
            # A total without its count would change the ratio: both are used, or neither is.
            both_finite = finite[:, total_column] & finite[:, count_column]
            finite = finite.at[:, np.array([total_column, count_column])].set(both_finite[:, None])
        # A number that is not finite must show in the mean, unless the guard has dealt with it.
        used = is_step[:, None] & (finite | ~skipped[:, None])
        added, error_of_added = _sum_rows(jnp.where(used, numbers, 0))
        totals, error_of_totals = _two_sum(blocks.totals, added)

        bad = is_bad(jnp.isfinite(loss), skipped) & is_step
        bad_gradient = no_flags
        if self.gradient_index is not None:
            bad_gradient = is_bad(jnp.isfinite(numbers[:, self.gradient_index]), skipped) & is_step
        skips_in_a_row = _count_in_a_row(skipped, sums.skips)
        reaches_limit = no_flags
        if self.limit is not None:
            reaches_limit = (skips_in_a_row >= self.limit) & is_step

        watched = blocks.watched
        dtype = watched.seen.dtype
        is_first_bad = (watched.bad_step < 0) & bad.any()
        new_watched = Watched(
            seen=watched.seen + num_steps.astype(dtype),
            bad_step=_first_index(watched.bad_step, bad, watched.seen),
            bad_loss=jnp.where(is_first_bad, loss[jnp.argmax(bad)], watched.bad_loss),
            bad_gradient_step=_first_index(watched.bad_gradient_step, bad_gradient, watched.seen),
            skip_limit_step=_first_index(watched.skip_limit_step, reaches_limit, watched.seen),
        )
        counts = blocks.counts + jnp.sum(used, axis=0).astype(rows.dtype)
        errors = blocks.errors + (error_of_totals + error_of_added)
        array = jnp.concatenate([totals, errors, counts, jnp.stack(new_watched)])
        return DeviceSums(array, skips_in_a_row[num_steps - 1])


def _first_index(recorded: Any, flags: Any, seen: Any) -> Any:
    """Return the index of the first step with a flag, or the recorded one."""
    index = seen + jnp.argmax(flags).astype(seen.dtype)
    return jnp.where((recorded < 0) & flags.any(), index, recorded)


def _count_in_a_row(skipped: Any, skips_before: Any) -> Any:
    """Return, for each row, the number of consecutive skipped updates that end with it."""
    rows = jnp.arange(len(skipped), dtype=np.int32)
    # The index of the latest row up to each one whose update was applied; −1 if there is none, so
    # that the skips before these rows count, too.
    last_applied = jax.lax.cummax(jnp.where(skipped, jnp.int32(-1), rows))
    return jnp.where(last_applied < 0, skips_before + rows + 1, rows - last_applied)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the rounded sum a + b, and its rounding error (Knuth)."""
    total = a + b
    b_added = total - a
    return total, (a - (total - b_added)) + (b - b_added)


def _sum_rows(numbers: Any) -> tuple[Any, Any]:
    """Return the sum over the rows, and its rounding error."""
    if len(numbers) == 1:
        return numbers[0], jnp.zeros_like(numbers[0])

    def add_with_error(a: Any, b: Any) -> tuple[Any, Any]:
        total, lost = _two_sum(a[0], b[0])
        return total, a[1] + b[1] + lost

    zero = jnp.zeros((), numbers.dtype)
    total, error = jax.lax.reduce(
        (numbers, jnp.zeros_like(numbers)), (zero, zero), add_with_error, (0,)
    )
    return total, error


def is_bad(finite: Any, skipped: Any) -> Any:
    """Whether a number is not finite and its update was not skipped, elementwise.

    It is called on the device and on the host.
    """
    return ~(finite | skipped)


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Chooses the columns of a traced step; no closure, as programs are cached by its equality."""

    limit: int | None = None

    def __call__(self, step: TracedStep) -> Columns:
        losses = losses_in({**step.metrics, **step.constants.all})
        return choose_columns(step.metrics, losses, step.constants.skipped, self.limit)


def choose_columns(
    metrics: Mapping[str, Any], losses: Collection[str], skip: str | None, limit: int | None = None
) -> Columns:
    """Return the columns of metrics on the device.

    Args:
        losses: The names of the losses, found among all metrics of the step. `metrics` has only
            those on the device, and `loss/note` is a loss only if the step has no `loss` at all.
    """
    names: list[str] = []
    ratios: list[int] = []
    added: list[Any] = []
    for name, value in metrics.items():
        is_ratio = isinstance(value, MeanOf)
        has_column = is_number(value.total if is_ratio else value)
        if has_column:
            if is_ratio:
                ratios.append(len(names))
            names.append(name)
        if has_column or name in losses:
            added.append(value)
    index: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    has_wide = any(map(_is_wide, jax.tree.leaves(added)))
    return Columns(
        names=tuple(names),
        ratios=tuple(ratios),
        losses=tuple(name for name in losses if name in metrics),
        skip_index=index.get(skip),
        gradient_index=index.get(GRAD_NORM),
        limit=limit,
        dtype="float64" if has_wide else "float32",
    )


def _is_wide(value: Any) -> bool:
    if not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return False
    num_parts = 2 if jnp.issubdtype(value.dtype, jnp.complexfloating) else 1
    return bool(value.dtype.itemsize > 4 * num_parts)


@functools.cache
def compile_add(columns: Columns, names: tuple[str, ...]) -> Callable[..., Any]:
    """Compile `add(sums, calls, num_steps) -> sums` for calls of one step.

    The calls are padded after `num_steps`.
    """

    def add(sums: DeviceSums, calls: list[list[Any]], num_steps: object) -> DeviceSums:
        rows = [columns.row(dict(zip(names, values, strict=True))) for values in calls]
        return columns.add(sums, jnp.stack(rows), num_steps)

    return jax.jit(add)


# The sums are on the devices of the metrics that are added to them.


class AddPlan(NamedTuple):
    """How the metrics of calls of one step are added to the sums.

    Attributes:
        names: The metrics that are added.
        max_calls: The number of calls that are added in one dispatch.
        is_local: Whether this process can read all shards of the metrics.
        shapes: The shapes of the losses.
    """

    columns: Columns
    names: tuple[str, ...] = ()
    max_calls: int = 1
    is_local: bool = True
    shapes: tuple[Any, ...] = ()


class DeviceAccumulator:
    """The sums since the last cut, and the calls of one step that are not part of them yet.

    Attributes:
        calls: The metrics of these calls; all have one plan.
        skips: The number of consecutive skipped updates at the last cut; None for 0.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.skips: Any = None
        self._sums: DeviceSums | None = None
        self._zeros: dict[Any, DeviceSums] = {}

    def zeros(self, columns: Columns, like: Tree) -> DeviceSums:
        """Return empty sums on the devices of `like`, made once: each transfer is a dispatch."""
        sharding = _sharding_of(like)
        key = columns, sharding
        if key not in self._zeros:
            with internal_transfers():
                array = _put(columns.zeros(), sharding)
                self._zeros[key] = DeviceSums(array, _put(np.int32(0), sharding))
        return self._zeros[key]

    def sums_like(self, columns: Columns, like: Tree) -> DeviceSums:
        """Return the sums since the last cut; the first ones are made on the devices of `like`."""
        if self._sums is not None:
            return self._sums
        sums = self.zeros(columns, like)
        if self.skips is not None:
            skips = self.skips
            sharding = _sharding_of(like)
            if _sharding_of(skips) != sharding:
                # The run has moved to other devices since the last cut.
                with internal_transfers():
                    skips = _put(read_value(skips), sharding)
            sums = sums._replace(skips=skips)
        self._sums = sums
        return sums

    def replace(self, sums: DeviceSums) -> None:
        self._sums = sums

    def flush(self, plan: AddPlan) -> None:
        """Add the pending calls, before code runs that may donate their metrics."""
        calls = self.calls
        self.calls = []
        # A committed array decides on which devices the program runs, and the sums must be on the
        # same ones.
        committed = (x for x in jax.tree.leaves(calls[0]) if getattr(x, "committed", False))
        sums = self.sums_like(plan.columns, next(committed, None))
        num_steps = np.int32(len(calls))
        # The last call is repeated as padding, so that one program serves any number of calls.
        calls += calls[-1:] * (plan.max_calls - len(calls))
        # A sum that is not finite is a result here, for which JAX's checks would raise.
        with internal_transfers(), jax.debug_nans(False), jax.debug_infs(False):
            self._sums = compile_add(plan.columns, plan.names)(sums, calls, num_steps)

    @property
    def array(self) -> Any:
        return None if self._sums is None else self._sums.array

    def clear(self) -> None:
        # The count of consecutive skips continues: its limit does not depend on when hooks are due.
        if self._sums is not None:
            self.skips = self._sums.skips
            self._sums = None


def _sharding_of(value: Any) -> Any:
    """Return the sharding of sums of an array or its shape; None for the default device."""
    # JAX moves an uncommitted array to the devices of the others, so its own device says nothing.
    if value is None or (isinstance(value, jax.Array) and not value.committed):
        return None
    if isinstance(value.sharding, NamedSharding):
        return NamedSharding(value.sharding.mesh, PartitionSpec())
    return value.sharding


def _put(value: Any, sharding: Any) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(np.shape(value), sharding, lambda _: np.asarray(value))
