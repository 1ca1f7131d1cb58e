"""The calls of a run's hooks in the loop's thread, up to the last step.

`ending.py` calls their `end`s.

| method | called | calls |
|---|---|---|
| `begin`, `call_before_steps` | before the first step | `begin`; evaluations, owed or first |
| `make_run_chunk` | once; what it returns, for each call | `before_step` |
| `call_after_step` | after each call | `after_step` of hooks that are due, but for savers |
| `save` | between two iterations, if a saver is due | savers that are due |
| `call_before_save` | before each save | `before_save` |
| `call_at_last_step` | after the last step | hooks that want it, due or not |
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jstep.compiling.chunks import Chunk
from jstep.compiling.dispatch import Dispatch
from jstep.core import processes
from jstep.core.exceptions import note_other, noting
from jstep.core.stopwatch import HOOKS, STEPPING, Stopwatch
from jstep.core.trees import Tree
from jstep.hooks.cadence import hook_cadence
from jstep.hooks.course import WITHIN, Activity, Course, HookCall
from jstep.hooks.hook import call_named, defines
from jstep.hooks.run_hook import (
    RunHook,
    is_user_hook,
    may_return_state,
    name_of_stop,
    phase_of,
    timing_key,
    use_run,
)
from jstep.hooks.run_info import RunInfo
from jstep.hooks.saver_hook import SaverHook
from jstep.hooks.timetable import Entry
from jstep.loop.hook_errors import HookErrors

RunChunk = Callable[[Any, Chunk], Any]
"""`run_chunk(state, chunk)` returns the new state and the last metrics."""


class HookRunner:
    """Calls a run's hooks when they are due, in the loop's thread, each in its timing context."""

    def __init__(self, run: RunInfo, hooks: Sequence[Any]) -> None:
        self._run = run
        self._timetable = run.timetable
        self._course = run.course
        self._hooks = hooks
        self._has_called_at_last_step = False

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
        savers: list[Any] = []
        others: list[Any] = []
        for hook in self._hooks:
            if isinstance(hook, SaverHook):
                savers.append(hook)
            elif _is_scheduled(hook):
                others.append(hook)
        self._timetable.begin(others, savers, course.first)
        return is_done

    def call_before_steps(self, fn: Callable[..., Any]) -> bool:
        """Call `call_at_start` or `call_again` of each evaluation; return whether the run ends."""
        course = self._course
        is_done = False
        for hook in self._run.evaluations:
            call = HookCall(hook, fn.__name__)
            result = self._timed(
                call, functools.partial(fn, hook), course.position.step, course.position.state
            )
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
            # Before the hooks: a signal may end the wait for the compiler, but after `before_step`
            # the step must run.
            dispatch.compile_for(state, chunk)
            self._course.forbid_saves()
            for hook in hooks:
                self.call(hook, "before_step", chunk.first, state)
            return dispatch(state, chunk)

        return run_after_hooks

    def call_after_step(self, first: int) -> None:
        """Call the hooks that are due after the call that began at step `first`, but for savers.

        This runs after each call, and mostly finds nothing due. Savers are only noted: they save at
        the end of the iteration (`save`), after the body.
        """
        run = self._run
        timetable = self._timetable
        position = self._course.position
        step = position.step
        # For the number of examples (`RunInfo.examples`).
        run.steps_by_rows[position.rows] += step - first
        if first >= timetable.next_check:
            self._check_step(first)
        timetable.read_clocks(step)
        if step >= timetable.next_hook or run.pending:
            self._call_due(timetable.due_hooks(step))
            # A saver may have become due meanwhile: the hooks may take long.
            timetable.read_clocks(step)

    def save(self, *, raises_failures: bool) -> None:
        """Call the savers that are due; then, with `raises_failures`, raise the errors of logs.

        The error of a best checkpoint is raised before the save: a restart from what is saved here
        would not repeat its evaluation. On several processes the savers agree on it (`may_save`).
        """
        if self._run.best_failure is not None and processes.is_single_process():
            self.raise_log_errors()
        self._call_due(
            self._timetable.due_savers(self._course.position.step), raises_failures=raises_failures
        )

    def _check_step(self, first: int) -> None:
        """Read the step from the device, and wait for it, after the first call of each stage.

        From then on the step is counted on the host, which is right only if the stage advances it
        by one. It is read again before each save and at the end (`RunInfo.check_step`).
        """
        course = self._course
        if first == course.first:
            self._run.watch.started()
            self._timetable.restart_computed_intervals(course.position.step)
        with course.doing(Activity.CHECKING):
            self._run.check_step(first)
            self._run.in_flight.drop_finished()
        self._timetable.plan_check(first)

    def _call_due(self, entries: Iterable[Entry], *, raises_failures: bool = False) -> None:
        """Call all due hooks, even if one raises: the step is done, and no hook must miss it."""
        run = self._run
        course = self._course
        errors = HookErrors(course)
        watch = run.watch
        step = course.position.step
        if run.pending:
            watch.switch(HOOKS)
            self._poll(errors)
        for entry in entries:
            call = HookCall(entry.hook, "after_step")
            began = watch.switch(phase_of(entry.hook))
            entry.called = step
            if is_user_hook(entry.hook):
                # It may pass the metrics to a function that donates them, before they are added.
                run.sums.flush()
            with errors:
                course.call_hook(call, self._apply_after_step, call)
                if errors.collected:
                    continue  # the run ends: no hook has a next step
                course.call_hook(HookCall(entry.hook, "next_due"), entry.reschedule, step)
                self._record(call, began)
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if raises_failures:
            errors.add_failures(run.failures)
        errors.end()
        self._timetable.update()

    def _poll(self, errors: HookErrors, *, wait: bool = False) -> None:
        """Call the checks that hooks have queued (`RunInfo.poll`).

        A check that returns True is called again after the next call.
        """
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
        step, state, metrics, _ = course.position
        if course.apply(call, call.hook.after_step(step, state, metrics)):
            course.stop(name_of_stop(call.hook))

    # A save.

    def call_before_save(self, step: int) -> bool:
        """Deliver all numbers, call `before_save`, and return whether a hook prevents the save."""
        self._run.transfers.deliver_all()
        built_in: list[Any] = []
        custom: list[Any] = []
        for hook in self._hooks:
            if isinstance(hook, RunHook):
                built_in.append(hook)
            elif defines(hook, "before_save"):
                custom.append(hook)
        # A list, as a generator would stop at the first True: each hook must be called, because it
        # may flush its file.
        results = [call_named(hook, "before_save", step) for hook in (*custom, *built_in)]
        is_prevented = any(results)
        if not custom:
            return is_prevented
        # All processes save or none does, and a user's hook may decide by what only one of them
        # knows.
        return processes.any_process(is_prevented)

    def is_followed_in_iteration(self) -> bool:
        """Whether the body, or a hook that may replace the state, follows the current hook's call.

        Of jstep's own hooks, only callbacks of evaluations return a state.
        """
        course = self._course
        if course.status != WITHIN:
            return False
        activity = course.activity
        if course.has_body or not isinstance(activity, HookCall):
            return True
        later_hooks = self._timetable.may_be_due_behind(activity.hook, course.position.step)
        return any(map(may_return_state, later_hooks))

    # After the last step.

    def call_at_last_step(self, failed: Callable[[BaseException], None] | None = None) -> None:
        """Call the hooks that want the last step, due or not; only the first call does anything.

        After an error, `rescue` calls this, too, whether it was called before or not. These hooks
        write the rows of the last iteration, which a restart does not make again, so they are
        called before the last save.

        Args:
            failed: Called with each error, also those of logs. If None, the first error is raised,
                and those of logs are raised later, after that save.
        """
        run = self._run
        course = self._course
        if not course.has_trained or self._has_called_at_last_step:
            return
        self._has_called_at_last_step = True
        errors = HookErrors(course)
        calls = [
            HookCall(hook, "after_step")
            for hook in self._timetable.due_at_last_step(course.position.step)
        ]
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
            # A delivery that fails has left the queue, and `errors` keeps its error: the next round
            # continues after it.
            with errors:
                self._run.transfers.deliver_all()
                is_done = True

    def raise_log_errors(self, failed: Callable[[BaseException], None] | None = None) -> None:
        errors = HookErrors(self._course)
        errors.add_failures(self._run.failures)
        errors.end(failed)

    def raise_log_errors_of_all(self) -> None:
        """Raise the errors of logs on all processes, at a step where all call this."""
        if processes.is_single_process():
            self.raise_log_errors()
            return
        first_text = ""
        if self._run.failures:
            error, _ = self._run.failures[0]
            first_text = f"{type(error).__name__}: {error}"
            del error  # its traceback will hold this frame, as `raise_log_errors` raises it
        texts = processes.gather_texts(first_text)
        self.raise_log_errors()
        for process, text in enumerate(texts):
            if text:
                raise RuntimeError(
                    f"process {process} of {len(texts)} could not write a log, {text}"
                )

    # Every call.

    def call(self, hook: Any, method: str, *args: Any) -> Any:
        """Call a method of a hook; its time counts as the hook's phase."""
        return self._timed(HookCall(hook, method), getattr(hook, method), *args)

    def _timed(self, call: HookCall, fn: Callable[..., Any], *args: Any) -> Any:
        phase = phase_of(call.hook)
        if phase == STEPPING:  # it measures its own time
            return self._course.call_hook(call, fn, *args)
        watch = self._run.watch
        began = watch.clock()
        with watch.phase(phase):
            result = self._course.call_hook(call, fn, *args)
        self._record(call, began)
        return result

    def _record(self, call: HookCall, began: float) -> None:
        if phase_of(call.hook) != STEPPING:
            self._run.watch.record(timing_key(call), began)


