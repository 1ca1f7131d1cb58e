"""Sums of metrics over intervals of steps: pieces of them, which the host adds up for each hook."""

import contextlib
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import internal_transfers
from jstep.hooks import metric_sums_program
from jstep.hooks.hook import Metrics
from jstep.hooks.metric_sums_program import (
    BAD,
    GRAD_NORM,
    GRADIENT,
    LOSS,
    SKIPPED,
    SKIPS,
    VALUE,
    WATCHED,
    Columns,
    Sums,
)
from jstep.training.step import Constants

NONE = Constants({})
_CALLS, _VALUES = 25, 128
"""The most calls, and values, that are added in one dispatch, which costs as much as a small step. 25 divides the usual
intervals, so that few dispatches are padded."""
_MOST_PIECES = 32
"""The number of pieces of an interval from which those that have arrived are merged."""


class BadStep(NamedTuple):
    """A step whose loss is not finite and whose update was applied."""

    step: int
    loss: float


class Totals(NamedTuple):
    """The sums over some steps, on the host.

    Attributes:
        last: The last step.
        sums: Name of a metric → sum and number of the steps that have it.
        skips: The number of consecutive skipped updates at the end.
        bad: The first step whose loss was not finite and whose update was applied, or None.
        gradient: The first step whose `grad_norm` was not finite and whose update was applied, or None.
        over: Limit of consecutive skipped updates → the step at which it was reached.
    """

    last: int
    sums: Mapping[str, tuple[float, float]]
    skips: int = 0
    bad: BadStep | None = None
    gradient: int | None = None
    over: Mapping[int, int] = {}

    def plus(self, later: "Totals") -> "Totals":
        """The sums over these and later steps."""
        sums = dict(self.sums)
        for name, (total, count) in later.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        gradient = later.gradient if self.gradient is None else self.gradient
        return Totals(later.last, sums, later.skips, self.bad or later.bad, gradient, {**later.over, **self.over})


