"""Hooks that report metrics: log lines, rows for a function, summaries."""

import fnmatch
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jstep import summary
from jstep.core import processes, trees
from jstep.core.checks import as_bool, as_function, describe_type, format_value, shortest_digits
from jstep.core.exceptions import note
from jstep.core.logs import IN_BAR, as_level, logger
from jstep.hooks.cadence import UNSET, Clock, make_cadence
from jstep.hooks.run_hook import RunHook
from jstep.hooks.run_info import RunInfo
from jstep.logs.speed import StepCounterHook, format_utilization, measure_finished
from jstep.metering import numbers
from jstep.metering.metric_sums import Needs
from jstep.state.train_state import TrainState
from jstep.summary.run_writer import as_writer, writer_of
from jstep.summary.summaries import mark_skipped
from jstep.training.metrics import SKIPPED, Metrics

LeaveOut = Callable[[], Collection[str]]
NO_METRICS: Metrics = {}

# The numbers of a step, or their means over an interval.


class ReportingHook(RunHook):
    """Base class of hooks that report scalar metrics. A subclass defines `deliver`.

    `deliver` gets the values of a step once they have arrived from the device: in the order of the
    steps, before the results of a later evaluation, before a checkpoint is saved, and before
    `train` returns or raises. The last step is always reported.

    Args:
        every_n_steps: Interval in steps; due at its multiples.
        every_n_secs: Interval in seconds. If both are given, whichever comes first.
        mean: Whether to deliver means over the steps since the last delivery, in place of the
            values of the step.
        leave_out: A function without arguments that returns names of metrics to omit.
        clock: Returns seconds; replaced in tests.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> class Rows(jstep.ReportingHook):
        ...     def begin(self, state):
        ...         self.rows = []
        ...         return super().begin(state)
        ...     def deliver(self, step, values):
        ...         self.rows.append((step, values["loss"]))
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> hook = Rows(every_n_steps=2)
        >>> state = jstep.train(train_step, state, lambda n: jnp.float32(n), 3, hooks=[hook])
        >>> hook.rows
        [(2, 1.0), (3, 1.0)]
    """

    _instead = "pass float(metrics['loss']) to your logger"

    def __init__(
        self,
        *,
        every_n_steps: int | None = UNSET,
        every_n_secs: float | None = None,
        mean: bool = False,
        leave_out: LeaveOut = tuple,
        clock: Clock = time.monotonic,
    ) -> None:
        self._cadence = make_cadence(
            steps=("every_n_steps", every_n_steps),
            secs=("every_n_secs", every_n_secs),
            clock=clock,
            at_last_step=True,
        )
        self._mean = as_bool(mean, "mean")
        self._leave_out = as_function(leave_out, "leave_out", "() -> names")

    def _use_run(self, run: RunInfo) -> None:
        super()._use_run(run)
        self._number = run.sums.subscribe(Needs.MEANS if self._mean else Needs.RATIOS)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._run.transfers.add(step, self._numbers(metrics, self._leave_out()), self.deliver, self)
        self._run.transfers.deliver_ready()

    def end(self, step: int, state: TrainState) -> None:
        self._run.transfers.deliver_all()

    def deliver(self, step: int, values: dict[str, Any]) -> None:
        """Report the values of a step: name → number.

        `loss` comes first, then learning rates, then the others by name.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no deliver(step, values)")

    def _numbers(self, metrics: Metrics, leave_out: Collection[str]) -> numbers.PendingTransfer:
        if self._mean:
            return self._means(leave_out)
        values = numbers.sorted_numbers(metrics, leave_out)
        if not self._run.sums.has_ratios:
            return numbers.start_transfer(values.values(), lambda: numbers.read_values(values))
        means = self._means(leave_out)

        def read() -> dict[str, Any]:
            row = means.read() | numbers.read_values(values)
            return {name: row[name] for name in numbers.sort_metrics(row, ())}

        numbers.start_copies(values.values())
        return numbers.PendingTransfer(
            lambda: means.is_ready() and numbers.is_ready(values.values()), read
        )

    def _means(self, leave_out: Collection[str]) -> numbers.PendingTransfer:
        interval = self._run.sums.take(self._number)
        names = numbers.sort_metrics(interval.names, leave_out)
        return numbers.PendingTransfer(interval.is_ready, lambda: interval.means(names))


# Log metrics.


class LoggingHook(ReportingHook):
    """A hook that logs scalar metrics.

    A line reads `step 1200  loss 0.1234  learning_rate 0.001  (812 steps/s)`.

    If the peak of the device is known, the utilization follows the rate (see `StepCounterHook`):
    `(812 steps/s, mfu 0.412)`. The last step is always logged. On several processes, only the first
    one logs.

    Args:
        level: The level of the log lines.
        every_n_steps: As in `ReportingHook`.
        every_n_secs: As in `ReportingHook`.
        mean: As in `ReportingHook`.
        leave_out: As in `ReportingHook`.
        clock: As in `ReportingHook`.

    Source: `tf.train.LoggingTensorHook`.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = UNSET,
        every_n_secs: float | None = None,
        leave_out: LeaveOut = tuple,
        level: int | str = logging.INFO,
        mean: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            every_n_secs=every_n_secs,
            mean=mean,
            leave_out=leave_out,
            clock=clock,
        )
        self._level = as_level(level)

    def deliver(self, step: int, values: dict[str, Any]) -> None:
        if processes.is_process_0():
            logger.log(
                self._level,
                "step %d  %s%s",
                step,
                numbers.format_numbers(values),
                self._speed(),
                extra=IN_BAR,
            )

    def _speed(self) -> str:
        counter = self._run.shared[StepCounterHook]
        measure_finished(counter)
        if counter.steps_per_sec is None:
            return ""
        figures: list[str] = []
        if counter.examples_per_sec is not None:
            figures.append(f"{counter.examples_per_sec:.4g} examples/s")
        figures += [f"{counter.steps_per_sec:.4g} steps/s", *format_utilization(counter)]
        return f"  ({', '.join(figures)})"


