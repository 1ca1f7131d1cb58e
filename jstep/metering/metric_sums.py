"""Sums of metrics over intervals of steps, in pieces from the device."""

import dataclasses
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree
from jstep.metering.numbers import is_number, is_ready, local_copy, read_value, real_parts, start_copies
from jstep.metrics.totals import MeanOf
from jstep.training.looped import TracedStep
from jstep.training.metrics import GRAD_NORM, SKIPPED, Constants, Metrics, losses_in

# For M numbers the array holds M sums, M corrections (the rounding errors), M counts, and the watched columns. Each sum
# is stored in two floats, so that a mean is as accurate as one of float64; integers are rounded to one float. The
# numbers are those of the metrics, where `mean_of` has its total, and then the counts of `mean_of`.
WATCHED = 5
SEEN, BAD, VALUE, GRADIENT, OVER = range(WATCHED)
"""The watched columns: the number of steps; the first bad step, counted from 0, or −1, and its loss; the first step
whose gradient norm is not finite, or −1; the step that reached the limit of skipped steps, or −1."""

NO_CONSTANTS = Constants({})
_CALLS, _VALUES = 25, 128
"""The most calls, and values, that are added in one dispatch."""

Pairs = dict[str, tuple[float, float]]
"""Name of a metric → sum and number of the steps that have it; of a `mean_of`, its counts."""


def _add_pair(sums: Pairs, name: str, total: float, count: float) -> None:
    before = sums.get(name, (0.0, 0.0))
    sums[name] = before[0] + total, before[1] + count


def merge_sums(sums: Mapping[str, tuple[float, float]], later: Mapping[str, tuple[float, float]]) -> Pairs:
    both = dict(sums)
    for name, pair in later.items():
        _add_pair(both, name, *pair)
    return both


class BadStep(NamedTuple):
    step: int
    loss: float


class HostSums(NamedTuple):
    """The sums over some steps, on the host.

    `bad` and `gradient` are the first steps with a nonfinite loss, or gradient norm; `over` is that of too many skipped
    updates.
    """

    last: int
    sums: Pairs
    bad: BadStep | None = None
    gradient: int | None = None
    over: int | None = None

    def merge(self, later: "HostSums") -> "HostSums":
        sums, gradient = merge_sums(self.sums, later.sums), self.gradient or later.gradient
        return HostSums(later.last, sums, self.bad or later.bad, gradient, self.over or later.over)


class Piece(NamedTuple):
    """The sums over the steps after `first`, on their way to the host; `fixed` holds numbers of the host."""

    first: int
    last: int
    columns: "Columns"
    array: Any
    fixed: Pairs

    def totals(self) -> HostSums:
        if self.array is None:
            return HostSums(self.last, self.fixed)
        with internal_transfers():
            row = read_value(self.array)
        columns, m, sums = self.columns, self.columns.width, dict(self.fixed)
        totals = [
            float(x) + (float(lost) if math.isfinite(x) else 0.0) for x, lost in zip(row, row[m : 2 * m], strict=False)
        ]
        for i, name in enumerate(columns.names):
            if i not in columns.ratios:
                _add_pair(sums, name, totals[i], float(row[2 * m + i]))
            elif count := totals[len(columns.names) + columns.ratios.index(i)]:
                _add_pair(sums, name, totals[i], count)
        watched = row[3 * m :]
        bad, gradient, over = (
            None if at < 0 else self.first + 1 + int(at) for at in watched[np.array([BAD, GRADIENT, OVER])]
        )
        return HostSums(self.last, sums, None if bad is None else BadStep(bad, float(watched[VALUE])), gradient, over)


