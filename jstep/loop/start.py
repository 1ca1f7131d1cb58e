"""The start of a run: its checkpoints are opened, and its state is restored while the first program is compiled."""

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint.saver import Saver, engine_of
from jstep.core import interactive, processes
from jstep.core.exceptions import noting
from jstep.core.logs import logger
from jstep.core.trees import Tree
from jstep.data.batch_sources import BatchSource
from jstep.data.loaders import are_made_one_by_one, open_source
from jstep.data.positions import saved_position
from jstep.data.sequence import BatchSequence
from jstep.evaluating.evaluation_hook import EvaluationHook, evaluate_first, evaluate_owed
from jstep.hooks.history import check_paths
from jstep.hooks.hook_states import check_stateful, get_states
from jstep.hooks.reporting import LoggingHook, SummarySaverHook, uses_writer_of_run
from jstep.hooks.saver_hook import SaverHook
from jstep.hooks.speed import StepCounterHook, count_examples
from jstep.loop.agreement import check_processes
from jstep.loop.arguments import Options
from jstep.loop.chunks import CallBoundaries, Chunk, make_chunks
from jstep.loop.contents import restore_hooks
from jstep.loop.course import Activity
from jstep.loop.dispatch import Dispatch, warn_of_ended_rate
from jstep.loop.feeder import BatchFeeder, BatchReader
from jstep.loop.finiteness import Finiteness
from jstep.loop.hook_runner import HookRunner
from jstep.loop.origin import ENDED, LAST_BODY, STOPPED, open_saver, plan_start, read_parent, restore, step_of_values
from jstep.loop.programs import ProgramTable
from jstep.loop.run_context import RunComponents, RunContext
from jstep.loop.saving import RunSaverHook
from jstep.loop.stopping import report_done
from jstep.metering.cadence import Cadence
from jstep.record.stall_files import FOLDER as STALLS
from jstep.record.starts import FINISHED, FOLDER, valid
from jstep.stores.files import check_no_links
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import is_alive, remove_temporary, this_process
from jstep.stores.urls import is_url, location
from jstep.summary.new_event_files import marks_of_start, remove_event_file, suffix_of_run
from jstep.summary.writer import SummaryWriter, settle

_NO_LOGS = "the logs cannot be opened"
_NO_BATCHES = "the batches cannot be opened"


def open_run(run: RunContext, batches: Tree) -> RunComponents:
    """Open all that a run needs, in this order, and push on its `closing` what closes it.

    The checkpoints come first, as the claim of their prefix refuses a second run before anything is written. While the
    state is read, a thread makes the first batch and another one compiles the step for it (`_restore`). Only then is
    the step known, at which the event file, the hooks and the batches begin.
    """
    _open_checkpoints(run)
    run.start_number = _open_record(run)
    dispatch = _make_dispatch(run)
    early_batches = _restore(run, dispatch, batches)
    hooks = _build_hooks(run)
    runner = HookRunner(run, run.course, hooks, run.options, run.train_steps)
    reader = _open_reader(run, batches, early_batches)
    chunks = _make_chunks(run, dispatch, runner, reader)
    feeder = BatchFeeder(reader, chunks, run.signals, run.watch)
    finiteness = Finiteness(run.course, hooks, run.sums, dispatch, feeder)
    run.initial_contents = finiteness.initial_contents
    run.closing.callback(_close_batches, run, reader, feeder)
    return RunComponents(
        dispatch=dispatch, batches=reader, feeder=feeder, hooks=hooks, runner=runner, finiteness=finiteness
    )


def _flush_before_saves(run: RunContext) -> None:
    """Let each save flush lines and rows first: a run that resumes from it does not write earlier ones again."""
    if run.saver is None:
        return
    flushes = [observer.flush for observer in run.observers]
    if run.writer is not None:
        flushes.insert(0, functools.partial(settle, run.writer))
    for flush in (*flushes, run.background.flush):
        run.closing.enter_context(run.saver.flushing(flush))


def _make_chunks(run: RunContext, dispatch: Dispatch, runner: HookRunner, reader: BatchReader) -> Iterator[Chunk]:
    table = dispatch.table
    boundaries = CallBoundaries(run.train_steps, reader.source.next_change)
    return make_chunks(
        reader,
        run.course.first,
        table.program_for,
        run.options.batch_sharding,
        on_device=table.on_device,
        ends=runner.ends(boundaries) if table.is_looped else (math.inf,),
    )


