"""The start of a run: its checkpoints are opened, and its state is restored while the first program is compiled.

The step at which the run begins is assumed first, and known once the state is read. The values, as they are set:

| value | is the step of | None if |
|---|---|---|
| the plan's `given_step` | the state that was passed | it is abstract, or was donated |
| the `step` of its `parent` | the checkpoint of another run | the run has checkpoints, or no `start_from` |
| its `latest` | the checkpoint to restore, the newest one or the parent's | there is none |
| its `first` | the state, as assumed: `latest`, else `given_step` | both are None, or that checkpoint is unreadable |
| the course's `first` | the state, assumed (or 0) while it is read, then known | - |
| the origin's `step` | the state; 0 until it is read | - |

The plan's `first` may be wrong: if a save of an earlier start ends in between, `restore` finds a newer checkpoint than
`latest`. Batches that were begun at `first` are then begun again (`_restore`).
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from jstep.evaluating.evaluation_hook import evaluate_first, repeat_interrupted
from jstep.hooks.cadence import Cadence
from jstep.hooks.hook_states import check_stateful, get_states
from jstep.hooks.reporting import LoggingHook
from jstep.hooks.speed import StepCounterHook, count_examples
from jstep.loop.agreement import check_processes
from jstep.loop.arguments import Options
from jstep.loop.build_hooks import NO_LOGS, build_hooks
from jstep.loop.chunks import Chunk, ProgramChanges, make_chunks
from jstep.loop.contents import restore_hooks
from jstep.loop.course import Activity
from jstep.loop.dispatch import Dispatch, warn_of_ended_rate
from jstep.loop.feeder import BatchFeeder, BatchReader
from jstep.loop.finiteness import Finiteness
from jstep.loop.hook_runner import HookRunner, make_next_due
from jstep.loop.origin import ENDED, LAST_BODY, STOPPED, open_saver, plan_start, read_parent, restore, step_of_values
from jstep.loop.programs import ProgramTable
from jstep.loop.run_context import RunComponents, RunContext
from jstep.loop.saving import RunSaverHook
from jstep.loop.stopping import report_done
from jstep.record.stall_files import FOLDER as STALLS
from jstep.record.starts import FOLDER
from jstep.stores.files import check_no_links
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import remove_temporary
from jstep.stores.urls import is_url
from jstep.summary.writer import sync_to_disk

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
    hooks = build_hooks(run)
    runner = HookRunner(run, run.course, hooks, run.train_steps)
    reader = _open_reader(run, batches, early_batches)
    chunks_from = functools.partial(_make_chunks, run, dispatch.table, hooks, reader)
    feeder = BatchFeeder(reader, chunks_from, run.course.first, run.signals, run.watch)
    finiteness = Finiteness(run.course, hooks, run.sums, dispatch, feeder)
    run.initial_contents = finiteness.initial_contents
    run.closing.callback(_close_batches, run, reader, feeder)
    return RunComponents(
        dispatch=dispatch, batches=reader, feeder=feeder, hooks=hooks, runner=runner, finiteness=finiteness
    )


def begin_hooks(run: RunContext) -> bool:
    """Begin the hooks, with the states that the checkpoint has of them; return whether there is a step to take.

    The hooks get the run last, as they write to what it has opened; so they are closed first.
    """
    components = run.components
    components.runner.use_run(run.closing)
    _flush_before_saves(run)
    first = run.course.first
    stop_step = run.options.stop_step
    check_stateful(components.hooks)
    for observer in run.observers:
        observer.on_restored()
    is_over = components.runner.begin()
    if run.restored is not None:
        keeps_stopped = _resume_hooks(run)  # called in any case: the hooks get their states back
        is_over = is_over or keeps_stopped
    else:
        if run.saver is not None:
            get_states(components.hooks)  # states that cannot be saved fail now, not at the first save
        if not is_over and first < stop_step:
            is_over = components.runner.make_evaluations(evaluate_first)
    if is_over and run.poll_stop_signal():
        return False  # a signal has interrupted the owed evaluation again: the next start makes it, and resumes
    if is_over or first >= stop_step:
        report_done(run)
        for observer in run.observers:
            observer.on_no_steps()
        return False
    stopped_by = run.origin.extra.get(STOPPED)
    if stopped_by is not None:
        logger.info("%s stopped this run at step %d; it resumes", stopped_by, first)
    components.dispatch.compiler.plan(components.batches.source, first, stop_step, run.options.batch_sharding)
    return True


def _flush_before_saves(run: RunContext) -> None:
    """Let each save flush lines and rows first: a run that resumes from it does not write earlier ones again."""
    if run.saver is None:
        return
    flushes = [observer.flush for observer in run.observers]
    if run.writer is not None:
        flushes.insert(0, functools.partial(sync_to_disk, run.writer))
    for flush in (*flushes, run.background.flush):
        run.closing.enter_context(run.saver.flushing(flush))


def _resume_hooks(run: RunContext) -> bool:
    """Give the hooks their states of the checkpoint; return whether one of them keeps the run stopped."""
    is_stopped = restore_hooks(run)
    for hook in run.components.hooks:
        if isinstance(hook, RunSaverHook):
            hook.resume(run.step, run.state)
    # If a signal interrupted an evaluation before this checkpoint was saved, it is made now. This is so even if a hook
    # keeps the run stopped: the result is owed.
    is_done = run.components.runner.make_evaluations(repeat_interrupted)
    return is_stopped or is_done


# The checkpoints, and the state.


def _open_checkpoints(run: RunContext) -> None:
    options = run.options
    course = run.course
    state = run.state
    check_processes(options, state, step_of_values(state))
    run.saver = open_saver(options)
    if run.saver is not None:
        run.closing.push(noting(functools.partial(_close_saver, run, run.saver)))
    run.plan = plan_start(options, state, run.saver, run.new_name)
    parent = run.plan.parent
    if parent is None:
        return
    course.assume_start(parent.step, parent.step)
    with run.times.timing("restore"), course.doing(Activity.RESTORING):
        run.plan, state = read_parent(options, run.plan, state)
    assert run.plan.latest is not None  # `read_parent` sets it
    # The programs are made for this state. `_restore` sets the start again, with the contents of the checkpoint.
    course.set_start(run.plan.latest, state)


def _close_saver(run: RunContext, saver: Saver) -> None:
    """Wait for pending writes, except after a second Ctrl-C; close the `Saver` unless the user passed it."""
    waits = not run.signals.received_twice
    if saver is not run.options.checkpoint_dir:
        saver.close(wait=waits)
    elif waits:
        saver.wait()


def _restore(run: RunContext, dispatch: Dispatch, batches: Tree) -> BatchReader | None:
    """Restore the state, while the first batch is made and its program compiled.

    Returns:
        Batches that can be used: begun at the right step, or of an iterator, which has no step. None if there are none.
    """
    saver = run.saver
    course = run.course
    plan = run.plan
    is_readable = plan.first is not None  # see the table above; if it is not, `restore` raises the reason
    if saver is not None and plan.latest is not None and is_readable:
        with contextlib.suppress(FileNotFoundError):  # `restore` uses the newest one at that time
            # Before a program is compiled, which takes longer.
            engine_of(saver).check_run(run.state, plan.latest)
    early_batches = processes.share_errors(lambda: _begin_batches_early(run, dispatch, batches), _NO_BATCHES)
    # The state of a branch was read with the parent's checkpoint.
    is_reading = plan.latest is not None and plan.parent is None
    with (
        contextlib.nullcontext() if plan.latest is None else run.times.timing("restore"),
        course.doing(Activity.RESTORING if is_reading else Activity.STARTING),
    ):
        if plan.parent is None:
            course.assume_start(plan.first or 0, plan.latest)
        run.origin, state = restore(saver, run.state, plan)
        extra = run.origin.extra
        is_restored = run.restored is not None
        course.set_start(run.origin.step, state, extra.get(ENDED), extra.get(LAST_BODY), is_restored=is_restored)
    if early_batches is None or course.first == plan.first:
        return early_batches
    if not early_batches.source.is_seekable:
        return early_batches  # an iterator continues where it is, whatever the step
    early_batches.wait_for_first()  # the thread ends before the batches are opened again
    return None


# The record of this start.


def _open_record(run: RunContext) -> int:
    """Let the observers open what they record of this start; return its number, which process 0 knows."""

    def open_and_number() -> tuple[int]:
        if jax.process_index() == 0:
            _prepare_directories(run.options, has_saver=run.saver is not None)
        for observer in run.observers:
            observer.on_open()
        return (0 if run.file is None else run.file.fields["number"],)

    (number,) = processes.first_ints_on_all(open_and_number, count=1, problem=NO_LOGS)
    return number


def _prepare_directories(options: Options, *, has_saver: bool) -> None:
    """Fail early if a bucket does not answer or `logdir` leads through a link, and remove files of dead processes.

    With a Saver, the bucket has answered: its checkpoints were listed.
    """
    if not has_saver and options.directory is not None and is_url(options.directory):
        # Listed once: the record and the event files would each wait for a bucket that does not answer.
        objects = Objects(options.directory)
        with objects.time_limit(START_TIMEOUT_SECS):
            objects.list(FOLDER, f"{FOLDER}~")
    if options.logdir is not None and options.directory is not None:
        check_no_links(os.fspath(options.logdir), options.directory)
    paths = {os.fspath(path) for path in (options.directory, options.logdir) if path is not None}
    for path in paths:
        if is_url(path):
            continue
        remove_temporary(path)
        stalls = os.path.join(path, STALLS)
        if not os.path.islink(stalls):
            remove_temporary(stalls)


# The calls.


def _make_dispatch(run: RunContext) -> Dispatch:
    options = run.options
    table = ProgramTable(
        run.train_steps, options.steps_per_call, state=run.state, sums=run.sums, compiling=run.compiling
    )
    dispatch = Dispatch(
        table,
        signals=run.signals,
        first_call=run.times.compiling,
        watch=run.watch,
        stage_listeners=[
            lambda chunk, state: interactive.forget(),
            functools.partial(warn_of_ended_rate, run.train_steps, options.last_step),
            *(observer.on_first_call for observer in run.observers),
            functools.partial(_log_start, run),
        ],
        count_examples=_find_example_counter(options),
    )
    run.closing.callback(dispatch.compiler.close)
    return dispatch


def _find_example_counter(options: Options) -> Callable[..., int | None] | None:
    """Return how the user's hook counts the examples of a batch; None if it is the size of the leading axis."""
    for hook in options.hooks:
        if isinstance(hook, StepCounterHook):
            return functools.partial(count_examples, hook)
    return None


