"""When something is due in a run: only `Timetable` decides."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jstep.core import processes
from jstep.core.agreed_clock import AgreedClock
from jstep.core.checks import describe_type, hook_name
from jstep.core.exceptions import note
from jstep.hooks.cadence import NEVER, Cadence, hook_cadence


def next_call(hook: object, step: int) -> tuple[int, int]:
    """Return the next step at which a hook is due by steps, and the next where it ends a call."""
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
    next_due = step + 1 if named is None else named
    return next_due, end


def _named_step(hook: Any, step: int) -> int | None:
    """Return what `next_due` of a hook returns, checked."""
    answer = hook.next_due(step) if hasattr(hook, "next_due") else None
    if answer is None:
        return None
    call = f"{hook_name(hook)}.next_due({step})"
    try:
        named = operator.index(answer)
    except TypeError:
        raise TypeError(
            f"{call} returned {describe_type(answer)}: must be a step, or None"
        ) from None
    if named <= step:
        raise ValueError(f"{call} returned {answer}: must be a later step, or None")
    return named


class Entry:
    """A hook in a timetable.

    Attributes:
        cadence: The hook's cadence when the run began; `next` is computed from its current one.
        next: The next step at which the hook is due by steps.
        deadline: The time at which it is due by seconds; infinite if it is not, or if all processes
            agree on it.
        called: The last step at which the hook was called, or the first step of the run.
    """

    def __init__(self, hook: Any, step: int, *, is_saver: bool) -> None:
        self.hook = hook
        self.is_saver = is_saver
        self.cadence = hook_cadence(hook) or Cadence()
        self.deadline = math.inf
        self._began = 0.0  # the interval of seconds, by the clock of the cadence
        self._agreed: AgreedClock | None = None
        if (
            self.cadence.secs is not None
            and self.cadence.together
            and not processes.is_single_process()
        ):
            self._agreed = AgreedClock(self.cadence.interval, self.cadence.clock)
        self.reschedule(step)

    def is_due(self, step: int) -> bool:
        """Whether the hook is due; every process must call this after every call."""
        if self._agreed is not None:
            # Ask in any case, because all processes must do so at the same steps.
            return self._agreed.due(step) or self.cadence.has_multiple(step)
        if step >= self.next:
            return True
        return self.deadline != math.inf and self._is_late()

    def _is_late(self) -> bool:
        cadence = self.cadence
        if cadence.clock() < self.deadline:
            return False
        # Asked again: an interval that the cadence computes may have grown since it began.
        self.deadline = self._began + cadence.interval()
        return cadence.clock() >= self.deadline

    def may_be_due(self, step: int) -> bool:
        """Whether `is_due` may return True at this step; any process may ask this, at any time."""
        return step >= self.next or self.deadline != math.inf

    def is_due_at_last_step(self, step: int) -> bool:
        cadence = self.cadence
        has_acted = self.called == step and (cadence.secs is not None or cadence.has_multiple(step))
        return cadence.at_last_step and (cadence.again_at_last_step or not has_acted)

    def reschedule(self, step: int) -> None:
        """Plan the next call after one at `step`."""
        self.called = step
        if self._agreed is not None:
            self._agreed.done()
            self.next = 0  # ask after every call
            return
        if self.cadence.secs is not None:
            self._began = self.cadence.clock()
            self.deadline = self._began + self.cadence.interval()
        self.next, _ = next_call(self.hook, step)


class Timetable:
    """When something is due in a run.

    | what | is due | the answer |
    |---|---|---|
    | a user's hook | at the step that `next_due` returns; if None, after each call | `due_hooks` |
    | a built-in hook | at multiples of its steps, and its seconds after its call | `due_hooks` |
    | a saver | likewise; noted after a call, saves between iterations | `next_save`, `due_savers` |
    | any of them, at the last step | if its cadence wants that | `due_at_last_step` |
    | the check of the step | after the first call, and the first one of each stage | `next_check` |
    | the body of the loop | after each call, or at multiples of `body_interval` | `is_body_due` |
    | the end of a call of several steps | at the next hook, body or log line | `next_end` |

    After each call it compares steps and reads clocks. `next_due` of a hook is called only after
    the hook was called, and to find where a call of several steps ends. If all processes must act
    together, the clock of process 0 decides (`AgreedClock`).

    Args:
        next_stage_start: `next_stage_start(step)`: the step at which the next stage begins; None if
            there is none.
        log_steps: The interval of the lines that process 0 logs: all processes end a call there.
        save_steps: The interval of the checkpoints of the run, in steps.

    Attributes:
        next_hook: The next step at which a hook that does not save is due.
        next_save: The next step at which a saver is due.
        next_check: The step of the state is read after the first call that begins at this step or
            later.
        body_interval: The interval in steps at which the body runs; None for every call.
    """

    def __init__(
        self,
        next_stage_start: Callable[[int], int | None] = lambda step: None,
        *,
        log_steps: int | None = None,
        save_steps: int | None = None,
    ) -> None:
        self._next_stage_start = next_stage_start
        self._lines = Cadence(log_steps)
        self._saves = Cadence(save_steps)
        # Empty until the hooks have begun, as a hook may choose its cadence in `begin`.
        self._hooks: list[Entry] = []
        self._savers: list[Entry] = []
        self._timed: list[Entry] = []  # those with a deadline
        self.next_hook = NEVER
        self.next_save = NEVER
        self.next_check = 0
        self.body_interval: int | None = None

    def begin(self, hooks: Sequence[Any], savers: Sequence[Any], step: int) -> None:
        """Plan the first call of each hook, in the order in which they are called."""
        self._hooks = [Entry(hook, step, is_saver=False) for hook in hooks]
        self._savers = [Entry(hook, step, is_saver=True) for hook in savers]
        self._timed = [entry for entry in self._entries() if entry.deadline != math.inf]
        self.update()

    def _entries(self) -> list[Entry]:
        return [*self._hooks, *self._savers]

    def update(self) -> None:
        """Update the next steps after hooks were called."""
        self.next_hook = min((entry.next for entry in self._hooks), default=NEVER)
        self.next_save = min((entry.next for entry in self._savers), default=NEVER)

    # After each call.

    def read_clocks(self, step: int) -> None:
        """Note the hooks that are due by seconds.

        The clock of each hook is read again at its turn, as those before it may take long.
        """
        for entry in self._timed:
            if entry.cadence.clock() < entry.deadline:
                continue
            if entry.is_saver:
                self.next_save = step
            else:
                self.next_hook = step

    def due_hooks(self, step: int) -> Iterator[Entry]:
        """Yield the hooks that are due, except savers.

        Whether one is due is decided after those before it have been called.
        """
        return (entry for entry in self._hooks if entry.is_due(step))

    def due_savers(self, step: int) -> Iterator[Entry]:
        return (entry for entry in self._savers if entry.is_due(step))

    def may_be_due_behind(self, hook: Any, step: int) -> Iterator[Any]:
        """Yield the hooks behind this one that may be due, except savers.

        A hook with a clock counts as due: an `AgreedClock` can be read only once, at the hook's
        turn.
        """
        is_behind = False
        for entry in self._hooks:
            if is_behind and entry.may_be_due(step):
                yield entry.hook
            is_behind = is_behind or entry.hook is hook

    def acts_at(self, hook: object, step: int) -> bool:
        """Whether a built-in hook does its work at a step after which it is called.

        It does not at a step that only the `next_due` of a subclass names, or that was planned
        before the interval of a `History` was restored. A saver does: it is called at the end of an
        iteration in which it was due.
        """
        cadence = hook_cadence(hook)
        if cadence is None or cadence.secs is not None or not cadence.ends_calls:
            return True
        return cadence.has_multiple(step) or any(entry.hook is hook for entry in self._savers)

    def plan_check(self, first: int) -> None:
        """Plan the next check of the step, after the check of the call that began at `first`."""
        next_stage = self._next_stage_start(first)
        self.next_check = NEVER if next_stage is None else next_stage

    def restart_computed_intervals(self, step: int) -> None:
        """Restart the intervals of automatic saves: from the first step, which compiles."""
        for entry in self._entries():
            if callable(entry.cadence.secs):
                entry.reschedule(step)

    def is_body_due(self, step: int) -> bool:
        return self.body_interval is None or step % self.body_interval == 0

    def due_at_last_step(self, step: int) -> list[Any]:
        """Return the hooks that are called after the last step of a run, due or not."""
        return [entry.hook for entry in self._entries() if entry.is_due_at_last_step(step)]

    # Ahead of calls.

    def next_end(self, hooks: Sequence[Any], step: int) -> int:
        """Return the next step at which a call of several steps ends.

        It ends where a hook, a log line or the body is due. This calls `next_due` again, as other
        code may have changed its result; then the call only ends earlier.
        """
        body = Cadence(self.body_interval)
        end = min(self._lines.next_multiple(step), body.next_multiple(step))
        for hook in hooks:
            try:
                _, end_of_hook = next_call(hook, step)
            except Exception as error:
                note(
                    error,
                    f"jstep: in {hook_name(hook)}.next_due({step}), which says where calls end",
                )
                raise
            end = min(end, end_of_hook)
        return end

    def next_planned_save(self, step: int) -> int:
        """Return the next step at which the run saves by its interval in steps.

        Any thread may ask this.
        """
        return self._saves.next_multiple(step)
