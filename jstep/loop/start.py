"""The start of a run: its checkpoints are opened, and its state is restored while the first batch and program are made.

In this order: the checkpoints and the files are opened (a branch reads the checkpoint that it begins from, a copy of
another run's directory becomes a run of its own), the first batch and compilation begin in threads, the state is
restored, the hooks are built, and they begin.
"""

import contextlib
import functools
import logging
import math
import os
from typing import Any

import jax

from jstep.checkpoint.hook_states import check_owners, get_states
from jstep.checkpoint.saver import Saver
from jstep.core import interactive
from jstep.data.loaders import Source, StateBatches, open_source
from jstep.data.positions import RarePosition, restore_position
from jstep.data.sequence import BatchSequence
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import NanLossHook
from jstep.loop.arguments import Options
from jstep.loop.build_hooks import build_hooks
from jstep.loop.dispatch import Dispatch, warn_of_ended_rate
from jstep.loop.feeder import BatchFeeder, FirstBatch, copy_batches
from jstep.loop.hook_runner import HookRunner
from jstep.loop.observer import Observers, compiling_for
from jstep.loop.origin import ENDED, STOPPED, Origin, open_checkpoints, restore
from jstep.loop.programs import Boundaries, ProgramTable, make_chunks
from jstep.loop.run import Run
from jstep.loop.saving import restore_hooks
from jstep.loop.setup import Setup
from jstep.loop.stopping import report_done
from jstep.metering.cadence import next_multiple
from jstep.record.stall_files import FOLDER as STALLS
from jstep.record.starts import FOLDER
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.urls import is_url

_logger = logging.getLogger("jstep")


def open_run(setup: Setup, observers: Observers) -> Run:
    """Open the checkpoints, restore the state, and make the hooks and chunks of the run; none of them has begun."""
    no_logs, no_batches = "the logs cannot be opened", "the batches cannot be opened"
    saver, origin = open_checkpoints(setup)
    processes.on_all_processes(lambda: _notify_opened(setup.options, observers, saver, origin), no_logs)
    dispatch = _dispatch_of(setup, observers)
    setup.closing.callback(dispatch.compiler.close)
    if saver is not None and origin.latest is not None and origin.first is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` uses the newest one at that time
            saver.check_run(setup.loop.at.state, origin.latest)  # before a program is compiled, which takes longer
    assumed_first = origin.first
    started = processes.on_all_processes(lambda: _begin_early(setup, dispatch, origin), no_batches)
    with contextlib.nullcontext() if origin.latest is None else setup.times.part("restore"):
        origin = restore(setup, saver, origin)
    if started is not None and started[0].seekable and setup.loop.first != assumed_first:
        # A save of an earlier run has ended meanwhile, so the batches begin at another step.
        started[1].take()  # the thread ends before the batches are opened again
        started = None
    hooks, reports = processes.on_all_processes(lambda: build_hooks(setup, observers, saver, origin, dispatch), no_logs)
    runner = HookRunner(setup, hooks, reports, origin.extra.get(ENDED))
    source, items = processes.on_all_processes(lambda: started or _open_batches(setup, origin), no_batches)
    table = dispatch.table
    chunks = make_chunks(
        items,
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
