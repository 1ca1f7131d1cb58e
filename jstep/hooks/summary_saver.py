"""Write summaries of metrics."""

import time
from typing import Any

from jstep.core.checks import as_function, kind, shown
from jstep.hooks.cadence import UNSET, cadence
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.reporting_hook import ReportingHook
from jstep.hooks.summaries import Selection, check_writer, histograms_of, made_in, of_metrics, scalars_summary
from jstep.hooks.values import LeaveOut, nothing
from jstep.state.train_state import TrainState


class SummarySaverHook(ReportingHook):
    """A hook that writes summaries: scalar metrics, summaries among the metrics, optionally histograms of the state.

    Args:
        summary_writer: Any object with `add_summary(summary, global_step)`. None for the one that `train` opens in
            its `logdir`; the hook then replaces the stock one, so that no number is written twice.
        save_steps: Interval in steps; due at its multiples. Unlike `LoggingHook`, it adds no summary at the last step.
        save_secs: Interval in seconds. If both are given, whichever comes first.
        histograms: Globs of the leaves to write histograms of: parameters (`"params/*"`, `"params/dense/*"`) and slots
            (`"slots/m/*"`); a string or several.
        leave_out: A function without arguments that returns names of metrics to omit, such as hyperparameters that
            never change.
        mean: Whether to write means over the steps since the last summary, in place of the values of the step. They are
            written a little later, when they have arrived from the device. Summaries among the metrics are always those
            of the step.
        clock: Returns seconds; replaced in tests.

    Attributes:
        takes_writer: Whether the hook was created without a writer.

    Raises:
        ValueError: A glob matches nothing (at the first step).

    Source: `tf.train.SummarySaverHook`.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        *,
        save_steps: int | None = UNSET,
        save_secs: float | None = None,
        histograms: Selection = (),
        leave_out: LeaveOut = nothing,
        mean: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            # The state is sharded over all processes, so all of them compute histograms.
            cadence(steps=("save_steps", save_steps), secs=("save_secs", save_secs), clock=clock, together=True),
            mean,
            self._write_means,
        )
        self._writer, self._constants = check_writer(summary_writer), nothing
        self._leave_out = as_function(leave_out, "leave_out", "() -> names")
        self.takes_writer = summary_writer is None
        self._histograms = _globs(histograms)

    def use_run(self, run: RunInfo) -> None:
        """Use the writer of `train` by default."""
        super().use_run(run)
        if self.takes_writer:
            self._writer, self._constants = run.writer, run.constant_metrics

    def begin(self, state: TrainState) -> bool | None:
        """Start to count seconds.

        Raises:
            ValueError: There is no writer.
        """
        self._check_writer()
        return super().begin(state)

    def _check_writer(self) -> None:
        if self._writer is None:
            raise ValueError("SummarySaverHook has nowhere to write: pass it a summary_writer, or pass logdir to train")

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Pass the values to the writer, which waits for them."""
        self._check_writer()  # the caller may not have called `begin`
        leave_out = {*self._leave_out(), *self._constants()}
        if self._mean:
            self.run.transfers.add(step, self._numbers(metrics, leave_out), self._deliver, self)
        for summary in made_in(metrics) if self._mean else of_metrics(metrics, leave_out):
            self._writer.add_summary(summary, step)
        if self._histograms:
            self._writer.add_summary(histograms_of(state, self._histograms), step)
        self.run.transfers.deliver_ready()

    def _write_means(self, step: int, values: dict[str, Any]) -> None:
        if values:
            self._writer.add_summary(scalars_summary(values), step)


def _globs(histograms: Any) -> tuple[str, ...]:
    try:
        globs = (histograms,) if isinstance(histograms, str) else tuple(histograms)
    except TypeError:
        globs = (histograms,)
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(
                f"histograms={shown(histograms)}: must be globs of paths, such as 'params/*', got {kind(glob)}"
            )
    return globs
