"""The calls of a run's hooks in the loop's thread: when they are due, before a save, and at the end."""

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jstep.core import processes
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other, noting
from jstep.core.public_names import is_public
from jstep.core.stopwatch import HOOKS, STEPPING, Stopwatch
from jstep.core.trees import Tree
from jstep.evaluating.evaluation_hook import EvaluationHook, stopped_by
from jstep.hooks.hook import call_named, defines
from jstep.hooks.run_hook import HookCall, RunHook, RunInfo, call_when_due, hook_cadence, make_last_row, use_run
from jstep.hooks.saver_hook import SaverHook
from jstep.hooks.schedule import HookSchedule, next_call
from jstep.loop.arguments import Options
from jstep.loop.chunks import CallBoundaries, Chunk
from jstep.loop.course import Activity, Course
from jstep.loop.dispatch import Dispatch
from jstep.loop.stages import TrainSteps
from jstep.metering.cadence import NEVER, Cadence

RunChunk = Callable[[Any, Chunk], Any]
"""`run_chunk(state, chunk)` returns the new state and the last metrics."""


class ScheduleGroup:
    """The schedules of some hooks.

    Attributes:
        timed: The schedules with a deadline.
        next: The next step at which one of the hooks is due.
    """

    def __init__(self, hooks: Iterable[Any], first: int) -> None:
        self.schedules = [HookSchedule(hook, first) for hook in hooks]
        self.timed = [schedule for schedule in self.schedules if schedule.deadline != math.inf]
        self.update()

    def update(self) -> None:
        self.next = min((schedule.next for schedule in self.schedules), default=NEVER)


