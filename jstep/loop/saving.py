"""The checkpoint of a run: the state, and everything else that a restart needs.

`RunSaverHook` saves these entries:

| key of its `extra` | content | saved by | restored by |
|---|---|---|---|
| `batches`, `batches_of_processes` | positions of the batches | `_positions` | `restore_position`, by `start.py` |
| `hooks` | the states of the hooks | `_hooks` | `restore_hooks` |
| `stopped` | the name of the hook that stopped the run | `_hooks` | a log line; it is kept if no step is run |
| `skipped` | the number of updates skipped in a row, if a `NanLossHook` limits it | `_hooks` | `restore_hooks` |
| `ended` | the step at which the hooks have ended | `_hooks` | `HookRunner`, which ends them once |
| `body` | the metrics of a step whose body in the user's loop had not ended | `_open_body` | `open_body_metrics` |
| `held` | the initial values of held hyperparameters | `_extra_of_run` | `origin.restore`, which warns of others |
| `run` | the name of the run and of its event files | `_extra_of_run` | `Origin.name` |
| `parent` | path and step of the checkpoint that the run began from | `_extra_of_run` | `origin.find_origin` |
| others | data of an observer, such as the past of a card | `Observer.about_to_save` | the observer |
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.hook_states import get_states, set_states
from jstep.checkpoint.manifest import CheckpointExtra
from jstep.checkpoint.saver import Saver
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING, STEPPING
from jstep.data.positions import gather_positions, positions_elsewhere
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import about_start
from jstep.loop.arguments import MAX_SECS, Options
from jstep.loop.origin import ENDED, HELD_VALUES, OPEN_BODY, PARENT, RUN_KEY, STOPPED
from jstep.loop.programs import AUTO
from jstep.loop.run_context import RunContext
from jstep.metering.cadence import Cadence
from jstep.state.train_state import TrainState
from jstep.stores import tagged_json
from jstep.stores.tagged_json import AttachedFiles, as_json, copy_encodable
from jstep.stores.urls import is_url
from jstep.training.metrics import Metrics

HOOK_STATES, SKIPPED_IN_A_ROW = "hooks", "skipped"
"""Keys of a checkpoint's `extra`, in addition to those of the origin, of positions and of observers."""


def restore_hooks(run: RunContext) -> bool:
    """Restore the states of the hooks; return whether one of them ends the run."""
    is_stopped = set_states(run.hooks, run.origin.extra.get(HOOK_STATES))
    if SKIPPED_IN_A_ROW in run.origin.extra:
        run.sums.begin_skipped(run.origin.extra[SKIPPED_IN_A_ROW])
    for hook in run.savers:
        if not isinstance(hook, RunSaverHook):
            continue
        if run.origin.trunk is None:
            hook.restored(run.first, run.state)
        else:  # from now on the other run is not read
            hook.save(run.first, run.state, wait=True)
        if not run.has_nan_hook and not hook.saver.allow_nonfinite:
            run.poll(hook, functools.partial(_warn_of_nan, run))
    return is_stopped and not run.origin.is_at_branch_point


def _warn_of_nan(run: RunContext, *, wait: bool = False) -> None:
    """Warn of restored parameters, now that the device is busy with the first step."""
    if bad := run.at_start.with_nan():
        logger.warning("%s", about_start(bad, run.first))


# The interval between automatic saves.

FIRST_SECS, BUCKET_SECS = 10.0, 60.0
"""The seconds until the first save and between two saves, and between two in a bucket. `SaveInterval` lengthens them to
`MAX_SECS` at most; a checkpoint within that time after a permanent one is temporary."""
_LOOP_SHARE, _WRITER_SHARE = 0.01, 0.1
"""The share of the time for which the loop may be blocked by saves, and for which a writer may be busy."""
_EARLY = 0.1
"""The tolerance for early saves, in seconds."""


