"""A stand-in for a run of `train`, for tests of one built-in hook alone."""

from typing import Any

from jstep.core.stopwatch import Stopwatch
from jstep.hooks.cadence import HookSchedule
from jstep.hooks.in_flight import InFlight
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.run_hook import ReportingContext
from jstep.hooks.speed import StepCounterHook
from jstep.state.contents import StateContents


class FakeRun:
    """Has what `RunInfo` has, and calls its hook when it is due after each `after_step`."""

    is_over, is_new_branch, restored, saver, last_step = False, False, None, None, None
    evaluations = ()

    def __init__(self, hook: Any, state: Any, step: int = 0) -> None:
        self.hook, self.state, self.step, self.metrics, self.stopped = hook, state, step, None, []
        counter = hook if isinstance(hook, StepCounterHook) else StepCounterHook()
        sums = MetricSums(getattr(hook, "max_skipped_steps", None))
        self.reports = ReportingContext(sums, TransferQueue(), counter, None, None, None)
        self.watch, self.in_flight, self.at_start = Stopwatch(), InFlight(), StateContents(state)
        self.polls: list[Any] = []
        for each in {counter, hook}:
            each.use_run(self)
        hook.begin(state)
        self.schedule = HookSchedule(hook, step)

    def after_step(self, step: int, state: Any, metrics: Any) -> Any:
        """What the loop does after a call."""
        first, self.step, self.state, self.metrics = self.step, step, state, metrics
        if self.reports.sums.is_wanted:
            self.reports.sums.add(step - 1, metrics)
        polls, self.polls = self.polls, []
        self.polls += [check for check in polls if check()]
        if not self.schedule.is_due(step):
            return bool(self.stopped)
        self.in_flight.drop_finished()
        self.in_flight.add(first, step, state, metrics)
        result = self.hook.after_step(step, state, metrics)
        self.schedule.reschedule(step)
        return result

    def poll(self, hook: Any, check: Any) -> None:
        self.polls.append(check)

    def stop(self, by: str) -> None:
        self.stopped.append(by)

    def log_failed(self, log: Any, error: Exception) -> None:
        raise error

    def constant_metrics(self) -> Any:
        return ()

    def meter(self, *_: object) -> None:
        pass

    def to_stop(self) -> bool:
        return False

    def before_save(self, step: int) -> bool:
        return False

    def require_finite(self, step: int, saver: Any) -> bool:
        return True

    def before_off_cadence(self) -> None:
        pass
