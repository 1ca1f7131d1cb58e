"""The checkpoint of a run: the state, and everything else that a restart needs.

Entries are saved by these methods of `RunSaverHook`:

| key of its `extra` | content | saved by | restored by |
|---|---|---|---|
| `batches`, `batches_of_processes` | positions of the batches | `_positions` | `restore_position`, by `start.py` |
| `hooks` | the states of the hooks | `_hooks` | `restore_hooks` |
| `stopped` | the name of the hook that stopped the run | `_hooks` | a log line; it is kept if no step is run |
| `ended` | the step at which the hooks have ended | `_hooks` | `HookRunner`, which ends them once |
| `held` | the initial values of held hyperparameters | `_extra_with` | `restore`, which warns if the new ones differ |
| `run` | the name of the run and of its event files | `_extra_with` | `Run.name` |
| `parent` | path and step of the checkpoint that the run began from | `_extra_with` | `parent_in`, for `Origin` |
| others | data of an observer, such as the past of a card | `Observer.checkpoint_extra` | the observer |
"""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jstep.checkpoint.manifest import Extra
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.exceptions import context_manager, note_other
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING, STEPPING
from jstep.data.positions import gather_positions, positions_elsewhere, with_files
from jstep.distributed import processes
from jstep.hooks.cadence import Cadence
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import Metrics, state_step
from jstep.hooks.nan_loss import about_start
from jstep.hooks.numbers import read_values
from jstep.hooks.stall_files import FOLDER as STALLS
from jstep.hooks.states import get_states, set_states
from jstep.loop.arguments import MAX_SECS, Options
from jstep.loop.branch import (
    PARENT,
    PARENT_RUN,
    RUN_KEY,
    Trunk,
    as_copy,
    open_trunk,
    parent_in,
    read_trunk,
    run_of,
    step_of_values,
)
from jstep.loop.calls import AUTO
from jstep.loop.run import ENDED, STOPPED, Observers, Origin, Run
from jstep.loop.setup import Setup
from jstep.optimizers.hyperparameters import held_values
from jstep.state.global_step import require_alive
from jstep.state.leaves import StateLeaves
from jstep.state.train_state import TrainState
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.starts import FOLDER
from jstep.stores.tagged_json import AttachedFiles, as_json
from jstep.stores.urls import is_url

_logger = logging.getLogger("jstep")

HOOK_STATES, HELD_VALUES = "hooks", "held"
"""Keys of a checkpoint's `extra`, in addition to those of the run, of positions and of observers."""

# Start: restore the newest checkpoint, or use the given state.


def open_checkpoints(setup: Setup, observers: Observers) -> tuple[Saver | None, Origin]:
    """Open the checkpoints, notify the observers, and read the small parts of the newest checkpoint."""
    options, state = setup.options, setup.loop.state
    directory, saver, origin, given = options.checkpoint_dir, None, Origin(), step_of_values(state)
    if directory is not None:

        def opened() -> tuple[Saver, int | None]:
            saver = directory if isinstance(directory, Saver) else Saver(directory, prefix=options.checkpoint_prefix)
            return saver, saver.latest_step()

        saver, latest = processes.on_all_processes(opened, "the checkpoints cannot be read")
        setup.closing.push(functools.partial(_leave, setup, saver))
        first = given if latest is None else None
        origin = Origin(latest=latest, given=given, held={} if given is None else _held(state), first=first)
    trunk = open_trunk(options, saver, origin.latest, given)
    if saver is not None:
        if origin.latest is None or origin.latest < options.stop_step:
            saver.claim(state)  # fails now, not at the first save
            origin = dataclasses.replace(origin, is_claimed=True)
        else:
            StateLeaves(state).left_out(saver.leave_out)
    reads = saver if trunk is None else trunk.saver
    if trunk is not None:
        if not trunk.is_named:  # before anything depends on which one it is
            setup.loop.set_restoring(trunk.step, trunk.step)
            with setup.times.part("restore"):
                trunk, state, extra = read_trunk(options, trunk, state)
            setup.loop.begin(trunk.step, state, restored=True)
            origin = dataclasses.replace(origin, first=trunk.step, extra=extra)
        name = run_of(trunk)
        origin = dataclasses.replace(origin, latest=trunk.step, trunk=trunk, parent=trunk.parent, parent_run=name)
        if jax.process_index() == 0:
            edited = ", with the state passed" if trunk.edited else ""
            _logger.info("this run begins from %s%s", trunk.parent["path"], edited)
    if reads is not None and origin.latest is not None and not origin.extra:
        with contextlib.suppress(Exception):  # `restore` reports the error
            extra = extra_at(reads, origin.latest)
            origin = dataclasses.replace(origin, first=origin.latest, extra=extra)
            origin = dataclasses.replace(origin, parent=origin.parent or parent_in(extra))
    if trunk is None and options.where is not None:
        origin = _of_copy(setup, options.where, saver, origin)
    processes.on_all_processes(lambda: _notify_opened(options, observers, saver, origin), "the logs cannot be opened")
    if reads is None:
        first = _step_of_given(state, "and no checkpoint_dir to restore from")
        return None, dataclasses.replace(origin, first=first)
    return saver, origin