class Interval:
    """The sums of an interval between two log lines, one piece for each program; perhaps only those of `mean_of`."""

    def __init__(self, of_ratios: bool = False) -> None:
        self.of_ratios = of_ratios
        self._merged: HostSums | None = None
        self._pieces: list[Piece] = []
        self.names: dict[str, None] = {}

    def add(self, piece: Piece) -> None:
        columns = piece.columns
        if self.of_ratios and not columns.ratios:
            return
        self._pieces.append(piece)
        names = [columns.names[i] for i in columns.ratios] if self.of_ratios else [*columns.names, *piece.fixed]
        self.names |= dict.fromkeys(names)
        while len(self._pieces) > 1 and is_ready([self._pieces[0].array]):
            self._merge()

    def _merge(self) -> None:
        later = self._pieces.pop(0).totals()
        if self.of_ratios:
            later = later._replace(sums={name: pair for name, pair in later.sums.items() if name in self.names})
        self._merged = later if self._merged is None else self._merged.merge(later)

    def is_ready(self) -> bool:
        return is_ready(piece.array for piece in self._pieces)

    @property
    def totals(self) -> HostSums | None:
        while self._pieces:
            self._merge()
        return self._merged

    def means(self, names: Collection[str]) -> dict[str, float]:
        sums = {} if self.totals is None else self.totals.sums
        pairs = {name: sums[name] for name in names if name in sums}
        return {name: total / count if count else math.nan for name, (total, count) in pairs.items()}


