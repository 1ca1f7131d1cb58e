"""The state of a run's loop: where it is, in which phase, which hook it calls, and which one stopped it.

The loop's thread writes it, except failures and the file of the start.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from jstep.core.annotations import Tree
from jstep.core.checks import hook_name
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING
from jstep.hooks.hook import Hook, check_hook_result
from jstep.hooks.run_hook import Poll, RunHook
from jstep.record.starts import StartFile

_T = TypeVar("_T")

BEGINNING, RUNNING, ENDING, LEAVING, CLOSING = "beginning", "running", "ending", "leaving", "closing"
"""The phases of a run: before its first call, while it takes steps, after its last call, after a signal, at the end."""


class HookCall(NamedTuple):
    hook: Any
    method: str

    @property
    def is_users(self) -> bool:
        return not isinstance(self.hook, RunHook)

    @property
    def part(self) -> str:
        """The stopwatch category of its time."""
        return HOOKS if self.is_users else str(self.hook.part)

    @property
    def thing(self) -> Hashable:
        """The key of its recorded duration: a save, an evaluation, or this method of the hook."""
        if self.part == HOOKS or self.method == "begin":
            return id(self.hook), self.method
        return (id(self.hook), EVALUATING) if self.part == EVALUATING else SAVING


class At(NamedTuple):
    """Where a loop over calls is; replaced as a whole, so that no thread sees the state of another step.

    Attributes:
        state: The latest state, including changes by hooks.
        rows: The number of rows of the last batch; None if unknown.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None


@dataclasses.dataclass
class LoopState:
    """The position of the loop of a run, and what it is doing.

    Attributes:
        first: The step at which the loop begins; while a checkpoint is restored, an assumption.
        is_known: Whether `first` is set.
        finite_at: The latest step with parameters that were found to be finite.
        restoring: The step of the checkpoint that is being restored.
        is_restored: Whether the loop began from a checkpoint.
        calling: The call of a hook that is in progress, or that raised.
        stopped_by: The first hook that ended the run.
        pending: The polls of hooks: `check()` is called after each call while it returns True, and `check(wait=True)`
            after the last step.
        failures: The errors of logs, raised after the next call or save; any thread may add one.
        file: The file of this start, while it is open; any thread writes it.
    """

    at: At
    first: int = 0
    is_known: bool = False
    finite_at: int = 0
    restoring: int | None = None
    is_restored: bool = False
    phase: str = BEGINNING
    calling: HookCall | None = None
    stopped_by: str | None = None
    pending: deque[tuple[Hook, Poll]] = dataclasses.field(default_factory=deque)
    failures: deque[tuple[HookCall, Exception]] = dataclasses.field(default_factory=deque)
    file: StartFile | None = None

    @property
    def is_over(self) -> bool:
        return self.phase not in (BEGINNING, RUNNING)

    def expect(self, first: int, restoring: int | None) -> None:
        """Assume where the loop will begin, before the checkpoint of a step, if any, is restored."""
        self.first, self.is_known, self.restoring = first, True, restoring

    def begin(self, step: int, state: Tree, *, restored: bool) -> None:
        self.expect(step, None)
        self.at, self.is_restored, self.finite_at = At(step, state), restored, step

    def during(self, call: HookCall, fn: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Return `fn(*args)`, which is a call of a hook; if it raises, `calling` still names it."""
        self.calling = call
        result = fn(*args, **options)
        self.calling = None
        return result

    def apply(self, call: HookCall, result: Any) -> bool:
        """Check what a hook returned, and continue with its state if it is one; return whether it ends the run."""
        stop, state = check_hook_result(result, self.at.state, self.at.step, f"{hook_name(call.hook)}.{call.method}")
        if state is not self.at.state:
            self.replace_state(state)
        return stop

    def replace_state(self, state: Tree) -> None:
        self.at = self.at._replace(state=state)

    def stop(self, by: str | None) -> None:
        """End the run after this step; the first hook that does so is named."""
        self.stopped_by = self.stopped_by or by