# Send metrics to an external logger.


class MetricsHook(ReportingHook):
    """A hook that passes scalar metrics to a function.

    The function may be a logger of W&B or MLflow, or a writer of JSON lines. Rows are passed as
    `ReportingHook` says. On several processes, only the first one writes. Metrics that are arrays
    are omitted. Hyperparameters that never change are not in the rows but in `constants`.

    Args:
        write: `write(step, values)`, where values is a dict of floats, those of float32 with its
            own digits. If it raises, the run stops with that exception and a note that names the
            step.
        every_n_steps: Interval in steps; due at its multiples.
        mean: Whether to pass means over the steps since the last row. A value that is not finite is
            ignored if the update of its step was skipped. A restart divides an interval into two
            rows.

    Attributes:
        constants: Name → value of the hyperparameters that never change, from the first row on; for
            a config, as in `wandb.config.update(hook.constants)`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> rows = []
        >>> hook = jstep.MetricsHook(
        ...     lambda step, values: rows.append((step, values["loss"])), every_n_steps=2
        ... )
        >>> state = jstep.train(train_step, state, lambda n: jnp.float32(n), 3, hooks=[hook])
        >>> rows
        [(2, 1.0), (3, 1.0)]
    """

    def __init__(
        self,
        write: Callable[[int, dict[str, float]], object],
        *,
        every_n_steps: int = 100,
        mean: bool = False,
    ) -> None:
        self._write = as_function(write, "write", "(step, values)")
        self._named: set[str] = set()  # the metrics that a line has named as left out
        self.constants: dict[str, float] = {}
        super().__init__(mean=mean)
        self._cadence = make_cadence(steps=("every_n_steps", every_n_steps), at_last_step=True)

    def begin(self, state: TrainState) -> bool | None:
        self._named = set()
        if self._mean and self._run.origin.is_restored and processes.is_process_0():
            self._report_first_row(self._run.origin.step)
        return super().begin(state)

    def _report_first_row(self, restored: int) -> None:
        assert self._cadence is not None
        last_step = math.inf if self._run.last_step is None else self._run.last_step
        row = min(self._cadence.next_multiple(restored), last_step)
        if not self._cadence.has_multiple(restored) and row > restored:
            logger.info(
                "MetricsHook: row %d is the mean of steps %d to %d, as the run resumes",
                row,
                restored + 1,
                row,
            )

    def _numbers(self, metrics: Metrics, leave_out: Collection[str]) -> numbers.PendingTransfer:
        names = sorted({*numbers.names_of_arrays(metrics)} - self._named)
        self._named.update(names)
        if names and processes.is_process_0():
            logger.info(
                "MetricsHook leaves out the metrics %s: they are not real numbers. Also return "
                "their means or norms, or handle them in a custom hook (jstep.every).",
                ", ".join(map(repr, names)),
            )
        constant_metrics = self._run.components.constant_metrics()
        constants = {
            name: value for name, value in constant_metrics.items() if numbers.is_number(value)
        }
        values = numbers.read_values(constants)
        self.constants = {name: shortest_digits(value) for name, value in values.items()}
        return super()._numbers(metrics, {*leave_out, *constants})

    def deliver(self, step: int, values: dict[str, Any]) -> None:
        if not processes.is_process_0():
            return
        try:
            self._write(step, {name: shortest_digits(value) for name, value in values.items()})
        except Exception as error:
            note(error, f"raised by the `write` of a MetricsHook, given the metrics of step {step}")
            raise


