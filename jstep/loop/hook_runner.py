"""Call hooks when they are due, and apply their results."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

from jstep.core.checks import note
from jstep.evaluating.evaluator import EvaluationHook
from jstep.hooks.hook import NEVER, Hook, check_hook_result, check_step, name_of
from jstep.hooks.run_hook import Due, RunHook, next_end
from jstep.hooks.stock import CheckpointSaverHook
from jstep.hooks.timeline import EVALUATING, HOOKS, SAVING, STEPPING
from jstep.loop.run import Run
from jstep.loop.run_saver_hook import RunSaverHook
from jstep.loop.stages import EndsAhead, StageBoundaries

FIRST_CALL = "first call"
"""What the device's seconds per step of the first call of each stage are recorded as."""


class HookRunner:
    """The hooks of a run, called in order.

    Args:
        run: The run, with all of its hooks.

    Attributes:
        precedes_calls: Whether a hook has a `before_step`, for which `before` must be called.
        is_done: Whether one of the hooks ends the run before any step.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._hooks = run, run.hooks
        self._before = [hook for hook in run.hooks if _overrides(hook, "before_step")]
        self.precedes_calls = bool(self._before)
        self._due: list[Due] = []
        self._ends: EndsAhead | None = None
        self._next_check = self._counted = run.first
        self._rows: int | None = None
        self.is_done = False

    def begin(self) -> None:
        """Begin the hooks, one of which may end the run before any step."""
        run = self._run
        for hook in self._hooks:
            if hasattr(hook, "begin") and self._call(hook, "begin", run.state):
                self.is_done = True
        self._due = [Due(hook, run.first) for hook in self._hooks if _acts(hook)]
        self._timed = [due for due in self._due if due.deadline != math.inf]
        self._next_due = min((due.next for due in self._due), default=NEVER)

    def before(self) -> None:
        """Call `before_step` of the hooks that have one, before a call."""
        for hook in self._before:
            self._call(hook, "before_step", self._run.step, self._run.state)

    def resume(self) -> None:
        """Repeat evaluations that a signal interrupted, one of which may end the run before any step."""
        run = self._run
        for hook in self._hooks:
            if isinstance(hook, EvaluationHook):
                result = self._call(hook, "evaluate_owed", run.step, run.state)
                if self._take(hook, "evaluate_owed", result):
                    self.is_done, run.stopped_by = True, hook.stopped_by or run.stopped_by

    def after(self, first: int) -> bool:
        """Run hooks after a call that began at step `first`; return whether the run stops here."""
        run = self._run
        step = run.step
        if run.rows != self._rows:
            self._count_examples(first)
        if first >= self._next_check:
            self._check_step(first)
        for due in self._timed:
            if due.clock() >= due.deadline:
                self._next_due = step
        if step >= self._next_due or run.pending:
            self._count_examples(step)
            self._call_due_hooks()
        if self._ends is not None:
            self._ends.extend()
        signals = run.signals
        if (signals.received is not None or signals.is_shared) and signals.to_stop():
            run.is_interrupted = True
        return run.is_interrupted or run.stopped_by is not None

    def _count_examples(self, step: int) -> None:
        """Count the examples up to a step: before hooks read them, and before batches of another size are counted."""
        run = self._run
        run.count_examples(step - self._counted, self._rows)
        self._counted, self._rows = step, run.rows

    def _check_step(self, first: int) -> None:
        """Check, once for each stage, that its step advances the global step by one; waits for the device."""
        run = self._run
        if first == run.first:
            run.watch.started()
            if run.logs_lines:
                run.times.log()
        run.is_checking = True
        began = run.watch.clock()
        check_step(run.step, run.state, first)
        run.watch.record(FIRST_CALL, began, share=1 / (run.step - first))
        run.is_checking = False
        edge = run.stages.edge_after(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due_hooks(self) -> None:
        run = self._run
        run.sums.read()
        step, watch = run.step, run.watch
        error: Exception | None = None
        failed: Any = None
        if run.pending:
            watch.switch(HOOKS)
        for hook, look in tuple(run.pending):
            run.pending.remove((hook, look))  # one that raises is not called again
            run.calling = (hook, "after_step")
            try:
                if not look():
                    run.pending.append((hook, look))
            except Exception as raised:  # call the other hooks as well
                if error is None:
                    error, failed = raised, run.calling
                else:
                    note(error, f"Additionally, {raised}")
        for due in self._due:
            if not due.now(step):
                continue
            hook = due.hook
            part = _part_of(hook)
            began = watch.switch(part)
            due.called = step
            if error is not None:
                self._call_after_error(error, hook)
                continue
            run.calling = (hook, "after_step")
            if not isinstance(hook, RunHook):
                run.sums.flush()
            try:
                result = hook.after_step(step, run.state, run.metrics)
                if result is not None and result is not False:
                    stop = self._take(hook, "after_step", result)
                    if stop and run.stopped_by is None:
                        run.stopped_by = getattr(hook, "stopped_by", None) or name_of(hook)
                due.done(step)
                watch.record(_thing(part, hook, "after_step"), began)
            except Exception as raised:
                error, failed = raised, run.calling
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if error is not None:
            run.calling = failed
            raise error
        run.calling = None
        self._next_due = min((due.next for due in self._due), default=NEVER)

    def _take(self, hook: Any, method: str, result: Any) -> bool:
        """Apply the result of a hook; return whether it ends the run."""
        run = self._run
        stop, run.state = check_hook_result(result, run.state, run.step, f"{name_of(hook)}.{method}")
        return stop

    def _call_after_error(self, error: Exception, hook: Any) -> None:
        """Call a hook that follows one that raised, so that its output for this step is not missing after a restart.

        Hooks that save are not called; the handler of the error saves.
        """
        run = self._run
        try:
            if not isinstance(hook, CheckpointSaverHook):
                self._take(hook, "after_step", hook.after_step(run.step, run.state, run.metrics))
        except Exception as other:
            note(error, f"Additionally, {other}")

    def last(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Run hooks after the last call, once; `failed` receives their exceptions while another error is handled."""
        run = self._run
        if run.step == run.first or run.is_over:
            return
        run.is_over = True
        run.sums.read()
        self._count_examples(run.step)
        errors: list[Exception] = []
        pending, run.pending = run.pending, []
        calls = [(hook, functools.partial(look, wait=True)) for hook, look in pending]
        last = {id(due.hook): due.hook for due in self._due if due.at_last(run.step)}  # each once
        for hook in last.values():
            calls.append((hook, functools.partial(hook.after_step, run.step, run.state, run.metrics)))
        for hook, call in calls:
            run.calling = (hook, "after_step")
            try:
                with run.watch.part(HOOKS):
                    call()
                run.calling = None
            except Exception as error:  # call the other hooks as well
                errors.append(error)
        while True:
            run.calling = (self._hooks[0], "after_step") if self._hooks else None
            try:
                run.transfers.deliver_all()
                break
            except Exception as error:  # drop the failed row and deliver the others
                errors.append(error)
        run.calling = run.calling if errors else None
        if failed is None and errors:
            raise errors[0]
        for one in errors:
            if failed is not None:
                failed(one)

    def end(self) -> None:
        """Call `end` of the hooks after a run that was not interrupted."""
        for hook in self._hooks:
            if hasattr(hook, "end"):
                self._take(hook, "end", self._call(hook, "end", self._run.step, self._run.state))

    def before_save(self, step: int) -> bool:
        """Deliver all pending metrics before a checkpoint; return whether a hook prevents the save."""
        self._run.transfers.deliver_all()
        hooks = [hook for hook in self._hooks if isinstance(hook, RunHook)]
        return True in [bool(hook.before_save(step)) for hook in hooks]  # a list: each hook must be called

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        run = self._run
        run.calling = (hook, method)
        part, began = _part_of(hook), run.watch.clock()
        if isinstance(hook, RunSaverHook):
            result = getattr(hook, method)(*args)
        else:
            with run.watch.part(part):
                result = getattr(hook, method)(*args)
        run.watch.record(_thing(part, hook, method), began)
        run.calling = None
        return result

    def ends(self, boundaries: StageBoundaries) -> EndsAhead:
        """The steps at which calls must end, also those at which a hook is due. Close it after the run."""
        run, known = self._run, [hook for hook in self._hooks if hasattr(hook, "next_due")]

        def due_after(step: int) -> int:
            return min((self._end_after(step, hook) for hook in known), default=NEVER)

        self._ends = EndsAhead(boundaries.ends(run.first, run.options.last_step, due_after))
        return self._ends

    def _end_after(self, step: int, hook: Any) -> int:
        self._run.calling = (hook, "next_due")
        end = next_end(hook, step)
        self._run.calling = None
        return end

    def not_called(self) -> list[str]:
        """The names of the hooks that are due at this step and that were not called, because another one hangs."""
        step = self._run.step
        late = [due.hook for due in self._due if due.called < step and due.next <= step]
        return [name_of(hook) for hook in late if not isinstance(hook, CheckpointSaverHook)]


