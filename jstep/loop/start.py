"""The start of a run: its state is restored while the first batch is made and the first program is compiled."""

import contextlib
import functools
import logging
import math
from typing import Any

import jax

from jstep.data.loaders import Source, StateBatches, source_of
from jstep.data.positions import RarePosition, saved_position
from jstep.data.sequence import BatchSequence
from jstep.distributed import processes
from jstep.hooks.cadence import next_multiple
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.nan_loss import NanLossHook, NonfiniteParametersHook
from jstep.hooks.report import LoggingHook, SummarySaverHook
from jstep.hooks.run_hook import RunHook
from jstep.hooks.speed import StepCounterHook
from jstep.hooks.states import check_owners, get_states
from jstep.loop.compile_ahead import compile_ahead, compile_first_program, shapes_of_batch
from jstep.loop.feeder import BatchFeeder, FirstBatch, copied_batches
from jstep.loop.foresight import look_ahead
from jstep.loop.hook_runner import HookRunner
from jstep.loop.run import Run
from jstep.loop.saving import STOPPED, RunSaverHook, restore, restore_hooks
from jstep.loop.stages import StageBoundaries
from jstep.loop.stopping import report_done
from jstep.summary.new_event_files import STARTS, starts_here
from jstep.summary.writer import SummaryWriter

_logger = logging.getLogger("jstep")

_PROBLEM = "the batches cannot be opened"


