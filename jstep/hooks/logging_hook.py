"""Log metrics."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from jstep.core.checks import as_function
from jstep.hooks.cadence import UNSET, cadence
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.log_every_n import as_level
from jstep.hooks.reporting_hook import ReportingHook
from jstep.hooks.step_counter import StepCounterHook
from jstep.hooks.utilization import shown_share
from jstep.hooks.values import LeaveOut, NewResults, nothing, text

_logger = logging.getLogger("jstep")


class LoggingHook(ReportingHook):
    """A hook that logs scalar metrics: `step 1200  loss 0.1234  learning_rate 0.001  (812 steps/s)`.

    If the peak of the device is known, the utilization follows the rate (see `StepCounterHook`): `(812 steps/s, mfu
    0.412)`. Results of evaluations are included in the first line after them, with their step if it is another. Logging
    never blocks: if the values of a line are not ready, the line is printed later. The last step is always logged. On
    several processes, only the first one logs.

    Args:
        every_n_steps: Interval in steps.
        every_n_secs: Interval in seconds. If both are given, whichever comes first.
        counter: The `StepCounterHook` whose rate to log; None for that of `train`.
        leave_out: A function without arguments that returns names to omit, such as hyperparameters that never change.
        level: The level of the log lines.
        mean: Whether to log means over the steps since the last line, in place of the values of the step.
        clock: Returns seconds; replaced in tests.

    Source: `tf.train.LoggingTensorHook`.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = UNSET,
        every_n_secs: float | None = None,
        counter: StepCounterHook | None = None,
        leave_out: LeaveOut = nothing,
        level: int | str = logging.INFO,
        mean: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            cadence(
                steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock, at_last=True
            ),
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
        """Use the counter of the run by default, and its evaluations."""
        super().use_run(run)
        self._counter = self._given_counter or run.counter
        self._results = NewResults(run.evaluations)

    def _hold(self, step: int, metrics: Metrics) -> None:
        deliver = functools.partial(self._log, evaluated=self._results.take())
        self.run.transfers.add(step, self._numbers(metrics, self._leave_out()), deliver, self)

    def _log(self, step: int, values: dict[str, Any], evaluated: Sequence[tuple[int, dict[str, Any]]] = ()) -> None:
        if jax.process_index() == 0:
            words = [text(values), *(_of_step(at, results, step) for at, results in evaluated)]
            _logger.log(self._level, "step %d  %s%s", step, "  ".join(filter(None, words)), self._speed(step))

    def _speed(self, step: int) -> str:
        counter, share = self._counter, None
        if isinstance(counter, StepCounterHook):
            counter.look()
            (steps, examples), share = counter.rates_at(step), counter.utilization_at(step)
        else:
            steps, examples = getattr(counter, "steps_per_sec", None), getattr(counter, "examples_per_sec", None)
        if steps is None:
            return ""
        figures = (
            [f"{steps:.4g} steps/s"] if examples is None else [f"{examples:.4g} examples/s", f"{steps:.4g} steps/s"]
        )
        return f"  ({', '.join([*figures, *shown_share(share)])})"


def _of_step(at: int, results: dict[str, Any], step: int) -> str:
    """Format results of an evaluation, each with the step of the evaluation if that is not the step of the line."""
    note = "" if at == step else f" (step {at})"
    return "  ".join(text({name: value}) + note for name, value in results.items())
