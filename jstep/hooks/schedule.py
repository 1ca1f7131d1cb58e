"""When a hook is due in a run, and where it ends calls of several steps."""

import math
import operator
from typing import Any

from jstep.core import processes
from jstep.core.agreed_clock import AgreedClock
from jstep.core.checks import describe_type, hook_name
from jstep.hooks.cadence import NEVER, Cadence
from jstep.hooks.run_hook import hook_cadence


def next_call(hook: object, step: int) -> tuple[int, int]:
    """Return the next step at which a hook is due by steps, and the next one at which it ends a call."""
    cadence = hook_cadence(hook)
    named = _named_step(hook, step)
    if cadence is None:
        if named is None:  # after every call, wherever these end
            return step + 1, NEVER
        return named, named
    multiple = cadence.next_multiple(step)
    end = NEVER
    if cadence.ends_calls:
        end = multiple if named is None else named
    if cadence.secs is not None:
        # Its seconds have a deadline of their own.
        return multiple, end
    return (step + 1 if named is None else named), end


def _named_step(hook: Any, step: int) -> int | None:
    """Return what `next_due` of a hook returns, checked."""
    answer = hook.next_due(step) if hasattr(hook, "next_due") else None
    if answer is None:
        return None
    call = f"{hook_name(hook)}.next_due({step})"
    try:
        named = operator.index(answer)
    except TypeError:
        raise TypeError(f"{call} returned {describe_type(answer)}: must be a step, or None") from None
    if named <= step:
        raise ValueError(f"{call} returned {answer}: must be a later step, or None")
    return named


class HookSchedule:
    """The schedule of a hook in a run.

    Attributes:
        cadence: That of the hook when the run began; `next` follows one that a hook changes.
        next: The next step at which the hook is due by steps.
        deadline: The time at which it is due by seconds; infinite if it is not, or if all processes agree on it.
        called: The last step at which the hook was called, or the first step of the run.
    """

    def __init__(self, hook: Any, step: int) -> None:
        self.hook = hook
        self.cadence = hook_cadence(hook) or Cadence()
        self.deadline = math.inf
        self._agreed: AgreedClock | None = None
        if self.cadence.secs is not None and self.cadence.together and not processes.is_single_process():
            self._agreed = AgreedClock(self.cadence.interval(), self.cadence.clock)
        self.reschedule(step)

    def is_due(self, step: int) -> bool:
        """Whether the hook is due; every process must call this after every call."""
        if self._agreed is not None:
            # Ask in any case, because all processes must do so at the same steps.
            return self._agreed.due(step) or self.cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.cadence.clock() >= self.deadline)

    def may_be_due(self, step: int) -> bool:
        """Whether `is_due` may return True at this step; any process may ask this, at any time."""
        return step >= self.next or self.deadline != math.inf

    def is_due_at_last_step(self, step: int) -> bool:
        cadence = self.cadence
        has_acted = self.called == step and (cadence.secs is not None or cadence.has_multiple(step))
        return cadence.at_last_step and (cadence.again_at_last_step or not has_acted)

    def reschedule(self, step: int) -> None:
        self.called = step
        if self._agreed is not None:
            self._agreed.done(self.cadence.interval())
            self.next = 0  # ask after every call
            return
        if self.cadence.secs is not None:
            self.deadline = self.cadence.interval() + self.cadence.clock()
        self.next, _ = next_call(self.hook, step)
