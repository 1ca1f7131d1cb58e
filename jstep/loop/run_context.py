"""The run that its loop, its hooks and its observers share.

`hooks.run_info.RunInfo` is the part that hooks see. `start.py` sets `saver` and `origin` once they
are found, and `components` once the run is open.
"""

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.compiling.dispatch import Dispatch
from jstep.compiling.stages import TrainSteps
from jstep.compiling.start_times import StartTimes
from jstep.core.exceptions import WrongStateError
from jstep.core.signals import StopSignals
from jstep.core.stopwatch import EVALUATING, STEPPING, new_watch
from jstep.core.trees import Tree
from jstep.hooks.course import Activity, Course, HookCall, LoopState
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.run_hook import phase_of
from jstep.hooks.run_info import RunInfo
from jstep.hooks.timetable import Timetable
from jstep.loop.background import BackgroundHooks
from jstep.loop.feeder import BatchFeeder, BatchReader
from jstep.loop.finiteness import Finiteness
from jstep.loop.hook_runner import HookRunner
from jstep.loop.observer import Observer
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.origin.arguments import Options
from jstep.state.nonfinite import StateContents


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RunComponents:
    """What a run has opened.

    `dispatch` runs the chunks that `feeder` makes of `batches`; `runner` calls the hooks.

    Attributes:
        start_number: The number of the recorded start, which all processes know; 0 if it is not
            recorded.
    """

    start_number: int
    course: Course
    signals: StopSignals
    dispatch: Dispatch
    batches: BatchReader
    feeder: BatchFeeder
    hooks: Sequence[Any]
    runner: HookRunner
    finiteness: Finiteness

    # For hooks; documented at `hooks.run_info.OpenComponents`.

    @property
    def initial_contents(self) -> StateContents:
        return self.finiteness.initial_contents

    def constant_metrics(self) -> Mapping[str, Any]:
        return self.dispatch.constants.values

    def poll_stop_signal(self) -> bool:
        # If a hook or the body still follows in this iteration, the evaluation is not abandoned:
        # they may change the state, and the next start would make the evaluation again with what
        # they have made of it.
        return not self.runner.is_followed_in_iteration() and self.signals.poll_stop_signal()

    def prevents_save(self, step: int) -> bool:
        return self.runner.call_before_save(step)

    def require_finite(self, step: int, saver: Saver) -> bool:
        return self.finiteness.require_finite(step, saver)

    def freeze_batch_position(self) -> None:
        if self.course.has_begun:
            self.batches.source.freeze()


def _least_skip_limit(hooks: Sequence[Any]) -> int | None:
    limits: list[int] = []
    for hook in hooks:
        if isinstance(hook, NanLossHook) and hook.max_skipped_steps is not None:
            limits.append(hook.max_skipped_steps)
    return min(limits, default=None)


class RunContext(RunInfo):
    """One run, from its arguments to its end.

    Attributes:
        given: The options as the user gave them; `options` has their values as the run uses them.
        observers: Those of the record, stalls, progress and so on; entered before anything is
            opened.
        closing: Closes what the run has opened.
        new_name: The name of the run if no earlier start gave it one.
    """

    background: BackgroundHooks
    components: RunComponents

    def __init__(
        self,
        options: Options,
        given: Options,
        train_steps: TrainSteps,
        state: Any,
        times: StartTimes,
        *,
        has_body: bool,
    ) -> None:
        watch = new_watch(times.began)
        sums = MetricSums(_least_skip_limit(options.hooks))
        transfers = TransferQueue(functools.partial(watch.phase, STEPPING), self._deliver)
        background = BackgroundHooks(options.hooks)
        timetable = Timetable(
            train_steps.next_stage_start,
            # Only process 0 writes lines, but all processes end a call when one is due.
            log_steps=None if options.progress is False else options.log_steps,
            save_steps=options.save_checkpoint_steps,
        )
        course = Course(LoopState(0, state), options.stop_step, timetable, has_body=has_body)
        course.on_replaced = self._report_replaced
        super().__init__(
            last_step=options.last_step,
            config=options.config,
            directories=options.directories,
            evaluations=[hook for hook in options.hooks if phase_of(hook) == EVALUATING],
            watch=watch,
            sums=sums,
            transfers=transfers,
            background=background,
            timetable=timetable,
            course=course,
        )
        self.options = options
        self.given = given
        self.train_steps = train_steps
        self.times = times
        limit = options.stop_secs
        self.signals = StopSignals(None if limit is None else functools.partial(times.left, limit))
        self.observers: tuple[Observer, ...] = ()
        self.closing = contextlib.ExitStack()
        self.new_name = secrets.token_hex(4)

    @property
    def is_open(self) -> bool:
        return hasattr(self, "components")

    def _deliver(
        self, hook: Any, deliver: Callable[[int, Any], None], step: int, numbers: Any
    ) -> None:
        """Deliver a row of numbers; if that fails, the run ends once the due checkpoint is saved.

        The activity is set back only if the run continues. Otherwise it stays, so that the note of
        the error names the hook.
        """
        call = HookCall(hook, "deliver")
        outer = self.course.activity
        try:
            self.course.call_hook(call, deliver, step, numbers)
        except WrongStateError:  # it must not be saved
            raise
        except Exception as error:
            self.log_failed(hook, error, call.method)
            self.course.activity = outer
        except BaseException:
            # An exit in the user's `write`. The row is lost, so its step must be taken again: back
            # to `WITHIN`, in which nothing is saved. A restart from a checkpoint saved here would
            # not make the row again.
            self.course.forbid_saves()
            raise

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Tell the observers that the loop waits for a program."""
        with self.course.doing(Activity.COMPILING), contextlib.ExitStack() as contexts:
            for observer in self.observers:
                contexts.enter_context(observer.compiling(name))
            yield

    def recorded_times(self) -> dict[str, Any]:
        """Return the span of steps that the device has finished, and the seconds of each phase."""
        course = self.course
        seconds = self.watch.seconds()
        finished = self.step
        unfinished = self.in_flight.unfinished()
        if unfinished is not None:
            finished, _ = unfinished
        steps = None
        if course.has_first:
            steps = [course.first, max(course.first, finished)]
        rounded = {phase: round(max(0.0, value), 6) for phase, value in seconds.items() if value}
        return {"step": steps, "seconds": rounded}

    def _report_replaced(self, step: int, author: str, old_state: Tree, new_state: Tree) -> None:
        for observer in self.observers:
            observer.on_replaced(step, author, old_state, new_state)
