"""The checkpoint of a run: the state, and everything else that a restart needs.

`RunSaverHook` saves these entries:

| key of its `extra` | content | saved by | restored by |
|---|---|---|---|
| `batches`, `batches_of_processes` | positions of the batches | `_positions` | `saved_position`, by `start.py` |
| `hooks` | the states of the hooks | `_hooks` | `restore_hooks` |
| `stopped` | the name of the hook that stopped the run | `_hooks` | a log line; it is kept if no step is run |
| `skipped` | the number of updates skipped in a row, if a `NanLossHook` limits it | `_hooks` | `restore_hooks` |
| `ended` | the step at which the hooks have ended | `_hooks` | `HookRunner`, which ends them once |
| `held` | the initial values of held hyperparameters | `_extra_of_run` | `origin.restore`, which warns of others |
| `run` | the name of the run and of its event files | `_extra_of_run` | `RunContext.name` |
| `parent` | path and step of the checkpoint that the run began from | `_extra_of_run` | `origin.find_opening` |
| others | data of an observer, such as the past of a card | `Observer.about_to_save` | the observer |
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax

from jstep.checkpoint.hook_states import get_states, set_states
from jstep.checkpoint.manifest import CheckpointExtra
from jstep.checkpoint.names import checkpoint_name, open_store
from jstep.checkpoint.saver import Saver
from jstep.core import processes
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING, STEPPING
from jstep.data.positions import gather_positions, positions_elsewhere
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import describe_nan_at_start
from jstep.loop.arguments import MAX_SECS, Options
from jstep.loop.origin import ENDED, HELD_VALUES, PARENT, RUN_KEY, STOPPED
from jstep.loop.programs import AUTO
from jstep.loop.run_context import Opened, RunContext
from jstep.metering.cadence import Cadence
from jstep.state.train_state import TrainState
from jstep.stores.tagged_json import AttachedFiles, as_json
from jstep.stores.urls import is_url
from jstep.training.metrics import Metrics

HOOK_STATES, SKIPPED_IN_A_ROW = "hooks", "skipped"
"""Keys of a checkpoint's `extra`."""


def restore_hooks(run: RunContext, opened: Opened) -> bool:
    """Set the states of the hooks; return whether one of them keeps the run stopped."""
    extra = run.origin.extra
    is_stopped = set_states(opened.hooks, extra.get(HOOK_STATES))
    if SKIPPED_IN_A_ROW in extra:
        run.sums.begin_skipped(extra[SKIPPED_IN_A_ROW])
    return is_stopped and not run.origin.is_at_branch_point


# The interval between automatic saves.

FIRST_SECS, BUCKET_SECS = 10.0, 60.0
"""The seconds until the first save, and the least between two; the least in a bucket."""
_LOOP_SHARE, _WRITER_SHARE = 0.01, 0.1
"""The share of the time for which saves may block the loop, and a writer may be busy."""
_EARLY = 0.1
"""The tolerance for early saves, in seconds."""


