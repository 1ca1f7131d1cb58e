"""A stand-in for a run of `train`, for tests of one built-in hook alone."""

import types
from collections import Counter

from jstep.core.stopwatch import Stopwatch
from jstep.hooks.origin import Origin
from jstep.hooks.run_hook import use_run
from jstep.hooks.run_info import RunInfo
from jstep.hooks.timetable import Timetable
from jstep.logs.speed import StepCounterHook
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.state.nonfinite import StateContents


class FakeRun:
    """Has what `RunInfo` has, and calls its hook when it is due after each `after_step`."""

    saver = last_step = background = config = best_failure = None
    origin = Origin()
    course = types.SimpleNamespace(is_over=False)
    evaluations, examples = (), RunInfo.examples

    def __init__(self, hook, state, step=0):
        self.hook, self.state, self.step, self.metrics, self.stopped = hook, state, step, None, []
        counter = hook if isinstance(hook, StepCounterHook) else StepCounterHook()
        self.components = self
        self.sums, self.transfers = (
            MetricSums(getattr(hook, "max_skipped_steps", None)),
            TransferQueue(),
        )
        self.steps_by_rows, self.timetable = Counter(), Timetable()
        self.watch, self.in_flight, self.initial_contents = (
            Stopwatch(),
            InFlight(),
            StateContents(state),
        )
        self.polls = []
        self.shared = {StepCounterHook: counter}
        for each in {counter, hook}:
            use_run(each, self)
        hook.begin(state)
        self.timetable.begin([hook], [], step)

    def after_step(self, step, state, metrics):
        """What the loop does after a call."""
        first, self.step, self.state, self.metrics = self.step, step, state, metrics
        if self.sums.is_wanted:
            self.sums.add(step - 1, metrics)
        polls, self.polls = self.polls, []
        self.polls += [check for check in polls if check()]
        result = bool(self.stopped)
        for entry in self.timetable.due_hooks(step):
            self.in_flight.drop_finished()
            self.in_flight.add(first, step, state, metrics)
            result = self.hook.after_step(step, state, metrics)
            entry.reschedule(step)
        return result

    def poll(self, hook, check):
        self.polls.append(check)

    def stop(self, caller):
        self.stopped.append(caller)

    def log_failed(self, log, error, method="flush"):
        raise error

    def constant_metrics(self):
        return ()

    def meter(self, *_):
        pass

    def poll_stop_signal(self):
        return False

    def prevents_save(self, step):
        return False

    def require_finite(self, step, saver):
        return True

    def check_step(self):
        pass

    def check_no_links(self, path):
        pass

    def freeze_batch_position(self):
        pass
