"""The start of a run: its checkpoints are opened, and its state is restored while the first batch and program are made.

In this order: the checkpoints and the files are opened (a branch reads the checkpoint that it begins from, a copy of
another run's directory becomes a run of its own), the first batch and compilation begin in threads, the state is
restored, the hooks are built, and they begin.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.hook_states import check_owners, get_states
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import interactive, trees
from jstep.core.exceptions import note_other
from jstep.core.meshes import internal_transfers
from jstep.data.loaders import Source, StateBatches, open_source
from jstep.data.positions import RarePosition, restore_position
from jstep.data.sequence import BatchSequence
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.hook import state_step
from jstep.hooks.nan_loss import NanLossHook
from jstep.loop.arguments import Options
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
    warn_of_other_trunk,
)
from jstep.loop.build_hooks import build_hooks
from jstep.loop.dispatch import Dispatch, warn_of_ended_rate
from jstep.loop.feeder import BatchFeeder, FirstBatch, copy_batches
from jstep.loop.hook_runner import HookRunner
from jstep.loop.programs import Boundaries, ProgramTable, make_chunks
from jstep.loop.run import ENDED, STOPPED, Observers, Origin, Run, compiling_for
from jstep.loop.saving import HELD_VALUES, extra_at, restore_hooks
from jstep.loop.setup import Setup
from jstep.loop.stopping import report_done
from jstep.metering.cadence import next_multiple
from jstep.metering.numbers import read_values
from jstep.optimizers.hyperparameters import held_values
from jstep.record.stall_files import FOLDER as STALLS
from jstep.record.starts import FOLDER
from jstep.state.global_step import require_alive
from jstep.state.leaves import StateLeaves
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.urls import is_url

_logger = logging.getLogger("jstep")


def open_run(setup: Setup, observers: Observers) -> Run:
    """Open the checkpoints, restore the state, and make the hooks and chunks of the run; none of them has begun."""
    saver, origin = open_checkpoints(setup, observers)
    dispatch = _dispatch_of(setup, observers)
    setup.closing.callback(dispatch.compiler.close)
    if saver is not None and origin.latest is not None and origin.first is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` uses the newest one at that time
            saver.check_run(setup.loop.at.state, origin.latest)  # before a program is compiled, which takes longer
    assumed_first, problem = origin.first, "the batches cannot be opened"
    started = processes.on_all_processes(lambda: _begin_early(setup, dispatch, origin), problem)
    with contextlib.nullcontext() if origin.latest is None else setup.times.part("restore"):
        origin = restore(setup, saver, origin)
    if started is not None and started[0].seekable and setup.loop.first != assumed_first:
        # A save of an earlier run has ended meanwhile, so the batches begin at another step.
        started[1].take()  # the thread ends before the batches are opened again
        started = None
    hooks, reports = processes.on_all_processes(
        lambda: build_hooks(setup, observers, saver, origin, dispatch), "the logs cannot be opened"
    )
    runner = HookRunner(setup, hooks, reports, origin.extra.get(ENDED))
    source, items = processes.on_all_processes(lambda: started or _open_batches(setup, origin), problem)
    table = dispatch.table
    chunks = make_chunks(
        iter(items),
        setup.loop.first,
        table.program_for,
        setup.options.batch_sharding,
        on_device=table.on_device,
        ends=runner.ends(Boundaries(setup.train_steps, source.next_change)) if table.is_looped else (math.inf,),
    )
    feeder = BatchFeeder(source, chunks, setup.signals, setup.watch)
    setup.closing.callback(feeder.close)
    run = Run(
        setup=setup,
        origin=origin,
        watch=setup.watch,
        in_flight=setup.in_flight,
        last_step=setup.options.last_step,
        is_new_branch=origin.trunk is not None,
        restored=origin.restored,
        evaluations=runner.evaluations,
        saver=saver,
        reports=reports,
        hooks=hooks,
        observers=observers,
        source=source,
        feeder=feeder,
        dispatch=dispatch,
        runner=runner,
        at_start=_contents_at_start(setup.loop.at.state, hooks),
    )
    runner.use_run(run)
    if saver is not None:  # a run that resumes from a checkpoint does not write earlier lines again
        summaries = [] if reports.writer is None else [reports.writer.settle]
        for flush in (*summaries, *(observer.flush for observer in observers), setup.background.flush):
            setup.closing.enter_context(saver.flushing(flush))
    return run


def begin(run: Run) -> bool:
    """Begin the hooks; return whether to run steps."""
    check_owners(run.hooks)
    for observer in run.observers:
        observer.before_begin(run)
    runner, first, last_step = run.runner, run.setup.loop.first, run.setup.options.stop_step
    is_over = runner.begin()
    if run.restored is not None:
        is_over = restore_hooks(run) or is_over
        is_over = runner.evaluate("evaluate_owed") or is_over  # a signal interrupted it
    elif run.saver is not None:
        get_states(run.hooks)  # states that cannot be saved fail now, not at the first save
    if run.restored is None and not is_over and first < last_step:
        is_over = runner.evaluate("evaluate_first")
    if is_over or first >= last_step:
        report_done(run)
        for observer in run.observers:
            observer.idle()
        return False
    if run.origin.extra.get(STOPPED) is not None:
        _logger.info("%s stopped this run at step %d; it resumes", run.origin.extra[STOPPED], first)
    run.dispatch.compiler.plan(run.source, first, last_step, run.setup.options.batch_sharding)
    return True


def _contents_at_start(state: TrainState, hooks: list[Any]) -> StateContents:
    has_hook = any(isinstance(hook, NanLossHook) for hook in hooks)
    is_checked = has_hook or any(isinstance(hook, CheckpointSaverHook) for hook in hooks)
    return StateContents(state if is_checked else {}, params_only=not has_hook)


def _dispatch_of(setup: Setup, observers: Observers) -> Dispatch:
    options, compiling = setup.options, functools.partial(compiling_for, observers)
    table = ProgramTable(
        setup.train_steps, options.steps_per_call, state=setup.loop.at.state, sums=setup.sums, compiling=compiling
    )
    return Dispatch(
        table,
        signals=setup.signals,
        first_call=setup.times.compiling,
        watch=setup.watch,
        after_first=[
            lambda chunk, state: interactive.forget(),
            functools.partial(warn_of_ended_rate, setup.train_steps, options.last_step),
            *(observer.after_first for observer in observers),
        ],
    )


# Open the checkpoints: those of the run, or the one that a branch begins from.


def open_checkpoints(setup: Setup, observers: Observers) -> tuple[Saver | None, Origin]:
    """Open the checkpoints, notify the observers, and read the small parts of the newest checkpoint."""
    options, state = setup.options, setup.loop.at.state
    given, directory = step_of_values(state), options.checkpoint_dir
    saver, origin = None, Origin(given=given, first=given)
    if directory is not None:

        def opened() -> tuple[Saver, int | None]:
            saver = directory if isinstance(directory, Saver) else Saver(directory, prefix=options.checkpoint_prefix)
            return saver, saver.latest_step()

        saver, latest = processes.on_all_processes(opened, "the checkpoints cannot be read")
        setup.closing.push(functools.partial(_leave, setup, saver))
        origin = dataclasses.replace(origin, latest=latest, held={} if given is None else _held(state))
    trunk = open_trunk(options, saver, origin.latest, given)
    if saver is not None:
        if origin.latest is None or origin.latest < options.stop_step:
            saver.claim(state)  # fails now, not at the first save
            origin = dataclasses.replace(origin, is_claimed=True)
        else:
            StateLeaves(state).left_out(saver.leave_out)
    if trunk is not None:
        origin = _branch(setup, trunk, origin)
    elif saver is not None and origin.latest is not None:
        first, extra = None, dict[str, Any]()
        with contextlib.suppress(Exception):  # `restore` reports the error
            first, extra = origin.latest, extra_at(saver, origin.latest)
        origin = dataclasses.replace(origin, first=first, extra=extra, parent=parent_in(extra))
        if extra and jax.process_index() == 0:
            warn_of_other_trunk(options.start_from, origin.parent)
    if trunk is None and options.where is not None:
        origin = _of_copy(setup, options.where, saver, origin)
    processes.on_all_processes(lambda: _notify_opened(options, observers, saver, origin), "the logs cannot be opened")
    return saver, origin


def _branch(setup: Setup, trunk: Trunk, origin: Origin) -> Origin:
    """Begin from the checkpoint of another run; it is read now, before anything depends on which one it is."""
    setup.loop.first, setup.loop.is_known, setup.loop.restoring = trunk.step, True, trunk.step
    with setup.times.part("restore"):
        trunk, state, extra = read_trunk(setup.options, trunk, setup.loop.at.state)
    setup.loop.begin(trunk.step, state, restored=True)
    if jax.process_index() == 0:
        edited = ", with the state passed" if trunk.edited else ""
        _logger.info("this run begins from %s%s", trunk.parent["path"], edited)
    origin = dataclasses.replace(origin, latest=trunk.step, first=trunk.step, extra=extra, trunk=trunk)
    return dataclasses.replace(origin, parent=trunk.parent, parent_run=run_of(trunk))


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


def _held(state: TrainState) -> dict[str, float]:
    values = {name: value for name, value in held_values(state.slots).items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read_values(values).items()}


# Restore the newest checkpoint, or use the given state.


def restore(setup: Setup, saver: Saver | None, origin: Origin) -> Origin:
    """Restore the newest checkpoint, or start from the given state; that of a branch has been read."""
    loop = setup.loop
    if origin.trunk is not None:
        # The branch is not stopped by the parent's hook, and has its own name.
        extra = {key: value for key, value in origin.extra.items() if key not in (STOPPED, RUN_KEY)}
        return _restored(origin, origin.trunk.step, extra, origin.trunk.parent["path"])
    loop.first, loop.is_known, loop.restoring = origin.first or 0, True, origin.latest
    state = None
    with contextlib.suppress(FileNotFoundError), internal_transfers():
        # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
        state = None if saver is None else saver.restore(loop.at.state)
    if saver is None or state is None:
        why = "no checkpoint_dir to restore from" if saver is None else "there is no checkpoint to restore"
        step = _step_of_given(loop.at.state, why)
        loop.begin(step, loop.at.state, restored=False)
        if saver is not None and jax.process_index() == 0:
            kind = "" if saver.prefix == "model" else f" {saver.prefix}-*"  # other prefixes may exist
            _logger.info("no checkpoint%s in %s: starts at step %d", kind, saver.directory, step)
        return dataclasses.replace(origin, first=step)
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


def _step_of_given(state: TrainState, why: str) -> int:
    """Return the step of the given state; reject one that is abstract or was donated."""
    for path, leaf in trees.leaves_with_paths(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), and {why}; give a state of "
                "arrays, such as TrainState.create makes, or the checkpoint_dir of an earlier run"
            )
    require_alive(state)
    return state_step(state)


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
                "state: the held hyperparameter %r is created as %g, but was %g at the start before. The value in %s "
                "is used; to change it, call jstep.set_hyperparameter in a hook.",
                hyperparameter,
                value,
                before[hyperparameter],
                name,
            )


# The batches, whose first one is made while the state is restored.


def _begin_early(setup: Setup, dispatch: Dispatch, origin: Origin) -> tuple[Source, FirstBatch] | None:
    """Start the first batch and the first compilation before the state is restored, or return None."""
    start, batches = origin.first, setup.batches
    own = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= setup.options.stop_step or isinstance(batches, StateBatches):
        return None
    if origin.latest is None if own is None else not own.is_endless and start >= len(own):
        return None
    source, first = _open_batches(setup, origin)
    # A function of the step is called again if it failed, because it may depend on a hook.
    again = (lambda: copy_batches(_source(setup, origin), setup.fetched)) if source.by_step else None
    first.start(again)
    sharding = setup.options.batch_sharding
    shapes = None if own is None or sharding is not None else functools.partial(own.shapes, start)
    dispatch.compiler.begin_first(start, sharding, setup.times, functools.partial(first.peek, shapes))
    return source, first


def _open_batches(setup: Setup, origin: Origin) -> tuple[Source, FirstBatch]:
    source = _source(setup, origin)
    return source, FirstBatch(copy_batches(source, setup.fetched), setup.times)


def _source(setup: Setup, origin: Origin) -> Source:
    """Return the batches from the first step, at its saved position."""
    first, options, loop = origin.first or 0, setup.options, setup.loop
    saved, is_saved = restore_position(origin.extra), options.checkpoint_dir is not None
    source = open_source(
        setup.batches, first, options.stop_step, saved, resumable=is_saved, state=lambda: loop.at.state
    )
    if not is_saved:
        return source._replace(position=None)  # the position is never saved
    if source.position is None:
        return source
    ask = source.position
    if not source.is_of_state:
        rare = RarePosition(source.position, functools.partial(_next_save, options, first))
        source, ask = source._replace(position=rare), rare.read
    if source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # a loader may not know its position before its first batch
        before = ask()
    return source._replace(begin=lambda: before)


def _next_save(options: Options, first: int, batches: int) -> int:
    """Return after how many batches of the run, more than these, a save by steps is due."""
    step, interval, last = first + batches, options.save_checkpoint_steps, options.stop_step
    return (last if interval is None else min(last, next_multiple(step, interval))) - first
