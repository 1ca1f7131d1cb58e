"""Log lines."""

import logging
import time
from typing import Any

import jax

from jstep.core.checks import as_bool, as_function
from jstep.hooks.cadence import UNSAID, CadencedHook, cadence
from jstep.hooks.deferred import Deferred
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.interval import Interval
from jstep.hooks.log_every_n import as_level
from jstep.hooks.results import NewResults
from jstep.hooks.step_counter import StepCounterHook
from jstep.hooks.values import LeaveOut, means, nothing, scalars, text
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class LoggingHook(CadencedHook):
    """Logs the numbers among the metrics: `step 1200  loss 0.1234  learning_rate 0.001  (812 steps/s)`.

    Results of evaluations come with the first line after them. A line whose values the device is still computing comes
    with a later one, or at the end: logging never waits. The last step is logged, whether due or not. On several
    processes the first one logs.

    Args:
        every_n_steps: How often, in steps.
        every_n_secs: How often, in seconds, instead; or as well, whichever comes first.
        counter: Whose steps per second to add; None for that of `train`.
        leave_out: A function that returns names to leave out, such as hyperparameters that never change.
        level: The level of the logger `jstep`.
        mean: Whether to log means over the steps since the last line, in place of the step's own values.
        clock: Seconds; for tests.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Source: `tf.train.LoggingTensorHook`.
    """

    def __init__(
        self,
        every_n_steps: int | None = UNSAID,
        every_n_secs: float | None = None,
        *,
        counter: StepCounterHook | None = None,
        leave_out: LeaveOut = nothing,
        level: int | str = logging.INFO,
        mean: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock)
        )
        if counter is not None and not hasattr(counter, "steps_per_sec"):
            raise TypeError(f"counter={counter!r}: must be a StepCounterHook, got {type(counter).__name__}")
        self._given_counter, self._counter = counter, counter
        self._leave_out = as_function(leave_out, "leave_out", "() -> names")
        self._level = as_level(level)
        self._lines = Deferred(self._log)
        self._interval = Interval() if as_bool(mean, "mean") else None
        self._results = NewResults()
        self._last = 0

    def use_run(self, run: RunInfo) -> None:
        """Takes the counter of the run, where the hook was made without one, and the evaluations."""
        self._counter = self._given_counter or run.counter
        self._results = NewResults(run.evaluations)

    def begin(self, state: TrainState) -> None:
        """Seconds count from here."""
        self._lines.clear()
        self._last = 0
        if self._interval is not None:
            self._interval.clear()
        super().begin(state)

    def next_due(self, step: int) -> int | None:
        """The next multiple; None where it has to see every step."""
        return None if self._interval is not None else super().next_due(step)

    def after_call(self, steps: range, metrics: Metrics) -> None:
        """Keeps the metrics of several steps that were one call, where means are wanted."""
        if self._interval is not None:
            self._interval.add_call(steps, metrics)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, logs what is ready."""
        if self._interval is not None:
            self._interval.add(step, metrics)
        if self._every.due(step):
            self._every.done()
            self._hold(step, metrics)
            self._lines.hand_over_ready()

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Logs the last step, and what is left."""
        if step > self._last:
            self._hold(step, metrics)
        self._lines.hand_over_all()

    def end(self, step: int, state: TrainState) -> None:
        """Logs what is left."""
        self._lines.hand_over_all()

    def _hold(self, step: int, metrics: Metrics) -> None:
        self._last = step
        leave_out = self._leave_out()
        found = scalars(metrics, leave_out)
        if self._interval is not None:
            self._interval.add(step, metrics)
            found = means(self._interval.take(step), leave_out)
        self._lines.add(step, {**found, **self._results.take()})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            _logger.log(self._level, "step %d  %s%s", step, text(values), self._speed())

    def _speed(self) -> str:
        if self._counter is None:
            return ""
        if isinstance(self._counter, StepCounterHook):
            self._counter.look()
        if self._counter.steps_per_sec is None:
            return ""
        examples = getattr(self._counter, "examples_per_sec", None)
        rate = f"{self._counter.steps_per_sec:.4g} steps/s"
        return f"  ({rate})" if examples is None else f"  ({examples:.4g} examples/s, {rate})"