def _of_copy(setup: Setup, where: str, saver: Saver | None, origin: Origin) -> Origin:
    """Return the origin of a run that begins in a copy of another run's directory, which is a run of its own."""
    prefix = setup.options.checkpoint_prefix if saver is None else saver.prefix
    extra = as_copy(where, prefix, origin.latest, origin.extra, setup.new_name)
    if extra is None:
        return origin
    is_new, parent = extra[RUN_KEY] == setup.new_name, extra[PARENT]
    if is_new and parent is not None and jax.process_index() == 0:
        _logger.info("%s is a copy: this run is a branch of %s from here on", where, parent["path"])
    return dataclasses.replace(origin, extra=extra, parent=parent, parent_run=extra[PARENT_RUN], is_copy=is_new)


def _notify_opened(options: Options, observers: Observers, saver: Saver | None, origin: Origin) -> None:
    if jax.process_index() == 0:
        if saver is None and options.where is not None and is_url(options.where):
            objects = Objects(options.where)  # asked now, as the record and the event files would each wait for it
            with objects.within(START_TIMEOUT_SECS):
                objects.list(FOLDER, f"{FOLDER}~")
        places = {os.fspath(place) for place in (options.where, options.logdir) if place is not None}
        for place in places:
            if not is_url(place):
                remove_temporary(place)
                if not os.path.islink(stalls := os.path.join(place, STALLS)):
                    remove_temporary(stalls)
    for observer in observers:
        observer.opened(saver, origin)


def restore(setup: Setup, saver: Saver | None, origin: Origin) -> Origin:
    """Restore the newest checkpoint, or start from the given state."""
    loop = setup.loop
    if origin.trunk is not None:
        return _begin_from(setup, origin, origin.trunk)
    loop.set_restoring(origin.first, origin.latest)
    if saver is None:
        return _with_given(setup, origin, "and no checkpoint_dir to restore from")
    try:
        with internal_transfers():
            # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
            state = saver.restore(loop.state)
    except FileNotFoundError:
        origin = _with_given(setup, origin, "and there is no checkpoint to restore")
        if jax.process_index() == 0:
            directory = setup.options.checkpoint_dir
            place = directory.directory if isinstance(directory, Saver) else os.fspath(directory or "")
            kind = "" if saver.prefix == "model" else f" {saver.prefix}-*"  # other prefixes may exist
            _logger.info("no checkpoint%s in %s: starts at step %d", kind, place, loop.first)
        return origin
    restored = state_step(state)
    extra = origin.extra if restored == origin.first else extra_at(saver, restored)
    loop.begin(restored, state, restored=True)
    name = checkpoint_name(saver.prefix, restored)
    _logger.info("restored %s", name)
    return _restored(origin, restored, extra, name)


def _restored(origin: Origin, step: int, extra: dict[str, Any], name: str) -> Origin:
    """Return the origin of a run whose state was restored; warn if the given state differs."""
    before = extra.get(HELD_VALUES)
    _warn_if_different(origin, step, before, name)
    held = origin.held if origin.given == 0 else (before or {})  # shapes, or a trained state, hold no initial values
    return dataclasses.replace(origin, restored=step, extra=extra, held=held, first=step)


def _begin_from(setup: Setup, origin: Origin, trunk: Trunk) -> Origin:
    """Restore a checkpoint of another run, unless that has been done."""
    extra = origin.extra
    if trunk.is_named:
        setup.loop.set_restoring(trunk.step, trunk.step)
        trunk, state, extra = read_trunk(setup.options, trunk, setup.loop.state)
        setup.loop.begin(trunk.step, state, restored=True)
    # The branch is not stopped by the parent's hook, and has its own name.
    extra = {key: value for key, value in extra.items() if key not in (STOPPED, RUN_KEY)}
    return _restored(origin, trunk.step, extra, trunk.parent["path"])