def _log_start(run: RunContext, chunk: Chunk, state: Tree) -> None:
    if chunk.first != run.course.first:
        return
    for hook in run.components.hooks:
        is_given = any(hook is option for option in run.options.hooks)
        if isinstance(hook, LoggingHook) and not is_given:
            run.times.log(run.watch.seconds_before)
            return


def _make_chunks(
    run: RunContext, table: ProgramTable, hooks: Sequence[Any], reader: BatchReader, first: int
) -> Iterator[Chunk]:
    options = run.options
    ends: Iterable[float] = (math.inf,)
    if table.is_looped:
        # Only process 0 writes lines, but all processes end a call when one is due.
        log_steps = None if options.progress is False else options.log_steps
        changes = ProgramChanges(run.train_steps, reader.source.next_change)
        ends = changes.end_steps(first, options.stop_step, make_next_due(hooks, run.course, log_steps))
    return make_chunks(reader, first, table.program_for, options.batch_sharding, on_device=table.on_device, ends=ends)


# The batches, whose first one is made while the state is restored.


def _begin_batches_early(run: RunContext, dispatch: Dispatch, batches: Tree) -> BatchReader | None:
    """Begin to make the first batch and its program, at the assumed step; return None if that is not possible."""
    first = run.plan.first
    if first is None or first >= run.options.stop_step:
        return None  # it is not known, or no step is left
    if are_made_one_by_one(batches):
        return None  # by the body, or with the state, which is not read yet
    sequence = batches if isinstance(batches, BatchSequence) else None
    if sequence is None and run.plan.latest is None:
        # Nothing is restored meanwhile. A sequence goes on all the same: its shapes are known, so that its program can
        # be compiled while its first batch is made.
        return None
    if sequence is not None and not sequence.is_endless and first >= len(sequence):
        return None  # the batches are used up
    extra = run.plan.extra
    reader = _begin_batches(run, batches, first, extra)
    reopen_source: Callable[[], BatchSource] | None = None
    if reader.source.may_be_opened_again:  # a function of the step may have failed because it depends on a hook
        reopen_source = functools.partial(_open_source, run, batches, first, extra)
    reader.start(reopen_source)
    sharding = run.options.batch_sharding

    def peek(is_over: Callable[[], bool]) -> Any:
        if sequence is None or sharding is not None:
            return reader.peek(is_over)
        # Its shapes are known without a batch.
        return reader.peek_shapes(lambda: sequence.shapes(first), is_over)

    dispatch.compiler.begin_first(first, sharding, run.times, peek)
    return reader


