"""Steps per second."""

import time
from typing import Any

from jstep.hooks.hook import CadencedHook, Clock, Metrics, every
from jstep.state import TrainState, get_global_step

TAG = "global_step/sec"


class StepCounterHook(CadencedHook):
    """Measures `global_step/sec` between the steps at which it is due.

    The first interval begins after the first step, so that compilation is left out.

    Args:
        every_n_steps: How often, in steps.
        every_n_secs: How often, in seconds, instead.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets the scalar `global_step/sec`.
        clock: Seconds; for tests.

    Attributes:
        steps_per_sec: The last figure, None before there is one.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Source: `tf.train.StepCounterHook`, which counts compilation in.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        summary_writer: Any = None,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        steps = None if every_n_secs is not None and every_n_steps == 100 else every_n_steps
        super().__init__(every(steps=("every_n_steps", steps), secs=("every_n_secs", every_n_secs), clock=clock))
        self._writer, self._clock = summary_writer, clock
        self._began: tuple[int, float] | None = None
        self.steps_per_sec: float | None = None

    def begin(self, state: TrainState) -> None:
        """Refuses a state without a step.

        Raises:
            RuntimeError: The state has no global step.
        """
        if get_global_step(state) is None:
            raise RuntimeError("Global step should be created to use StepCounterHook.")
        self._began, self.steps_per_sec = None, None
        super().begin(state)

    def after_first_call(self, step: int) -> None:
        """The first interval begins here: what had to be compiled is compiled."""
        self._began = (step, self._clock())
        self._every.start()

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, takes the time."""
        now = self._clock()
        if self._began is None:
            self.after_first_call(step)
        elif step > self._began[0] and self._every.due(step):
            first, then = self._began
            self.steps_per_sec = (step - first) / max(now - then, 1e-9)
            self._began = (step, now)
            self._every.done()
            if self._writer is not None:
                from jstep.hooks.summaries import scalar

                self._writer.add_summary(scalar(TAG, self.steps_per_sec), step)