def extra_at(saver: Saver, step: int) -> dict[str, Any]:
    """Return the data that `train` saved beside the state at a step, or an empty dict."""
    extra = saver.extra(step)
    return with_files(extra, functools.partial(saver.read_file, step=step)) if isinstance(extra, dict) else {}


def _with_given(setup: Setup, origin: Origin, why: str) -> Origin:
    step = _step_of_given(setup.loop.state, why)
    setup.loop.begin(step, setup.loop.state)
    return dataclasses.replace(origin, first=step)


def _step_of_given(state: TrainState, why: str) -> int:
    """Return the step of the given state; reject one that is abstract or was donated."""
    for path, leaf in trees.leaves_with_paths(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), {why}; give a state of arrays, "
                "such as TrainState.create makes, or the checkpoint_dir of an earlier run"
            )
    require_alive(state)
    return state_step(state)


def _held(state: TrainState) -> dict[str, float]:
    values = {name: value for name, value in held_values(state.slots).items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read_values(values).items()}


def _warn_if_different(origin: Origin, restored: int, before: object, name: str) -> None:
    step, parent = origin.given, origin.parent or {}
    if step and step not in (restored, parent.get("step")):  # the run may have begun with that state
        _logger.warning(
            "state: the state passed (step %d) is ignored in favor of %s, the newest checkpoint of checkpoint_dir. To "
            "continue from the state passed, give another checkpoint_dir.",
            step,
            name,
        )
    if step or not isinstance(before, dict):
        return
    for hyperparameter, value in origin.held.items():
        if before.get(hyperparameter, value) != value:
            _logger.warning(
                "state: the held hyperparameter %r is created as %g, but was %g when this run started. The value in %s "
                "is used; to change it, call jstep.set_hyperparameter in a hook.",
                hyperparameter,
                value,
                before[hyperparameter],
                name,
            )


def _leave(setup: Setup, saver: Saver, kind: object, error: BaseException | None, trace: object) -> None:
    """Wait for pending writes, except after a second Ctrl-C; close the `Saver` unless the user passed it."""
    is_given, waits = saver is setup.options.checkpoint_dir, not setup.signals.received_twice
    try:
        if not is_given:
            saver.close(wait=waits)
        elif waits:
            saver.wait()
    except Exception as failure:
        if error is None:
            raise
        note_other(error, failure)


def restore_hooks(run: Run) -> bool:
    """Restore the states of the hooks; return whether one of them ends the run."""
    is_stopped = set_states(run.hooks, run.origin.extra.get(HOOK_STATES))
    for hook in run.savers:
        if not isinstance(hook, RunSaverHook):
            continue
        if run.origin.trunk is None:
            hook.restored(run.setup.loop.first, run.state)
        else:  # from now on the other run is not read
            hook.save(run.setup.loop.first, run.state, wait=True)
        if not run.has_nan_hook and not hook.saver.allow_nonfinite:
            run.poll(hook, functools.partial(_warn_of_nan, run))
    return is_stopped and not run.origin.is_at_branch_point


