"""The start of a run: its state is restored while the first batch is made and the first program is compiled."""

import contextlib
import dataclasses
import functools
import json
import logging
import math
from typing import Any

import jax

from jstep.checkpoint.saver import Saver
from jstep.core import interactive
from jstep.core.annotations import Tree
from jstep.data.loaders import Source, StateBatches, open_source
from jstep.data.positions import RarePosition, restore_position
from jstep.data.sequence import BatchSequence
from jstep.distributed import processes
from jstep.hooks.cadence import next_multiple
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.report import LoggingHook, SummarySaverHook
from jstep.hooks.run_hook import ReportingContext
from jstep.hooks.speed import StepCounterHook
from jstep.hooks.states import check_owners, get_states
from jstep.loop.arguments import Options
from jstep.loop.compiling import shapes_of_batch
from jstep.loop.dispatch import Dispatch, warn_of_ended_rate
from jstep.loop.feeder import BatchFeeder, FirstBatch, copy_batches
from jstep.loop.hook_runner import HookRunner
from jstep.loop.programs import Boundaries, ProgramTable, make_chunks
from jstep.loop.run import ENDED, STOPPED, Observers, Origin, Run, compiling_for, name_of_run
from jstep.loop.saving import RunSaverHook, open_checkpoints, restore, restore_hooks
from jstep.loop.setup import Setup
from jstep.loop.stopping import report_done
from jstep.state.contents import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.owners import is_alive, this_process
from jstep.stores.urls import location
from jstep.summary.new_event_files import STARTS, starts_here, suffix_of_run
from jstep.summary.writer import SummaryWriter

_logger = logging.getLogger("jstep")

_PROBLEM = "the batches cannot be opened"


