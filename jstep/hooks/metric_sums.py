"""Sums of metrics over intervals of steps, accumulated on the device in a single array."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.hooks.hook import Metrics
from jstep.hooks.metric_sums_layout import GRAD_NORM, LOSS, Layout, Part
from jstep.hooks.metric_sums_program import BAD, GRADIENT, SKIPS, TOO_MANY, VALUE
from jstep.hooks.skipped_updates import SKIPPED, SkipMetric
from jstep.hooks.values import host, shown


class BadStep(NamedTuple):
    """A step whose loss is not finite and whose update was applied."""

    step: int
    loss: float


class MetricSums:
    """Sums of the metrics of all steps for several hooks, each with its own intervals.

    A mean is over the steps that have the metric. A value that is not finite is ignored if the update of its step was
    skipped. Constant metrics, which no step computes, are not accumulated.

    Args:
        skip_metric: Returns the name of the metric that is 1 if the whole update was skipped.
        constants: Returns the names of the metrics that no step computes; known after the first step.
    """

    def __init__(
        self, skip_metric: SkipMetric = lambda: SKIPPED, constants: Callable[[], Collection[str]] = tuple
    ) -> None:
        self._skip_metric, self._constants = skip_metric, constants
        self._limits: list[float] = []
        self._has_means = False
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._varying: set[str] = set()
        """The names of constants that had another value for other shapes of the batches: they are accumulated."""
        self._last: Layout | None = None

    def subscribe(self, max_skipped: int | None = None, *, means: bool = True) -> int:
        """Register a hook, before the first step, and return its number for `take`.

        Args:
            max_skipped: The number of consecutive skipped updates to report; None for no limit.
            means: Whether the hook needs means; if no hook does, only the loss is accumulated.
        """
        self._limits.append(math.inf if max_skipped is None else max_skipped)
        self._has_means = self._has_means or means
        return len(self._limits) - 1

    @property
    def is_wanted(self) -> bool:
        """Whether a hook is registered."""
        return bool(self._limits)

    def add(self, first: int, steps: int, metrics: Metrics, stacked: bool) -> None:
        """Add the metrics of the steps after `first`; must be called before a hook can change the mapping."""
        layout = self._layouts.get((stacked, *metrics))
        if layout is None or (changed := layout.changed(metrics)):
            self._varying.update(() if layout is None else changed)
            layout = self._layout(metrics, stacked)
        if layout is not self._last:
            if self._last is not None:
                self._last.flush()
                if self._last.sums is not None:
                    layout.resume_from(self._last.sums)
            self._last = layout
        layout.add(first, steps, metrics)

    def flush(self) -> None:
        """Processes pending metrics, before they are passed to code that may donate them."""
        if self._last is not None:
            self._last.flush()

    def take(self, number: int) -> "Interval":
        """Return the sums since the last call with this number."""
        return Interval([part for layout in self._layouts.values() if (part := layout.take(number)) is not None])

    def _layout(self, metrics: Metrics, stacked: bool) -> "Layout":
        """Create the layout of new metrics, or of metrics whose constants changed; the old layout is kept."""
        key: tuple[Any, ...] = (stacked, *metrics)
        if key in self._layouts:
            old = self._layouts.pop(key)
            self._layouts[(*key, len(self._layouts))] = old  # its sums have not been taken yet
        skip = self._skip_metric()
        if not self._has_means:
            metrics = {name: value for name, value in metrics.items() if name in (LOSS, GRAD_NORM, skip)}
        constants = frozenset(self._constants()) - self._varying
        layout = self._layouts[key] = Layout(metrics, stacked, self._limits, constants, skip)
        return layout


class Interval:
    """The sums over an interval."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        for part in parts:
            part.row.copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether reading the sums would not wait."""
        return all(part.row.is_ready() for part in self._parts)

    def names(self) -> list[str]:
        """The names of all metrics of the interval."""
        return list(dict.fromkeys(name for part in self._parts for name in self._all(part)))

    def _all(self, part: Part) -> list[str]:
        return [*part.names, *(name for name, _ in part.fixed)]

    def means(self, names: Collection[str]) -> dict[str, float]:
        """Wait for the means of these metrics and return them."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for part, row in self._rows:
            m = len(part.names)
            for i, name in enumerate(part.names):
                if name in found:
                    total, lost = float(row[i]), float(row[m + i])
                    found[name].append((total + lost if math.isfinite(total) else total, float(row[2 * m + i])))
            for name, value in part.fixed:
                if name in found:
                    found[name].append((float(np.mean(host(value), dtype=np.float64)) * part.steps, part.steps))
        return {name: _mean(sums) for name, sums in found.items()}

    def first_bad(self) -> BadStep | None:
        """The first step whose loss was not finite and whose update was applied; waits for the device."""
        bad = [BadStep(part.step_of(int(row[BAD])), float(row[VALUE])) for part, row in self._rows if row[BAD] >= 0]
        return min(bad, default=None)

    def first_bad_gradient(self) -> int | None:
        """The first step whose `grad_norm` was not finite and whose update was applied; waits for the device."""
        steps = [part.step_of(int(row[GRADIENT])) for part, row in self._rows if row[GRADIENT] >= 0]
        return min(steps, default=None)

    def skipped_since(self, start: int) -> bool:
        """Whether all updates after a step were skipped, up to the last step of the interval; waits for the device."""
        last = [(part.step_of(part.steps - 1), int(row[SKIPS])) for part, row in self._rows]
        return bool(last) and max(last)[1] >= max(last)[0] - start

    def first_over_limit(self) -> int | None:
        """The step at which the limit of consecutive skipped updates was reached; waits for the device."""
        steps = [part.step_of(int(row[TOO_MANY])) for part, row in self._rows if row[TOO_MANY] >= 0]
        return min(steps, default=None)

    @functools.cached_property
    def _rows(self) -> list[tuple[Part, Any]]:
        with internal_transfers():
            return [(part, host(part.row)) for part in self._parts]


class PendingMeans:
    """The means of an interval, in display order, being transferred to the host."""

    def __init__(self, interval: Interval, leave_out: Collection[str] = ()) -> None:
        self._interval, self._names = interval, shown(interval.names(), leave_out)

    def start(self) -> None:
        """Do nothing: the transfer has started already."""

    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._interval.is_ready()

    def read(self) -> dict[str, Any]:
        """Wait for the means and return them."""
        return dict(self._interval.means(self._names))


def _mean(sums: list[tuple[float, float]]) -> float:
    if len(sums) == 1 and sums[0][1]:
        return sums[0][0] / sums[0][1]
    count = sum(n for _, n in sums)
    return sum(total for total, _ in sums) / count if count else math.nan