class SaveInterval:
    """The seconds between two automatic saves: as few as a small share of the run's time allows."""

    def __init__(self, saver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._saver, self._clock = saver, clock
        self._least = BUCKET_SECS if is_url(saver.directory) else FIRST_SECS
        self._saved_at: float | None = None
        self.blocked_secs = 0.0  # how long the latest save blocked the loop

    def __call__(self) -> float:
        """Return the seconds until the next save, given the known costs of the latest one."""
        if self._saved_at is None:
            return FIRST_SECS
        passed = self._clock() - self._saved_at
        busy = passed if self._saver.write_secs is None else self._saver.write_secs  # it is still being written
        secs = min(MAX_SECS, max(self._least, self.blocked_secs / _LOOP_SHARE, busy / _WRITER_SHARE))
        return max(secs - passed, 0.0)

    def is_too_early(self) -> bool:
        """Return whether a due save would cost too much, as the latest one took longer than expected."""
        return self._saved_at is not None and self() > _EARLY

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._saved_at = self._clock()
            self.blocked_secs = self._saved_at - began


# The contents of a checkpoint, beside the state.


class _HostState(NamedTuple):
    """The parts of a checkpoint that hooks may change at the same step after the save."""

    positions: CheckpointExtra
    hooks: CheckpointExtra


# The hook that saves.


class RunSaverHook(CheckpointSaverHook):
    """Hook that saves the state, the position of the batches, the states of hooks, and which hook stopped the run.

    A step is saved again if hooks changed any of these after the save.
    """

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
        self._has_open_body = False

    @property
    def run(self) -> RunContext:
        return cast(RunContext, super().run)

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save, without counting the wait for steps in flight."""
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        timed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._interval is not None:
            import jstep.checkpoint.array_writer  # noqa: F401  # the first import is slow and not part of a save

            timed = self._interval.saving()
        with self.run.watch.phase(SAVING), timed:
            return super().save(step, state, wait=wait)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save; an automatic checkpoint may be temporary, except at the last step.

        If that was not known to be the last one, it is saved again, as the hooks have ended since.
        """
        interval = self._interval
        if interval is not None and processes.broadcast_ints(interval.is_too_early())[0]:
            return
        self._temporary_secs = None if interval is None or self.run.is_at_last else MAX_SECS
        try:
            self.save(step, state)
        finally:
            self._temporary_secs = None

    def save_alone(self, step: int, state: TrainState, *, is_finite: bool) -> None:
        """Save from another thread while the loader or a hook stalls, without calling any hook."""
        if not super().has_saved(step, state):
            extra = self._extra_of_run(self._saved_host_state.hooks)  # as of the latest save
            with internal_transfers(), self.saver.knowing(is_finite):
                self.saver.save(state, extra=extra)
        self.saver.wait()

    def restored(self, step: int, state: TrainState) -> None:
        self._host_state = _HostState(self._positions(), self._hooks())
        self._has_open_body = self.run.origin.has_open_body
        self.mark_saved(step, state)

    def mark_saved(self, step: int, state: TrainState) -> None:
        super().mark_saved(step, state)
        self._saved_host_state, self._saved_iterations = self._host_state, self.run.feeder.position.iterations
        # For `save_alone`, when they are no longer in memory:
        for name, file in self._host_state.hooks.files.items():
            file.load = functools.partial(self.saver.read_file, name, step)

    def has_saved(self, step: int, state: TrainState) -> bool:
        run, saved = self.run, self._saved_host_state
        if not super().has_saved(step, state) or (self._has_open_body and not run.is_in_body):
            return False
        is_same = True
        # Only positions of batches made with the state can change after their step; all processes must compare them.
        if run.source.is_of_loop:
            is_same = run.feeder.position.iterations == self._saved_iterations
        elif run.source.is_of_state and run.feeder.has_begun:
            is_same = not processes.any_process(not self._positions().is_same(saved.positions))
        return self._hooks().is_same(saved.hooks) and is_same

    def _hooks(self) -> CheckpointExtra:
        run = self.run
        # A run that takes no step keeps the name of the hook that stopped the earlier one.
        by = run.stopped_by or (None if run.feeder.has_begun else run.origin.extra.get(STOPPED))
        states = get_states(run.hooks)
        entries = {HOOK_STATES: states or None, STOPPED: by, ENDED: run.step if run.runner.has_ended() else None}
        if run.sums.limit is not None:
            entries[SKIPPED_IN_A_ROW] = run.sums.skipped_in_a_row()
        values = {key: value for key, value in entries.items() if value is not None}
        files = AttachedFiles("hooks.")
        return CheckpointExtra(as_json(values, files), files if jax.process_index() == 0 else {})

    def _positions(self) -> CheckpointExtra:
        """Return the positions of the batches; must be called on all processes."""
        run = self.run
        if not run.feeder.has_begun:  # the positions have not changed
            return CheckpointExtra(*positions_elsewhere(run.origin.extra))
        # A batch that was fetched but not trained on is fetched again after a restart.
        return CheckpointExtra(*gather_positions(run.feeder.position_after(run.step - run.first)))

    def _extra_of_run(self, states: CheckpointExtra | None = None) -> CheckpointExtra:
        """Notify the observers of a save that nothing prevents any more, and return its `extra`.

        `states` replaces the states of the hooks if their `get_state` must not be called.
        """
        run = self.run
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
            observed |= observer.about_to_save(run.step)
        body = _open_body(run)
        self._has_open_body = bool(body)
        held_values = {HELD_VALUES: run.origin.held_values} if run.origin.held_values else {}
        parent = {} if run.origin.parent is None else {PARENT: run.origin.parent}
        return CheckpointExtra(
            positions.values | observed | hooks.values | body | held_values | parent | {RUN_KEY: run.name},
            {**positions.files, **hooks.files},
        )


def _open_body(run: RunContext) -> dict[str, Any]:
    """Return the entry of a body that has not ended: its metrics, as a restart runs it again. It may be empty."""
    if not run.is_in_body or run.source.is_of_loop:
        return {}
    with internal_transfers():
        return {OPEN_BODY: as_json(copy_encodable(jax.tree.map(np.asarray, run.metrics)))}


def open_body_metrics(run: RunContext) -> Any:
    with internal_transfers():
        return jax.tree.map(jnp.asarray, tagged_json.decode(run.origin.extra[OPEN_BODY]))


def why_position_lost(run: RunContext) -> str:
    """Describe why the state must not be saved: the batches, or the body, have advanced past it; "" if not."""
    if run.saver is None:
        return ""
    if run.is_in_body and run.replaced_at == run.step:
        return (
            "the body of the loop had replaced the state and has not ended, so a restart could not run it again; the "
            "next start resumes from the newest checkpoint, if there is one"
        )
    if not run.feeder.is_position_lost(run.step - run.first):
        return ""
    if run.source.is_of_loop:
        return (
            "the iteration of the loop is not complete, so a restart could not resume it; the next start resumes "
            "from the newest checkpoint, if there is one"
        )
    return (
        "the data source has advanced, and its position is too large (above 64 kB) to be copied before each batch; the "
        "next start resumes from the newest checkpoint, if there is one"
    )
