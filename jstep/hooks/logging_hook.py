"""Log lines."""

import logging
import time
from collections import deque
from typing import Any

from jstep.hooks.hook import CadencedHook, Clock, Metrics, every
from jstep.hooks.step_counter import StepCounterHook
from jstep.hooks.values import LeaveOut, is_ready, nothing, scalars, start_transfer, text
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class LoggingHook(CadencedHook):
    """Logs the numbers among the metrics: `step 1200  loss 0.1234  learning_rate 0.001  (812 steps/s)`.

    A line whose values the device is still computing comes with a later one, or at the end: logging never waits.

    Args:
        every_n_steps: How often, in steps.
        every_n_secs: How often, in seconds, instead.
        counter: Whose steps per second to add.
        leave_out: A function that returns names to leave out, such as hyperparameters that never change.
        level: The level of the logger `jstep`.
        clock: Seconds; for tests.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Source: `tf.train.LoggingTensorHook`.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        *,
        counter: StepCounterHook | None = None,
        leave_out: LeaveOut = nothing,
        level: int = logging.INFO,
        clock: Clock = time.monotonic,
    ) -> None:
        steps = None if every_n_secs is not None and every_n_steps == 100 else every_n_steps
        super().__init__(every(steps=("every_n_steps", steps), secs=("every_n_secs", every_n_secs), clock=clock))
        self._counter, self._leave_out, self._level = counter, leave_out, level
        self._held: deque[tuple[int, dict[str, Any], float | None]] = deque()

    def begin(self, state: TrainState) -> None:
        """Seconds count from here."""
        self._held.clear()
        super().begin(state)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, logs what is ready."""
        if not self._every.due(step):
            return
        self._every.done()
        values = scalars(metrics, self._leave_out())
        start_transfer(values)
        self._held.append((step, values, self._counter.steps_per_sec if self._counter else None))
        while self._held and is_ready(self._held[0][1]):
            self._log(*self._held.popleft())

    def end(self, step: int, state: TrainState) -> None:
        """Logs what is left."""
        while self._held:
            self._log(*self._held.popleft())

    def _log(self, step: int, values: dict[str, Any], rate: float | None) -> None:
        speed = "" if rate is None else f"  ({rate:.4g} steps/s)"
        _logger.log(self._level, "step %d  %s%s", step, text(values), speed)
