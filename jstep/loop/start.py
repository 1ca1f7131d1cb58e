"""The start of a run: open its checkpoints, and restore its state while a program is compiled.

`find_origin` comes first. It finds at which step the run begins and all that its checkpoint holds
except for the values of the state, so the record, the first batch and its program can begin before
these are read.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.compiling.chunks import Chunk, ProgramChanges, make_chunks
from jstep.compiling.dispatch import Dispatch
from jstep.compiling.programs import ProgramTable
from jstep.core import interactive, processes
from jstep.core.exceptions import noting
from jstep.core.logs import logger
from jstep.core.trees import Tree
from jstep.data.batch_sources import BatchSource
from jstep.data.loaders import are_made_one_by_one, open_source
from jstep.data.positions import saved_position
from jstep.data.sequence import BatchSequence
from jstep.hooks.course import Activity
from jstep.hooks.hook_states import check_stateful, get_states
from jstep.hooks.origin import Kind
from jstep.hooks.run_extra import STOPPED
from jstep.hooks.run_hook import call_again, call_at_start, example_counter
from jstep.loop.build_hooks import NO_LOGS, build_hooks
from jstep.loop.contents import restore_hooks
from jstep.loop.feeder import BatchFeeder, BatchReader
from jstep.loop.finiteness import Finiteness
from jstep.loop.hook_runner import HookRunner
from jstep.loop.observer import observers_that_define
from jstep.loop.run_context import RunComponents, RunContext
from jstep.loop.saving import RunSaverHook
from jstep.loop.stopping import report_done
from jstep.origin.agreement import check_processes
from jstep.origin.arguments import Options
from jstep.origin.find_origin import (
    StateSource,
    find_origin,
    open_saver,
    read_state,
    step_of_values,
)
from jstep.stores.owners import remove_temporary
from jstep.stores.urls import is_url

_NO_BATCHES = "the batches cannot be opened"


def open_run(run: RunContext, batches: Tree) -> RunComponents:
    """Open all that a run needs, in this order, and push on its `closing` what closes it.

    The checkpoints come first, because the claim of their prefix rejects a second run before
    anything is written, and because they determine at which step the run begins. While the state is
    read, a thread makes the first batch and another one compiles the step for it (`_restore`). The
    event file and the hooks follow, which may need the state.
    """
    source = _open_checkpoints(run)
    start_number = _open_record(run)
    dispatch = _make_dispatch(run)
    early_batches = _restore(run, source, dispatch, batches)
    hooks = build_hooks(run)
    runner = HookRunner(run, hooks)

    def open_reader() -> BatchReader:
        if early_batches is not None:
            return early_batches
        return BatchReader(_open_source(run, batches), run.times)

    reader = processes.share_errors(open_reader, _NO_BATCHES)
    chunks = _make_chunks(run, dispatch.table, hooks, reader)
    feeder = BatchFeeder(reader, chunks, run.signals, run.watch)
    finiteness = Finiteness(run.course, hooks, run.sums, dispatch, feeder)
    run.closing.callback(_close_batches, run, reader, feeder)
    return RunComponents(
        start_number=start_number,
        course=run.course,
        signals=run.signals,
        dispatch=dispatch,
        batches=reader,
        feeder=feeder,
        hooks=hooks,
        runner=runner,
        finiteness=finiteness,
    )


def begin_hooks(run: RunContext) -> bool:
    """Begin the hooks, and set their states; return whether there is a step to take.

    The hooks get the run after it has opened all else: they write to it, and so close first.
    """
    components = run.components
    components.runner.use_run(run.closing)
    _flush_before_saves(run)
    first = run.course.first
    stop_step = run.options.stop_step
    check_stateful(components.hooks)
    for observer in run.observers:
        observer.on_restored(components.start_number)
    is_over = components.runner.begin()
    if run.origin.is_restored:
        keeps_stopped = _resume_hooks(run)  # called in any case: the hooks get their states back
        is_over = is_over or keeps_stopped
    else:
        if run.saver is not None:
            # States that cannot be saved fail now, not at the first save.
            get_states(components.hooks)
        if not is_over and first < stop_step:
            is_over = components.runner.call_before_steps(call_at_start)
    if is_over and components.poll_stop_signal():
        # A signal has interrupted the owed evaluation again: the next start makes it and resumes.
        return False
    if is_over or first >= stop_step:
        report_done(run)
        for observer in run.observers:
            observer.on_no_steps()
        return False
    stopped_by = run.origin.extra.get(STOPPED)
    if stopped_by is not None:
        logger.info("%s stopped this run at step %d; it resumes", stopped_by, first)
    components.dispatch.compiler.plan(
        components.batches.source, first, stop_step, run.options.batch_sharding
    )
    return True


def _flush_before_saves(run: RunContext) -> None:
    """Let each save flush lines and rows first: a run that resumes from it does not repeat them."""
    if run.saver is None:
        return
    flushes = [observer.flush for observer in observers_that_define("flush", run.observers)]
    for flush in (*flushes, run.background.flush):
        run.closing.enter_context(run.saver.flushing(flush))


def _resume_hooks(run: RunContext) -> bool:
    """Set the hooks' states from the checkpoint; return whether one keeps the run stopped."""
    is_stopped = restore_hooks(run)
    for hook in run.components.hooks:
        if isinstance(hook, RunSaverHook):
            hook.resume(run.step, run.state)
    # If a signal interrupted an evaluation before this checkpoint was saved, it is made now. This
    # is so even if a hook keeps the run stopped: the result is owed.
    is_done = run.components.runner.call_before_steps(call_again)
    return is_stopped or is_done


