"""What a checkpoint of a run contains in addition to the state: all else that a restart needs.

| key of its `extra` | content | taken by | restored by |
|---|---|---|---|
| `batches`, `batches_of_processes` | their positions | `_take_positions` | `saved_position` |
| `hooks` | the states of the hooks | `_take_hooks` | `restore_hooks` |
| `stopped` | the hook that stopped the run | `_take_hooks` | a log line; kept if no step is run |
| `skipped` | skips in a row, if a `NanLossHook` limits them | `_take_hooks` | `restore_hooks` |
| `last_iteration` | the step, if iterations ended there | `_take_hooks` | `Course`: owes `end`s |
| `ended` | the mark: the step with all `end`s made | `_take_hooks` | `Course`: owes no `end` |
| `last_body` | the step, if its body ran only at the end | `_take_hooks` | `Course`: owes no body |
| `before_end` | true in the pre-end checkpoint (`ending.py`) | `as_extra` | `RunSaverHook.resume` |
| `held` | initial values of `jstep.held` | `as_extra` | `find_origin.read_state` warns of others |
| `run` | the name of the run and of its event files | `as_extra` | `Origin.name` |
| `parent` | path and step of the checkpoint that it began from | `as_extra` | `find_origin` |
| others | data of an observer, such as the `Recorder`'s past | `Observer.on_save` | the observer |

`run_extra.py` has their types, which are checked when they are read.
"""

from typing import Any, NamedTuple

from jstep.array_store.manifest import CheckpointExtra
from jstep.core import processes
from jstep.core.exceptions import note
from jstep.data.positions import gather_positions, positions_elsewhere
from jstep.hooks.hook_states import get_states, set_states
from jstep.hooks.run_extra import (
    BEFORE_END,
    ENDED,
    HELD_VALUES,
    HOOK_STATES,
    LAST_BODY,
    LAST_ITERATION,
    PARENT,
    RUN_KEY,
    SKIPPED_IN_A_ROW,
    STOPPED,
)
from jstep.loop.observer import observers_that_define
from jstep.loop.run_context import RunContext
from jstep.stores.tagged_json import AttachedFiles, as_json


class Contents(NamedTuple):
    """What hooks and the body of a loop may change without a step.

    If it has changed, the same step is saved again.
    """

    positions: CheckpointExtra
    hooks: CheckpointExtra
    iterations: int


NOTHING = Contents(CheckpointExtra({}, {}), CheckpointExtra({}, {}), 0)


class RunContents:
    """Takes, compares and writes down the contents of one run.

    It knows nothing of when and how they are saved.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._observers = observers_that_define("on_save", run.observers)

    def take(self, hooks: CheckpointExtra | None = None) -> Contents:
        """Return the current contents; `hooks` are states of hooks taken before, to be used."""
        positions = self._take_positions()
        if hooks is None:
            hooks = self._take_hooks()
        return Contents(positions, hooks, self._run.course.iterations)

    def equals(self, saved: Contents) -> bool:
        """Whether `take` would return the same; all processes must call this, and get one answer.

        Positions are compared only if they may change without a step, because taking them may be
        slow. The objects of `from_loop` change only in an iteration of the body, so for them it is
        enough to compare the iterations.
        """
        run = self._run
        source = run.components.batches.source
        if source.moves_between_steps and run.course.has_begun:
            are_positions_same = self._take_positions().is_same(saved.positions)
        else:
            are_positions_same = run.course.iterations == saved.iterations
        are_hooks_same = self._take_hooks().is_same(saved.hooks)
        # All save again or none does. A position may have changed on one process alone, and so may
        # a hook: only process 0 calls its `flush` and `saved`.
        has_changed = not are_positions_same or not are_hooks_same
        return not processes.any_process(has_changed)

    def as_extra(self, contents: Contents, *, is_pre_end: bool = False) -> CheckpointExtra:
        """Return all that is saved beside the state.

        Call this only when nothing prevents the save any more, as `on_save` of observers requires.
        """
        run = self._run
        values = dict(contents.positions.values)
        for observer in self._observers:
            values |= observer.on_save(run.step)
        values |= contents.hooks.values
        if run.origin.held_values:
            values[HELD_VALUES] = dict(run.origin.held_values)
        if run.origin.lineage.parent is not None:
            values[PARENT] = run.origin.lineage.parent
        values[RUN_KEY] = run.origin.name
        if is_pre_end:
            values[BEFORE_END] = True
        return CheckpointExtra(values, {**contents.positions.files, **contents.hooks.files})

    def _take_hooks(self) -> CheckpointExtra:
        """Return the states of the hooks, and the other entries of the table that they decide."""
        run = self._run
        course = run.course
        entries = {
            HOOK_STATES: get_states(run.components.hooks),
            STOPPED: course.stopped_by,
            ENDED: run.step if course.has_ended else None,
            LAST_BODY: run.step if course.has_run_last_body else None,
        }
        if course.has_made_last_iteration:
            entries[LAST_ITERATION] = run.step
        if course.stopped_by is None and not course.has_begun:
            # A run that takes no step keeps the name of the hook that stopped the earlier one.
            entries[STOPPED] = run.origin.extra.get(STOPPED)
        if run.sums.limit is not None:
            entries[SKIPPED_IN_A_ROW] = run.sums.skipped_in_a_row()
        values = {key: value for key, value in entries.items() if value is not None}
        files = AttachedFiles("hooks.")
        encoded: Any = as_json(values, files)
        if not processes.is_process_0():
            return CheckpointExtra(encoded, {})
        return CheckpointExtra(encoded, files)

    def _take_positions(self) -> CheckpointExtra:
        run = self._run
        if not run.course.has_begun:  # the positions have not changed
            return CheckpointExtra(*positions_elsewhere(run.origin.extra))
        # A batch that was fetched but not trained on is fetched again after a restart.
        position = run.components.batches.source.position_after(run.step - run.course.first)
        return CheckpointExtra(*gather_positions(position, self._progress))

    def _progress(self) -> str:
        """Describe how far this process is in its loop, which must be the same on all of them."""
        run = self._run
        course = run.course
        parts = [f"step {run.step}"]
        if course.iterations:
            parts.append(f"iteration {course.iterations}")
        if course.replacements:
            parts.append(f"its state replaced {course.replacements}×")
        if course.is_over or course.stopped_by is not None:
            parts.append("the end of the loop")
        return ", ".join(parts)


def restore_hooks(run: RunContext) -> bool:
    """Set the states of the hooks; return whether one of them keeps the run stopped."""
    extra = run.origin.extra
    try:
        is_stopped = set_states(run.components.hooks, extra.get(HOOK_STATES))
    except Exception as error:
        note(error, f"jstep: the states of the hooks are those in {run.origin.source}")
        raise
    if SKIPPED_IN_A_ROW in extra:
        run.sums.begin_skipped(extra[SKIPPED_IN_A_ROW])
    return is_stopped and not run.origin.is_at_branch_point