class Piece:
    """The sums over consecutive steps that return the same metrics, being transferred to the host.

    Args:
        first: The step before the first one.
        steps: The number of steps.
        columns: What was accumulated.
        array: The sums on the device; None if nothing was.
        fixed: The sums of constant metrics.

    Attributes:
        names: The names of the metrics.
    """

    def __init__(
        self, first: int, steps: int, columns: Columns, array: Any, fixed: Mapping[str, tuple[float, float]]
    ) -> None:
        self._first, self._steps, self._columns, self._array, self._fixed = first, steps, columns, array, fixed
        self.names = [*columns.names, *fixed]
        if isinstance(array, jax.Array):
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether `totals` would not wait."""
        return not isinstance(self._array, jax.Array) or metric_sums_program.is_ready({"": self._array})

    @functools.cached_property
    def totals(self) -> Totals:
        """The sums; waits for the device."""
        last = self._first + self._steps
        if self._array is None:
            return Totals(last, self._fixed)
        with internal_transfers():
            row = metric_sums_program.host(self._array)
        names, m = self._columns.names, len(self._columns.names)
        watched = row[3 * m :]
        sums = dict(self._fixed)
        for i, name in enumerate(names):
            total, lost = float(row[i]), float(row[m + i])
            sums[name] = total + lost if math.isfinite(total) else total, float(row[2 * m + i])
        reached = zip(self._columns.limits, watched[WATCHED:], strict=True)
        return Totals(
            last,
            sums,
            int(watched[SKIPS]),
            BadStep(self._step_of(watched[BAD]), float(watched[VALUE])) if watched[BAD] >= 0 else None,
            self._step_of(watched[GRADIENT]) if watched[GRADIENT] >= 0 else None,
            {limit: self._step_of(at) for limit, at in reached if at >= 0},
        )

    def _step_of(self, index: Any) -> int:
        return self._first + 1 + int(index)


class Interval:
    """The sums over an interval."""

    def __init__(self) -> None:
        self._merged: Totals | None = None
        self._pieces: list[Piece] = []
        self._names: dict[str, None] = {}

    def add(self, piece: Piece) -> None:
        """Add the next steps; merge what has arrived if there are many pieces."""
        self._pieces.append(piece)
        self._names |= dict.fromkeys(piece.names)
        while len(self._pieces) > _MOST_PIECES and self._pieces[0].is_ready():
            self._merge()

    def _merge(self) -> None:
        later = self._pieces.pop(0).totals
        self._merged = later if self._merged is None else self._merged.plus(later)

    def is_ready(self) -> bool:
        """Whether `totals` would not wait."""
        return all(piece.is_ready() for piece in self._pieces)

    def names(self) -> list[str]:
        """The names of all metrics of the interval."""
        return list(self._names)

    @property
    def totals(self) -> Totals | None:
        """The sums; None without a step. Waits for the device."""
        while self._pieces:
            self._merge()
        return self._merged

    def means(self, names: Collection[str]) -> dict[str, float]:
        """Wait for the means of these metrics and return them."""
        sums = {} if self.totals is None else self.totals.sums
        found = {name: sums.get(name, (0.0, 0.0)) for name in names}
        return {name: total / count if count else math.nan for name, (total, count) in found.items()}

    def skipped_since(self, start: int) -> bool:
        """Whether all updates after a step were skipped, up to the last step of the interval; waits for the device."""
        return self.totals is not None and self.totals.skips >= self.totals.last - start


class PendingMeans:
    """The means of an interval, in display order, being transferred to the host."""

    def __init__(self, interval: Interval, leave_out: Collection[str] = ()) -> None:
        self._interval, self._names = interval, metric_sums_program.shown(interval.names(), leave_out)

    def start(self) -> None:
        """Do nothing: the transfer has started already."""

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._interval.is_ready()

    def read(self) -> dict[str, Any]:
        """Wait for the means and return them."""
        return dict(self._interval.means(self._names))


class _Layout(NamedTuple):
    """The form in which the metrics of calls of one step are accumulated.

    Attributes:
        columns: What is accumulated.
        computed: The names of the metrics on devices, with that of a loss of several numbers.
        plain: The names of numbers of the host.
        room: The number of calls to add in one dispatch.
        is_global: Whether other processes, which may not run this program, hold parts of the metrics.
    """

    columns: Columns
    computed: tuple[str, ...]
    plain: tuple[str, ...]
    room: int
    is_global: bool


class MetricSums:
    """Sums of the metrics of all steps for several hooks, each with its own intervals.

    A mean is over the steps that have the metric. A value that is not finite is ignored if the update of its step was
    skipped. Constant metrics, which no step computes, are added up on the host.

    A program of several steps accumulates by itself: `begin` returns the sums that it continues, `ran` takes them back.
    The metrics of other calls, of one step each, are added by a program of their own, many at once.

    Args:
        limits: The numbers of consecutive skipped updates that hooks report.

    Attributes:
        is_wanted: Whether a hook is registered.
    """

    def __init__(self, limits: Iterable[int] = ()) -> None:
        self.limits = tuple(sorted(set(limits)))
        self.is_wanted = False
        self._intervals: list[Interval] = []
        self._has_means = False
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._known: dict[_Layout, _Layout] = {}
        self._traced: Constants | None = None
        self._selected: _Layout | None = None
        self._unread: list[Metrics] = []  # of consecutive steps of `_traced`
        self._unread_first = self._unread_stop = -1
        self._pending: list[tuple[list[Any], Any]] = []
        self._layout: _Layout | None = None
        self._columns: Columns | None = None
        self._sums: Sums | None = None
        self._skips: Any = None
        self._empty: dict[Any, Any] = {}
        self._first = self._stop = -1
        self._constants: Constants | None = None
        self._constant_steps = 0
        self._fixed: dict[str, tuple[float, float]] = {}

    def subscribe(self, max_skipped: int | None = None, *, means: bool = True) -> int:
        """Register a hook, before the first step, and return its number for `take`.

        Args:
            max_skipped: The number of consecutive skipped updates to report; None for no limit.
            means: Whether the hook needs means; if no hook does, only the loss is accumulated.
        """
        if max_skipped is not None and max_skipped not in self.limits:
            self.limits = tuple(sorted({*self.limits, max_skipped}))
        self._intervals.append(Interval())
        self._has_means = self._has_means or means
        self.is_wanted = True
        return len(self._intervals) - 1

    # Calls that accumulate by themselves.

    def begin(self, columns: Columns, like: Any) -> Sums:
        """Return the sums that a call continues.

        Args:
            columns: What the call accumulates.
            like: An array of the state, on whose devices the sums are.
        """
        self.flush()
        if self._columns != columns:
            self.cut()
            self._columns, self._layout = columns, None
        if self._sums is None:
            self._sums = self._start(columns, like)
        return self._sums

    def empty(self, columns: Columns, like: Any) -> Sums:
        """Sums of no step, as `begin` returns at first."""
        key = columns, (sharding := _sharding_of(like))
        if key not in self._empty:
            with internal_transfers():
                self._empty[key] = Sums(_put(columns.empty(), sharding), _put(np.int32(0), sharding))
        return self._empty[key]

    def ran(self, first: int, steps: int, sums: Sums, constants: Constants) -> None:
        """Take the sums back from a call of some steps after `first`."""
        self._follow(first, steps, constants)
        self._sums = sums

    # Calls of one step.

    def add_traced(self, first: int, metrics: Metrics, constants: Constants) -> None:
        """Add the metrics that a compiled step computed, as `add`: `read` does the bookkeeping of several together.

        The program is known by the identity of its constant metrics.
        """
        if constants is not self._traced or first != self._unread_stop:
            self.read()
            if constants is not self._traced:
                self._traced, layout = constants, self._layout_of(metrics, constants.skipped)
                self._selected = self._known.setdefault(layout, layout)
            self._unread_first = first
        self._unread_stop, selected = first + 1, self._selected
        assert selected is not None
        # A mapping that has nothing else is kept as it is; any other one would keep large arrays alive.
        names = selected.computed
        self._unread.append(metrics if len(metrics) == len(names) else {name: metrics[name] for name in names})
        if len(self._unread) >= selected.room:
            self.read()

    def read(self) -> None:
        """Do the bookkeeping that `add_traced` has put off; must be called before a hook can change the mappings."""
        unread, self._unread = self._unread, []
        if unread:
            layout: Any = self._selected
            constants: Any = self._traced  # both are known, by `add_traced`
            calls = [[metrics[name] for name in layout.computed] for metrics in unread]
            self._add(layout, self._unread_first, constants, calls)
            self._unread_first = self._unread_stop

    def add(
        self,
        first: int,
        metrics: Metrics,
        skip: str | None = SKIPPED,
        constants: Constants = NONE,
        kinds: tuple[Any, ...] = (),
    ) -> None:
        """Add the metrics of the step after `first`; must be called before a hook can change the mapping.

        Args:
            first: The step before it.
            metrics: The metrics that the step computed.
            skip: The name of the metric that is 1 if the whole update was skipped.
            constants: Its constant metrics.
            kinds: Their kinds, as from `kinds_of`, if these may change from step to step.
        """
        self.read()
        key = (*metrics, skip, kinds)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layout_of(metrics, skip)
            layout = self._layouts[key] = self._known.setdefault(layout, layout)
        halves = _halves([metrics[n] for n in layout.plain], layout.columns.dtype) if layout.plain else None
        self._add(layout, first, constants, [[metrics[name] for name in layout.computed]], halves)

    def _add(
        self, layout: _Layout, first: int, constants: Constants, calls: list[list[Any]], plain: Any = None
    ) -> None:
        """Add consecutive calls of one step."""
        if layout is not self._layout:
            self.cut()
            self._layout, self._columns = layout, layout.columns
        self._follow(first, len(calls), constants)
        if not layout.columns.names and layout.columns.loss is None:
            return
        for values in calls:
            self._pending.append(([_local(value) for value in values] if layout.is_global else values, plain))
            if len(self._pending) >= layout.room:
                self.flush()

    def flush(self) -> None:
        """Process pending metrics, before they are passed to code that may donate them."""
        self.read()
        if not self._pending or self._layout is None:
            return
        pending, self._pending = self._pending, []
        columns, count, missing = self._layout.columns, len(pending), self._layout.room - len(pending)
        if self._sums is None:
            like = next((x for x in pending[0][0] if getattr(x, "committed", False)), None)
            self._sums = self._start(columns, like)
        calls = [values for values, _ in pending]
        calls += calls[-1:] * missing  # padding, so that one program serves any number of calls
        halves = [half for _, half in pending]
        plain = np.concatenate(halves + halves[-1:] * missing, axis=1) if self._layout.plain else None
        with internal_transfers(), _without_nan_checks():
            add = metric_sums_program.program(columns, self._layout.computed)
            self._sums = add(self._sums, calls, plain, np.int32(count))

    # Intervals.

    def take(self, number: int) -> Interval:
        """Return the sums since the last call with this number."""
        self.cut()
        interval, self._intervals[number] = self._intervals[number], Interval()
        return interval

    def cut(self) -> None:
        """End the current piece: hand its sums to all hooks, and start from zero."""
        self.read()
        if self._stop <= self._first:
            return
        self.flush()
        assert self._columns is not None
        self._fold()
        array = None if self._sums is None else self._sums.array
        piece = Piece(self._first, self._stop - self._first, self._columns, array, self._fixed)
        for interval in self._intervals:
            interval.add(piece)
        self._first, self._fixed = self._stop, {}
        if self._sums is not None:
            self._skips, self._sums = self._sums.skips, None

    def latest(self) -> Totals | None:
        """The sums since the last cut; None without a step. Waits for the device."""
        self.read()
        if self._stop <= self._first or self._columns is None:
            return None
        self.flush()
        array = None if self._sums is None else self._sums.array
        return Piece(self._first, self._stop - self._first, self._columns, array, {}).totals

    def _follow(self, first: int, steps: int, constants: Constants) -> None:
        if first != self._stop:  # in another run, or after steps that were not reported
            self.cut()
            self._first = first
        self._stop = first + steps
        if constants is not self._constants:
            self._fold()
            self._constants = constants
        self._constant_steps += steps

    def _layout_of(self, metrics: Metrics, skip: str | None) -> _Layout:
        if not self._has_means:
            metrics = {name: value for name, value in metrics.items() if name in (LOSS, GRAD_NORM, skip)}
        computed = {name: value for name, value in metrics.items() if isinstance(value, jax.Array)}
        plain = tuple(
            name for name, value in metrics.items() if name not in computed and metric_sums_program.is_number(value)
        )
        columns = metric_sums_program.columns_of(computed, skip, self.limits, plain)
        wanted = tuple(n for n in computed if n in columns.names or (n == LOSS and columns.loss is not None))
        room = 1 if columns.loss == -1 else max(1, min(_CALLS, _VALUES // max(1, len(wanted))))
        is_global = any(not computed[n].is_fully_addressable for n in wanted)
        return _Layout(columns, wanted, plain, room, is_global)

    def _fold(self) -> None:
        """Add up the constants of the latest steps."""
        steps, self._constant_steps = self._constant_steps, 0
        constants = NONE if self._constants is None or not steps else self._constants
        for name, value in constants.values.items():
            if metric_sums_program.is_number(value):
                total, count = self._fixed.get(name, (0.0, 0.0))
                self._fixed[name] = total + float(value) * steps, count + steps

    def _start(self, columns: Columns, like: Any) -> Sums:
        """Sums of no step that continue the count of skipped steps."""
        empty, skips = self.empty(columns, like), self._skips
        if skips is None:
            return empty
        sharding = _sharding_of(like)
        if _sharding_of(skips) != sharding:  # another stage, on other devices
            with internal_transfers():
                skips = _put(metric_sums_program.host(skips), sharding)
        return empty._replace(skips=skips)


def kinds_of(metrics: Metrics) -> tuple[Any, ...]:
    """The kinds of the metrics of a function that is not compiled: a number of one step may be None in the next one.

    The shape of a JAX array is not part of its kind, because the compiled sums know it.
    """
    return tuple([value.ndim if type(value) is np.ndarray else type(value) for value in metrics.values()])


def _halves(values: list[Any], dtype: str) -> np.ndarray[Any, Any]:
    """Split numbers of the host into two floats each: [2, 1, metrics]."""
    both = np.array([[float(metric_sums_program.host(value)) for value in values]])
    with np.errstate(over="ignore", invalid="ignore"):
        high = both.astype(dtype)
        low = np.where(np.isfinite(high), both - high, 0).astype(dtype)
    return np.stack([high, low])


def _local(value: Any) -> Any:
    """This process's copy of a value that is replicated over all processes."""
    is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
    return value.addressable_data(0) if is_global else value


def _sharding_of(value: Any) -> Any:
    """The sharding of sums that belong to an array or its shape; None for the default device."""
    is_placed = value is not None and (not isinstance(value, jax.Array) or value.committed)
    sharding = value.sharding if is_placed else None
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _put(value: Any, sharding: Any) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(np.shape(value), sharding, lambda _: np.asarray(value))


def _without_nan_checks() -> contextlib.AbstractContextManager[object]:
    """Disable JAX's checks for NaN and infinity: here, such sums are results, not errors."""
    flags: Any = jax.config
    stack = contextlib.ExitStack()
    if flags.jax_debug_nans or flags.jax_debug_infs:
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
    return stack