# The checkpoints, and the state.


def _open_checkpoints(run: RunContext) -> StateSource:
    """Open the `Saver` of the run, and find its origin; return where its state comes from."""
    options = run.options
    course = run.course
    state = run.state
    check_processes(options, state, step_of_values(state))
    run.saver = open_saver(options)
    if run.saver is not None:
        run.closing.push(noting(functools.partial(_close_saver, run, run.saver)))
    origin, source = find_origin(options, state, run.saver, functools.partial(_reading, run))
    for observer in run.observers:
        origin = dataclasses.replace(origin, lineage=observer.find_lineage(origin))
    if origin.lineage.name is None:
        origin = dataclasses.replace(origin, lineage=origin.lineage._replace(name=run.new_name))
    run.origin = origin
    if origin.is_new_branch:
        # The programs are made for this state. `_restore` sets it again, with the contents of the
        # checkpoint.
        course.begin_at(origin.step)
        course.set_state(source.state)
    return source


@contextlib.contextmanager
def _reading(run: RunContext, step: int) -> Iterator[None]:
    run.course.begin_at(step)
    with run.times.timing("restore"), run.course.doing(Activity.RESTORING):
        yield


def _close_saver(run: RunContext, saver: Saver) -> None:
    """Wait for writes, except after a second Ctrl-C; close the `Saver` unless it is the user's."""
    waits = not run.signals.received_twice
    if saver is not run.options.checkpoint_dir:
        saver.close(wait=waits)
    elif waits:
        saver.wait()


def _restore(
    run: RunContext, source: StateSource, dispatch: Dispatch, batches: Tree
) -> BatchReader | None:
    """Restore the state, while the first batch is made and its program compiled.

    Return the reader of the batches, if it has begun.
    """
    origin = run.origin
    if source.problem is not None:
        raise source.problem
    unread = source.checkpoint if source.state is None else None
    if unread is not None:
        unread.check_run(run.state)  # before a program is compiled, which takes longer
    run.course.begin_at(origin.step)
    early_batches = processes.share_errors(
        lambda: _begin_batches_early(run, dispatch, batches), _NO_BATCHES
    )
    if unread is not None:
        reading = _reading(run, origin.step)
    else:
        reading = run.course.doing(Activity.STARTING)
    with reading:
        state = read_state(run.saver, origin, source, run.state)
    run.course.set_start(state, origin)
    return early_batches


# The record of this start.