def _warn_of_nan(run: Run, *, wait: bool = False) -> None:
    """Warn of restored parameters, now that the device is busy with the first step."""
    if bad := run.at_start.with_nan():
        _logger.warning("%s", about_start(bad, run.setup.loop.first))


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
        now = self._clock()
        busy = self._saver.write_secs
        if busy is None:  # it is still being written
            busy = now - self._saved_at
        secs = min(MAX_SECS, max(self._least, self.blocked_secs / _LOOP_SHARE, busy / _WRITER_SHARE))
        return max(self._saved_at + secs - now, 0.0)

    def is_too_early(self) -> bool:
        """Return whether a due save would cost too much, as the latest one took longer than expected."""
        return self._saved_at is not None and self() > _EARLY

    @context_manager
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

    positions: Extra
    hooks: Extra


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
        self.part = STEPPING  # it measures its own time when it saves
        self._saved_host_state = self._host_state = _HostState(Extra({}, {}), Extra({}, {}))

    @property
    def run(self) -> Run:
        return cast(Run, super().run)

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save, without counting the wait for steps in flight."""
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        timed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._interval is not None:
            import jstep.checkpoint.orbax_arrays  # noqa: F401  # the first import is slow and not part of a save

            timed = self._interval.saving()
        with self.run.watch.part(SAVING), timed:
            return super().save(step, state, wait=wait)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save; an automatic checkpoint may be temporary, except at the last step.

        If that was not known to be the last one, it is saved again, as the hooks have ended since.
        """
        interval = self._interval
        if interval is not None and processes.broadcast_ints(interval.is_too_early())[0]:
            return
        self._temporary_secs = None if interval is None or self.run.setup.is_at_last else MAX_SECS
        try:
            self.save(step, state)
        finally:
            self._temporary_secs = None

    def save_alone(self, step: int, state: TrainState, *, is_finite: bool) -> None:
        """Save from another thread while the loader or a hook stalls, without calling any hook."""
        if not super().has_saved(step, state):
            hooks = self._saved_host_state.hooks  # as of the latest save
            extra = self._extra_with(lambda: _HostState(self._positions(), hooks))
            with internal_transfers(), self.saver.knowing(is_finite):
                self.saver.save(state, extra=extra)
        self.saver.wait()

    def restored(self, step: int, state: TrainState) -> None:
        self._host_state = self._contents()
        self.mark_saved(step, state)

    def mark_saved(self, step: int, state: TrainState) -> None:
        super().mark_saved(step, state)
        self._saved_host_state = self._host_state
        # For `save_alone`, when they are no longer in memory:
        for name, file in self._host_state.hooks.files.items():
            file.load = functools.partial(self.saver.read_file, name, step)

    def has_saved(self, step: int, state: TrainState) -> bool:
        if not super().has_saved(step, state):
            return False
        run, saved, is_same = self.run, self._saved_host_state, True
        # Only positions of batches made with the state can change after their step; all processes must compare them.
        if run.source.is_of_state and run.feeder.has_begun:
            is_same = not processes.any_process(not self._positions().is_same(saved.positions))
        return self._hooks().is_same(saved.hooks) and is_same

    def _extra_of_run(self) -> Extra:
        def contents() -> _HostState:
            self._host_state = self._contents()
            return self._host_state

        return self._extra_with(contents)

    def _contents(self) -> _HostState:
        return _HostState(self._positions(), self._hooks())

    def _hooks(self) -> Extra:
        run = self.run
        # A run that takes no step keeps the name of the hook that stopped the earlier one.
        by = run.setup.loop.stopped_by or (None if run.feeder.has_begun else run.origin.extra.get(STOPPED))
        states = get_states(run.hooks)
        entries = {HOOK_STATES: states or None, STOPPED: by, ENDED: run.step if run.runner.has_ended() else None}
        values = {key: value for key, value in entries.items() if value is not None}
        files = AttachedFiles("hooks.")
        return Extra(as_json(values, files), files if jax.process_index() == 0 else {})

    def _positions(self) -> Extra:
        """Return the positions of the batches; must be called on all processes."""
        run = self.run
        files = AttachedFiles()
        if not run.feeder.has_begun:  # the positions have not changed
            return Extra(positions_elsewhere(run.origin.extra, files), files)
        # A batch that was fetched but not trained on is fetched again after a restart.
        return Extra(gather_positions(run.feeder.position_after(run.step - run.setup.loop.first), files), files)

    def _extra_with(self, host_state: Callable[[], _HostState]) -> Extra:
        """Notify the observers of a save that nothing prevents any more, and return its `extra`."""
        run = self.run
        # A run that resumes from a checkpoint does not write earlier summaries again.
        if (writer := run.reports.writer) is not None:
            try:
                writer.drain()
            except Exception as error:
                run.log_failed(writer, error)
        for observer in run.observers:
            observer.about_to_save()
        positions, hooks = host_state()
        observed = {
            key: value for observer in run.observers for key, value in observer.checkpoint_extra(run.step).items()
        }
        held = {HELD_VALUES: run.origin.held} if run.origin.held else {}
        parent = {} if run.origin.parent is None else {PARENT: run.origin.parent}
        return Extra(
            positions.values | observed | hooks.values | held | parent | {RUN_KEY: run.name},
            {**positions.files, **hooks.files},
        )


def why_position_lost(run: Run) -> str:
    """Describe why the state must not be saved: the batches have advanced past it; "" if not."""
    if run.saver is None or not run.feeder.is_position_lost(run.step - run.setup.loop.first):
        return ""
    newest = run.saver.latest_step()
    name = "" if newest is None else checkpoint_name(run.saver.prefix, newest)
    return (
        "the data source has advanced, and its position is too large (above 64 kB) to be copied "
        f"before each batch; {f'the newest is {name}' if name else 'there is no checkpoint'}"
    )
