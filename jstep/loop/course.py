"""The course of a run: where it is, what it is doing, and what ends it; the one state machine of the loop.

| status | from | to | saved after an error or a stall |
|---|---|---|---|
| `BEGINNING` | the start | `BETWEEN`; `ENDING`, if no step is taken | nothing |
| `BETWEEN` | the first call; the end of an iteration | `WITHIN`; `ENDING`; `LEAVING`, by a signal | the state |
| `WITHIN` | `before_step`, a call, or a body that makes batches | `BETWEEN`, after the body; `BROKEN` | nothing |
| `ENDING` | the last iteration; an error or a signal between two | `CLOSING` | the state |
| `LEAVING` | a signal between two iterations | `ENDING`, by the exception that it raises | the state |
| `BROKEN` | an error within an iteration | `CLOSING` | nothing |
| `CLOSING` | the end of all hooks | | |

An iteration is defined in `stopping.py`. A run of `train` has no body, and is never `WITHIN` one: after an error of a
hook it is saved.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jstep.core import trees
from jstep.core.checks import truncate, truncate_path
from jstep.core.trees import Tree
from jstep.hooks.hook import check_hook_result
from jstep.hooks.run_hook import HookCall, LoopState

_T = TypeVar("_T")

BEGINNING, BETWEEN, WITHIN = "beginning", "between", "within"
ENDING, LEAVING, BROKEN, CLOSING = "ending", "leaving", "broken", "closing"


BODY = HookCall(None, "the body of the loop")
AFTER_LOOP = HookCall(None, "the code after the loop")
"""What is in progress while code of the user's block runs."""


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
        state_changes: When the body or a hook replaced the state.
    """

    def __init__(self, position: LoopState, stop_step: int, *, has_body: bool) -> None:
        self.position = position
        self.stop_step, self.has_body = stop_step, has_body
        self.status = BEGINNING
        self.calling: HookCall | None = None
        self.stopped_by: str | None = None
        self.body_interval: int | None = None
        self.first, self.is_first_known = 0, False
        self.restoring: int | None = None
        self.state_changes = StateChanges()

    @property
    def is_over(self) -> bool:
        return self.status not in (BEGINNING, BETWEEN, WITHIN)

    @property
    def is_whole(self) -> bool:
        """Whether the state is one between two iterations, which a restart may resume from."""
        return self.status not in (WITHIN, BROKEN)

    @property
    def is_at_last(self) -> bool:
        """Whether the run ends at this step, as far as is known: the batches may end earlier."""
        return self.position.step >= self.stop_step or self.stopped_by is not None

    @property
    def has_stepped(self) -> bool:
        return self.position.step > self.first

    # The start.

    def expect(self, first: int, restoring: int | None) -> None:
        self.first, self.is_first_known = first, True
        self.restoring = restoring

    def begin_at(self, step: int, state: Tree) -> None:
        self.expect(step, None)
        self.position = LoopState(step, state)

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

    def begin_iteration(self) -> None:
        """Begin an iteration with code of the user; a run without a body has no inside."""
        if self.has_body:
            self.status = WITHIN

    # The end.

    def stop(self, by: str | None) -> None:
        self.stopped_by = self.stopped_by or by

    def fail(self) -> None:
        self.status = ENDING if self.is_whole else BROKEN

    def close(self) -> None:
        self.position = LoopState(self.position.step, None)
        self.status, self.calling = CLOSING, None


# What replaced the state between two calls: the body of the loop, or a hook; at which steps, which leaves.

_MAX_KINDS, _MAX_LEAVES, _MAX_STEPS, _MAX_TEXT = 6, 4, 10, 80
"""The maximum number of kinds of changes, of paths of one, of its first and of its newest steps, and of characters: the
file of a start is written each second."""
_OTHERS = "the body or a hook", ("other leaves",)


class StateChanges:
    """The changes of a state by code of the user, of bounded size.

    A leaf counts as changed if it is another array. None is read, as the one before may have been donated.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, Any], dict[str, Any]] = {}

    def add(self, step: int, by: str, before: Tree, after: Tree) -> None:
        pairs = zip(trees.flatten(before)[0], trees.flatten(after)[0], strict=True)
        changed = tuple(i for i, (old, new) in enumerate(pairs) if old is not new)
        if not changed:
            return
        key: tuple[str, Any] = (by, changed)
        if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            key = _OTHERS
        kind = self._kinds.get(key)
        if kind is None:
            paths = _subtrees(trees.leaf_paths(after), changed) if key is not _OTHERS else [*_OTHERS[1]]
            shown = [truncate_path(path, _MAX_TEXT) for path in paths[:_MAX_LEAVES]]
            by = truncate(key[0], _MAX_TEXT)
            kind = {"by": by, "leaves": shown, "leaves_left_out": len(paths) - len(shown), "count": 0, "steps": []}
        steps = kind["steps"]
        if step not in steps[-1:]:  # replaced twice at one step
            steps = [*steps, step]
            newest = steps[max(_MAX_STEPS, len(steps) - _MAX_STEPS) :]
            kind = {**kind, "count": kind["count"] + 1, "steps": [*steps[:_MAX_STEPS], *newest]}
        self._kinds = {**self._kinds, key: kind}  # not in place: another thread may be writing the record

    def as_record(self) -> list[dict[str, Any]]:
        """Return the changes as `schema.StateChange`."""
        return [*self._kinds.values()]


def _subtrees(paths: list[str], changed: tuple[int, ...]) -> list[str]:
    """Return the paths of the largest subtrees of which each leaf has changed."""
    unchanged = {part for i in {*range(len(paths))}.difference(changed) for part in _prefixes(paths[i])}
    found = (next((part for part in _prefixes(paths[i]) if part not in unchanged), paths[i]) for i in changed)
    return list(dict.fromkeys(found))


def _prefixes(path: str) -> list[str]:
    """Return `a`, `a/b` and `a/b/c` for `a/b/c`."""
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