def _open_record(run: RunContext) -> int:
    """Let observers open their record of this start; return its number, which process 0 knows."""

    def open_and_number() -> tuple[int]:
        if processes.is_process_0():
            # The files of dead processes.
            for path in run.options.directories:
                if not is_url(path):
                    remove_temporary(path)
        number = 0
        for observer in run.observers:
            number = observer.on_open(run.origin) or number
        return (number,)

    (number,) = processes.first_ints_on_all(open_and_number, count=1, problem=NO_LOGS)
    return number


# The calls.


def _make_dispatch(run: RunContext) -> Dispatch:
    options = run.options
    table = ProgramTable(
        run.train_steps,
        options.steps_per_call,
        state=run.state,
        sums=run.sums,
        compiling=run.compiling,
    )
    dispatch = Dispatch(
        table,
        signals=run.signals,
        first_call=run.times.compiling,
        watch=run.watch,
        stage_listeners=[
            lambda chunk, state: interactive.forget(),
            *(observer.on_first_call for observer in run.observers),
        ],
        count_examples=_find_example_counter(options),
    )
    run.closing.callback(dispatch.compiler.close)
    return dispatch


def _find_example_counter(options: Options) -> Callable[..., int | None] | None:
    """Return how a hook of the user's counts a batch's examples; None for its leading axis."""
    for hook in options.hooks:
        counter = example_counter(hook)
        if counter is not None:
            return counter
    return None


def _make_chunks(
    run: RunContext, table: ProgramTable, hooks: Sequence[Any], reader: BatchReader
) -> Iterator[Chunk]:
    options = run.options
    first = run.course.first
    ends: Iterable[float] = (math.inf,)  # a call of one step needs no planned end
    if table.is_looped:
        changes = ProgramChanges(run.train_steps, reader.source.next_change)
        ends = changes.end_steps(
            first, options.stop_step, functools.partial(run.timetable.next_end, hooks)
        )
    return make_chunks(
        reader,
        first,
        table.program_for,
        options.batch_sharding,
        on_device=table.on_device,
        ends=ends,
    )


# The batches, whose first one is made while the state is restored.


def _begin_batches_early(run: RunContext, dispatch: Dispatch, batches: Tree) -> BatchReader | None:
    """Begin to make the first batch and its program; return None if that is not possible."""
    first = run.origin.step
    if first >= run.options.stop_step:
        return None
    if are_made_one_by_one(batches):
        return None  # by the body, or with the state, which is not read yet
    sequence = batches if isinstance(batches, BatchSequence) else None
    if sequence is None and run.origin.kind is Kind.FRESH:
        # Nothing is restored meanwhile. A sequence is begun anyway: its shapes are known, so that
        # its program can be compiled while its first batch is made.
        return None
    if sequence is not None and not sequence.is_endless and first >= len(sequence):
        return None  # the batches are used up
    reader = BatchReader(_open_source(run, batches), run.times)
    reopen_source: Callable[[], BatchSource] | None = None
    if reader.source.may_be_opened_again:
        # A function of the step may have failed because it depends on a hook.
        reopen_source = functools.partial(_open_source, run, batches)
    reader.start(reopen_source)
    sharding = run.options.batch_sharding

    def peek(is_over: Callable[[], bool]) -> Any:
        if sequence is None or sharding is not None:
            return reader.peek(is_over)
        # Its shapes are known without a batch.
        return reader.peek_shapes(lambda: sequence.shapes(first), is_over)

    dispatch.compiler.begin_first(first, sharding, run.times, peek)
    return reader


def _open_source(run: RunContext, batches: Tree) -> BatchSource:
    options = run.options
    first = run.origin.step

    def next_save(count: int) -> int:
        """Return the number of batches, above `count`, after which a save is due."""
        due = run.timetable.next_planned_save(first + count)
        return min(options.stop_step, due) - first

    return open_source(
        batches,
        first,
        options.stop_step,
        saved_position(run.origin.extra, run.origin.source),
        is_saved=options.checkpoint_dir is not None,
        next_save=next_save,
        state=lambda: run.state,
    )


def _close_batches(run: RunContext, reader: BatchReader, feeder: BatchFeeder) -> None:
    trained = run.step - run.course.first
    is_idle = feeder.close()
    if reader.fetched > trained or feeder.waiting:  # a batch may have been read in part
        reader.source.set_back(trained, reader.fetched, is_idle=is_idle)