def close_hooks(
    course: Course,
    watch: Stopwatch,
    hooks: Sequence[Any],
    problems: Iterable[BaseException],
    error: BaseException | None,
    must_leave: Callable[[], bool],
) -> None:
    """Call `failed`, `closed` and `close` of the user's hooks.

    Their exceptions become notes of the run's error; without it, the first one is raised. This
    includes an exit or an interrupt that a hook raises: the remaining hooks still close what they
    have opened, and a run that has failed does not exit with 0.

    Args:
        problems: The errors of `saved`, which come first.
        must_leave: Whether the user has pressed Ctrl-C twice: then an interrupt leaves immediately.
    """
    errors = HookErrors(course, must_leave)
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
        # `use_run` has pushed the `close` of a RunHook: it comes before that of the logs that it
        # writes to.
        if not isinstance(hook, RunHook):
            call(hook, "close")
    errors.end(None if error is None else functools.partial(note_other, error))


def _is_scheduled(hook: Any) -> bool:
    """Whether a hook is called after steps, or has a `next_due` that says where calls end."""
    if isinstance(hook, RunHook):
        return hook_cadence(hook) is not None or type(hook).after_step is not RunHook.after_step
    if defines(hook, "after_step"):
        return True
    # A subclass of `Hook` that only defines where calls end. It is scheduled so that the value of
    # its `next_due` is checked for any `steps_per_call`.
    return hasattr(hook, "after_step") and defines(hook, "next_due")