def _begin_batches(run: RunContext, batches: Tree, first: int, extra: Mapping[str, Any]) -> BatchReader:
    return BatchReader(_open_source(run, batches, first, extra), run.times)


def _open_source(run: RunContext, batches: Tree, first: int, extra: Mapping[str, Any]) -> BatchSource:
    options = run.options
    save_cadence = Cadence(options.save_checkpoint_steps)

    def next_save(count: int) -> int:
        """Return the number of batches, above `count`, after which a save is due."""
        due = save_cadence.next_multiple(first + count)
        return min(options.stop_step, due) - first

    return open_source(
        batches,
        first,
        options.stop_step,
        saved_position(extra),
        is_saved=options.checkpoint_dir is not None,
        next_save=next_save,
        state=lambda: run.state,
    )


def _open_reader(run: RunContext, batches: Tree, early_batches: BatchReader | None) -> BatchReader:
    """Return the batches that have begun early, or open them at the step that is known now."""
    origin = run.origin

    def open_batches() -> BatchReader:
        return early_batches or _begin_batches(run, batches, origin.step, origin.extra)

    return processes.share_errors(open_batches, _NO_BATCHES)


def _close_batches(run: RunContext, reader: BatchReader, feeder: BatchFeeder) -> None:
    trained = run.step - run.course.first
    is_idle = feeder.close()
    if reader.fetched > trained or feeder.waiting:  # a batch may have been read in part
        reader.source.set_back(trained, reader.fetched, is_idle=is_idle)
