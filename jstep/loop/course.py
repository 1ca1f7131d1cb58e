"""The course of a run: where it is, what it is doing, and what ends it; the one state machine of the loop.

| status | from | to | saved after an error or a stall |
|---|---|---|---|
| `BEGINNING` | the start | `READY`; `ENDING`, if there is no step to take | nothing |
| `READY` | the hooks have begun | `BETWEEN`, by the first batch; `ENDING`, if it is stopped before | nothing |
| `BETWEEN` | the first batch; the end of an iteration | `WITHIN`; `ENDING`; `LEAVING`, by a signal | the state |
| `WITHIN` | `before_step`, a call, or a body that makes batches | `BETWEEN`, after the body; `BROKEN` | nothing |
| `ENDING` | the last iteration; an error or a signal between two | `CLOSING` | the state |
| `LEAVING` | a signal between two iterations | `ENDING`, by the exception that it raises | the state |
| `BROKEN` | an error within an iteration | `CLOSING` | nothing |
| `CLOSING` | the end of all hooks | | |

An iteration is defined in `stopping.py`. A run of `train` has no body, and is never `WITHIN` one: after an error of a
hook it is saved.

Each arrow of the table is a method below, and only the loop's thread calls them. Other threads (observers, the saver of
a stalled run) read: so a change is one assignment of a new value, never a change in place.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jstep.core.trees import Tree
from jstep.hooks.hook import check_hook_result
from jstep.hooks.run_hook import HookCall, LoopState
from jstep.record.state_changes import StateChanges

_T = TypeVar("_T")

BEGINNING, READY, BETWEEN, WITHIN = "beginning", "ready", "between", "within"
ENDING, LEAVING, BROKEN, CLOSING = "ending", "leaving", "broken", "closing"


BODY = HookCall(None, "the body of the loop")
AFTER_LOOP = HookCall(None, "the code after the loop")
"""What is in progress while code of the user's block runs."""
BODY_TIMES = BODY.timing_key
"""The key of the recorded durations of the body."""


