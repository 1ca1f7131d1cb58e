"""What happens around the steps: hooks are called when they are due, and what they answer is done."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jstep.core.checks import kind
from jstep.hooks import CheckpointSaverHook, StepCounterHook
from jstep.hooks.answers import taken_answer
from jstep.hooks.cadence import CadencedHook
from jstep.hooks.hook import NEVER, name_of
from jstep.loop.drive import At
from jstep.state import TrainState
from jstep.training import last_of


class Around:
    """The hooks of a run, called in their order.

    Args:
        hooks: All of them.
        start: The step the run begins from.
        stacked: Whether calls make several steps, whose metrics are stacked.
        to_stop: Asked after each call: whether a signal ends the run.

    Attributes:
        acting: The hook and the method that is being called, or that raised; None where none is.
        stopped: Whether a hook ended the run.
        called_off: Whether a signal did.
    """

    def __init__(self, hooks: Sequence[Any], start: int, *, stacked: bool, to_stop: Callable[[], bool]) -> None:
        self._hooks, self._start, self._stacked, self._to_stop = hooks, start, stacked, to_stop
        self._acting = [hook for hook in hooks if hasattr(hook, "after_step")]
        self._due_of = [_due_of(hook) for hook in self._acting]
        self._dues: list[int] = []
        self._next_due = NEVER
        self.acting: tuple[Any, str] | None = None
        self.stopped = self.called_off = self._is_over = False

    def begin(self, state: TrainState) -> bool:
        """Begins the hooks; whether one of them wants no step."""
        done = any(self.each("begin", state))
        self._dues = [due_of(self._start) for due_of in self._due_of]
        self._next_due = min(self._dues, default=NEVER)
        return done

    def resume(self, at: At) -> bool:
        """Evaluations that a signal cut short are made up for; whether one of them wants no step."""
        done = False
        for hook in self._hooks:
            if hasattr(hook, "evaluate_owed"):
                answer = self._call(hook, "evaluate_owed", at.step, at.state)
                stop, at.state = taken_answer(answer, at.state, at.step, f"{name_of(hook)}.evaluate_owed")
                done = done or stop
        return done

    def after(self, first: int, at: At) -> bool:
        """What follows a call that began at step `first`; whether it was the last one."""
        step = at.step
        if first == self._start:
            self._first(first, at)
        if self._stacked:
            self.each("after_call", range(first + 1, step + 1), at.metrics)
        if step >= self._next_due:
            self._act(at)
        if self._to_stop():
            self.called_off = True
        return self.called_off or self.stopped

    def _first(self, first: int, at: At) -> None:
        for hook in self._hooks:
            if isinstance(hook, StepCounterHook):
                self._call(hook, "started", range(first + 1, at.step + 1), at.metrics, at.rows)
            elif hasattr(hook, "after_first_call"):
                self._call(hook, "after_first_call", at.step)

    def _act(self, at: At) -> None:
        step = at.step
        metrics = last_of(at.metrics) if self._stacked else at.metrics
        error: Exception | None = None
        for i, hook in enumerate(self._acting):
            if self._dues[i] <= step:
                if error is not None:
                    self._besides(error, hook, at, metrics)
                    continue
                self.acting = (hook, "after_step")
                try:
                    answer = hook.after_step(step, at.state, metrics)
                    if answer is not None:
                        stop, at.state = taken_answer(answer, at.state, step, f"{name_of(hook)}.after_step")
                        self.stopped = self.stopped or stop
                    self._dues[i] = self._due_of[i](step)
                except Exception as raised:
                    error = raised
        if error is not None:
            raise error
        self.acting = None
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
            error.add_note(f"Besides, {other}")

    def last(self, at: At, failed: Callable[[Exception], None] | None = None) -> None:
        """What follows the last call, once; `failed` takes what hooks raise where another error is under way."""
        if at.step == self._start or self._is_over:
            return
        self._is_over = True
        errors: list[Exception] = []
        for hook in self._hooks:
            if hasattr(hook, "after_last"):
                try:
                    metrics = last_of(at.metrics) if self._stacked else at.metrics
                    self._call(hook, "after_last", at.step, metrics)
                except Exception as error:  # the others are still to be called
                    errors.append(error)
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

    def each(self, method: str, *args: Any) -> list[bool]:
        """Calls a method of all hooks that have it."""
        return [bool(self._call(hook, method, *args)) for hook in self._hooks if hasattr(hook, method)]

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        self.acting = (hook, method)
        answer = getattr(hook, method)(*args)
        self.acting = None
        return answer

    def lengths(self, last_step: int, steps_per_call: int) -> Iterator[int]:
        """How many steps each call makes: no hook that says when it is due is passed over."""
        step = self._start
        names = ("next_due", "next_multiple")
        known = [(hook, name) for hook in self._hooks for name in names if hasattr(hook, name)]
        while step < last_step:
            dues = [_checked(hook, name, step) for hook, name in known]
            end = min([step + steps_per_call, last_step, *(due for due in dues if due is not None)])
            yield end - step
            step = end


def _due_of(hook: Any) -> Callable[[int], int]:
    """From a step to the next one at which the loop calls a hook: the very next where the hook does not say."""
    next_due = getattr(hook, "next_due", None)
    if next_due is None or (isinstance(hook, CadencedHook) and hook.asks_clock):
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
