"""The calls of a run's hooks in the loop's thread: when they are due, before a save, and at the end."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from jstep.checkpoint.hook_states import is_public
from jstep.core import trees
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other, noting
from jstep.core.stopwatch import HOOKS, STEPPING
from jstep.core.trees import Tree
from jstep.distributed import processes
from jstep.evaluating.evaluation_hook import EvaluationHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import call_named, check_step, defines
from jstep.hooks.reporting import LoggingHook
from jstep.hooks.run_hook import RunHook
from jstep.loop.origin import ENDED
from jstep.loop.programs import Boundaries, Chunk, EndsAhead
from jstep.loop.run_context import LEAVING, HookCall, RunContext
from jstep.metering.cadence import NEVER, Cadence, HookSchedule, next_call

RunChunk = Callable[[Any, Chunk], Any]
"""`run_chunk(state, chunk)` runs the steps of a chunk; it returns the new state and the last metrics."""


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
    """Calls the hooks of a run when they are due, in the loop's thread, each in the context that times it."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._hooks = run, run.hooks
        self.evaluations = [hook for hook in run.hooks if isinstance(hook, EvaluationHook)]
        # The savers among the hooks are called after the body of the loop.
        self._non_savers = self.savers = ScheduleGroup((), run.first)
        self._ends: EndsAhead | None = None
        self.is_checking = self._was_last = False
        self._next_check = run.first
        # The step at which `end` of the hooks was called last, also by an earlier start.
        self.ended_at: int | None = run.origin.extra.get(ENDED)

    def use_run(self) -> None:
        """Pass the run to the built-in hooks, and close them with it."""
        for hook in self._hooks:
            if isinstance(hook, RunHook):
                self._run.closing.push(noting(functools.partial(call_named, hook, "close")))
                hook.use_run(self._run)

    def with_before_step(self, run_chunk: RunChunk) -> RunChunk:
        """Return `run_chunk`, after a call of each hook's `before_step`."""
        hooks = [hook for hook in self._hooks if defines(hook, "before_step")]

        def run_after_hooks(state: Tree, chunk: Chunk) -> Any:
            for hook in hooks:
                self._call(hook, "before_step", chunk.first, state)
            return run_chunk(state, chunk)

        return run_after_hooks if hooks else run_chunk

    def begin(self) -> bool:
        run, is_done = self._run, False
        for hook in self._hooks:
            if hasattr(hook, "begin") and self._call(hook, "begin", run.at.state):
                is_done = True
        non_savers = [hook for hook in self._hooks if _acts(hook) and not isinstance(hook, CheckpointSaverHook)]
        self._non_savers = ScheduleGroup(non_savers, run.first)
        self.savers = ScheduleGroup(run.savers, run.first)
        return is_done

    def evaluate(self, method: str) -> bool:
        """Call `evaluate_first`, or `evaluate_owed` after a restart; return whether that ends the run."""
        run, is_done = self._run, False
        for hook in self.evaluations:
            if run.apply(HookCall(hook, method), self._call(hook, method, run.at.step, run.at.state)):
                is_done = True
                run.end_by(hook.stopped_by)
        return is_done

    def after(self, first: int) -> None:
        """Run the hooks that are due after a call that began at step `first`, except those that save."""
        run = self._run
        step = run.at.step
        run.steps_by_rows[run.at.rows] += step - first
        if first >= self._next_check:
            self._check_step(first)
        non_savers, savers = self._non_savers, self.savers
        for schedule in non_savers.timed:
            if schedule.cadence.clock() >= schedule.deadline:
                non_savers.next = step
        if step >= non_savers.next or run.pending:
            self._call_due(non_savers)
        for schedule in savers.timed:  # after the others, which may take long
            if schedule.cadence.clock() >= schedule.deadline:
                savers.next = step
        if run.deferred:
            savers.next = step
        if run.failures and step < savers.next:  # else once it is saved
            self.raise_log_errors()
        if self._ends is not None:
            self._ends.extend()

    def save(self) -> None:
        """Let the hooks save that are due, once all other code of this step has run."""
        errors = HookErrors(self._run)
        self._save_deferred(errors)
        errors.end()
        self._call_due(self.savers, with_failures=True)

    def _save_deferred(self, errors: "HookErrors") -> None:
        run = self._run
        while run.deferred:
            call, save = run.deferred.popleft()
            with errors, run.watch.phase(call.phase):
                run.during(call, save)

    def _check_step(self, first: int) -> None:
        """Check, once for each stage, that its step advances the global step by one; waits for the device."""
        run, watch = self._run, self._run.watch
        if first == run.first:
            watch.started()
            # The intervals of automatic saves begin with the first step.
            for schedule in (*self._non_savers.schedules, *self.savers.schedules):
                if callable(schedule.cadence.secs):
                    schedule.reschedule(run.at.step)
            if any(isinstance(hook, LoggingHook) and hook not in run.options.hooks for hook in self._hooks):
                run.times.log(watch.before)
        self.is_checking = True
        check_step(run.at.step, run.at.state, first)
        run.in_flight.drop_finished()
        self.is_checking = False
        edge = run.train_steps.edge_after(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due(self, group: ScheduleGroup, *, with_failures: bool = False) -> None:
        """Call all due hooks, even if one raises, so that no output is missing after a restart."""
        run, errors = self._run, HookErrors(self._run)
        watch, step = run.watch, run.at.step
        if run.pending:
            watch.switch(HOOKS)
            self._poll(errors)
        for schedule in group.schedules:
            if not schedule.is_due(step):
                continue
            call = HookCall(schedule.hook, "after_step")
            began = watch.switch(call.phase)
            schedule.called = step
            if call.is_users:
                run.sums.flush()
            with errors:
                run.during(call, self._after_step, call)
                if errors.all:
                    continue
                run.during(HookCall(schedule.hook, "next_due"), schedule.reschedule, step)
                self._record(call, began)
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if errors.all or with_failures:
            errors.add_failures()
        errors.end()
        group.update()

    def _poll(self, errors: "HookErrors", **options: bool) -> None:
        run = self._run
        for _ in range(len(run.pending)):
            hook, check = run.pending.popleft()  # one that raises is not called again
            with errors:
                if run.during(HookCall(hook, "after_step"), check, **options):
                    run.pending.append((hook, check))

    def _after_step(self, call: HookCall) -> None:
        run, act = self._run, call.hook.after_step
        # A saver may be due at a step within an iteration of several steps.
        if isinstance(call.hook, CheckpointSaverHook) and type(call.hook).after_step is RunHook.after_step:
            act = call.hook.when_due
        if run.apply(call, act(run.at.step, run.at.state, run.at.metrics)):
            run.end_by(getattr(call.hook, "stopped_by", None) or hook_name(call.hook))

    def before_save(self, step: int) -> bool:
        """Deliver pending results; return whether a hook prevents the save, on any process."""

        def failed(error: Exception) -> None:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                raise error
            self._run.failures.append((HookCall(self._run.transfers.take_failed_owner(), "flush"), error))

        self._deliver_all(failed)
        built_in = [hook for hook in self._hooks if isinstance(hook, RunHook)]
        custom = [hook for hook in self._hooks if not isinstance(hook, RunHook) and defines(hook, "before_save")]
        prevented = [call_named(hook, "before_save", step) for hook in (*custom, *built_in)]  # each must be called
        return processes.any_process(any(prevented)) if custom else any(prevented)

    def call_at_last(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Run hooks after the last call, once; `failed` receives their exceptions if another error is handled."""
        run, errors = self._run, HookErrors(self._run)
        if run.at.step == run.first or self._was_last:
            return
        self._was_last = True
        schedules = (*self._non_savers.schedules, *self.savers.schedules)
        due = [schedule.hook for schedule in schedules if schedule.at_last(run.at.step)]
        calls = {id(hook): HookCall(hook, "after_step") for hook in due}  # each hook once
        with run.watch.phase(HOOKS):
            self._save_deferred(errors)
            self._poll(errors, wait=True)
            for call in calls.values():
                with errors:
                    run.during(call, self._after_step, call)
        self._deliver_all(functools.partial(errors.add, calling=None))
        errors.add_failures()
        errors.end(failed)

    def _deliver_all(self, failed: Callable[[Exception], None]) -> None:
        """Deliver all numbers; a row that fails is dropped, the others are delivered."""
        while True:
            try:
                return self._run.transfers.deliver_all()
            except Exception as error:
                failed(error)

    def raise_log_errors(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Raise the errors of logs that could not be written before the last checkpoint, or pass them to `failed`."""
        errors = HookErrors(self._run)
        errors.add_failures()
        errors.end(failed)

    def end(self) -> None:
        """Call `end` of the hooks; a start that takes no step only repeats the last evaluations, to fill `results`."""
        run, errors = self._run, HookErrors(self._run)
        hooks = self._hooks
        if run.at.step == run.first and (run.restored is None or self.ended_at == run.at.step):
            hooks = self._repeat_evaluations()
        before = run.at.state
        # Savers come last; all of them run, even if one raises.
        for hook in hooks:
            is_saver = isinstance(hook, CheckpointSaverHook)
            if is_saver:
                self.ended_at = run.at.step
            if not hasattr(hook, "end"):
                continue
            try:
                run.apply(HookCall(hook, "end"), self._call(hook, "end", run.at.step, run.at.state))
            except Exception as error:
                if is_saver:
                    errors.add(error, run.calling)
                    continue
                if not trees.is_donated(before):
                    run.replace_state(before)  # the next start calls all of them again
                raise
        errors.end()

    def _repeat_evaluations(self) -> list[Any]:
        """Repeat evaluations that have ended already; return the others and the savers, which have to end."""
        step, state = self._run.at.step, self._run.at.state
        left = [hook for hook in self.evaluations if hook.owes_end(step)]
        for hook in self.evaluations:
            if hook not in left:
                self._call(hook, "repeat", step, state)
        return [*left, *self._run.savers] if left else []

    def has_ended(self) -> bool:
        """Return whether the hooks have ended at this step, or only need to save there."""
        run, options = self._run, self._run.options
        if self.ended_at == run.at.step:
            return True
        is_evaluated = all(run.at.step in hook.results for hook in self.evaluations)
        # User-defined hooks may act at the end; what jstep's do there shows in the checkpoint.
        has_ends = any(defines(hook, "end") and not is_public(type(hook)) for hook in options.hooks)
        return run.is_at_last and is_evaluated and not (has_ends or run.is_in_body or run.status == LEAVING)

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        watch, call = self._run.watch, HookCall(hook, method)
        began = watch.clock()
        with contextlib.nullcontext() if call.phase == STEPPING else watch.phase(call.phase):
            result = self._run.during(call, getattr(hook, method), *args)
        self._record(call, began)
        return result

    def _record(self, call: HookCall, began: float) -> None:
        if call.phase != STEPPING:
            self._run.watch.record(call.timing_key, began)

    def ends(self, boundaries: Boundaries) -> EndsAhead:
        """Return the steps at which calls must end, also because a hook is due."""
        run, options = self._run, self._run.options
        hooks = [hook for hook in self._hooks if hasattr(hook, "next_due")]
        # Only process 0 writes lines, but all processes end a call when one is due.
        lines = Cadence(None if options.progress is False else options.log_steps)

        def due_after(step: int) -> int:
            due = min(lines.next_multiple(step), Cadence(run.body_interval).next_multiple(step))
            try:
                for hook in hooks:
                    due = min(due, next_call(hook, step)[1])
            except Exception as error:  # raised when the run gets there
                note(error, f"jstep: in {hook_name(hook)}.next_due({step}), which says where calls end")
                raise
            return due

        self._ends = EndsAhead(boundaries.ends(run.first, options.stop_step, due_after))
        return self._ends


class HookErrors(contextlib.AbstractContextManager["HookErrors"]):
    """A context that collects the errors of hooks: each call of one runs in it, so all hooks are called."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._transfers = run, run.transfers
        self._calling: HookCall | None = None
        self.all: list[Exception] = []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.add(error, self._run.calling)
        return True

    def add(self, error: Exception, calling: HookCall | None) -> None:
        """Add an error; it belongs to the hook whose numbers were being delivered, if any."""
        owner = self._transfers.take_failed_owner()
        if owner is not None:
            calling = HookCall(owner, "after_step" if calling is None else calling.method)
        self._calling = self._calling or calling
        self.all.append(error)

    def add_failures(self) -> None:
        """Add the errors of logs, each once."""
        while self._run.failures:
            calling, error = self._run.failures.popleft()
            self.add(error, calling)

    def end(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Pass the errors to `failed`, or raise the first, with the others as notes."""
        self._run.calling = self._calling  # of the first error
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


def close_hooks(run: RunContext, error: BaseException | None) -> None:
    """Call `failed`, `closed` and `close` of the user's hooks after a run that ended with this error, if any.

    Exceptions of hooks, also those in the background, become notes of that error; without it, the first one is raised.
    """
    hooks, errors = run.options.hooks, HookErrors(run)
    for problem in run.background.end():
        errors.add(problem, None)
    calls: list[tuple[Any, str, tuple[Any, ...]]] = [
        (hook, "failed", (run.at.step, error)) for hook in hooks if error is not None
    ]
    calls += [(hook, method, ()) for hook in reversed(hooks) for method in ("closed", "close")]
    for hook, method, args in calls:
        # `HookRunner` has closed it, before the logs that it uses.
        is_closed = method == "close" and isinstance(hook, RunHook)
        if defines(hook, method) and not is_closed:
            with errors:
                call_named(hook, method, *args)
    errors.end(None if error is None else functools.partial(note_other, error))


def _acts(hook: Any) -> bool:
    """Return whether a hook may act after a step."""
    if isinstance(hook, RunHook):
        return hook.cadence is not None or type(hook).after_step is not RunHook.after_step
    return defines(hook, "after_step") or (hasattr(hook, "after_step") and defines(hook, "next_due"))
