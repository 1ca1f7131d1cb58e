"""The calls of a run's hooks in the loop's thread, up to the last step; `ending.py` calls their `end`s.

| method | called | calls |
|---|---|---|
| `begin`, `call_before_steps` | before the first step | `begin`, and evaluations that are owed, or of the first state |
| `make_run_chunk` | once; what it returns, for each call | `before_step` |
| `call_after_step` | after each call | `after_step` of hooks that are due, but for savers |
| `save` | between two iterations, if a saver is due | savers that are due |
| `call_before_save` | before each save | `before_save` |
| `call_at_last_step` | after the last step | hooks that want it, due or not |
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jstep.core import processes
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other, noting
from jstep.core.stopwatch import HOOKS, STEPPING, Stopwatch
from jstep.core.trees import Tree
from jstep.hooks.cadence import NEVER, Cadence
from jstep.hooks.hook import call_named, defines
from jstep.hooks.run_hook import (
    HookCall,
    RunHook,
    RunInfo,
    call_when_due,
    hook_cadence,
    may_return_state,
    name_of_stop,
    use_run,
)
from jstep.hooks.saver_hook import SaverHook
from jstep.hooks.schedule import HookSchedule, next_call
from jstep.loop.chunks import Chunk
from jstep.loop.course import Activity, Course
from jstep.loop.dispatch import Dispatch
from jstep.loop.hook_errors import HookErrors
from jstep.loop.stages import TrainSteps

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

    def __init__(self, run: RunInfo, course: Course, hooks: Sequence[Any], train_steps: TrainSteps) -> None:
        self._run = run
        self._course = course
        self._hooks = hooks
        self._train_steps = train_steps
        # Empty until the hooks have begun, as a hook may choose its cadence in `begin`.
        self._non_savers = ScheduleGroup((), course.first)
        self.savers = ScheduleGroup((), course.first)
        self._has_called_at_last_step = False
        self._next_check = course.first

    # Before the first step.

    def use_run(self, closing: contextlib.ExitStack) -> None:
        for hook in self._hooks:
            if isinstance(hook, RunHook):
                closing.push(noting(functools.partial(call_named, hook, "close")))
                use_run(hook, self._run)

    def begin(self) -> bool:
        """Begin the hooks; return whether one of them ends the run before its first step."""
        course = self._course
        is_done = False
        for hook in self._hooks:
            if hasattr(hook, "begin") and self.call(hook, "begin", course.position.state):
                is_done = True
        savers = [hook for hook in self._hooks if isinstance(hook, SaverHook)]
        others = [hook for hook in self._hooks if _is_scheduled(hook) and not isinstance(hook, SaverHook)]
        self._non_savers = ScheduleGroup(others, course.first)
        self.savers = ScheduleGroup(savers, course.first)
        return is_done

    def call_before_steps(self, fn: Callable[..., Any]) -> bool:
        """Call `call_at_start` or `call_again` of each evaluation; return whether one ends the run."""
        course = self._course
        is_done = False
        for hook in self._run.evaluations:
            call = HookCall(hook, fn.__name__)
            result = self._timed(call, functools.partial(fn, hook), course.position.step, course.position.state)
            if course.apply(call, result):
                is_done = True
                course.stop(name_of_stop(hook))
        return is_done

    # Around each call.

    def make_run_chunk(self, dispatch: Dispatch) -> RunChunk:
        """Return `dispatch`, after a call of each hook's `before_step`."""
        hooks = [hook for hook in self._hooks if defines(hook, "before_step")]
        if not hooks:
            return dispatch

        def run_after_hooks(state: Tree, chunk: Chunk) -> Any:
            # Before the hooks: a signal may end the wait for the compiler, but after `before_step` the step must run.
            dispatch.compile_for(state, chunk)
            self._course.forbid_saves()
            for hook in hooks:
                self.call(hook, "before_step", chunk.first, state)
            return dispatch(state, chunk)

        return run_after_hooks

    def call_after_step(self, first: int) -> None:
        """Call the hooks that are due after the call that began at step `first`, but for savers.

        This runs after each call, and mostly finds nothing due: it compares two numbers, and reads the clocks of the
        hooks that are due by time. A hook is asked for its next step only after it was called.
        """
        run = self._run
        position = self._course.position
        step = position.step
        run.steps_by_rows[position.rows] += step - first  # for the number of examples (`RunInfo.examples`)
        if first >= self._next_check:
            self._check_step(first)
        non_savers = self._non_savers
        savers = self.savers
        # A hook that is due by time makes its group due here; `_call_due` then asks each schedule, on all processes at
        # the same step. The loop stands here twice, because a method for it would be two more calls in each step.
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

    def save(self, *, raises_failures: bool) -> None:
        """Call the savers that are due; then, with `raises_failures`, raise the errors of logs.

        The error of a best checkpoint is raised before the save: a restart from what is saved here would not repeat its
        evaluation. On several processes the savers agree on it (`may_save`).
        """
        if self._run.best_failure is not None and processes.is_single_process():
            self.raise_log_errors()
        self._call_due(self.savers, raises_failures=raises_failures)

    def _check_step(self, first: int) -> None:
        """Read the step from the device, and wait for it, after the first call of each stage.

        From then on the step is counted on the host, which is right only if the stage advances it by one. It is read
        again before each save and at the end (`RunInfo.check_step`).
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
        next_stage = self._train_steps.next_stage_start(first)
        self._next_check = NEVER if next_stage is None else next_stage

    def _call_due(self, group: ScheduleGroup, *, raises_failures: bool = False) -> None:
        """Call all due hooks, even if one raises: the step is done, and the others must not miss it."""
        run = self._run
        course = self._course
        errors = HookErrors(course)
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
                # It may pass the metrics to a function that donates them, before they are added.
                run.sums.flush()
            with errors:
                course.call_hook(call, self._apply_after_step, call)
                if errors.collected:
                    continue  # the run ends: no hook has a next step
                course.call_hook(HookCall(schedule.hook, "next_due"), schedule.reschedule, step)
                self._record(call, began)
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if raises_failures:
            errors.add_failures(run.failures)
        errors.end()
        group.update()

    def _poll(self, errors: HookErrors, *, wait: bool = False) -> None:
        """Call what hooks wait for (`RunInfo.poll`); what returns True is called again after the next call."""
        pending = self._run.pending
        for _ in range(len(pending)):
            # Put back only once it has returned, so that a check that raises is not called again.
            hook, check = pending.popleft()
            with errors:
                call = functools.partial(check, wait=True) if wait else check
                # A check has no name that a user knows. It is called where `after_step` is.
                if self._course.call_hook(HookCall(hook, "after_step"), call):
                    pending.append((hook, check))

    def _apply_after_step(self, call: HookCall) -> None:
        course = self._course
        after_step = call.hook.after_step
        # A saver is called at the end of an iteration. If that has several steps, it may have been due at an earlier
        # one. The inherited `after_step` does nothing but at multiples of the interval, and would skip it.
        if isinstance(call.hook, SaverHook) and type(call.hook).after_step is RunHook.after_step:
            after_step = functools.partial(call_when_due, call.hook)
        step, state, metrics, _ = course.position
        if course.apply(call, after_step(step, state, metrics)):
            course.stop(name_of_stop(call.hook))

    # A save.

    def call_before_save(self, step: int) -> bool:
        """Deliver all numbers, and call `before_save` of the hooks; return whether one of them prevents the save."""
        self._run.transfers.deliver_all()
        built_in = [hook for hook in self._hooks if isinstance(hook, RunHook)]
        custom = [hook for hook in self._hooks if not isinstance(hook, RunHook) and defines(hook, "before_save")]
        # A list, as a generator would stop at the first True: each hook must be called, which may flush its file.
        answers = [call_named(hook, "before_save", step) for hook in (*custom, *built_in)]
        is_prevented = any(answers)
        if not custom:
            return is_prevented
        # All processes save or none does, and a user's hook may decide by what only one of them knows.
        return processes.any_process(is_prevented)

    def may_change_state_after(self, hook: Any) -> bool:
        """Whether a hook behind this one may replace the state in this iteration.

        A hook with a clock counts as due: its clock can be asked only once, at its turn (`AgreedClock`). Of jstep's own
        hooks, only callbacks of evaluations return a state.
        """
        step = self._course.position.step
        is_behind = False
        for schedule in self._non_savers.schedules:
            if is_behind and schedule.may_be_due(step) and may_return_state(schedule.hook):
                return True
            is_behind = is_behind or schedule.hook is hook
        return False

    # After the last step.

    def call_at_last_step(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Call the hooks that want the last step, due or not; only the first call does anything.

        After an error, `rescue` calls this, whether it was called before or not. These hooks write the rows of the last
        iteration, which a restart does not make again: so they come before the last save.

        Args:
            failed: Called with each error, also those of logs. If None, the first error is raised, and those of logs
                are raised later, after that save.
        """
        run = self._run
        course = self._course
        if not course.has_trained or self._has_called_at_last_step:
            return
        self._has_called_at_last_step = True
        errors = HookErrors(course)
        calls: list[HookCall] = []
        for schedule in (*self._non_savers.schedules, *self.savers.schedules):
            if schedule.is_due_at_last_step(course.position.step):
                calls.append(HookCall(schedule.hook, "after_step"))
        with run.watch.phase(HOOKS):
            self._poll(errors, wait=True)
            for call in calls:
                with errors:
                    course.call_hook(call, self._apply_after_step, call)
        self.deliver_all(errors)
        if failed is not None:
            errors.add_failures(run.failures)
        errors.end(failed)

    def deliver_all(self, errors: HookErrors) -> None:
        """Deliver all numbers, even if some deliveries fail."""
        is_done = False
        while not is_done:
            # A delivery that fails has left the queue, and `errors` keeps its error: the next round goes on behind it.
            with errors:
                self._run.transfers.deliver_all()
                is_done = True

    def raise_log_errors(self, failed: Callable[[Exception], None] | None = None) -> None:
        errors = HookErrors(self._course)
        errors.add_failures(self._run.failures)
        errors.end(failed)

    def raise_log_errors_of_all(self) -> None:
        """Raise the errors of logs on all processes, at a step where all call this."""
        failures = [f"{type(error).__name__}: {error}" for error, _ in self._run.failures]
        texts = [""]
        if not processes.is_single_process():
            texts = processes.gather_texts(failures[0] if failures else "")
        self.raise_log_errors()
        for process, text in enumerate(texts):
            if text:
                raise RuntimeError(f"process {process} of {len(texts)} could not write a log, {text}")

    # Every call.

    def call(self, hook: Any, method: str, *args: Any) -> Any:
        """Call a method of a hook; its time counts as the hook's phase."""
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