# Write summaries of metrics.


class SummarySaverHook(ReportingHook):
    """A hook that writes summaries.

    These are scalar metrics, summaries among the metrics, and optionally histograms of the state.

    Args:
        summary_writer: Any object with `add_summary(summary, global_step)`. None for the one that
            `train` opens in its `logdir`; the hook then replaces the built-in one.
        save_steps: Interval in steps; due at its multiples. Unlike `LoggingHook`, it adds no
            summary at the last step.
        save_secs: Interval in seconds; whichever comes first.
        histograms: Globs of the leaves to write histograms of: parameters (`"params/*"`,
            `"params/dense/*"`) and slots (`"slots/m/*"`); a string or several.
        leave_out: As in `ReportingHook`. Summaries among the metrics always describe the step.
        mean: As in `ReportingHook`.
        clock: As in `ReportingHook`.

    Raises:
        ValueError: A glob matches nothing (at the first step).

    Source: `tf.train.SummarySaverHook`.
    """

    _instead = (
        "call add_summary(jstep.summary.scalar(name, value), step) of a jstep.summary.SummaryWriter"
    )

    def __init__(
        self,
        summary_writer: object = None,
        *,
        save_steps: int | None = UNSET,
        save_secs: float | None = None,
        histograms: str | Sequence[str] = (),
        leave_out: LeaveOut = tuple,
        mean: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(mean=mean, leave_out=leave_out)
        # The state is sharded over all processes, so all of them compute histograms.
        self._cadence = make_cadence(
            steps=("save_steps", save_steps),
            secs=("save_secs", save_secs),
            clock=clock,
            together=True,
        )
        self._given_writer = as_writer(summary_writer)
        self._histograms = _globs(histograms)

    @property
    def _writer(self) -> Any:
        if self._given_writer is not None:
            return self._given_writer
        return writer_of(self._run)

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        if self._writer is None:
            raise ValueError(
                "SummarySaverHook has nowhere to write: pass it a summary_writer, or "
                "pass logdir to train"
            )

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        leave_out = {*self._leave_out()}
        if uses_writer_of_run(self):
            leave_out.update(self._run.components.constant_metrics())
        if self._mean or self._run.sums.has_ratios:
            self._run.transfers.add(step, self._means(leave_out), self.deliver, self)
        values = {} if self._mean else numbers.sorted_numbers(metrics, leave_out)
        self.deliver(step, values, metrics)
        if self._histograms:
            self._writer.add_summary(summarize_histograms(state, self._histograms), step)
        self._run.transfers.deliver_ready()

    def deliver(self, step: int, values: dict[str, Any], metrics: Metrics = NO_METRICS) -> None:
        if numbers.is_ready(values.values()):  # numbers on the host are the quickest to write
            values = numbers.read_values(values)
        scalars = [summary.scalar(name, value, collections=()) for name, value in values.items()]
        made_by_step = summary.summaries_in(dict(metrics))
        if made_by_step is not None and SKIPPED in metrics:
            made_by_step = mark_skipped(made_by_step, metrics[SKIPPED])
        merged = summary.merge([*scalars, made_by_step])
        if merged.parts:
            self._writer.add_summary(merged, step)


def uses_writer_of_run(hook: SummarySaverHook) -> bool:
    """Whether a hook writes to the run's event file, in place of the built-in hook."""
    return hook._given_writer is None


def summarize_histograms(state: TrainState, globs: Sequence[str]) -> Any:
    leaves: dict[str, Any] = {}
    for path, leaf in trees.leaves_with_paths({"params": state.params, "slots": state.slots}):
        if trees.is_trainable(leaf):
            leaves[path] = leaf
    chosen: dict[str, Any] = {}
    for glob in globs:
        matching = {path: leaf for path, leaf in leaves.items() if fnmatch.fnmatchcase(path, glob)}
        if not matching:
            raise ValueError(
                f"histograms: {glob!r} matches nothing; parameters are 'params/…', "
                "slots 'slots/name/…'"
            )
        chosen |= matching
    return summary.merge(
        [summary.histogram(path, leaf, collections=()) for path, leaf in chosen.items()]
    )


def _globs(histograms: Any) -> tuple[str, ...]:
    globs = (histograms,) if isinstance(histograms, str) else histograms
    if not isinstance(globs, Iterable) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"histograms={format_value(histograms)}: must be globs of paths, such as 'params/*', "
            f"got {describe_type(histograms)}"
        )
    return tuple(globs)
