"""The base class of jstep's hooks, which know their run, and the run of one that other code than `train` calls."""

from typing import Any

from jstep.core.checks import shown
from jstep.core.stopwatch import HOOKS
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.cadence import Cadence, Due
from jstep.hooks.hook import Hook, Metrics
from jstep.hooks.run_info import Repeated, RunCall, RunInfo
from jstep.state.train_state import TrainState


class RunHook(Hook):
    """Base class of stock hooks. In addition to the methods of `Hook`, `train` calls those below, on no other hooks.

    A hook with a `cadence` defines `when_due`, which is called when it is due: the loop decides that. Other code than
    `train` may call `after_step` after every update: a run of the hook's own then decides it.

    Attributes:
        cadence: When the hook is due; None if it overrides `after_step` or has nothing to do there.
        part: The part of the run's time that its calls count as.
    """

    cadence: Cadence | None = None
    part: str = HOOKS
    _run: RunInfo | None = None
    _given_writer: Any = None

    @property
    def run(self) -> RunInfo:
        """The run: that of `train`, or one of the hook's own."""
        if self._run is None:
            self.use_run(OwnRun(self))
        assert self._run is not None
        return self._run

    @property
    def _writer(self) -> Any:
        """The writer of event files that the hook was given, or that of the run; None if there is neither."""
        return self.run.reports.writer if self._given_writer is None else self._given_writer

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self._run = run

    def begin(self, state: TrainState) -> bool | None:
        """Begin a run; a subclass with a cadence that overrides it calls it first."""
        if self._run is None or isinstance(self._run, OwnRun):
            self.use_run(OwnRun(self))
        return None

    @shortens_tracebacks
    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Do what is to be done, when due."""
        return self.run.after_step(self, step, state, metrics)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Called when due, with the arguments and the results of `after_step`."""

    def next_due(self, step: int) -> int | None:
        """The next multiple of the steps of the cadence; None if that depends on the clock.

        Also None if a run of the hook's own adds up the metrics, for which it must be called after every step.
        """
        if self.cadence is None or self.cadence.secs is not None:
            return None
        if isinstance(self._run, OwnRun) and self._run.reports.sums.is_wanted:
            return None
        return self.cadence.next_multiple(step)

    def around_calls(self, run_call: RunCall, again: Repeated) -> RunCall:
        """Return what runs the calls of the run: `run_call`, or what does more around it."""
        return run_call

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint; if it returns True, nothing is saved, and an exception also stops the run."""

    def close(self) -> None:
        """Called at the very end of each run, also after an error, to release the run."""
        self._run = None


class OwnRun(RunInfo):
    """The run of one hook that other code than `train` calls, after every update; it counts seconds from now on.

    Args:
        hook: The hook.
    """

    def __init__(self, hook: RunHook) -> None:
        super().__init__()
        self._due = Due(hook, 0, by_cadence=True)

    def after_step(self, hook: RunHook, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Add up the metrics, and call the hook when it is due."""
        if self.metrics is None or step <= self.step:  # the first step, or that of another loop
            self._due.follow(step - 1)
        self.step, self.metrics = step, metrics  # not the state, which the next step may use up
        if self.reports.sums.is_wanted:
            self.reports.sums.add(step - 1, metrics)
        self.pending[:] = [(one, look) for one, look in self.pending if not look()]
        if not self._due.now(step):
            return None if self.stopped_by is None else True
        try:
            return hook.when_due(step, state, metrics)
        finally:
            self._due.done(step)


def check_writer(summary_writer: Any) -> Any:
    """Return the writer, or None; refuse an object without `add_summary`.

    Raises:
        TypeError: The writer has no method `add_summary`.
    """
    if summary_writer is not None and (
        isinstance(summary_writer, type) or not callable(getattr(summary_writer, "add_summary", None))
    ):
        raise TypeError(
            f"summary_writer={shown(summary_writer)}: must have a method add_summary(summary, global_step), such as a "
            "jstep.summary.SummaryWriter"
        )
    return summary_writer
