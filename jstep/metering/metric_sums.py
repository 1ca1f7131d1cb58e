"""Sums of metrics over intervals of steps, accumulated on the device, read without waiting for it.

A mean over an interval needs one number from the device, not one for each step. So the sums stay on
the device, and when a hook ends its interval, the steps since the last cut become a `Piece`, whose
array is copied to the host in the background. Hooks with different intervals share the pieces, so
that a second hook costs no second sum.
"""

import enum
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree
from jstep.metering.device_sums import (
    AddPlan,
    Columns,
    DeviceAccumulator,
    DeviceSums,
    choose_columns,
)
from jstep.metering.intervals import (
    HostSums,
    Interval,
    NewestRatios,
    Piece,
    SumsAndCounts,
    add_pair,
)
from jstep.metering.numbers import is_number, local_copy, read_value, real_parts, start_copies
from jstep.metrics.totals import MeanOf
from jstep.training.metrics import GRAD_NORM, SKIPPED, Constants, Metrics, losses_in

NO_CONSTANTS = Constants({})
_MAX_CALLS = 25
"""The calls whose metrics are added in one dispatch, which costs as much as a small train step.

25 divides the usual intervals, so that few dispatches are padded.
"""
_MAX_VALUES = 128
"""The values that are added in one dispatch: each is an argument of its program."""
_MAX_STEPS = 2**23
"""The steps after which a piece ends, if no hook has cut it.

They are counted in float32, which is exact up to 2**24: a call of several steps may add as many
again.
"""


class Needs(enum.Enum):
    """What a hook needs of the steps of its interval.

    Attributes:
        MEANS: The means of all metrics.
        WATCHED: What is recorded of single steps (`device_sums.Watched`), and each `mean_of`.
        RATIOS: Only each `mean_of`.
    """

    MEANS = enum.auto()
    WATCHED = enum.auto()
    RATIOS = enum.auto()