def thing_of(hook: Any, method: str) -> Hashable:
    """The name under which durations of calls are recorded: saves, the evaluations of one hook, one method of it."""
    return _thing(_part_of(hook), hook, method)


def _thing(part: str, hook: Any, method: str) -> Hashable:
    if part == HOOKS or method == "begin":
        return id(hook), method
    return (id(hook), EVALUATING) if part == EVALUATING else SAVING


def _part_of(hook: Any) -> str:
    """The category of time that a hook counts as; `RunSaverHook` measures its own time when it saves."""
    kinds = ((RunSaverHook, STEPPING), (CheckpointSaverHook, SAVING), (EvaluationHook, EVALUATING))
    return next((part for kind, part in kinds if isinstance(hook, kind)), HOOKS)


def _acts(hook: Any) -> bool:
    """Whether a hook may have something to do after a step: it has a cadence, or methods of its own."""
    if isinstance(hook, RunHook) and hook.cadence is not None:
        return True
    return _overrides(hook, "after_step") or (hasattr(hook, "after_step") and _overrides(hook, "next_due"))


def _overrides(hook: Any, method: str) -> bool:
    """Whether a hook overrides a method of its base class, `Hook` or `RunHook`."""
    own = getattr(getattr(hook, method, None), "__func__", getattr(hook, method, None))
    does_nothing = getattr(RunHook if isinstance(hook, RunHook) else Hook, method)
    return own is not None and own is not does_nothing