class HookRunner:
    """Calls the hooks of a run when they are due, in the loop's thread, each in the context that times it.

    Attributes:
        savers: The hooks that save, which are called between two iterations.
    """

    def __init__(
        self,
        run: RunInfo,
        course: Course,
        hooks: Sequence[Any],
        options: Options,
        train_steps: TrainSteps,
    ) -> None:
        self._run = run
        self._course = course
        self._hooks = hooks
        self._options = options
        self._train_steps = train_steps
        self._non_savers = ScheduleGroup((), course.first)
        self.savers = ScheduleGroup((), course.first)
        self._has_called_at_last_step = False
        self._next_check = course.first

    def use_run(self, closing: contextlib.ExitStack) -> None:
        for hook in self._hooks:
            if isinstance(hook, RunHook):
                closing.push(noting(functools.partial(call_named, hook, "close")))
                use_run(hook, self._run)

    def with_before_step(self, dispatch: Dispatch) -> RunChunk:
        """Return `dispatch`, after a call of each hook's `before_step`, before which its program is compiled."""
        hooks = [hook for hook in self._hooks if defines(hook, "before_step")]

        def run_after_hooks(state: Tree, chunk: Chunk) -> Any:
            dispatch.prepare(state, chunk)
            self._course.begin_iteration()
            for hook in hooks:
                self._call(hook, "before_step", chunk.first, state)
            return dispatch(state, chunk)

        return run_after_hooks if hooks else dispatch

    def begin(self) -> bool:
        course = self._course
        is_done = False
        for hook in self._hooks:
            if hasattr(hook, "begin") and self._call(hook, "begin", course.position.state):
                is_done = True
        savers = [hook for hook in self._hooks if isinstance(hook, SaverHook)]
        others = [hook for hook in self._hooks if _acts(hook) and not isinstance(hook, SaverHook)]
        self._non_savers = ScheduleGroup(others, course.first)
        self.savers = ScheduleGroup(savers, course.first)
        return is_done

    def evaluate(self, evaluate: Callable[..., Any]) -> bool:
        """Call `evaluate_first` or `evaluate_owed` for each evaluation."""
        course = self._course
        is_done = False
        for hook in self._run.evaluations:
            call = HookCall(hook, evaluate.__name__)
            result = self._timed(call, functools.partial(evaluate, hook), course.position.step, course.position.state)
            if course.apply(call, result):
                is_done = True
                course.stop(stopped_by(hook))
        return is_done

    def after(self, first: int) -> None:
        """Call the hooks that are due after the call that began at step `first`, but for savers.

        This runs after each call, and mostly finds nothing due: it compares two numbers, and reads the clocks of the
        hooks that are due by time. A hook is asked for its next step only after it was called.
        """
        run = self._run
        position = self._course.position
        step = position.step
        run.steps_by_rows[position.rows] += step - first
        if first >= self._next_check:
            self._check_step(first)
        non_savers = self._non_savers
        savers = self.savers
        # A hook that is due by time makes its group due here; `_call_due` then asks each schedule, on all processes at
        # the same step.
        for schedule in non_savers.timed:
            if schedule.cadence.clock() >= schedule.deadline:
                non_savers.next = step
        if step >= non_savers.next or run.pending:
            self._call_due(non_savers)
        # Savers are only noted: they save at the end of the iteration (`save`), after the body. Their clocks are read
        # after the other hooks, which may take long.
        for schedule in savers.timed:
            if schedule.cadence.clock() >= schedule.deadline:
                savers.next = step

    def save(self, *, with_failures: bool) -> None:
        """Call the savers that are due, and perhaps raise the errors of logs, which must not prevent a save.

        The error of a best checkpoint must: from what is saved here, its evaluation would not be made again. On several
        processes the savers agree on it (`may_save`).
        """
        if self._run.best_failure is not None and processes.is_single_process():
            self.raise_log_errors()
        self._call_due(self.savers, with_failures=with_failures)

    def _check_step(self, first: int) -> None:
        """Read the step from the device, after the first call of each stage: the only such wait of the loop.

        From then on the step is counted on the host, which is right only if the stage advances it by one.
        """
        course = self._course
        if first == course.first:
            self._run.watch.started()
            # The intervals of automatic saves begin with the first step.
            for schedule in (*self._non_savers.schedules, *self.savers.schedules):
                if callable(schedule.cadence.secs):
                    schedule.reschedule(course.position.step)
        with course.doing(Activity.CHECKING):
            self._run.check_step(first)
            self._run.in_flight.drop_finished()
        edge = self._train_steps.next_stage_start(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due(self, group: ScheduleGroup, *, with_failures: bool = False) -> None:
        """Call all due hooks, even if one raises, so that no output is missing."""
        run = self._run
        course = self._course
        errors = HookErrors(self._course)
        watch = run.watch
        step = course.position.step
        if run.pending:
            watch.switch(HOOKS)
            self._poll(errors)
        for schedule in group.schedules:
            if not schedule.is_due(step):
                continue
            call = HookCall(schedule.hook, "after_step")
            began = watch.switch(call.phase)
            schedule.called = step
            if call.is_user_hook:
                run.sums.flush()
            with errors:
                course.call_hook(call, self._after_step, call)
                if errors.all:
                    continue
                course.call_hook(HookCall(schedule.hook, "next_due"), schedule.reschedule, step)
                self._record(call, began)
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if with_failures:
            errors.add_failures(run.failures)
        errors.end()
        group.update()

    def _poll(self, errors: "HookErrors", **options: bool) -> None:
        pending = self._run.pending
        for _ in range(len(pending)):
            hook, check = pending.popleft()  # one that raises is not called again
            with errors:
                if self._course.call_hook(HookCall(hook, "after_step"), check, **options):
                    pending.append((hook, check))

    def _after_step(self, call: HookCall) -> None:
        course = self._course
        act = call.hook.after_step
        # A saver may be due at a step within an iteration of several steps.
        if isinstance(call.hook, SaverHook) and type(call.hook).after_step is RunHook.after_step:
            act = functools.partial(call_when_due, call.hook)
        step, state, metrics, _ = course.position
        if course.apply(call, act(step, state, metrics)):
            course.stop(_name_of_stop(call.hook))

    def before_save(self, step: int) -> bool:
        self._run.transfers.deliver_all()
        built_in = [hook for hook in self._hooks if isinstance(hook, RunHook)]
        custom = [hook for hook in self._hooks if not isinstance(hook, RunHook) and defines(hook, "before_save")]
        prevented = [call_named(hook, "before_save", step) for hook in (*custom, *built_in)]  # each must be called
        return processes.any_process(any(prevented)) if custom else any(prevented)

    def call_at_last_step(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Call the hooks that want the last step, due or not. Once: an error among them ends here again.

        These are the rows of the last iteration: they come before its boundary, as a restart does not make them again.

        Args:
            failed: Called with each error, those of logs, too. None to raise the first one; those of logs are then left
                to whoever saves the boundary.
        """
        run = self._run
        course = self._course
        errors = HookErrors(self._course)
        if not course.has_trained or self._has_called_at_last_step:
            return
        self._has_called_at_last_step = True
        schedules = (*self._non_savers.schedules, *self.savers.schedules)
        due = [schedule.hook for schedule in schedules if schedule.is_due_at_last_step(course.position.step)]
        calls = {id(hook): HookCall(hook, "after_step") for hook in due}  # each hook once
        with run.watch.phase(HOOKS):
            self._poll(errors, wait=True)
            for call in calls.values():
                with errors:
                    course.call_hook(call, self._after_step, call)
        self._deliver_all(errors)
        if failed is not None:
            errors.add_failures(run.failures)
        errors.end(failed)

    def _deliver_all(self, errors: "HookErrors") -> None:
        while True:
            with errors:
                return self._run.transfers.deliver_all()

    def raise_log_errors(self, failed: Callable[[Exception], None] | None = None) -> None:
        errors = HookErrors(self._course)
        errors.add_failures(self._run.failures)
        errors.end(failed)

    def raise_log_errors_of_all(self) -> None:
        """Raise the errors of logs on all processes, at a step where all call this."""
        texts = [f"{type(error).__name__}: {error}" for error, _ in self._run.failures]
        of_processes = [""] if processes.is_single_process() else processes.gather_texts(texts[0] if texts else "")
        self.raise_log_errors()
        for process, text in enumerate(of_processes):
            if text:
                raise RuntimeError(f"process {process} of {len(of_processes)} could not write a log, {text}")

    # The end: see `ending.py`.

    def make_last_rows(self) -> None:
        errors = HookErrors(self._course)
        step, state, metrics, _ = self._course.position
        for hook in self._hooks:
            if isinstance(hook, RunHook):
                with errors:
                    self._course.call_hook(HookCall(hook, "make_last_row"), make_last_row, hook, step, state, metrics)
        self._deliver_all(errors)
        errors.end()

    def acts_at_end(self) -> bool:
        """Whether an `end` changes anything: one of the user's, or an evaluation that has not been made."""
        return any(map(self._acts_at_end, self._hooks))

    def _acts_at_end(self, hook: Any) -> bool:
        if hook in self._run.evaluations:
            return self._course.position.step not in hook.results
        return (
            defines(hook, "end") and not is_public(type(hook)) and any(hook is option for option in self._options.hooks)
        )

    def end(self) -> bool:
        """Call `end` of all hooks but savers; return False if a signal has left one out."""
        course = self._course
        for hook in self._hooks:
            if isinstance(hook, SaverHook) or not hasattr(hook, "end"):
                continue
            # All processes call the same `end`s, and so agree here equally often. What is built in and changes nothing
            # is called in any case: it only closes what it has opened.
            is_owed = self._acts_at_end(hook)
            if is_owed and self._run.poll_stop_signal():
                return False
            step, state, _, _ = course.position
            course.apply(HookCall(hook, "end"), self._call(hook, "end", step, state))
            if hook in self._run.evaluations and step not in hook.results:  # abandoned
                return False
        return True

    def may_change_state_after(self, hook: Any) -> bool:
        """Whether a hook behind this one may replace the state in this iteration.

        A hook that is due by a clock counts as due: it is asked only once, when it is its turn. Of jstep's own, only
        callbacks of evaluations return a state.
        """
        step = self._course.position.step
        is_behind = False
        for schedule in self._non_savers.schedules:
            if is_behind and schedule.may_be_due(step) and _may_return_state(schedule.hook):
                return True
            is_behind = is_behind or schedule.hook is hook
        return False

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        return self._timed(HookCall(hook, method), getattr(hook, method), *args)

    def _timed(self, call: HookCall, fn: Callable[..., Any], *args: Any) -> Any:
        watch = self._run.watch
        began = watch.clock()
        with contextlib.nullcontext() if call.phase == STEPPING else watch.phase(call.phase):
            result = self._course.call_hook(call, fn, *args)
        self._record(call, began)
        return result

    def _record(self, call: HookCall, began: float) -> None:
        if call.phase != STEPPING:
            self._run.watch.record(call.timing_key, began)

    def ends(self, boundaries: CallBoundaries) -> Iterator[int]:
        options = self._options
        course = self._course
        hooks = [hook for hook in self._hooks if hasattr(hook, "next_due")]
        # Only process 0 writes lines, but all processes end a call when one is due.
        lines = Cadence(None if options.progress is False else options.log_steps)

        def due_after(step: int) -> int:
            due = min(lines.next_multiple(step), Cadence(course.body_interval).next_multiple(step))
            try:
                for hook in hooks:
                    due = min(due, next_call(hook, step)[1])
            except Exception as error:
                note(error, f"jstep: in {hook_name(hook)}.next_due({step}), which says where calls end")
                raise
            return due

        return boundaries.ends(course.first, options.stop_step, due_after)


class HookErrors(contextlib.AbstractContextManager["HookErrors"]):
    """A context that collects the errors of hooks, so that all are called."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._activity: HookCall | Activity | None = None  # of the first error
        self.all: list[Exception] = []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.add(error, self._course.activity)
        return True

    def add(self, error: Exception, activity: HookCall | Activity | None) -> None:
        self._activity = self._activity or activity
        self.all.append(error)

    def add_failures(self, failures: deque[tuple[Exception, HookCall]]) -> None:
        while failures:
            self.add(*failures.popleft())

    def end(self, failed: Callable[[Exception], None] | None = None) -> None:
        if self._activity is not None:
            self._course.activity = self._activity  # which the note of the first error names
        if failed is not None:
            for error in self.all:
                failed(error)
        elif self.all:
            error, *others = self.all
            for other in others:
                note_other(error, other)
            self.all.clear()
            try:
                raise error
            finally:
                del error  # breaks the reference cycle with this frame, which its traceback holds


def close_hooks(
    course: Course, watch: Stopwatch, hooks: Sequence[Any], problems: Iterable[Exception], error: BaseException | None
) -> None:
    """Call `failed`, `closed` and `close` of the user's hooks.

    Their exceptions become notes of the run's error; without it, the first one is raised.
    """
    errors = HookErrors(course)
    for problem in problems:
        errors.add(problem, None)
    calls: list[tuple[Any, str, tuple[Any, ...]]] = [
        (hook, "failed", (course.position.step, error)) for hook in hooks if error is not None
    ]
    calls += [(hook, method, ()) for hook in reversed(hooks) for method in ("closed", "close")]
    for hook, method, args in calls:
        # `HookRunner` has closed it, before the logs that it uses.
        is_closed = method == "close" and isinstance(hook, RunHook)
        if defines(hook, method) and not is_closed:
            with errors, watch.phase(HOOKS):
                call_named(hook, method, *args)
    errors.end(None if error is None else functools.partial(note_other, error))


def _acts(hook: Any) -> bool:
    if isinstance(hook, RunHook):
        return hook_cadence(hook) is not None or type(hook).after_step is not RunHook.after_step
    return defines(hook, "after_step") or (hasattr(hook, "after_step") and defines(hook, "next_due"))


def _name_of_stop(hook: Any) -> str:
    """Return what stops a run if a hook does: the callback of an evaluation, or the hook."""
    key = stopped_by(hook) if isinstance(hook, EvaluationHook) else None
    return key or hook_name(hook)


def _may_return_state(hook: Any) -> bool:
    return bool(hook.callbacks) if isinstance(hook, EvaluationHook) else not isinstance(hook, RunHook)
