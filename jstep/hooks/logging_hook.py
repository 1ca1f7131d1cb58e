"""Log lines."""

import logging
import time
from typing import Any

import jax

from jstep.core.checks import as_function
from jstep.hooks.cadence import UNSAID, cadence
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.log_every_n import as_level
from jstep.hooks.numbers_hook import NumbersHook
from jstep.hooks.results import NewResults
from jstep.hooks.step_counter import StepCounterHook
from jstep.hooks.values import LeaveOut, nothing, text
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class LoggingHook(NumbersHook):
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
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock),
            mean,
            self._log,
        )
        if counter is not None and not hasattr(counter, "steps_per_sec"):
            raise TypeError(f"counter={counter!r}: must be a StepCounterHook, got {type(counter).__name__}")
        self._given_counter, self._counter = counter, counter
        self._leave_out = as_function(leave_out, "leave_out", "() -> names")
        self._level = as_level(level)
        self._results = NewResults()

    def use_run(self, run: RunInfo) -> None:
        """Takes the counter of the run, where the hook was made without one, and the evaluations."""
        self._counter = self._given_counter or run.counter
        self._results = NewResults(run.evaluations)

    def end(self, step: int, state: TrainState) -> None:
        """Logs what is left."""
        self._held.hand_over_all()

    def _hold(self, step: int, metrics: Metrics) -> None:
        self._held.add(step, {**self._numbers(step, metrics, self._leave_out()), **self._results.take()})

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