class NewestRatios:
    """The value of each `mean_of` in the newest piece that has it, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._values: dict[str, float] = {}

    def add(self, piece: Piece) -> None:
        if piece.columns.ratios:
            self._pieces.append(piece)
            self.arrived()

    def arrived(self) -> dict[str, float]:
        """Return the values that have arrived, without waiting."""
        with self._lock:
            while self._pieces and is_ready([self._pieces[0].array]):
                piece = self._pieces.popleft()
                sums = piece.totals().sums
                names = [piece.columns.names[i] for i in piece.columns.ratios]
                self._values |= {name: sums[name][0] / sums[name][1] for name in names if name in sums}
            return dict(self._values)


class Grouping(NamedTuple):
    """The columns to which calls of one step add the metrics `names`, `room` calls in one dispatch."""

    columns: "Columns"
    names: tuple[str, ...] = ()
    room: int = 1
    is_local: bool = True


class MetricSums:
    """Sums of the metrics of all steps, for several hooks with different intervals.

    A mean is over the steps that have the metric. A value that is not finite is ignored if its update was skipped. A
    program of several steps accumulates by itself, between `begin` and `ran`.

    Attributes:
        is_wanted: Whether a hook needs more than the sums of `mean_of`.
        has_ratios: Whether a program had a `mean_of`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.is_wanted = self.has_ratios = False
        self._intervals: list[Interval] = []
        self._newest: list[NewestRatios] = []
        self._has_means = False
        self._groupings: dict[tuple[Any, ...], Grouping] = {}
        self._empty: dict[Any, DeviceSums] = {}
        # The steps since the last cut, (_first, _stop], all of one grouping:
        self._first = self._stop = -1
        self._grouping: Grouping | None = None
        self._sums: DeviceSums | None = None  # on the device
        self._calls: list[list[Any]] = []  # not yet part of `_sums`
        self._fixed: Pairs = {}  # of numbers on the host
        self._constants, self._constant_steps = NO_CONSTANTS, 0  # not yet part of `_fixed`
        self._skips: Any = None  # at the last cut
        self._traced: Constants | None = None  # of the program whose metrics have the grouping, if known

    def subscribe(self, *, means: bool = True, ratios: bool = False) -> int:
        """Register a hook, before the first step, and return its number for `take`.

        Without `means` it needs only the loss and the `mean_of`, with `ratios` only the latter.
        """
        self._intervals.append(Interval(ratios))
        self._has_means = self._has_means or (means and not ratios)
        self.is_wanted = self.is_wanted or not ratios
        return len(self._intervals) - 1

    def follow_ratios(self) -> NewestRatios:
        """Return what has the newest value of each `mean_of`, as of the latest cut."""
        self._newest.append(newest := NewestRatios())
        return newest

    def begin_skipped(self, steps: int) -> None:
        with internal_transfers():
            self._skips = jnp.asarray(np.int32(steps))

    def skipped_in_a_row(self) -> int:
        with internal_transfers():
            return 0 if self._skips is None else int(read_value(self._skips))

    # Calls that accumulate by themselves.

    def begin(self, columns: "Columns", like: Tree) -> "DeviceSums":
        self.flush()
        self.has_ratios = self.has_ratios or bool(columns.ratios)
        if self._grouping is None or self._grouping.columns != columns:
            self._use(Grouping(columns))
        self._traced = None
        return self._started(columns, like)

    def empty(self, columns: "Columns", like: Tree) -> "DeviceSums":
        key = columns, (sharding := _sharding_of(like))
        if key not in self._empty:
            with internal_transfers():
                self._empty[key] = DeviceSums(_put(columns.empty(), sharding), _put(np.int32(0), sharding))
        return self._empty[key]

    def ran(self, first: int, steps: int, sums: "DeviceSums", constants: Constants) -> None:
        self._follow(first, steps, constants)
        self._sums = sums

    # Calls of one step.

    def add(
        self, first: int, metrics: Metrics, skip: str | None = SKIPPED, constants: Constants = NO_CONSTANTS
    ) -> None:
        """Add the metrics of the step after `first`; `skip` names the one that is 1 if the update was skipped."""
        # A compiled program is recognized by the identity of its constant metrics.
        if first == self._stop and constants is self._traced:
            self._stop += 1
            self._constant_steps += 1
        else:
            metrics = self._select(first, metrics, skip, constants)
        grouping, calls = self._grouping, self._calls
        assert grouping is not None  # by `_select`
        if grouping.names:
            values = [metrics[name] for name in grouping.names]
            calls.append(values if grouping.is_local else jax.tree.map(local_copy, values))
            if len(calls) >= grouping.room:
                self.flush()

    def _select(self, first: int, metrics: Metrics, skip: str | None, constants: Constants) -> dict[str, Any]:
        losses = losses_in(metrics)
        if not self._has_means:
            watched = *losses, GRAD_NORM, skip
            metrics = {name: x for name, x in metrics.items() if name in watched or isinstance(x, MeanOf)}
        computed: dict[str, Any] = {}
        on_host: dict[str, float] = {}
        for name, value in metrics.items():
            if isinstance(value, MeanOf):
                computed[name] = value
            elif isinstance(value, jax.Array):
                if value.ndim == 0 or name in losses:
                    computed[name] = value
            elif is_number(value):
                if name == skip or not math.isfinite(value):  # it counts unless the step was skipped
                    computed[name] = np.float32(value)
                else:
                    on_host[name] = float(value)
            elif name in losses:  # arrays of NumPy, or several of any kind
                computed[name] = [_canonical(part) for part in real_parts([value])]
        ratios = (name for name, value in computed.items() if isinstance(value, MeanOf))
        key = skip, tuple(losses), *computed, *ratios
        grouping = self._groupings.get(key) if constants is NO_CONSTANTS else None
        if grouping is None:
            grouping = self._groupings[key] = self._choose_grouping(computed, losses, skip)
        if grouping != self._grouping:
            self._use(grouping)
        self._traced = None if constants is NO_CONSTANTS else constants
        self._follow(first, 1, constants)
        for name, number in on_host.items():
            _add_pair(self._fixed, name, number, 1)
        return computed

    def flush(self) -> None:
        """Add the latest calls, before code that may donate their metrics runs."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        grouping = self._grouping
        assert grouping is not None
        committed = (x for x in jax.tree.leaves(calls[0]) if getattr(x, "committed", False))
        sums = self._started(grouping.columns, next(committed, None))
        count = np.int32(len(calls))
        calls += calls[-1:] * (grouping.room - len(calls))  # padding, so that one program serves any number of calls
        # Sums that are not finite are results, whatever JAX checks.
        with internal_transfers(), jax.debug_nans(False), jax.debug_infs(False):
            self._sums = compile_add(grouping.columns, grouping.names)(sums, calls, count)

    # Intervals.

    def take(self, number: int) -> Interval:
        self.cut()
        interval, self._intervals[number] = self._intervals[number], Interval(self._intervals[number].of_ratios)
        return interval

    def cut(self) -> None:
        """End the current piece, pass its sums to all intervals, and start from zero."""
        if self._stop <= self._first:
            return
        piece = self._piece()
        start_copies([piece.array])
        for interval in self._intervals:
            interval.add(piece)
        for newest in self._newest:
            newest.add(piece)
        self._first, self._fixed = self._stop, {}
        if self._sums is not None:
            self._skips, self._sums = self._sums.skips, None

    def latest(self) -> HostSums | None:
        return None if self._stop <= self._first else self._piece().totals()

    def _piece(self) -> Piece:
        self.flush()
        self._fold()
        assert self._grouping is not None
        array = None if self._sums is None else self._sums.array
        return Piece(self._first, self._stop, self._grouping.columns, array, self._fixed)

    def _use(self, grouping: Grouping) -> None:
        self.cut()
        self._grouping = grouping

    def _follow(self, first: int, steps: int, constants: Constants) -> None:
        if first != self._stop:  # in another run, or after steps that were not reported
            self.cut()
            self._first = first
        self._stop = first + steps
        if constants is not self._constants:
            self._fold()
            self._constants = constants
        self._constant_steps += steps

    def _fold(self) -> None:
        steps, self._constant_steps = self._constant_steps, 0
        for name, value in self._constants.all.items() if steps else ():
            if is_number(value):
                _add_pair(self._fixed, name, float(value) * steps, steps)

    def _choose_grouping(self, metrics: Metrics, losses: Collection[str], skip: str | None) -> Grouping:
        columns = choose_columns(metrics, losses, skip, self.limit)
        self.has_ratios = self.has_ratios or bool(columns.ratios)
        names = tuple(name for name in metrics if name in columns.names or name in columns.losses)
        room = max(1, min(_CALLS, _VALUES // max(1, len(names))))
        is_local = all(
            getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves([metrics[name] for name in names])
        )
        return Grouping(columns, names, room, is_local)

    def _started(self, columns: "Columns", like: Tree) -> "DeviceSums":
        if self._sums is None:
            empty, skips = self.empty(columns, like), self._skips
            if skips is not None and _sharding_of(skips) != (sharding := _sharding_of(like)):  # on other devices
                with internal_transfers():
                    skips = _put(read_value(skips), sharding)
            self._sums = empty if skips is None else empty._replace(skips=skips)
        return self._sums


def _canonical(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _sharding_of(value: Any) -> Any:
    """The sharding of sums of an array or its shape; None for the default device."""
    is_placed = value is not None and (not isinstance(value, jax.Array) or value.committed)
    sharding = value.sharding if is_placed else None
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _put(value: Any, sharding: Any) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(np.shape(value), sharding, lambda _: np.asarray(value))


# What the device accumulates.


class DeviceSums(NamedTuple):
    """The sums since the last cut, and the number of consecutive skipped steps, which a cut keeps."""

    array: Any
    skips: Any


class Columns(NamedTuple):
    """The metrics of which the sums have a column, with the indices of those that are watched.

    A step contributes a row: the numbers of these metrics, the counts of `ratios`, and its loss, or of several losses
    the sum of what is not finite. `limit` is the number of consecutive skipped steps to report, if any.
    """

    names: tuple[str, ...]
    ratios: tuple[int, ...]
    losses: tuple[str, ...]
    skip: int | None
    gradient: int | None
    limit: int | None
    dtype: str

    @property
    def width(self) -> int:
        return len(self.names) + len(self.ratios)

    def empty(self) -> np.ndarray[Any, Any]:
        array = np.zeros(3 * self.width + WATCHED, self.dtype)
        array[3 * self.width :][[BAD, GRADIENT, OVER]] = -1
        return array

    def row(self, metrics: Mapping[str, Any]) -> Any:
        parts = real_parts(metrics[name] for name in self.losses) or [jnp.zeros((), self.dtype)]
        loss = parts[0]
        if len(parts) > 1 or loss.ndim:
            bad = [jnp.where(jnp.isfinite(part), jnp.zeros_like(part), part).sum() for part in parts]
            loss = sum([part.astype(self.dtype) for part in bad[1:]], bad[0].astype(self.dtype))
        values = [metrics[name] for name in self.names]
        counts = [values[i].count for i in self.ratios]
        for i in self.ratios:
            values[i] = values[i].total
        return jnp.stack([x.astype(self.dtype) for x in (*values, *counts, loss)])

    def add(self, sums: DeviceSums, rows: Any, count: Any) -> DeviceSums:
        numbers, loss = rows[:, :-1], rows[:, -1]
        m = self.width
        nothing = jnp.zeros(len(rows), bool)
        counted = jnp.arange(len(rows), dtype=np.int32) < count
        skipped = nothing if self.skip is None else numbers[:, self.skip] == 1
        finite = jnp.isfinite(numbers)
        for k, i in enumerate(self.ratios, len(self.names)):  # a total is used with its count, or neither is
            finite = finite.at[:, np.array([i, k])].set((finite[:, i] & finite[:, k])[:, None])
        used = counted[:, None] & (finite | ~skipped[:, None])
        x, error = _total(jnp.where(used, numbers, 0))
        total, lost = _two_sum(sums.array[:m], x)
        bad = is_bad(jnp.isfinite(loss), skipped) & counted
        bad_gradient = nothing
        if self.gradient is not None:
            bad_gradient = is_bad(jnp.isfinite(numbers[:, self.gradient]), skipped) & counted
        watched, skips = self._watch(sums.array[3 * m :], sums.skips, bad, loss, skipped, bad_gradient, count)
        array = [
            total,
            sums.array[m : 2 * m] + (lost + error),
            sums.array[2 * m : 3 * m] + jnp.sum(used, axis=0).astype(rows.dtype),
            watched,
        ]
        return DeviceSums(jnp.concatenate(array), skips)

    def _watch(
        self, watched: Any, before: Any, bad: Any, loss: Any, skipped: Any, bad_gradient: Any, count: Any
    ) -> tuple[Any, Any]:
        dtype, steps = watched.dtype, jnp.arange(len(bad), dtype=np.int32)

        def first(column: Any, flags: Any) -> Any:
            step = watched[SEEN] + jnp.argmax(flags).astype(dtype)
            return jnp.where((column < 0) & flags.any(), step, column)

        last_made = jax.lax.cummax(jnp.where(skipped, jnp.int32(-1), steps))
        in_a_row = jnp.where(last_made < 0, before + steps + 1, steps - last_made)
        is_over = jnp.zeros_like(bad) if self.limit is None else (in_a_row >= self.limit) & (steps < count)
        is_first = (watched[BAD] < 0) & bad.any()
        new = [
            watched[SEEN] + count.astype(dtype),
            first(watched[BAD], bad),
            jnp.where(is_first, loss[jnp.argmax(bad)], watched[VALUE]),
            first(watched[GRADIENT], bad_gradient),
            first(watched[OVER], is_over),
        ]
        return jnp.stack(new), in_a_row[count - 1]


@dataclasses.dataclass(frozen=True)
class Accumulate:
    limit: int | None = None

    def __call__(self, step: TracedStep) -> Columns:
        losses = losses_in({**step.metrics, **step.constants.all})
        return choose_columns(step.metrics, losses, step.constants.skipped, self.limit)


def _is_wide(value: Any) -> bool:
    if not hasattr(value, "dtype") or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return False
    parts = 2 if jnp.issubdtype(value.dtype, jnp.complexfloating) else 1
    return bool(value.dtype.itemsize > 4 * parts)


def choose_columns(
    metrics: Mapping[str, Any], losses: Collection[str], skip: str | None, limit: int | None = None
) -> Columns:
    totals = {name: value.total if isinstance(value, MeanOf) else value for name, value in metrics.items()}
    index = {name: i for i, name in enumerate([name for name, value in totals.items() if is_number(value)])}
    ratios = tuple(i for name, i in index.items() if isinstance(metrics[name], MeanOf))
    losses = tuple(name for name in losses if name in metrics)
    added = [value for name, value in metrics.items() if name in index or name in losses]
    dtype = "float64" if any(map(_is_wide, jax.tree.leaves(added))) else "float32"
    return Columns(tuple(index), ratios, losses, index.get(skip or ""), index.get(GRAD_NORM), limit, dtype)


@functools.cache
def compile_add(columns: Columns, names: tuple[str, ...]) -> Callable[..., Any]:
    """Compile `add(sums, calls, count) -> sums` for calls of one step, padded after `count`."""

    def add(sums: DeviceSums, calls: list[list[Any]], count: object) -> DeviceSums:
        rows = [columns.row(dict(zip(names, values, strict=True))) for values in calls]
        return columns.add(sums, jnp.stack(rows), count)

    return jax.jit(add)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum a + b, and its rounding error (Knuth)."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def _total(numbers: Any) -> tuple[Any, Any]:
    if len(numbers) == 1:
        return numbers[0], jnp.zeros_like(numbers[0])

    def both(a: Any, b: Any) -> tuple[Any, Any]:
        s, lost = _two_sum(a[0], b[0])
        return s, a[1] + b[1] + lost

    zero = jnp.zeros((), numbers.dtype)
    x, error = jax.lax.reduce((numbers, jnp.zeros_like(numbers)), (zero, zero), both, (0,))
    return x, error


def is_bad(finite: Any, skipped: Any) -> Any:
    return ~(finite | skipped)
