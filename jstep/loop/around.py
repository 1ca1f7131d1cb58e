"""Calls the hooks of a run when they are due, and does what they return."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jstep.core.checks import kind
from jstep.core.notes import note
from jstep.hooks import CheckpointSaverHook, EvaluationHook
from jstep.hooks.answers import taken_answer
from jstep.hooks.cadence import CadencedHook, Every
from jstep.hooks.hook import NEVER, Hook, name_of
from jstep.hooks.pending import Pending
from jstep.hooks.run_hook import RunHook
from jstep.hooks.sums import Sums
from jstep.loop.drive import At
from jstep.loop.saving import RunSaverHook
from jstep.loop.stages import Edges, lengths
from jstep.state import TrainState
from jstep.timeline import Stopwatch
from jstep.timeline.stopwatch import EVALUATING, HOOKS, SAVING, STEPPING
from jstep.training import last_of


class Around:
    """The hooks of a run, called in their order.

    Args:
        hooks: All of them.
        start: The step the run begins from.
        sums: What hooks add up over intervals.
        pending: What hooks report.
        to_stop: Asked after each call: whether a signal ends the run.
        watch: Where the time goes.
        on_first: Called after the first call.

    Attributes:
        hooks: All of them.
        acting: The hook and the method that is being called, or that raised; None if none is.
        stopped_by: The hook, or the function of a hook, that ended the run; None if none did.
        called_off: Whether a signal did.
        why_one: Why there are calls of one step, where others have several.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        start: int,
        sums: Sums,
        pending: Pending,
        *,
        to_stop: Callable[[], bool],
        watch: Stopwatch,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._watch = watch
        self.hooks = self._hooks = hooks
        self._start, self._to_stop, self._on_first = start, to_stop, on_first
        self._run_hooks = [hook for hook in hooks if isinstance(hook, RunHook)]
        self._sums, self._pending, self._is_summed = sums, pending, sums.is_wanted
        self._before = [hook for hook in hooks if _has_own(hook, "before_step")]
        acting = [hook for hook in hooks if hasattr(hook, "after_step")]
        self._acting = [hook for hook in acting if _has_own(hook, "after_step") or _has_own(hook, "next_due")]
        self._due_of: list[Callable[[int], int]] = []
        self._timers: list[Every | None] = []
        self._waiting: list[Every] = []
        self._part_of = [_part_of(hook) for hook in self._acting]
        self._rows: int | None = None
        self._dues: list[int] = []
        self._next_due = NEVER
        self._act_by: tuple[Any, str] | None = None
        self.stopped_by: str | None = None
        self.called_off = self._is_over = False
        self.why_one = ""

    @property
    def acting(self) -> tuple[Any, str] | None:
        """Who is at work: where a hook hands over what another one reports, that other one."""
        if self._act_by is not None and self._pending.culprit is not None:
            return self._pending.culprit, self._act_by[1]
        return self._act_by

    def begin(self, state: TrainState) -> bool:
        """Begins the hooks; whether one of them wants no step."""
        done = any(self.each("begin", state))
        self._timers = [_timer_of(hook) for hook in self._acting]
        self._waiting = [timer for timer in self._timers if timer is not None]
        self._due_of = [_due_of(hook) for hook in self._acting]
        self._dues = [due_of(self._start) for due_of in self._due_of]
        self._next_due = min(self._dues, default=NEVER)
        return done

    @property
    def before(self) -> Callable[[At], None] | None:
        """What precedes a call; None where no hook wants to know."""
        return self._call_before if self._before else None

    def _call_before(self, at: At) -> None:
        for hook in self._before:
            self._call(hook, "before_step", at.step, at.state)

    def resume(self, at: At) -> bool:
        """Evaluations that a signal cut short are made up for; whether one of them wants no step."""
        done = False
        for hook in self._hooks:
            if isinstance(hook, EvaluationHook):
                answer = self._call(hook, "evaluate_owed", at.step, at.state)
                stop, at.state = taken_answer(answer, at.state, at.step, f"{name_of(hook)}.evaluate_owed")
                if stop:
                    done, self.stopped_by = True, hook.stopped_by or self.stopped_by
        return done

    def after(self, first: int, at: At) -> bool:
        """What follows a call that began at step `first`; whether it was the last one."""
        step = at.step
        if self._is_summed:  # before any hook may change the metrics
            self._sums.add(first, step - first, at.metrics, at.stacked)
        if at.rows != self._rows and first != self._start:
            for hook in self._run_hooks:
                hook.batch_size_changed(first, at.rows)
        self._rows = at.rows
        if first == self._start:
            self._watch.started()
            self._on_first()
            for hook in self._run_hooks:
                self._call(hook, "started", range(first + 1, step + 1), at.metrics, at.rows)
        for timer in self._waiting:
            if timer.clock() >= timer.deadline:
                self._next_due = step
        if step >= self._next_due:
            self._act(at)
        if self._to_stop():
            self.called_off = True
        return self.called_off or self.stopped_by is not None

    def _act(self, at: At) -> None:
        step, metrics, watch = at.step, _last_metrics(at), self._watch
        error: Exception | None = None
        for i, (hook, timer) in enumerate(zip(self._acting, self._timers, strict=True)):
            if self._dues[i] <= step or (timer is not None and timer.clock() >= timer.deadline):
                if watch.current != self._part_of[i]:
                    watch.switch(self._part_of[i])
                if error is not None:
                    self._besides(error, hook, at, metrics)
                    continue
                self._act_by = (hook, "after_step")
                if not isinstance(hook, RunHook):
                    self._sums.flush()
                try:
                    answer = hook.after_step(step, at.state, metrics)
                    if answer is not None and answer is not False:
                        stop, at.state = taken_answer(answer, at.state, step, f"{name_of(hook)}.after_step")
                        if stop and self.stopped_by is None:
                            self.stopped_by = getattr(hook, "stopped_by", None) or name_of(hook)
                    self._dues[i] = self._due_of[i](step)
                except Exception as raised:
                    error = raised
        if watch.current != STEPPING:
            watch.switch(STEPPING)
        if error is not None:
            raise error
        self._act_by = None
        self._next_due = min(self._dues)

    def _besides(self, error: Exception, hook: Any, at: At, metrics: Any) -> None:
        """The hooks after one that raised see the step, too: what they write of it is not missing after a restart.

        But for what saves, which is left to who handles the error.
        """
        try:
            if not isinstance(hook, CheckpointSaverHook):
                answer = hook.after_step(at.step, at.state, metrics)
                _, at.state = taken_answer(answer, at.state, at.step, f"{name_of(hook)}.after_step")
        except Exception as other:
            note(error, f"Besides, {other}")

    def last(self, at: At, failed: Callable[[Exception], None] | None = None) -> None:
        """What follows the last call, once; `failed` takes what hooks raise where another error is under way."""
        if at.step == self._start or self._is_over:
            return
        self._is_over = True
        errors: list[Exception] = []
        for hook in self._run_hooks:
            try:
                self._call(hook, "after_last", at.step, _last_metrics(at))
            except Exception as error:  # the others are still to be called
                errors.append(error)
        while True:
            self._act_by = (self._hooks[0], "after_last") if self._hooks else None
            try:
                self._pending.hand_over_all()
                break
            except Exception as error:  # what it failed at is gone: the others' rows are still to come
                errors.append(error)
        self._act_by = self._act_by if errors else None
        if failed is None and errors:
            raise errors[0]
        for one in errors:
            if failed is not None:
                failed(one)

    def end(self, at: At) -> None:
        """What follows a run that came to its end."""
        for hook in self._hooks:
            if hasattr(hook, "end"):
                answer = self._call(hook, "end", at.step, at.state)
                _, at.state = taken_answer(answer, at.state, at.step, f"{name_of(hook)}.end")

    def before_save(self, step: int) -> bool:
        """What precedes each checkpoint: all that was reported is handed over; whether a hook prevents the save."""
        self._pending.hand_over_all()
        return True in [bool(hook.before_save(step)) for hook in self._run_hooks]  # each of them is asked

    def each(self, method: str, *args: Any) -> list[bool]:
        """Calls a method of all hooks that have it."""
        return [bool(self._call(hook, method, *args)) for hook in self._hooks if hasattr(hook, method)]

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        self._act_by = (hook, method)
        if isinstance(hook, RunSaverHook):
            answer = getattr(hook, method)(*args)
        else:
            with self._watch.part(_part_of(hook)):
                answer = getattr(hook, method)(*args)
        self._act_by = None
        return answer

    def lengths(self, last_step: int, steps_per_call: int, edges: Edges) -> Iterator[int]:
        """How many steps each call takes: `steps_per_call`, or one at a time where a hook is due before their end."""
        known = [hook for hook in self._hooks if hasattr(hook, "next_due")]

        def end_after(step: int) -> tuple[int, str]:
            end, why = edges.after(step, last_step)
            due, hook = min(((_next_due(hook, step), i) for i, hook in enumerate(known)), default=(NEVER, -1))
            return (due, f"a hook is due at step {due} ({name_of(known[hook])})") if due < end else (end, why)

        def why_one(why: str) -> None:
            self.why_one = self.why_one or why

        return lengths(self._start, last_step, steps_per_call, end_after, why_one)


def _part_of(hook: Any) -> str:
    """Which part of a run's time a hook takes; what saves the run itself says so where it saves."""
    kinds = ((RunSaverHook, STEPPING), (CheckpointSaverHook, SAVING), (EvaluationHook, EVALUATING))
    return next((part for kind, part in kinds if isinstance(hook, kind)), HOOKS)


def _last_metrics(at: At) -> Any:
    return last_of(at.metrics) if at.stacked else at.metrics


def _has_own(hook: Any, method: str) -> bool:
    """Whether a hook has a method of its own, not the one of `Hook` that does nothing."""
    if not hasattr(hook, method):
        return False
    return getattr(getattr(hook, method), "__func__", None) is not getattr(Hook, method)


def _next_due(hook: Any, step: int) -> int:
    """The next step at which a call has to end for a hook."""
    due = _checked(hook, "next_due", step)
    if due is None and isinstance(hook, RunHook):
        due = hook.next_multiple(step)
    return NEVER if due is None else due


def _timer_of(hook: Any) -> Every | None:
    return hook.timer if isinstance(hook, CadencedHook) else None


def _due_of(hook: Any) -> Callable[[int], int]:
    """From a step to the next one at which the loop calls a hook: the very next where the hook does not say."""
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