class SaveInterval:
    def __init__(self, saver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._saver, self._clock = saver, clock
        self._least = BUCKET_SECS if is_url(saver.directory) else FIRST_SECS
        self._saved_at: float | None = None
        self.blocked_secs = 0.0  # how long the latest save blocked the loop

    def __call__(self) -> float:
        if self._saved_at is None:
            return FIRST_SECS
        passed = self._clock() - self._saved_at
        busy = passed if self._saver.write_secs is None else self._saver.write_secs  # it is still being written
        secs = min(MAX_SECS, max(self._least, self.blocked_secs / _LOOP_SHARE, busy / _WRITER_SHARE))
        return max(secs - passed, 0.0)

    def is_too_early(self) -> bool:
        return self._saved_at is not None and self() > _EARLY

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._saved_at = self._clock()
            self.blocked_secs = self._saved_at - began


class _HostState(NamedTuple):
    """The parts of a checkpoint that hooks may change at the same step after the save."""

    positions: CheckpointExtra
    hooks: CheckpointExtra


# The hook that saves, and the contents of a checkpoint beside the state.


class RunSaverHook(CheckpointSaverHook):
    """Saves the state and the entries above, again if hooks changed any of these after the save."""

    def __init__(self, options: Options, saver: Saver) -> None:
        is_auto = options.save_checkpoint_secs == AUTO
        secs: Any = None if is_auto else options.save_checkpoint_secs
        super().__init__(saver, save_secs=secs, save_steps=options.save_checkpoint_steps, extra=self._extra_of_run)
        self._interval = SaveInterval(saver) if is_auto else None
        if self._interval is not None:
            self.cadence = Cadence(secs=self._interval, together=True)
        self.phase = STEPPING  # it measures its own time when it saves
        self._saved_host_state = self._host_state = _HostState(CheckpointExtra({}, {}), CheckpointExtra({}, {}))
        self._saved_iterations = 0

    @property
    def run(self) -> RunContext:
        return cast(RunContext, super().run)

    def save(self, step: int, state: TrainState, *, wait: bool = False, temporary_secs: float | None = None) -> bool:
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        timed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._interval is not None:
            import jstep.checkpoint.array_writer  # noqa: F401  # the first import is slow and not part of a save

            timed = self._interval.saving()
        with self.run.watch.phase(SAVING), timed:
            return super().save(step, state, wait=wait, temporary_secs=temporary_secs)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save; an automatic checkpoint may be temporary, except at the last step."""
        interval = self._interval
        if interval is not None and processes.broadcast_ints(interval.is_too_early())[0]:
            return
        self.save(step, state, temporary_secs=None if interval is None or self.run.course.is_at_last else MAX_SECS)

    def save_alone(self, step: int, state: TrainState, *, is_finite: bool) -> None:
        if not super().has_saved(step, state):
            extra = self._extra_of_run(self._saved_host_state.hooks)._replace(finite=is_finite)  # as of the latest save
            with internal_transfers():
                self.saver.save(state, extra=extra)
        self.saver.wait()

    def resume(self, step: int, state: TrainState) -> None:
        """Continue from the checkpoint that was restored; a branch saves it, and does not read the other run again."""
        run = self.run
        if run.is_new_branch:
            self.save(step, state, wait=True)
        else:
            self._host_state = _HostState(self._positions(), self._hooks())
            self.mark_saved(step, state)
        if not run.opened.finiteness.has_nan_hook and not self.saver.allow_nonfinite:
            run.poll(self, self._warn_of_nan)

    def _warn_of_nan(self, *, wait: bool = False) -> None:
        if bad := self.run.at_start.with_nan():
            logger.warning("%s", describe_nan_at_start(bad, self.run.course.first))

    def mark_saved(self, step: int, state: TrainState) -> None:
        super().mark_saved(step, state)
        self._saved_host_state, self._saved_iterations = self._host_state, self.run.opened.feeder.iterations
        # For `save_alone`, when they are no longer in memory:
        for name, file in self._host_state.hooks.files.items():
            file.load = functools.partial(self.saver.read_file, name, step)

    def has_saved(self, step: int, state: TrainState) -> bool:
        if not super().has_saved(step, state):
            return False
        opened, saved, is_same = self.run.opened, self._saved_host_state, True
        feeder, source = opened.feeder, opened.batches.source
        # Only positions of batches made with the state can change after their step; all processes must compare them.
        if source.is_of_loop:
            is_same = feeder.iterations == self._saved_iterations
        elif source.is_of_state and feeder.has_begun:
            is_same = not processes.any_process(not self._positions().is_same(saved.positions))
        return self._hooks().is_same(saved.hooks) and is_same

    def _hooks(self) -> CheckpointExtra:
        run = self.run
        opened = run.opened
        # A run that takes no step keeps the name of the hook that stopped the earlier one.
        by = run.course.stopped_by or (None if opened.feeder.has_begun else run.origin.extra.get(STOPPED))
        states = get_states(opened.hooks)
        entries = {HOOK_STATES: states or None, STOPPED: by, ENDED: run.step if opened.runner.has_ended() else None}
        if run.sums.limit is not None:
            entries[SKIPPED_IN_A_ROW] = run.sums.skipped_in_a_row()
        values = {key: value for key, value in entries.items() if value is not None}
        files = AttachedFiles("hooks.")
        return CheckpointExtra(as_json(values, files), files if jax.process_index() == 0 else {})

    def _positions(self) -> CheckpointExtra:
        run = self.run
        feeder = run.opened.feeder
        if not feeder.has_begun:  # the positions have not changed
            return CheckpointExtra(*positions_elsewhere(run.origin.extra))
        # A batch that was fetched but not trained on is fetched again after a restart.
        position = feeder.position_after(run.step - run.course.first)
        return CheckpointExtra(*gather_positions(position, self._progress))

    def _progress(self) -> str:
        """Describe how far this process has come in its loop, and what it did, which must be alike on all."""
        run, course = self.run, self.run.course
        iteration = f", iteration {run.opened.feeder.iterations}" if run.opened.feeder.iterations else ""
        changes = sum(change["count"] for change in course.state_changes.as_record())
        replaced = f", its state replaced {changes}×" if changes else ""
        end = ", the end of the loop" if course.is_over or course.stopped_by is not None else ""
        return f"step {run.step}{iteration}{replaced}{end}"

    def _extra_of_run(self, states: CheckpointExtra | None = None) -> CheckpointExtra:
        run = self.run
        step = run.step
        # A run that resumes from a checkpoint does not write earlier summaries again.
        if (writer := run.writer) is not None:
            try:
                writer.drain()
            except Exception as error:
                run.log_failed(writer, error)
        self._host_state = _HostState(self._positions(), self._hooks() if states is None else states)
        positions, hooks = self._host_state
        observed: dict[str, Any] = {}
        for observer in run.observers:
            observed |= observer.about_to_save(step)
        held_values = {HELD_VALUES: dict(run.origin.held_values)} if run.origin.held_values else {}
        lineage = run.opening.lineage
        parent = {} if lineage.parent is None else {PARENT: lineage.parent}
        return CheckpointExtra(
            positions.values | observed | hooks.values | held_values | parent | {RUN_KEY: run.name},
            {**positions.files, **hooks.files},
        )


# What prevents a save after an error or a stall, and where the next start begins then.


def why_not_saved(run: RunContext) -> str:
    if not run.course.is_whole:
        return "because the iteration has not ended"
    if run.saver is None or not run.opened.feeder.is_position_lost(run.step - run.course.first):
        return ""
    return (
        "because the data source has advanced, and its position is too large (above 64 kB) to be copied before each "
        "batch"
    )


def where_resumed(run: RunContext) -> str:
    saver = run.saver
    if saver is None:
        return ""
    newest = "the newest checkpoint, if there is one"
    if processes.is_single_process() and not run.signals.received_twice:  # otherwise this could wait forever
        with contextlib.suppress(Exception):  # the save has failed, or the store cannot be reached
            saver.settle()
            store = open_store(saver.directory)
            found = next(iter(store.newest_first(saver.prefix)), None)
            if found is None:
                return "; there is no checkpoint yet, so the next start begins from scratch"
            step, path = found
            age = max(0.0, time.time() - store.manifest(path).saved_at)
            newest = f"{checkpoint_name(saver.prefix, step)}, {age:.0f} s old"
    return f"; the next start resumes from {newest}"