def open_run(setup: Setup, observers: Observers, batches: Tree) -> Run:
    """Open the checkpoints, restore the state, and make the hooks and calls of the run; none of them has begun."""
    saver, origin = open_checkpoints(setup, observers)
    dispatch = _dispatch_of(setup, observers)
    setup.closing.callback(dispatch.compiler.close)
    if saver is not None and origin.latest is not None and origin.first is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` uses the newest one at that time
            saver.check_run(setup.loop.state, origin.latest)  # before a program is compiled, which takes longer
    opening = _Opening(setup, dispatch, batches, is_saved=saver is not None)
    assumed_first = origin.first
    started = processes.on_all_processes(lambda: opening.early(origin), _PROBLEM)
    with contextlib.nullcontext() if origin.latest is None else setup.times.part("restore"):
        origin = restore(setup, saver, origin)
    if started is not None and started[0].seekable and setup.loop.first != assumed_first:
        # A save of an earlier run has ended meanwhile, so the batches begin at another step.
        started[1].take()  # the thread ends before the batches are opened again
        started = None
    for observer in observers:
        observer.restored(saver, origin, dispatch, batches)
    hooks, reports = processes.on_all_processes(
        lambda: build_hooks(setup, observers, saver, origin, dispatch), "the logs cannot be opened"
    )
    runner = HookRunner(setup, hooks, reports, origin.extra.get(ENDED))
    source, items = processes.on_all_processes(lambda: started or opening.opened(origin), _PROBLEM)
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
        at_start=_contents_at_start(setup.loop.state, hooks),
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
            observer.idle(lambda step: shapes_of_batch(run.source, step, run.setup.options.batch_sharding))
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
        setup.train_steps, options.steps_per_call, state=setup.loop.state, sums=setup.sums, compiling=compiling
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


@dataclasses.dataclass(frozen=True)
class _Opening:
    """The opening of the batches; `is_saved` says whether the run has checkpoints, and so positions."""

    setup: Setup
    dispatch: Dispatch
    batches: Any
    is_saved: bool

    def early(self, origin: Origin) -> tuple[Source, FirstBatch] | None:
        """Start the first batch and the first compilation before the state is restored, or return None."""
        start, last_step = origin.first, self.setup.options.stop_step
        own = self.batches if isinstance(self.batches, BatchSequence) else None
        if start is None or start >= last_step or isinstance(self.batches, StateBatches):
            return None
        if origin.latest is None if own is None else not own.is_endless and start >= len(own):
            return None
        source, first = self.opened(origin)
        # A function of the step is called again if it failed, because it may depend on a hook.
        again = (lambda: copy_batches(self._source(origin), self.setup.fetched)) if source.by_step else None
        first.start(again)
        sharding = self.setup.options.batch_sharding
        shapes = None if own is None or sharding is not None else functools.partial(own.shapes, start)
        peek = functools.partial(first.peek, shapes)
        self.dispatch.compiler.begin_first(start, sharding, self.setup.times, peek)
        return source, first

    def opened(self, origin: Origin) -> tuple[Source, FirstBatch]:
        source = self._source(origin)
        return source, FirstBatch(copy_batches(source, self.setup.fetched), self.setup.times)

    def _source(self, origin: Origin) -> Source:
        """Return the batches from the first step, at its saved position."""
        first, last_step, loop = origin.first or 0, self.setup.options.stop_step, self.setup.loop
        saved = restore_position(origin.extra)
        source = open_source(self.batches, first, last_step, saved, resumable=self.is_saved, state=lambda: loop.state)
        if not self.is_saved:
            return source._replace(position=None)  # the position is never saved
        if source.position is None:
            return source
        ask = source.position
        if not source.is_of_state:
            rare = RarePosition(source.position, functools.partial(_next_save, self.setup.options, first))
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


# Assemble user-supplied and built-in hooks.


def build_hooks(
    setup: Setup, observers: Observers, saver: Saver | None, origin: Origin, dispatch: Dispatch
) -> tuple[list[Any], ReportingContext]:
    """Open the event file; return all hooks, and the objects that reporting hooks share."""
    options, writer = setup.options, _open_writer(setup, saver, origin)
    own = [hook for hook in options.hooks if not isinstance(hook, CheckpointSaverHook)]
    savers = [hook for hook in options.hooks if isinstance(hook, CheckpointSaverHook)]
    hooks = list(own)
    counter = next((hook for hook in own if isinstance(hook, StepCounterHook)), None)
    if counter is None:
        counter = StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)
        hooks.append(counter)
    progress_hooks = [hook for observer in observers if (hook := observer.progress_hook()) is not None]
    hooks += progress_hooks
    is_logged = options.log_steps is not None and not any(hook.replaces_log_lines for hook in progress_hooks)
    if is_logged and options.progress is not False and jax.process_index() == 0:
        hooks.append(LoggingHook(every_n_steps=options.log_steps, leave_out=lambda: dispatch.constants.values.keys()))
    has_summary_hook = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in own)
    if writer is not None and options.save_summaries_steps is not None and not has_summary_hook:
        hooks.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    if saver is not None:
        savers.insert(0, RunSaverHook(options, saver))
    hooks += savers  # last: the checkpoint of a step includes the other hooks' changes to the state
    return hooks, ReportingContext(setup.sums, setup.transfers, counter, writer, setup.background, options.config)


def _open_writer(setup: Setup, saver: Saver | None, origin: Origin) -> SummaryWriter | None:
    options, where = setup.options, setup.options.where
    if options.logdir is None or where is None:
        return None
    prefix = options.checkpoint_prefix if saver is None else saver.prefix
    suffix = suffix_of_run(location(options.logdir, "logdir"), where, prefix, name_of_run(setup, origin))
    writer = setup.closing.enter_context(SummaryWriter(options.logdir, filename_suffix=suffix))
    if writer.path is not None:
        # The point of a restored step is kept. A run that begins again may evaluate before its first step again.
        first = setup.loop.first + (origin.restored is not None)
        own = origin.restored if origin.trunk is None else None
        if starts_here(writer.path, first, same_place=own is not None or not _is_another_run(setup)):
            for _ in range(STARTS):
                writer.add_session_log("START", first)
    if setup.options.config and jax.process_index() == 0:
        plain = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in list(setup.options.config.items())
        }
        with contextlib.suppress(ImportError):  # TensorBoard is not installed
            writer.add_hparams(plain)
    return writer


def _is_another_run(setup: Setup) -> bool:
    """Return whether a start without a checkpoint begins another run: the previous one there finished, or is alive."""
    file = setup.lines.file
    earlier = [] if file is None else [one for one in file.earlier if not one.get("problem")]
    if not earlier:
        return False
    process, (status, *_) = earlier[-1].get("process"), earlier[-1].get("end") or (None,)
    if status is None:
        return process is not None and process != this_process() and bool(is_alive(process))
    return status == "finished"
