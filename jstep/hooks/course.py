"""The course of a run: where it is, what it is doing, what ends it; the loop's one state machine.

| status | from | to | saved after an error, or a stall |
|---|---|---|---|
| `BEGINNING` | the start | `READY`; `ENDING`, if there is no step to take | nothing |
| `READY` | the hooks have begun | `BETWEEN`, by the first batch; `ENDING`, if stopped | nothing |
| `BETWEEN` | the first batch; the end of an iteration | `WITHIN`; `ENDING`; `LEAVING` | the state |
| `WITHIN` | `before_step`, a call, a body that makes batches | `BETWEEN`; `BROKEN` | nothing |
| `ENDING` | the last iteration; an error between two | `CLOSING`; `WITHIN` | the pre-end state |
| `LEAVING` | a signal between two iterations | `ENDING`, by its exception; `WITHIN` | the state |
| `BROKEN` | an error within an iteration | `CLOSING` | nothing |
| `CLOSING` | the end of all hooks | | |

A start that has taken no step has nothing to save after an error, whatever its status
(`has_trained`).

An error leads from `WITHIN` to `BROKEN`, and from all others before `CLOSING` to `ENDING`. An exit
in a user's log leads to `WITHIN` first, also from `ENDING` and `LEAVING`, in which the last rows
are delivered. So it ends in `BROKEN`, and nothing is saved: the row of a step is lost
(`RunContext._deliver`, in `loop`).

An iteration is defined in `loop/stopping.py`, the end in `loop/ending.py`. `train` and a loop of
the user's own have the same iterations: a run of `train` only knows that no body follows its hooks.

Each arrow of the table is a method below, and only the loop's thread calls them. Other threads
(observers, the saver of a stalled run) only read, at any time: so a change is one assignment of a
new value, never a change in place. The two arrows of each step, `BETWEEN` → `WITHIN` → `BETWEEN`,
are also assigned in `Run`, where a call of a method would cost each step 50 ns.
"""

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from jstep.core import trees
from jstep.core.checks import hook_name
from jstep.core.trees import Tree
from jstep.hooks.hook import as_hook_result
from jstep.hooks.origin import Origin
from jstep.hooks.run_extra import ENDED, LAST_BODY, LAST_ITERATION
from jstep.hooks.timetable import Timetable

_T = TypeVar("_T")

BEGINNING = "beginning"
READY = "ready"
BETWEEN = "between"
WITHIN = "within"
ENDING = "ending"
LEAVING = "leaving"
BROKEN = "broken"
CLOSING = "closing"