def begin(run: Run, batches: Any) -> None:
    """Restore the state, begin the hooks, and make the calls of the run: `run.feeder`, None if it takes no step."""
    run.closing.callback(run.programs.compiler.close)
    if run.saver is not None and run.resumed.latest is not None and run.resumed.first is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` takes the one that is then the newest
            run.saver.check_run(run.state, run.resumed.latest)  # before a program is compiled, which takes longer
    started, sought = processes.on_all_processes(lambda: _begin_batches(run, batches), _PROBLEM), run.first
    with contextlib.nullcontext() if run.resumed.latest is None else run.times.part("restore"):
        restore(run)
    if started is not None and started[0].seekable and run.first != sought:
        # A save that an earlier run had left in progress has ended meanwhile: the batches begin at another step.
        started[1].take()  # the thread ends before the batches are opened again
        started = None
    for observer in run.observers:
        observer.restored(batches)
    processes.on_all_processes(lambda: build_hooks(run), "the logs cannot be opened")
    runner = run.runner = HookRunner(run)
    source, items = processes.on_all_processes(lambda: started or _open_batches(run, batches), _PROBLEM)
    check_owners(run.hooks)
    is_over = runner.begin()
    if run.restored is not None:
        is_over = restore_hooks(run) or is_over
        is_over = runner.evaluate("evaluate_owed") or is_over  # what a signal interrupted
    elif run.saver is not None:
        get_states(run.hooks)  # a state that cannot be kept is an error now, not at the first save
    if run.restored is None and not is_over and run.first < run.options.last_step:
        is_over = runner.evaluate("evaluate_first")
    if is_over or run.first >= run.options.last_step:
        report_done(run)
        for observer in run.observers:
            observer.idle(lambda step: shapes_of_batch(source, step, run.options.batch_sharding))
        return
    if run.resumed.extra.get(STOPPED) is not None:
        _logger.info("%s stopped this run at step %d; it resumes", run.resumed.extra[STOPPED], run.first)
    look_ahead(run)
    _make_calls(run, runner, source, items)


def _make_calls(run: Run, runner: HookRunner, source: Source, items: FirstBatch) -> None:
    boundaries = StageBoundaries(run.programs.train_steps, source.next_change)
    compile_ahead(run, boundaries, source)
    ends = runner.ends(boundaries) if run.programs.is_looped else None
    made = run.programs.calls(iter(items), run.first, ends or (math.inf,), run.options.batch_sharding)
    run.feeder = BatchFeeder(source, made, run.signals, run.watch)
    run.closing.callback(run.feeder.close)
    if ends is not None:
        run.closing.callback(ends.close)  # first, as the thread of the feeder may wait for one


def _begin_batches(run: Run, batches: Any) -> tuple[Source, FirstBatch] | None:
    """Start the first batch and the first compilation before the checkpoint is read; None if that is not possible."""
    start = run.resumed.first
    own = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= run.options.last_step or isinstance(batches, StateBatches):
        return None
    if run.resumed.latest is None if own is None else not own.is_endless and start >= len(own):
        return None
    source, first = _open_batches(run, batches)
    # A function of the step can be called again, if its first call failed because it needs what a hook sets up.
    again = (lambda: copied_batches(_source(run, batches), run.fetched)) if source.by_step is not None else None
    first.start(again)
    compile_first_program(run, first, None if own is None else functools.partial(own.shapes, start))
    return source, first


def _open_batches(run: Run, batches: Any) -> tuple[Source, FirstBatch]:
    source = _source(run, batches)
    return source, FirstBatch(copied_batches(source, run.fetched), run.times)


def _source(run: Run, batches: Any) -> Source:
    """The batches from the start of the run, at the position that was saved with its checkpoint."""
    resumable, saved, last_step = run.saver is not None, saved_position(run.resumed.extra), run.options.last_step
    source = source_of(batches, run.first, last_step, saved, resumable=resumable, state=lambda: run.state)
    if not resumable:
        return source._replace(position=None)  # the position is never saved
    if source.position is None:
        return source
    ask = source.position
    if not source.is_of_state:
        rare = RarePosition(source.position, functools.partial(_next_save, run))
        source, ask = source._replace(position=rare), rare.read
    if source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # a loader may not know its position before its first batch
        before = ask()
    return source._replace(begin=lambda: before)


def _next_save(run: Run, batches: int) -> int:
    """After how many batches of the run, more than these, a checkpoint is due by steps."""
    step, interval, last = run.first + batches, run.options.save_checkpoint_steps, int(run.options.last_step)
    return (last if interval is None else min(last, next_multiple(step, interval))) - run.first


# Assemble user-supplied and stock hooks.


def build_hooks(run: Run) -> None:
    """Open the event file, append the stock hooks to the user's, and give the run to the stock hooks."""
    options = run.options
    run.reports.writer = _open_writer(run)
    own = [hook for hook in options.hooks if not isinstance(hook, CheckpointSaverHook)]
    savers = [hook for hook in options.hooks if isinstance(hook, CheckpointSaverHook)]
    run.hooks = list(own)
    counter = next((hook for hook in own if isinstance(hook, StepCounterHook)), None)
    if counter is None:
        counter = StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)
        run.hooks.append(counter)
    run.reports.counter = counter
    reporters = [hook for observer in run.observers if (hook := observer.reporter()) is not None]
    run.hooks += reporters
    if not reporters and options.log_steps is not None and options.progress is not False and jax.process_index() == 0:
        run.hooks.append(LoggingHook(every_n_steps=options.log_steps, leave_out=run.constant_metrics))
        run.times.is_logged = True
    summed = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in own)
    if run.reports.writer is not None and options.save_summaries_steps is not None and not summed:
        run.hooks.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    if (run.saver is not None or savers) and not any(isinstance(hook, NanLossHook) for hook in own):
        run.hooks.append(NonfiniteParametersHook())
    if run.saver is not None:
        # A run that resumes from a checkpoint does not write earlier summaries and times again.
        if run.reports.writer is not None:
            run.reports.flushes.insert(0, run.reports.writer.settle)
        savers.insert(0, RunSaverHook(run, run.saver))
    run.hooks += savers  # last: the checkpoint of a step includes the other hooks' changes to the state
    for hook in run.hooks:
        if isinstance(hook, RunHook):
            run.closing.callback(hook.close)
            hook.use_run(run)
    if run.saver is not None:
        for flush in run.reports.flushes:
            run.closing.enter_context(run.saver.flushing(flush))


def _open_writer(run: Run) -> SummaryWriter | None:
    if run.options.logdir is None:
        return None
    suffix, first = f".{run.name}", run.first + 1
    writer = run.closing.enter_context(SummaryWriter(run.options.logdir, filename_suffix=suffix))
    if writer.path is not None and starts_here(writer.path, suffix, first):
        for _ in range(STARTS):
            writer.add_session_log("START", first)
    return writer