class Course:
    """Where a run is. Only the loop's thread changes it.

    Args:
        position: The state that was passed, at an assumed step.
        has_body: Whether a body of the user runs between two calls.

    Attributes:
        calling: The call of a hook, or the `BODY`, that is in progress or raised.
        stopped_by: What ended the run: the name of the first hook that did, or of the loop.
        body_interval: The interval in steps at which the body runs; None for every call.
        first: The step at which the loop begins, assumed unless `is_first_known`.
        has_begun: Whether the run has been `BETWEEN`: a batch was asked for, so that positions may have changed.
        iterations: The iterations that have begun, of a body that makes its batches.
        body_ended_at: The latest step after which no body is owed any more; None if an earlier start may owe one.
        ended_at: The step at which `end` of the hooks was called last, also by an earlier start.
        failure: The error that ends the run, until the block of the user is left: the block may swallow it.
        state_changes: When the body or a hook replaced the state.
    """

    def __init__(self, position: LoopState, stop_step: int, *, has_body: bool) -> None:
        self.position = position
        self.stop_step = stop_step
        self.has_body = has_body
        self.status = BEGINNING
        self.calling: HookCall | None = None
        self.stopped_by: str | None = None
        self.body_interval: int | None = None
        self.first = 0
        self.is_first_known = False
        self.restoring: int | None = None
        self.has_begun = False
        self.iterations = 0
        self.body_ended_at: int | None = None
        self.ended_at: int | None = None
        self.failure: BaseException | None = None
        self.state_changes = StateChanges()

    @property
    def is_over(self) -> bool:
        return self.status not in (BEGINNING, READY, BETWEEN, WITHIN)

    @property
    def is_whole(self) -> bool:
        """Whether the state is one between two iterations, which a restart may resume from."""
        return self.status not in (WITHIN, BROKEN)

    @property
    def is_at_last(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.position.step >= self.stop_step or self.stopped_by is not None

    @property
    def has_next(self) -> bool:
        """Whether another iteration follows, if there is a batch for it.

        If this is true when the loop has ended, the batches were what ended it.
        """
        return self.status in (READY, BETWEEN) and not self.is_at_last

    @property
    def is_leaving(self) -> bool:
        return self.status == LEAVING

    @property
    def has_stepped(self) -> bool:
        return self.position.step > self.first

    # The start.

    def expect(self, first: int, restoring: int | None) -> None:
        self.first = first
        self.is_first_known = True
        self.restoring = restoring

    def begin_at(self, step: int, state: Tree, ended_at: int | None = None, *, is_restored: bool = False) -> None:
        """Begin with this state. A restored run may owe the body of its step: see `owes_body`."""
        self.expect(step, None)
        self.position = LoopState(step, state)
        self.ended_at = ended_at
        self.body_ended_at = None if is_restored and ended_at != step else step

    def get_ready(self) -> None:
        """`BEGINNING` → `READY`: the hooks have begun, and there is a step to take."""
        self.status = READY

    def begin(self) -> None:
        """`READY` → `BETWEEN`, before the first batch is asked for."""
        self.status = BETWEEN
        self.has_begun = True

    # An iteration.

    def begin_iteration(self) -> None:
        """`BETWEEN` → `WITHIN`, before code of the user; a run without a body has no inside."""
        if self.has_body:
            self.status = WITHIN

    def has_due_body(self) -> bool:
        """Whether the body follows the call that has just ended, in a run that has one."""
        step = self.position.step
        if self.body_interval is not None and step % self.body_interval and not self.is_at_last:
            return False
        self.body_ended_at = step
        return True

    def end_iteration(self) -> None:
        """`WITHIN` → `BETWEEN`: from here on, a checkpoint may hold this step."""
        self.status = BETWEEN

    def owes_body(self) -> bool:
        """Whether the batches have ended after a step that had no body: the end of the loop is a multiple, too.

        An earlier start may owe it as well: if it was stopped at such a step, and the batches turn out to be used up
        there. It does not if its hooks have ended at that step, as the body ran before them.
        """
        step = self.position.step
        is_skipped = self.body_interval is not None and step % self.body_interval > 0 and self.body_ended_at != step
        return self.has_body and self.has_begun and is_skipped and not self.is_leaving

    # What the run is doing.

    def during(self, call: HookCall, fn: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Call a hook; if it raises, `calling` still names it."""
        self.calling = call
        result = fn(*args, **options)
        self.calling = None
        return result

    def apply(self, call: HookCall, result: Any) -> bool:
        """Continue with the state that a hook returned, if any; return whether it ends the run."""
        stop, state = check_hook_result(result, self.position.state, self.position.step, call.name)
        if state is not self.position.state:
            self.replace_state(state, call)
        return stop

    def replace_state(self, state: Tree, call: HookCall | None) -> None:
        """Continue with another state; `call` is what made it, None if it is an earlier one."""
        if call is not None:
            by = "the body" if call is BODY else call.name
            self.state_changes.add(self.position.step, by, self.position.state, state)
        self.position = self.position._replace(state=state)

    # The end.

    def stop(self, by: str | None) -> None:
        self.stopped_by = self.stopped_by or by

    def leave(self) -> None:
        """→ `LEAVING`: a signal ends the run here, at a step that is whole."""
        self.status = LEAVING

    def end(self) -> None:
        """→ `ENDING`: no iteration follows. A run that leaves by a signal goes on leaving."""
        if not self.is_leaving:
            self.status = ENDING

    def fail(self) -> None:
        """→ `ENDING` or `BROKEN`, by an error: which one decides what is saved."""
        self.status = ENDING if self.is_whole else BROKEN

    def close(self) -> None:
        """→ `CLOSING`. The state is dropped here, so that nothing of jstep holds its memory."""
        self.position = LoopState(self.position.step, None)
        self.status = CLOSING
        self.calling = None

    def take_failure(self) -> BaseException | None:
        """Return the error and drop it: its traceback holds the frames of the run."""
        error, self.failure = self.failure, None
        return error