def _open_checkpoints(run: RunContext) -> None:
    options = run.options
    course = run.course
    state = run.state
    check_processes(options, state, step_of_values(state))
    run.saver = open_saver(options)
    if run.saver is not None:
        run.closing.push(noting(functools.partial(_close, run, run.saver)))
    run.plan = plan_start(options, state, run.saver, run.new_name)
    parent = run.plan.parent
    if parent is None:
        return
    course.expect(parent.step, parent.step)
    with run.times.timing("restore"), course.doing(Activity.RESTORING):
        run.plan, state = read_parent(options, run.plan, state)
    course.begin_at(run.plan.latest or 0, state)


def _close(run: RunContext, saver: Saver) -> None:
    """Wait for pending writes, except after a second Ctrl-C; close the `Saver` unless the user passed it."""
    waits = not run.signals.received_twice
    if saver is not run.options.checkpoint_dir:
        saver.close(wait=waits)
    elif waits:
        saver.wait()


def _restore(run: RunContext, dispatch: Dispatch, batches: Tree) -> BatchReader | None:
    saver = run.saver
    course = run.course
    latest = run.plan.latest
    assumed_first = run.plan.first
    if saver is not None and latest is not None and assumed_first is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` uses the newest one at that time
            engine_of(saver).check_run(run.state, latest)  # before a program is compiled, which takes longer
    started = processes.share_errors(lambda: _begin_early(run, dispatch, batches), _NO_BATCHES)
    is_restoring = latest is not None and run.plan.parent is None
    with (
        contextlib.nullcontext() if latest is None else run.times.timing("restore"),
        course.doing(Activity.RESTORING if is_restoring else Activity.STARTING),
    ):
        if run.plan.parent is None:
            course.expect(assumed_first or 0, latest)
        run.origin, state = restore(saver, run.state, run.plan)
        extra = run.origin.extra
        is_restored = run.restored is not None
        course.begin_at(run.origin.step, state, extra.get(ENDED), extra.get(LAST_BODY), is_restored=is_restored)
    if started is not None and started.source.is_seekable and course.first != assumed_first:
        # A save of an earlier run has ended meanwhile, so the batches begin at another step.
        started.wait_for_first()  # the thread ends before the batches are opened again
        started = None
    return started


def begin_hooks(run: RunContext) -> bool:
    """Begin the hooks, with the states that the checkpoint has of them; return whether there is a step to take.

    They are given the run last: they write to what it has opened, and are closed before it.
    """
    components = run.components
    components.runner.use_run(run.closing)
    _flush_before_saves(run)
    first = run.course.first
    last_step = run.options.stop_step
    check_stateful(components.hooks)
    for observer in run.observers:
        observer.on_restored()
    is_over = components.runner.begin()
    if run.restored is not None:
        is_over = _resume_hooks(run) or is_over
    elif run.saver is not None:
        get_states(components.hooks)  # states that cannot be saved fail now, not at the first save
    if run.restored is None and not is_over and first < last_step:
        is_over = components.runner.evaluate(evaluate_first)
    if is_over or first >= last_step:
        report_done(run)
        for observer in run.observers:
            observer.on_no_steps()
        return False
    if run.origin.extra.get(STOPPED) is not None:
        logger.info("%s stopped this run at step %d; it resumes", run.origin.extra[STOPPED], first)
    components.dispatch.compiler.plan(components.batches.source, first, last_step, run.options.batch_sharding)
    return True


def _resume_hooks(run: RunContext) -> bool:
    """Give the hooks their states of the checkpoint; return whether one of them keeps the run stopped."""
    is_stopped = restore_hooks(run)
    for hook in run.components.hooks:
        if isinstance(hook, RunSaverHook):
            hook.resume(run.step, run.state)
    # A signal interrupted it before the save. Evaluated even if a hook keeps the run stopped: its result is owed.
    is_done = run.components.runner.evaluate(evaluate_owed)
    return is_stopped or is_done


def _open_record(run: RunContext) -> int:
    """Open the record of this start, on process 0; return its number."""
    (number,) = processes.first_ints_on_all(lambda: _open_on_first(run), 1, _NO_LOGS)
    return number


def _open_on_first(run: RunContext) -> tuple[int]:
    options = run.options
    if jax.process_index() == 0:
        if run.saver is None and options.where is not None and is_url(options.where):
            objects = Objects(options.where)  # asked now, as the record and the event files would each wait for it
            with objects.time_limit(START_TIMEOUT_SECS):
                objects.list(FOLDER, f"{FOLDER}~")
        paths = {os.fspath(path) for path in (options.where, options.logdir) if path is not None}
        if options.logdir is not None and options.where is not None:
            check_no_links(os.fspath(options.logdir), options.where)
        for path in paths:
            if not is_url(path):
                remove_temporary(path)
                if not os.path.islink(stalls := os.path.join(path, STALLS)):
                    remove_temporary(stalls)
    for observer in run.observers:
        observer.on_open()
    return (0 if run.file is None else run.file.fields["number"],)


def _make_dispatch(run: RunContext) -> Dispatch:
    options = run.options
    steps_per_call = options.steps_per_call
    table = ProgramTable(run.train_steps, steps_per_call, state=run.state, sums=run.sums, compiling=run.compiling)
    dispatch = Dispatch(
        table,
        signals=run.signals,
        first_call=run.times.compiling,
        watch=run.watch,
        after_first=[
            lambda chunk, state: interactive.forget(),
            functools.partial(warn_of_ended_rate, run.train_steps, options.last_step),
            *(observer.on_first_call for observer in run.observers),
            functools.partial(_log_start, run),
        ],
        count_examples=_counts_examples(options),
    )
    run.closing.callback(dispatch.compiler.close)
    return dispatch


def _counts_examples(options: Options) -> Callable[..., int | None] | None:
    """Return how the user's hook counts the examples of a batch; None if it is the size of the leading axis."""
    for hook in options.hooks:
        if isinstance(hook, StepCounterHook):
            return functools.partial(count_examples, hook)
    return None


def _log_start(run: RunContext, chunk: Chunk, state: Tree) -> None:
    is_logged = any(isinstance(hook, LoggingHook) and hook not in run.options.hooks for hook in run.components.hooks)
    if chunk.first == run.course.first and is_logged:
        run.times.log(run.watch.before)


# The batches, whose first one is made while the state is restored.


def _begin_early(run: RunContext, dispatch: Dispatch, batches: Tree) -> BatchReader | None:
    """Start the first batch and compilation before the state is restored, if possible."""
    start = run.plan.first
    sequence = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= run.options.stop_step or are_made_one_by_one(batches):
        return None
    is_past_end = sequence is not None and not sequence.is_endless and start >= len(sequence)
    if is_past_end or (sequence is None and run.plan.latest is None):
        return None
    extra = run.plan.extra
    reader = _open_batches(run, batches, start, extra)
    open_again: Callable[[], BatchSource] | None = None
    if reader.source.may_be_opened_again:  # a function of the step may have failed because it depends on a hook
        open_again = functools.partial(_open_source, run, batches, start, extra)
    reader.start(open_again)
    sharding = run.options.batch_sharding
    shapes = None if sequence is None or sharding is not None else functools.partial(sequence.shapes, start)
    dispatch.compiler.begin_first(start, sharding, run.times, functools.partial(reader.peek, shapes))
    return reader


def _open_batches(run: RunContext, batches: Tree, first: int, extra: Mapping[str, Any]) -> BatchReader:
    return BatchReader(_open_source(run, batches, first, extra), run.times)


def _open_source(run: RunContext, batches: Tree, first: int, extra: Mapping[str, Any]) -> BatchSource:
    options = run.options
    return open_source(
        batches,
        first,
        options.stop_step,
        saved_position(extra),
        is_saved=options.checkpoint_dir is not None,
        next_save=functools.partial(_next_save, options, first),
        state=lambda: run.course.position.state,
    )


def _open_reader(run: RunContext, batches: Tree, early_batches: BatchReader | None) -> BatchReader:
    """Return the batches whose first one was made early, or open them at the step that is known now."""
    origin = run.origin

    def open_batches() -> BatchReader:
        return early_batches or _open_batches(run, batches, origin.step, origin.extra)

    return processes.share_errors(open_batches, _NO_BATCHES)


def _close_batches(run: RunContext, reader: BatchReader, feeder: BatchFeeder) -> None:
    trained = run.step - run.course.first
    is_idle = feeder.close()
    if reader.fetched > trained or feeder.waiting:  # a batch may have been read in part
        reader.source.set_back(trained, reader.fetched, is_idle=is_idle)


def _next_save(options: Options, first: int, batches: int) -> int:
    """After how many batches of the run, more than these, a save is due."""
    due = Cadence(options.save_checkpoint_steps).next_multiple(first + batches)
    return min(options.stop_step, due) - first


# The hooks, and the event file that they share.


def _build_hooks(run: RunContext) -> list[Any]:
    """Return the hooks of a run, on all processes alike."""
    return processes.share_errors(lambda: _own_hooks(run), _NO_LOGS)


def _own_hooks(run: RunContext) -> list[Any]:
    """Return the user's hooks, jstep's, and savers last: a checkpoint has what the other hooks did to the state."""
    check_paths(run.options.hooks)
    run.writer = _open_writer(run)
    savers = [hook for hook in run.options.hooks if isinstance(hook, SaverHook)]
    hooks = [hook for hook in run.options.hooks if not isinstance(hook, SaverHook)]
    run.counter = _counter_among(hooks, run.options)
    if run.counter not in hooks:
        hooks.append(run.counter)
    hooks += _logs_for(run, hooks)
    if run.saver is not None:
        savers.insert(0, RunSaverHook(run, run.saver))
    run.evaluations = [hook for hook in hooks if isinstance(hook, EvaluationHook)]
    return hooks + savers


def _counter_among(hooks: list[Any], options: Options) -> StepCounterHook:
    """Return the user's counter of steps, or one that is due when something shows its rate."""
    for hook in hooks:
        if isinstance(hook, StepCounterHook):
            return hook
    return StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)


def _logs_for(run: RunContext, hooks: list[Any]) -> list[Any]:
    """Return the hooks that show the run: a progress line or log lines, and summaries unless the user has a hook."""
    options = run.options
    logs = [hook for observer in run.observers if (hook := observer.progress_hook()) is not None]
    is_shown = any(observer.replaces_log_lines for observer in run.observers)
    if options.log_steps is not None and options.progress is not False and jax.process_index() == 0 and not is_shown:
        logs.append(LoggingHook(every_n_steps=options.log_steps, leave_out=lambda: run.constant_metrics().keys()))
    has_summaries = any(isinstance(hook, SummarySaverHook) and uses_writer_of_run(hook) for hook in hooks)
    if run.writer is not None and options.save_summaries_steps is not None and not has_summaries:
        logs.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    return logs


_FLUSH_SECS, _BUCKET_FLUSH_SECS = 1.0, 10.0
"""The seconds after which a background thread writes events, and in a bucket, where each upload has a price."""


def _open_writer(run: RunContext) -> SummaryWriter | None:
    options = run.options
    if options.logdir is None or options.where is None:
        return None
    suffix = suffix_of_run(location(options.logdir, "logdir"), options.where, options.prefix, run.name)
    secs = _BUCKET_FLUSH_SECS if is_url(options.logdir) else _FLUSH_SECS
    paths: list[str] = []
    run.closing.callback(_remove_if_idle, run, paths)  # once it is closed
    writer = run.closing.enter_context(SummaryWriter(options.logdir, filename_suffix=suffix, flush_secs=secs))
    if writer.path is not None:
        # The point of a restored step is kept. A run that begins again may evaluate before its first step again.
        first = run.course.first + (run.restored is not None)
        is_resumed = run.restored is not None and not run.is_new_branch
        same_place = is_resumed or not _is_another_run(run)
        marks = marks_of_start(writer.path, first, same_place=same_place, is_new=run.restored is None)
        for _ in range(marks.in_file):
            writer.add_session_log("START", first)
        paths += [writer.path, *marks.new_paths]
    if options.config and jax.process_index() == 0:
        plain = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in options.config.items()
        }
        with contextlib.suppress(ImportError):  # TensorBoard is not installed
            writer.add_hparams(plain)
    return writer


def _remove_if_idle(run: RunContext, paths: Sequence[str]) -> None:
    """Remove the event files of a start that has found the end of the run, and had nothing to do there.

    Whether it has is known only at its end: its batches may be used up.
    """
    is_idle = run.course.has_found_end and run.course.is_finished and not run.course.has_trained
    if not is_idle:
        return
    for path in paths:
        with contextlib.suppress(OSError):  # a bucket may allow no deletion
            remove_event_file(path)


def _is_another_run(run: RunContext) -> bool:
    earlier = [] if run.file is None else valid(run.file.earlier)
    if not earlier:
        return False
    process = earlier[-1]["process"]
    end = earlier[-1]["end"]
    return end[0] == FINISHED if end else process != this_process() and bool(is_alive(process))