class HostAccumulator:
    """The sums of metrics that are numbers of the host.

    Metrics that are constants of the program, such as a learning rate, are the same at each step:
    their steps are only counted, and `collect` multiplies.

    Attributes:
        constant_steps: The steps of these constants that are not yet in the sums. `MetricSums.add`
            counts them, without another call in each step.
    """

    def __init__(self) -> None:
        self.constant_steps = 0
        self._constants = NO_CONSTANTS
        self._sums: SumsAndCounts = {}

    def add(self, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            add_pair(self._sums, name, number, 1)

    def add_constants(self, steps: int, constants: Constants) -> None:
        if constants is not self._constants:
            self._multiply_constants()
            self._constants = constants
        self.constant_steps += steps

    def _multiply_constants(self) -> None:
        steps = self.constant_steps
        self.constant_steps = 0
        if not steps:
            return
        for name, value in self._constants.all.items():
            if is_number(value):
                add_pair(self._sums, name, float(value) * steps, steps)

    def collect(self) -> SumsAndCounts:
        self._multiply_constants()
        return self._sums

    def clear(self) -> None:
        self._sums = {}


class SplitMetrics(NamedTuple):
    """The metrics of a call of one step, by where they are added, and how.

    Attributes:
        on_device: The metrics that the device adds, as the plan says.
        on_host: The numbers that the host adds.
    """

    plan: AddPlan
    on_device: dict[str, Any]
    on_host: dict[str, float]


class PlanTable:
    """The plans of how the metrics of calls of one step are added.

    There is one plan for all metrics of the same names, kinds and shapes.

    Attributes:
        limit: The number of consecutive skipped updates to report.
        has_means: Whether a hook needs the means of all metrics; otherwise only a few are added.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.has_means = False
        self._plans: dict[tuple[Any, ...], AddPlan] = {}

    def split(self, metrics: Metrics, skip: str | None, *, may_reuse: bool) -> SplitMetrics:
        """Split metrics into those that are added on the device and on the host.

        Args:
            may_reuse: Whether to use an earlier plan for metrics of these names. This is for a
                step that jstep did not make, which calls this at each step. A program of jstep
                calls it only when it follows another program, whose metrics may have had other
                dtypes.
        """
        losses = losses_in(metrics)
        if not self.has_means:
            watched = *losses, GRAD_NORM, skip
            metrics = {
                name: x for name, x in metrics.items() if name in watched or isinstance(x, MeanOf)
            }
        on_device: dict[str, Any] = {}
        on_host: dict[str, float] = {}
        for name, value in metrics.items():
            if isinstance(value, MeanOf):
                on_device[name] = value
            elif isinstance(value, jax.Array):
                if value.ndim == 0 or name in losses:
                    on_device[name] = value
            elif is_number(value):
                # Whether a number that is not finite counts depends on whether its update was
                # skipped, which only the device knows.
                if name == skip or not math.isfinite(value):
                    on_device[name] = np.float32(value)
                else:
                    on_host[name] = float(value)
            elif name in losses:  # arrays of NumPy, or several of any kind
                on_device[name] = [_in_dtype_of_jax(part) for part in real_parts([value])]
        # A metric may be a number at one step and a `mean_of` at the next.
        ratios = tuple(name for name, value in on_device.items() if isinstance(value, MeanOf))
        # A loss may be an array, such as one value per example. Calls are stacked before they are
        # added, which requires equal shapes.
        shapes = tuple(_shape(on_device[name]) for name in losses if name in on_device)
        key = skip, tuple(losses), tuple(on_device), ratios, shapes
        plan = self._plans.get(key) if may_reuse else None
        if plan is None:
            plan = self._make(on_device, losses, skip, shapes)
            self._plans[key] = plan
        return SplitMetrics(plan, on_device, on_host)

    def _make(
        self, metrics: Metrics, losses: Metrics, skip: str | None, shapes: tuple[Any, ...]
    ) -> AddPlan:
        columns = choose_columns(metrics, losses, skip, self.limit)
        names = tuple(name for name in metrics if name in columns.names or name in columns.losses)
        arrays = jax.tree.leaves([metrics[name] for name in names])
        return AddPlan(
            columns=columns,
            names=names,
            max_calls=max(1, min(_MAX_CALLS, _MAX_VALUES // max(1, len(names)))),
            is_local=all(getattr(array, "is_fully_addressable", True) for array in arrays),
            shapes=shapes,
        )


def _shape(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(map(np.shape, value))
    return np.shape(value)


def _in_dtype_of_jax(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


class MetricSums:
    """Sums of the metrics of all steps, for several hooks with different intervals.

    Only the loop's thread calls it, with two exceptions:

    - Any thread may read the `NewestRatios` that `follow_ratios` has returned.
    - If the loop hangs in a loader, the thread that then ends the process calls `latest`.

    A mean is over the steps that have the metric. A value that is not finite is ignored if its
    update was skipped. A program of several steps accumulates by itself, between `begin_call` and
    `end_call`; calls of one step pass their metrics to `add`.

    Attributes:
        is_wanted: Whether a hook needs more than the sums of `mean_of`.
        has_ratios: Whether a program had a `mean_of`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.is_wanted = False
        self.has_ratios = False
        self._intervals: list[Interval] = []
        self._newest: list[NewestRatios] = []
        self._plans = PlanTable(limit)

        # The open piece: the steps since the last cut, (_first, _last], all of one plan. Each
        # metric of them is in one of the two accumulators, and `_make_piece` brings these together.
        self._first = -1
        self._last = -1
        self._plan: AddPlan | None = None
        self._device = DeviceAccumulator()
        self._host = HostAccumulator()
        self._cut_piece: Piece | None = None  # the piece that the latest cut has ended
        # The program whose metrics are known to fit `_plan`, recognized by the identity of its
        # constants.
        self._planned_for: Constants | None = None

    @property
    def limit(self) -> int | None:
        return self._plans.limit

    def subscribe(self, needs: Needs = Needs.MEANS) -> int:
        """Register a hook, before the first step, and return its number for `take`."""
        self._intervals.append(Interval(ratios_only=needs is Needs.RATIOS))
        if needs is not Needs.RATIOS:
            self.is_wanted = True
        if needs is Needs.MEANS:
            self._plans.has_means = True
        return len(self._intervals) - 1

    def follow_ratios(self) -> NewestRatios:
        """Return an object that has the newest value of each `mean_of`, as of the latest cut."""
        newest = NewestRatios()
        self._newest.append(newest)
        return newest

    def begin_skipped(self, steps: int) -> None:
        """Continue a count of consecutive skipped updates."""
        with internal_transfers():
            self._device.skips = jnp.asarray(np.int32(steps))

    def skipped_in_a_row(self) -> int:
        """Return the number of consecutive skipped updates at the last cut."""
        if self._device.skips is None:
            return 0
        with internal_transfers():
            return int(read_value(self._device.skips))

    # Programs of several steps, which accumulate by themselves.

    def begin_call(self, columns: Columns, like: Tree) -> DeviceSums:
        """Return the sums to which the program adds; it returns them to `end_call`."""
        self.flush()
        if columns.ratios:
            self.has_ratios = True
        if self._plan is None or self._plan.columns != columns:
            self._switch_plan(AddPlan(columns))
        self._planned_for = None
        return self._device.sums_like(columns, like)

    def zeros(self, columns: Columns, like: Tree) -> DeviceSums:
        return self._device.zeros(columns, like)

    def end_call(self, first: int, steps: int, sums: DeviceSums, constants: Constants) -> None:
        self._extend(first, steps, constants)
        self._device.replace(sums)
        if self._last - self._first >= _MAX_STEPS:
            self.cut()

    # Calls of one step.

    def add(
        self,
        first: int,
        metrics: Metrics,
        skip: str | None = SKIPPED,
        constants: Constants = NO_CONSTANTS,
    ) -> None:
        """Add the metrics of the step after `first`.

        `skip` names the metric that is 1 if the update was skipped.
        """
        # The fast path: the same program as at the last step has the same metrics, so its plan
        # fits. Its only numbers on the host are constants, because its metrics are split when it is
        # traced.
        if first == self._last and constants is self._planned_for:
            self._last += 1
            self._host.constant_steps += 1
        else:
            metrics = self._begin_step(first, metrics, skip, constants)
        plan = self._plan
        assert plan is not None  # by `_begin_step`
        if not plan.names:
            return
        # A comprehension for its speed: this runs at each step.
        values = [metrics[name] for name in plan.names]
        calls = self._device.calls
        if not plan.is_local:
            # All processes would have to run a program on an array with shards in other processes
            # together.
            values = jax.tree.map(local_copy, values)
        calls.append(values)
        if len(calls) >= plan.max_calls:
            self.flush()
        if self._last - self._first >= _MAX_STEPS:
            self.cut()

    def _begin_step(
        self, first: int, metrics: Metrics, skip: str | None, constants: Constants
    ) -> dict[str, Any]:
        """Choose the plan of a step, count the step, and add its numbers on the host.

        Return the metrics that the device adds.
        """
        is_program = constants is not NO_CONSTANTS  # of jstep, not a step of the user's
        plan, on_device, on_host = self._plans.split(metrics, skip, may_reuse=not is_program)
        if plan.columns.ratios:
            self.has_ratios = True
        if plan != self._plan:
            self._switch_plan(plan)
        self._planned_for = constants if is_program else None
        self._extend(first, 1, constants)
        self._host.add(on_host)
        return on_device

    def flush(self) -> None:
        """Add the pending calls, before code runs that may donate their metrics."""
        if self._device.calls:
            assert self._plan is not None  # by `add`
            self._device.flush(self._plan)

    # Intervals.

    def take(self, number: int) -> Interval:
        """Return the interval of a hook, up to the current step, and begin its next one."""
        self.cut()
        interval = self._intervals[number]
        self._intervals[number] = Interval(ratios_only=interval.ratios_only)
        return interval

    def cut(self) -> None:
        """End the open piece, pass its sums to all intervals, and start from zero."""
        if self._last <= self._first:
            return
        piece = self._make_piece()
        self._cut_piece = piece
        start_copies([piece.array])
        for interval in self._intervals:
            interval.add(piece)
        for newest in self._newest:
            newest.add(piece)
        self._first = self._last
        self._host.clear()
        self._device.clear()

    def latest(self) -> HostSums | None:
        """Return the sums of the piece with the latest step, without a cut; wait for the device."""
        if self._last > self._first:
            return self._make_piece().totals()
        # A hook has cut at this step, and nothing has been added since.
        return None if self._cut_piece is None else self._cut_piece.totals()

    def _make_piece(self) -> Piece:
        self.flush()
        assert self._plan is not None  # a step was added
        return Piece(
            first=self._first,
            last=self._last,
            columns=self._plan.columns,
            array=self._device.array,
            host_sums=self._host.collect(),
        )

    def _switch_plan(self, plan: AddPlan) -> None:
        self.cut()
        self._plan = plan

    def _extend(self, first: int, steps: int, constants: Constants) -> None:
        """Extend the open piece by the steps after `first`, or open another if they do not fit."""
        if first != self._last:  # in another run, or after steps that were not reported
            self.cut()
            self._first = first
        self._last = first + steps
        self._host.add_constants(steps, constants)
