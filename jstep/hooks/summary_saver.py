"""Summaries on the way."""

import time
from typing import Any

from jstep.hooks.hook import CadencedHook, Clock, Metrics, every
from jstep.hooks.summaries import Selection, histograms_of, of_metrics
from jstep.hooks.values import LeaveOut, nothing
from jstep.state import TrainState


class SummarySaverHook(CadencedHook):
    """Writes the numbers and the summaries among the metrics, and histograms of the state if asked.

    Args:
        summary_writer: Any object with `add_summary(summary, global_step)`. None for the one that `train` opens in
            its `logdir`; the hook then takes the place of the stock one, so that no number is written twice.
        save_steps: How often, in steps: at their multiples.
        save_secs: How often, in seconds, instead.
        histograms: Globs of what to draw histograms of: parameters by their paths (`"params/*"`, `"params/dense/*"`),
            slots (`"slots/m/*"`); a string or several.
        leave_out: A function that returns names of metrics to leave out, such as hyperparameters that never change.
        clock: Seconds; for tests.

    Attributes:
        takes_writer: Whether it was made without a writer.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given; a glob matches nothing (at the first step).

    Source: `tf.train.SummarySaverHook`.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        save_steps: int | None = 100,
        save_secs: float | None = None,
        *,
        histograms: Selection = (),
        leave_out: LeaveOut = nothing,
        clock: Clock = time.monotonic,
    ) -> None:
        if summary_writer is not None and not callable(getattr(summary_writer, "add_summary", None)):
            raise TypeError(f"summary_writer={summary_writer!r}: must have a method add_summary(summary, global_step)")
        steps = None if save_secs is not None and save_steps == 100 else save_steps
        super().__init__(every(steps=("save_steps", steps), secs=("save_secs", save_secs), clock=clock))
        self._writer, self._leave_out, self._told = summary_writer, leave_out, nothing
        self.takes_writer = summary_writer is None
        self._histograms = (histograms,) if isinstance(histograms, str) else tuple(histograms)

    def use_writer(self, summary_writer: Any, leave_out: LeaveOut) -> None:
        """Takes the writer of `train`, where the hook was made without one."""
        if self.takes_writer:
            self._writer, self._told = summary_writer, leave_out

    def begin(self, state: TrainState) -> None:
        """Seconds count from here.

        Raises:
            ValueError: There is no writer.
        """
        if self._writer is None:
            raise ValueError("SummarySaverHook has nowhere to write: give it a summary_writer, or give train a logdir")
        super().begin(state)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, hands the values over; whoever writes them waits for them."""
        if not self._every.due(step):
            return
        self._every.done()
        for summary in of_metrics(metrics, {*self._leave_out(), *self._told()}):
            self._writer.add_summary(summary, step)
        if self._histograms:
            self._writer.add_summary(histograms_of(state, self._histograms), step)
