"""Call hooks when they are due, and apply their results."""

import operator
from collections.abc import Callable
from typing import Any

from jstep.core.checks import kind
from jstep.core.exceptions import note
from jstep.hooks import CheckpointSaverHook, EvaluationHook
from jstep.hooks.cadence import CadencedHook, CadenceTimer
from jstep.hooks.hook import NEVER, Hook, check_step, name_of
from jstep.hooks.hook_results import check_hook_result
from jstep.hooks.run_hook import RunHook
from jstep.loop.run import Run
from jstep.loop.run_saver_hook import RunSaverHook
from jstep.loop.stages import EndsAhead, StageBoundaries
from jstep.timeline.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING


class HookRunner:
    """The hooks of a run, called in order.

    Args:
        run: The run, with all of its hooks.

    Attributes:
        is_done: Whether one of the hooks ends the run before any step.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._hooks = run, run.hooks
        self._run_hooks = [hook for hook in run.hooks if isinstance(hook, RunHook)]
        self._before = [hook for hook in run.hooks if _overrides(hook, "before_step")]
        acting = [hook for hook in run.hooks if hasattr(hook, "after_step")]
        self._acting = [hook for hook in acting if _overrides(hook, "after_step") or _overrides(hook, "next_due")]
        self._part_of = [_part_of(hook) for hook in self._acting]
        self._rows: int | None = None
        self._ends: EndsAhead | None = None
        self._is_over = False
        self._next_check = run.first
        self.is_done = False

    def begin(self) -> None:
        """Begin the hooks, one of which may end the run before any step."""
        run = self._run
        for hook in self._hooks:
            if hasattr(hook, "begin") and self._call(hook, "begin", run.state):
                self.is_done = True
        self._timers = [_timer_of(hook) for hook in self._acting]
        self._waiting = [timer for timer in self._timers if timer is not None]
        self._due_of = [_due_of(hook) for hook in self._acting]
        self._next_steps = [due_of(run.first) for due_of in self._due_of]
        self._next_due = min(self._next_steps, default=NEVER)

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
        step, is_first = run.step, first == run.first
        if run.rows != self._rows and not is_first:
            for hook in self._run_hooks:
                hook.batch_size_changed(first, run.rows)
        self._rows = run.rows
        if is_first:
            run.watch.started()
            if run.logs_lines:
                run.times.log()
            for hook in self._run_hooks:
                self._call(hook, "started", range(first + 1, step + 1), run.metrics, run.rows)
        if first >= self._next_check:
            self._check_step(first)
        for timer in self._waiting:
            if timer.clock() >= timer.deadline:
                self._next_due = step
        if step >= self._next_due:
            self._call_due_hooks()
        if self._ends is not None:
            self._ends.extend()
        if run.signals.to_stop():
            run.is_interrupted = True
        return run.is_interrupted or run.stopped_by is not None

    def _check_step(self, first: int) -> None:
        """Check, once for each stage, that its step advances the global step by one; waits for the device."""
        run = self._run
        run.is_checking = True
        check_step(run.step, run.state, first)
        run.is_checking = False
        edge = run.stages.edge_after(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due_hooks(self) -> None:
        run = self._run
        step, watch = run.step, run.watch
        error: Exception | None = None
        for i, (hook, timer) in enumerate(zip(self._acting, self._timers, strict=True)):
            if self._next_steps[i] <= step or (timer is not None and timer.clock() >= timer.deadline):
                if watch.current != self._part_of[i]:
                    watch.switch(self._part_of[i])
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
                    self._next_steps[i] = self._due_of[i](step)
                except Exception as raised:
                    error = raised
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if error is not None:
            raise error
        run.calling = None
        self._next_due = min(self._next_steps)

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
        if run.step == run.first or self._is_over:
            return
        self._is_over = True
        errors: list[Exception] = []
        for hook in self._run_hooks:
            try:
                self._call(hook, "after_last", run.step, run.metrics)
            except Exception as error:  # call the other hooks as well
                errors.append(error)
        while True:
            run.calling = (self._hooks[0], "after_last") if self._hooks else None
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
        return True in [bool(hook.before_save(step)) for hook in self._run_hooks]  # a list: each hook must be called

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        self._run.calling = (hook, method)
        if isinstance(hook, RunSaverHook):
            result = getattr(hook, method)(*args)
        else:
            with self._run.watch.part(_part_of(hook)):
                result = getattr(hook, method)(*args)
        self._run.calling = None
        return result

    def ends(self, boundaries: StageBoundaries) -> EndsAhead:
        """The steps at which calls must end, also those at which a hook is due. Close it after the run."""
        run, known = self._run, [hook for hook in self._hooks if hasattr(hook, "next_due")]

        def due_after(step: int) -> int:
            return min((self._due_after(step, hook) for hook in known), default=NEVER)

        self._ends = EndsAhead(boundaries.ends(run.first, run.options.last_step, due_after))
        return self._ends

    def _due_after(self, step: int, hook: Any) -> int:
        self._run.calling = (hook, "next_due")
        due = _next_due(hook, step)
        self._run.calling = None
        return due


def _part_of(hook: Any) -> str:
    """The category of time that a hook counts as; `RunSaverHook` measures its own time when it saves."""
    kinds = ((RunSaverHook, STEPPING), (CheckpointSaverHook, SAVING), (EvaluationHook, EVALUATING))
    return next((part for kind, part in kinds if isinstance(hook, kind)), HOOKS)


def _overrides(hook: Any, method: str) -> bool:
    """Whether a hook overrides a method of `Hook`, which does nothing."""
    if not hasattr(hook, method):
        return False
    return getattr(getattr(hook, method), "__func__", None) is not getattr(Hook, method)


def _next_due(hook: Any, step: int) -> int:
    """The next step at which a call must end for a hook."""
    due = _checked(hook, "next_due", step)
    if due is None and isinstance(hook, RunHook):
        due = hook.next_multiple(step)
    return NEVER if due is None else due


def _timer_of(hook: Any) -> CadenceTimer | None:
    return hook.timer if isinstance(hook, CadencedHook) else None


def _due_of(hook: Any) -> Callable[[int], int]:
    """A function from a step to the next one at which the loop calls a hook: every step by default."""
    if (timer := _timer_of(hook)) is not None:
        return timer.next_multiple
    if not hasattr(hook, "next_due") or (isinstance(hook, CadencedHook) and hook.asks_clock):
        return lambda step: step + 1

    def due_of(step: int) -> int:
        due = _checked(hook, "next_due", step)
        return step + 1 if due is None else due

    return due_of


def _checked(hook: Any, method: str, step: int) -> int | None:
    due = getattr(hook, method)(step)
    if due is None:
        return None
    try:
        later = operator.index(due)
    except TypeError:
        raise TypeError(f"{name_of(hook)}.{method}({step}) returned {kind(due)}: must be a step, or None") from None
    if later <= step:
        raise ValueError(f"{name_of(hook)}.{method}({step}) returned {due}: must be a later step, or None")
    return later