def make_next_due(hooks: Sequence[Any], course: Course, log_steps: int | None) -> Callable[[int], int]:
    """Return `next_due(step)`: the next step at which a call of several steps ends for a hook, a line or the body."""
    due_hooks = [hook for hook in hooks if hasattr(hook, "next_due")]
    lines = Cadence(log_steps)

    def next_due(step: int) -> int:
        # Not made once, because `run.every(n)` sets the interval after the hooks have begun.
        body = Cadence(course.body_interval)
        due = min(lines.next_multiple(step), body.next_multiple(step))
        try:
            for hook in due_hooks:
                _, end_of_call = next_call(hook, step)
                due = min(due, end_of_call)
        except Exception as error:
            note(error, f"jstep: in {hook_name(hook)}.next_due({step}), which says where calls end")
            raise
        return due

    return next_due


def close_hooks(
    course: Course, watch: Stopwatch, hooks: Sequence[Any], problems: Iterable[Exception], error: BaseException | None
) -> None:
    """Call `failed`, `closed` and `close` of the user's hooks.

    Their exceptions become notes of the run's error; without it, the first one is raised.
    """
    errors = HookErrors(course)
    for problem in problems:
        errors.add(problem, None)

    def call(hook: Any, method: str, *args: Any) -> None:
        if defines(hook, method):
            with errors, watch.phase(HOOKS):
                call_named(hook, method, *args)

    if error is not None:
        for hook in hooks:
            call(hook, "failed", course.position.step, error)
    # In reverse order, as nested `with` statements end.
    for hook in reversed(hooks):
        call(hook, "closed")
        # `use_run` has pushed the `close` of a RunHook: it comes before that of the logs that it writes to.
        if not isinstance(hook, RunHook):
            call(hook, "close")
    errors.end(None if error is None else functools.partial(note_other, error))


def _is_scheduled(hook: Any) -> bool:
    """Whether a hook is scheduled: called after steps, or asked by `next_due` where calls end."""
    if isinstance(hook, RunHook):
        return hook_cadence(hook) is not None or type(hook).after_step is not RunHook.after_step
    if defines(hook, "after_step"):
        return True
    # A subclass of `Hook` that only says where calls end. It is scheduled so that what its `next_due` returns is
    # checked whatever `steps_per_call` is.
    return hasattr(hook, "after_step") and defines(hook, "next_due")
