"""The start of a run: restore the state while the first batch is made and the first program is compiled."""

import contextlib
import functools
import logging
from typing import Any

from jstep.data.loaders import Source, saved_position, source_of
from jstep.data.sequence import BatchSequence, StateBatches
from jstep.distributed import processes
from jstep.hooks.hook import check_owners, get_states, set_states
from jstep.loop.batch_feeder import BatchFeeder, copied_batches
from jstep.loop.build_hooks import build_hooks
from jstep.loop.cards import Cards
from jstep.loop.compile_ahead import compile_ahead, compile_first_program
from jstep.loop.end_messages import reason_done
from jstep.loop.hook_runner import HookRunner
from jstep.loop.restore import restore
from jstep.loop.run import RUNNING, Run
from jstep.loop.run_saver_hook import HOOKS, STOPPED, RunSaverHook
from jstep.loop.stages import StageBoundaries
from jstep.loop.start_times import FirstBatch
from jstep.loop.timeline_recorder import TimelineRecorder

_logger = logging.getLogger("jstep")
_PROBLEM = "the batches cannot be opened"


def begin(run: Run, batches: Any, recorder: TimelineRecorder) -> None:
    """Restore the state, begin the hooks, and make the calls of the run: `run.feeder`, None if it takes no step."""
    started = processes.on_all_processes(lambda: _begin_batches(run, batches), _PROBLEM)
    with contextlib.nullcontext() if run.latest is None else run.times.part("restore"):
        restore(run)
    if recorder.is_open:
        run.programs.cards = Cards(recorder.write, run, batches)
        run.closing.callback(run.programs.cards.close)
    processes.on_all_processes(lambda: build_hooks(run, recorder), "the logs cannot be opened")
    runner = run.runner = HookRunner(run)
    run.before_save = runner.before_save
    source, items = processes.on_all_processes(lambda: started or _open_batches(run, batches), _PROBLEM)
    check_owners(run.hooks)
    runner.begin()
    if run.restored is not None:
        _remember(run, runner)
    elif run.saver is not None:
        get_states(run.hooks)  # a state that cannot be kept is an error now, not at the first save
    if runner.is_done or run.first >= run.options.last_step:
        _logger.info("the run is at step %d already: no step is run%s", run.first, reason_done(run))
        return
    if run.extra.get(STOPPED) is not None:
        _logger.info("%s stopped this run at step %d; it resumes", run.extra[STOPPED], run.first)
    _make_calls(run, runner, source, items)


def _remember(run: Run, runner: HookRunner) -> None:
    """Restore the states of the hooks, and repeat what a signal interrupted."""
    if set_states(run.hooks, run.extra.get(HOOKS)):
        runner.is_done = True
    for hook in run.savers:
        if isinstance(hook, RunSaverHook):
            hook.restored(run.first, run.state)
    runner.resume()


def _make_calls(run: Run, runner: HookRunner, source: Source, items: Any) -> None:
    boundaries = StageBoundaries(run.stages, source.next_change)
    compile_ahead(run, boundaries, source)
    ends = runner.ends(boundaries) if run.programs.is_looped else None
    made = run.programs.calls(iter(items), run.first, ends, run.options.batch_sharding)
    run.feeder = BatchFeeder(source, made, stopping=run.is_stopping, watch=run.watch)
    run.closing.callback(run.feeder.close)
    if run.feeder.live is not None:
        run.before_off_cadence = run.feeder.live.fix
    if ends is not None:
        run.closing.callback(ends.close)  # first, as the thread of the feeder may wait for one
    run.phase = RUNNING


def _begin_batches(run: Run, batches: Any) -> tuple[Source, FirstBatch] | None:
    """Start the first batch and the first compilation before the checkpoint is read; None if that is not possible."""
    start = run.start
    own = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= run.options.last_step or (own is None and run.latest is None):
        return None
    if isinstance(batches, StateBatches):
        return None
    if own is not None and not own.is_endless and start >= len(own):
        return None
    source = _source(run, batches)
    # A function of the step can be called again, if its first call failed because it needs what a hook sets up.
    again = (lambda: copied_batches(_source(run, batches), run.fetched)) if source.is_function else None
    first = FirstBatch(copied_batches(source, run.fetched), run.times, again)
    compile_first_program(run, first, None if own is None else functools.partial(own.shapes, start))
    return source, first


def _open_batches(run: Run, batches: Any) -> tuple[Source, Any]:
    source = _source(run, batches)
    return source, run.times.first_of(copied_batches(source, run.fetched))


def _source(run: Run, batches: Any) -> Source:
    """The batches from the start of the run, at the position that was saved with its checkpoint."""
    resumable = run.saver is not None
    source = source_of(
        batches,
        run.first,
        run.options.last_step,
        saved_position(run.extra),
        resumable=resumable,
        state=lambda: run.state,
    )
    if not resumable:
        return source._replace(position=None)  # the position is never saved
    if source.position is None or source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # a loader may not know its position before its first batch
        before = source.position()
    return source._replace(begin=lambda: before)