class LoopState(NamedTuple):
    """Where a loop over calls is; replaced as a whole, for other threads.

    Attributes:
        state: The latest state, including changes by hooks.
        rows: The number of rows of the last batch; None if unknown.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None


class HookCall(NamedTuple):
    """What a run is doing when it calls a hook."""

    hook: Any
    method: str

    @property
    def name(self) -> str:
        return self.method if self.hook is None else f"{hook_name(self.hook)}.{self.method}"


class Activity(enum.Enum):
    """What a run is doing when it calls no hook.

    The loop says it, so that nobody who watches has to infer it.
    """

    STARTING = "the start"
    RESTORING = "a restore"
    FETCHING = "the wait for a batch"
    COMPILING = "a compilation"
    CALLING = "a call"
    CHECKING = "the check of the step"
    BODY = "the body of the loop"
    AFTER_LOOP = "the code after the loop"
    ENDING = "the end"


class Course:
    """Where a run is. Only the loop's thread changes it.

    Args:
        position: The state that was passed, at an assumed step.
        has_body: Whether a body of the user may follow the hooks of a step; not in `train`.

    Attributes:
        activity: What the run is doing: a `HookCall`, or one of `Activity`. After an error, what
            raised it.
        stopped_by: What ended the run: the name of the first hook that did, or of the loop.
        first: The step at which the loop begins.
        has_first: Whether it is known: not while the run looks for checkpoints.
        has_begun: Whether the run has been `BETWEEN`: a batch was requested, so that positions may
            have changed.
        iterations: The iterations that have begun, of a body that makes its batches.
        is_restored: Whether the run began from a checkpoint of its own.
        body_taken_at: The latest step that owes no body: its body has begun, or it has none. None
            if the restored step may owe one.
        last_iteration: The latest step at which the iterations were over, in this start or an
            earlier one.
        ended_at: The latest step at which all `end`s have been called, by this start or, as its
            checkpoint says, an earlier one.
        is_finished: Whether the run has ended well, and its last checkpoint is on disk, unless a
            hook forbade it.
        failure: The error that ends the run, until the block of the user is left: the block may
            swallow it.
        replacements: The number of times that the body or a hook has replaced a leaf of the state.
        on_replaced: Called each time, with the step, what replaced it, the old and the new state.
    """

    def __init__(
        self, position: LoopState, stop_step: int, timetable: Timetable, *, has_body: bool
    ) -> None:
        self.position = position
        self.stop_step = stop_step
        self._timetable = timetable
        self.has_body = has_body
        self.status = BEGINNING
        self.activity: HookCall | Activity = Activity.STARTING
        self.stopped_by: str | None = None
        self.first = 0
        self.has_first = False
        self.is_restored = False
        self.has_begun = False
        self.iterations = 0
        self.body_taken_at: int | None = None
        self.last_iteration: int | None = None
        self.ended_at: int | None = None
        self.is_finished = False
        self.failure: BaseException | None = None
        self.replacements = 0
        self.on_replaced: Callable[[int, str, Tree, Tree], None] = _ignore

    @property
    def is_over(self) -> bool:
        return self.status not in (BEGINNING, READY, BETWEEN, WITHIN)

    @property
    def is_resumable(self) -> bool:
        """Whether the state is one between two iterations, which a restart may resume from."""
        return self.status not in (WITHIN, BROKEN)

    @property
    def is_last_step(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.position.step >= self.stop_step or self.stopped_by is not None

    @property
    def has_next(self) -> bool:
        """Whether another iteration follows, if there is a batch for it.

        If this is true when the loop has ended, the batches were what ended it.
        """
        return self.status in (READY, BETWEEN) and not self.is_last_step

    @property
    def is_leaving(self) -> bool:
        return self.status == LEAVING

    @property
    def has_trained(self) -> bool:
        return self.position.step > self.first

    @property
    def has_made_last_iteration(self) -> bool:
        """Whether the iterations, of this start or an earlier one, are over at this step."""
        return self.last_iteration == self.position.step

    @property
    def has_ended(self) -> bool:
        """Whether all `end`s of this step were called, by this start or an earlier one."""
        return self.ended_at == self.position.step

    @property
    def owes_end(self) -> bool:
        """Whether the `end`s of this step are still to be called.

        A start that takes no step still calls the `end`s in which an earlier start was killed, but
        none in mid-run.
        """
        return self.has_made_last_iteration and not self.has_ended

    # The start.

    def begin_at(self, first: int) -> None:
        """Note the step at which the run begins; its state may be read later."""
        self.first = first
        self.has_first = True

    def set_state(self, state: Tree) -> None:
        self.position = LoopState(self.first, state)

    def set_start(self, state: Tree, origin: Origin) -> None:
        """Set the state that the run begins with, once it is read.

        A restored run may owe the body of its step (`owes_body`). It does not if all `end`s were
        called there, as the body ran before them, nor if the checkpoint says that the body has run:
        then an `end` failed after it.
        """
        step = self.first
        self.set_state(state)
        self.last_iteration = origin.extra.get(LAST_ITERATION)
        self.ended_at = origin.extra.get(ENDED)
        self.is_restored = origin.is_restored
        has_run_body = step in (self.ended_at, origin.extra.get(LAST_BODY))
        may_owe_body = origin.is_restored and not has_run_body
        self.body_taken_at = None if may_owe_body else step

    def set_ready(self) -> None:
        """`BEGINNING` → `READY`: the hooks have begun, and there is a step to take."""
        self.status = READY

    def begin_loop(self) -> None:
        """`READY` → `BETWEEN`, before the first batch is fetched."""
        self.status = BETWEEN
        self.has_begun = True

    # An iteration.

    def forbid_saves(self) -> None:
        """→ `WITHIN`, before code of the user.

        Its effects are saved once the whole iteration has been done.
        """
        self.status = WITHIN

    def take_due_body(self) -> bool:
        """Return whether the body follows the call that has just ended.

        If it does, the body of this step counts as taken.
        """
        step = self.position.step
        if not self._timetable.is_body_due(step) and not self.is_last_step:
            return False
        self.body_taken_at = step
        return True

    def end_iteration(self) -> None:
        """`WITHIN` → `BETWEEN`: from here on, a checkpoint may hold this step."""
        self.status = BETWEEN

    @property
    def owes_body(self) -> bool:
        """Whether the body of the last step is still to run.

        With `run.every(n)` the body also runs at the end of the loop, which is known only once the
        batches have ended: the last step may be no multiple of n. A restart at such a step may owe
        it, too (`set_start`).
        """
        if not self.has_body or not self.has_begun or self.is_leaving:
            return False
        return self._is_between_bodies() and self.body_taken_at != self.position.step

    def begin_last_body(self) -> None:
        """→ `WITHIN`, before a body that was owed.

        If it fails, nothing is saved, and the next start owes it again.
        """
        self.body_taken_at = self.position.step
        self.forbid_saves()

    @property
    def has_run_last_body(self) -> bool:
        """Whether the body of this step has run only because the run ends here.

        A restart cannot tell that by the step.
        """
        return (
            self.has_body and self._is_between_bodies() and self.body_taken_at == self.position.step
        )

    def _is_between_bodies(self) -> bool:
        return not self._timetable.is_body_due(self.position.step)

    # What the run is doing.

    @contextlib.contextmanager
    def doing(self, activity: HookCall | Activity) -> Iterator[None]:
        """A context for an activity.

        If it raises, `activity` still names what did: the note of the error reads it.
        """
        outer = self.activity
        self.activity = activity
        yield  # not in a `try`: see above
        self.activity = outer

    def call_hook(self, call: HookCall, fn: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Call a method of a hook; as `doing`, without the costs of a context."""
        outer = self.activity
        self.activity = call
        result = fn(*args, **options)
        self.activity = outer
        return result

    def apply(self, call: HookCall, result: Any) -> bool:
        """Continue with the state that a hook returned, if any; return whether it ends the run."""
        stop, state = as_hook_result(result, self.position.state, self.position.step, call.name)
        if state is not self.position.state:
            self.replace_state(state, call.name)
        return stop

    def replace_state(self, state: Tree, author: str | None) -> None:
        """Continue with another state; `author` names what made it, None for an earlier state."""
        step = self.position.step
        old_state = self.position.state
        self.position = self.position._replace(state=state)
        if author is None:
            return
        # Compared by identity, as the leaves of the old state may have been donated.
        leaves = zip(trees.flatten(old_state)[0], trees.flatten(state)[0], strict=True)
        if any(old is not new for old, new in leaves):
            self.replacements += 1
        self.on_replaced(step, author, old_state, state)

    # The end.

    def stop(self, by: str | None) -> None:
        """Let no iteration follow this one; of several callers, the first one is kept."""
        self.stopped_by = self.stopped_by or by

    def leave(self) -> None:
        """→ `LEAVING`: a signal ends the run here, at a step that is whole."""
        self.status = LEAVING

    def end(self) -> None:
        """→ `ENDING`: no iteration follows. A run that leaves by a signal stays `LEAVING`."""
        if self._is_at_last_iteration():
            self.last_iteration = self.position.step
        if not self.is_leaving:
            self.status = ENDING
        self.activity = Activity.ENDING

    def _is_at_last_iteration(self) -> bool:
        """Whether the iterations of the run are over, and not only those of this start."""
        if self.status == READY:  # the block was left before its first batch
            return False
        if self.has_next:  # the batches are used up
            return True
        if self.has_trained:
            return self.is_last_step
        if not self.is_restored:
            return False
        # No step was taken: a hook's `begin` ends this start alone, and so does a `last_step` that
        # the run has passed. But an evaluation that was still owed may have stopped the run, as it
        # would have without an interruption.
        return self.position.step == self.stop_step or self.stopped_by is not None

    def fail(self) -> None:
        """→ `ENDING` or `BROKEN`, by an error; the status decides what is saved."""
        self.status = ENDING if self.is_resumable else BROKEN

    def close(self) -> None:
        """→ `CLOSING`. The state is dropped here, so that nothing of jstep holds its memory."""
        self.position = LoopState(self.position.step, None)
        self.status = CLOSING
        self.activity = Activity.ENDING

    def take_failure(self) -> BaseException | None:
        """Return the error and drop it: its traceback holds the frames of the run."""
        error = self.failure
        self.failure = None
        return error


def _ignore(step: int, author: str, old_state: Tree, new_state: Tree) -> None:
    """The default of `on_replaced`."""
