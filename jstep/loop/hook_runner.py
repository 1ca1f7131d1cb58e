"""Call hooks when they are due, and apply their results."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jstep.core.checks import kind
from jstep.core.notes import note
from jstep.hooks import CheckpointSaverHook, EvaluationHook
from jstep.hooks.async_transfer import TransferQueue
from jstep.hooks.cadence import CadencedHook, CadenceTimer
from jstep.hooks.hook import NEVER, Hook, check_step, name_of
from jstep.hooks.hook_results import check_hook_result
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.run_hook import RunHook
from jstep.loop.run_saver_hook import RunSaverHook
from jstep.loop.run_steps import LoopState
from jstep.loop.stages import EndsAhead, StageBoundaries
from jstep.state import TrainState
from jstep.timeline import Stopwatch
from jstep.timeline.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING


class HookRunner:
    """The hooks of a run, called in order.

    Args:
        hooks: All hooks.
        start: The step at which the run begins.
        sums: The sums of metrics over the hooks' intervals.
        transfers: The asynchronous transfers of metrics to hooks that report.
        to_stop: Called after each call; returns whether a signal ends the run.
        watch: The stopwatch of the run.
        on_first: Called after the first call.
        edge_after: Maps a step to the next one at which a stage begins, or to None.

    Attributes:
        hooks: All hooks.
        current_call: The hook and the method that is being called, or that raised; None if none is.
        stopped_by: The name of the hook, or of the callback of a hook, that ended the run; None if none did.
        interrupted: Whether a signal ended the run.
        is_checking: Whether the first state of a stage is being checked.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        start: int,
        sums: MetricSums,
        transfers: TransferQueue,
        *,
        to_stop: Callable[[], bool],
        watch: Stopwatch,
        on_first: Callable[[], None] = lambda: None,
        edge_after: Callable[[int], int | None] = lambda step: None,
    ) -> None:
        self._watch = watch
        self.hooks = self._hooks = hooks
        self._start, self._to_stop, self._on_first = start, to_stop, on_first
        self._run_hooks = [hook for hook in hooks if isinstance(hook, RunHook)]
        self._sums, self._transfers = sums, transfers
        self._before = [hook for hook in hooks if _overrides(hook, "before_step")]
        acting = [hook for hook in hooks if hasattr(hook, "after_step")]
        self._acting = [hook for hook in acting if _overrides(hook, "after_step") or _overrides(hook, "next_due")]
        self._due_of: list[Callable[[int], int]] = []
        self._timers: list[CadenceTimer | None] = []
        self._waiting: list[CadenceTimer] = []
        self._part_of = [_part_of(hook) for hook in self._acting]
        self._rows: int | None = None
        self._ends: EndsAhead | None = None
        self._next_steps: list[int] = []
        self._next_due = NEVER
        self._calling: tuple[Any, str] | None = None
        self.stopped_by: str | None = None
        self.interrupted = self._is_over = self.is_checking = False
        self._edge_after, self._next_check = edge_after, start

    @property
    def current_call(self) -> tuple[Any, str] | None:
        """The hook and method that is running; if a hook delivers the metrics of another, that other hook."""
        if self._calling is not None and self._transfers.failed_owner is not None:
            return self._transfers.failed_owner, self._calling[1]
        return self._calling

    def begin(self, state: TrainState) -> bool:
        """Begin the hooks; return whether one of them ends the run before any step."""
        done = any(self.each("begin", state))
        self._timers = [_timer_of(hook) for hook in self._acting]
        self._waiting = [timer for timer in self._timers if timer is not None]
        self._due_of = [_due_of(hook) for hook in self._acting]
        self._next_steps = [due_of(self._start) for due_of in self._due_of]
        self._next_due = min(self._next_steps, default=NEVER)
        return done

    @property
    def before(self) -> Callable[[LoopState], None] | None:
        """Function that runs `before_step` before each call; None if no hook has one."""
        return self._call_before if self._before else None

    def _call_before(self, loop: LoopState) -> None:
        for hook in self._before:
            self._call(hook, "before_step", loop.step, loop.state)

    def resume(self, loop: LoopState) -> bool:
        """Repeat evaluations that a signal interrupted; return whether one of them ends the run before any step."""
        done = False
        for hook in self._hooks:
            if isinstance(hook, EvaluationHook):
                result = self._call(hook, "evaluate_owed", loop.step, loop.state)
                stop, loop.state = check_hook_result(result, loop.state, loop.step, f"{name_of(hook)}.evaluate_owed")
                if stop:
                    done, self.stopped_by = True, hook.stopped_by or self.stopped_by
        return done

    def after(self, first: int, loop: LoopState) -> bool:
        """Run hooks after a call that began at step `first`; return whether the run stops here."""
        step = loop.step
        if loop.rows != self._rows and first != self._start:
            for hook in self._run_hooks:
                hook.batch_size_changed(first, loop.rows)
        self._rows = loop.rows
        if first == self._start:
            self._watch.started()
            self._on_first()
            for hook in self._run_hooks:
                self._call(hook, "started", range(first + 1, step + 1), loop.metrics, loop.rows)
        if first >= self._next_check:
            self._check_step(first, loop)
        for timer in self._waiting:
            if timer.clock() >= timer.deadline:
                self._next_due = step
        if step >= self._next_due:
            self._call_due_hooks(loop)
        if self._ends is not None:
            self._ends.extend()
        if self._to_stop():
            self.interrupted = True
        return self.interrupted or self.stopped_by is not None

    def _check_step(self, first: int, loop: LoopState) -> None:
        """Check, once for each stage, that its step advances the global step by one; waits for the device."""
        self.is_checking = True
        check_step(loop.step, loop.state, first)
        self.is_checking = False
        edge = self._edge_after(first)
        self._next_check = NEVER if edge is None else edge

    def _call_due_hooks(self, loop: LoopState) -> None:
        step, metrics, watch = loop.step, loop.metrics, self._watch
        error: Exception | None = None
        for i, (hook, timer) in enumerate(zip(self._acting, self._timers, strict=True)):
            if self._next_steps[i] <= step or (timer is not None and timer.clock() >= timer.deadline):
                if watch.current != self._part_of[i]:
                    watch.switch(self._part_of[i])
                if error is not None:
                    self._call_after_error(error, hook, loop, metrics)
                    continue
                self._calling = (hook, "after_step")
                if not isinstance(hook, RunHook):
                    self._sums.flush()
                try:
                    result = hook.after_step(step, loop.state, metrics)
                    if result is not None and result is not False:
                        stop, loop.state = check_hook_result(result, loop.state, step, f"{name_of(hook)}.after_step")
                        if stop and self.stopped_by is None:
                            self.stopped_by = getattr(hook, "stopped_by", None) or name_of(hook)
                    self._next_steps[i] = self._due_of[i](step)
                except Exception as raised:
                    error = raised
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if error is not None:
            raise error
        self._calling = None
        self._next_due = min(self._next_steps)

    def _call_after_error(self, error: Exception, hook: Any, loop: LoopState, metrics: Any) -> None:
        """Call a hook that follows one that raised, so that its output for this step is not missing after a restart.

        Hooks that save are not called; the handler of the error saves.
        """
        try:
            if not isinstance(hook, CheckpointSaverHook):
                result = hook.after_step(loop.step, loop.state, metrics)
                _, loop.state = check_hook_result(result, loop.state, loop.step, f"{name_of(hook)}.after_step")
        except Exception as other:
            note(error, f"Additionally, {other}")

    def last(self, loop: LoopState, failed: Callable[[Exception], None] | None = None) -> None:
        """Run hooks after the last call, once; `failed` receives their exceptions while another error is handled."""
        if loop.step == self._start or self._is_over:
            return
        self._is_over = True
        errors: list[Exception] = []
        for hook in self._run_hooks:
            try:
                self._call(hook, "after_last", loop.step, loop.metrics)
            except Exception as error:  # call the other hooks as well
                errors.append(error)
        while True:
            self._calling = (self._hooks[0], "after_last") if self._hooks else None
            try:
                self._transfers.deliver_all()
                break
            except Exception as error:  # drop the failed row and deliver the others
                errors.append(error)
        self._calling = self._calling if errors else None
        if failed is None and errors:
            raise errors[0]
        for one in errors:
            if failed is not None:
                failed(one)

    def end(self, loop: LoopState) -> None:
        """Call `end` of the hooks after a run that was not interrupted."""
        for hook in self._hooks:
            if hasattr(hook, "end"):
                result = self._call(hook, "end", loop.step, loop.state)
                _, loop.state = check_hook_result(result, loop.state, loop.step, f"{name_of(hook)}.end")

    def before_save(self, step: int) -> bool:
        """Deliver all pending metrics before a checkpoint; return whether a hook prevents the save."""
        self._transfers.deliver_all()
        return True in [bool(hook.before_save(step)) for hook in self._run_hooks]  # a list: each hook must be called

    def each(self, method: str, *args: Any) -> list[bool]:
        """Call a method of all hooks that have it, and return the results as bools."""
        return [bool(self._call(hook, method, *args)) for hook in self._hooks if hasattr(hook, method)]

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        self._calling = (hook, method)
        if isinstance(hook, RunSaverHook):
            result = getattr(hook, method)(*args)
        else:
            with self._watch.part(_part_of(hook)):
                result = getattr(hook, method)(*args)
        self._calling = None
        return result

    def ends(self, last_step: int, boundaries: StageBoundaries) -> EndsAhead:
        """The steps at which calls must end, also those at which a hook is due. Close it after the run."""
        known = [hook for hook in self._hooks if hasattr(hook, "next_due")]

        def due_after(step: int) -> int:
            return min((self._due_after(step, hook) for hook in known), default=NEVER)

        self._ends = EndsAhead(boundaries.ends(self._start, last_step, due_after))
        return self._ends

    def _due_after(self, step: int, hook: Any) -> int:
        self._calling = (hook, "next_due")
        due = _next_due(hook, step)
        self._calling = None
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
