"""The start of a run: restoring, hooks, compiling ahead, and the first batch."""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.slots import left_out_indices
from jstep.core import trees
from jstep.core.checks import note
from jstep.core.matching import difference
from jstep.core.meshes import internal_transfers
from jstep.data.loaders import RarePosition, Source, saved_position, source_of, with_files
from jstep.data.sequence import BatchSequence, StateBatches
from jstep.data.to_devices import as_shardings, copied, placement
from jstep.distributed import processes
from jstep.evaluating.evaluator import EvaluationHook
from jstep.hooks.base import RunHook
from jstep.hooks.hook import check_owners, get_states, name_of, set_states, step_of
from jstep.hooks.nan_loss import NanLossHook, NonfiniteParametersHook
from jstep.hooks.numbers import read
from jstep.hooks.report import LoggingHook, SummarySaverHook
from jstep.hooks.speed import StepCounterHook
from jstep.hooks.stock import CheckpointSaverHook
from jstep.loop.compiler import BackgroundCompiler, CompileJob, FirstBatch, interruptible, shapes_of
from jstep.loop.feeder import BatchFeeder, copied_batches
from jstep.loop.foresight import look_ahead
from jstep.loop.hook_runner import HookRunner
from jstep.loop.programs import Programs
from jstep.loop.run_record import RUNNING, Options, Run
from jstep.loop.saving import HELD, HOOK_STATES, STOPPED, RunSaverHook
from jstep.loop.stages import Segment, Stage, StageBoundaries
from jstep.loop.stopping import reason_done
from jstep.optimizers.hyperparameters import held_values
from jstep.state.global_step import require_alive
from jstep.state.train_state import TrainState
from jstep.training.step import refuse_a_loss

# Restore the newest checkpoint, or start from the given state.

_logger = logging.getLogger("jstep")


def open_checkpoints(run: Run) -> None:
    """Open the checkpoints, tell the observers once the run may write, and read the small parts of the newest one.

    Then the step at which the run begins is known, unless what is wrong with the checkpoint is left to `restore`.
    """
    options, state = run.options, run.state
    if options.checkpoint_dir is not None:
        saver, run.latest = processes.on_all_processes(lambda: _opened(options), "the checkpoints cannot be read")
        run.closing.push(functools.partial(_leave, run, saver))
        run.saver, run.given = saver, _step_if_known(state)
        run.held = _held(state) if run.given is not None else {}
        if run.latest is None or run.latest < options.last_step:
            saver.claim(state)  # fails now, not at the first save
        else:
            left_out_indices(state, saver.leave_out)
    for observer in run.observers:
        observer.opened()
    if run.saver is None:
        _begin_with_given(run, "and no checkpoint_dir to restore from")
        return
    run.start = run.given if run.latest is None else run.latest
    run.first = run.start or 0
    if run.latest is not None:
        try:
            run.extra = _extra(run.saver, run.latest)
        except Exception:  # `restore` reports what is wrong
            run.start = None


def _opened(options: Options) -> tuple[Saver, int | None]:
    """Open the checkpoints of a run, and find the newest one."""
    given = options.checkpoint_dir
    assert given is not None
    saver = given if isinstance(given, Saver) else Saver(given, prefix=options.checkpoint_prefix)
    return saver, saver.latest_step()


def restore(run: Run) -> None:
    """Restore the newest checkpoint, or start from the given state."""
    run.is_begun = True
    saver = run.saver
    if saver is None:
        return
    try:
        with internal_transfers():
            # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
            run.state = saver.restore(run.state)
    except FileNotFoundError:
        _begin_with_given(run, "and there is no checkpoint to restore")
        if jax.process_index() == 0:
            given = run.options.checkpoint_dir
            place = given.directory if isinstance(given, Saver) else os.fspath(given or "")
            kind = "" if saver.prefix == "model" else f" {saver.prefix}-*"  # others may be there
            _logger.info("no checkpoint%s in %s: starts at step %d", kind, place, run.first)
        return
    restored = step_of(run.state)
    if restored != run.start:
        run.extra = _extra(saver, restored)
    run.restored = restored
    run.begin_at(restored)
    _logger.info("restored %s", checkpoint_name(saver.prefix, restored))
    before = run.extra.get(HELD)
    _warn_if_different(run.given, run.held, restored, before, checkpoint_name(saver.prefix, restored))
    run.held = (before or {}) if run.given else run.held


def _extra(saver: Saver, step: int) -> dict[str, Any]:
    extra = saver.extra(step)
    return with_files(extra, functools.partial(saver.read_file, step=step)) if isinstance(extra, dict) else {}


def _begin_with_given(run: Run, why: str) -> None:
    """Start from the given state; refuse one that a run cannot start from: an abstract one, or one that was donated."""
    for path, leaf in trees.leaves_with_paths(run.state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), {why}; give a state of arrays, "
                "such as TrainState.create makes, or the checkpoint_dir of an earlier run"
            )
    require_alive(run.state)
    run.begin_at(step_of(run.state))


def _step_if_known(state: TrainState) -> int | None:
    """The step of the given state; None if it is abstract or was donated."""
    step = state.global_step
    if not trees.is_array(step) or trees.donated_leaf(state) is not None:
        return None
    return step_of(state)


def _held(state: TrainState) -> dict[str, float]:
    values = {name: value for name, value in held_values(state.slots).items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read(values).items()}


def _warn_if_different(given: int | None, held: dict[str, float], restored: int, before: Any, name: str) -> None:
    """Warn if the given state differs from the checkpoint, which wins."""
    if given and given != restored:
        _logger.warning(
            "state: the state passed (step %d) is ignored in favor of %s, the newest checkpoint of checkpoint_dir. To "
            "continue from the state passed, give another checkpoint_dir.",
            given,
            name,
        )
    if given or not isinstance(before, dict):
        return
    for hyperparameter, value in held.items():
        if before.get(hyperparameter, value) != value:
            _logger.warning(
                "state: held %r starts at %g, which was %g when this run started; the value in %s is used. Set "
                "another value by jstep.set_hyperparameter, in a hook.",
                hyperparameter,
                value,
                before[hyperparameter],
                name,
            )


def _leave(run: Run, saver: Saver, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Wait for pending writes, also after an error, but not after a second Ctrl-C; close the `Saver` if it is ours."""
    leave = saver.wait if saver is run.options.checkpoint_dir else saver.close
    try:
        if not run.signals.at_once:
            leave()
        elif leave == saver.close:
            saver.close(wait=False)
    except Exception as failure:
        if error is None:
            raise
        note(error, f"Additionally, {failure}")


# Assemble user-supplied and stock hooks.

_NOT_CALLED = ("after_call", "after_first_call", "after_last", "before_save", "close", "use_writer")
"""Methods that `train` called on every hook in jstep 0.2 and earlier."""


def build_hooks(run: Run) -> None:
    """Open the event file, append the stock hooks to the user's, and give the run to the stock hooks."""
    options = run.options
    run.writer = _open_writer(run)
    own = [hook for hook in options.hooks if not isinstance(hook, CheckpointSaverHook)]
    savers = [hook for hook in options.hooks if isinstance(hook, CheckpointSaverHook)]
    _warn_of_methods_not_called(own)
    run.evaluations = tuple(hook for hook in own if isinstance(hook, EvaluationHook))
    run.counter = _first(own, StepCounterHook)
    run.hooks = list(own)
    if run.counter is None:
        run.counter = StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)
        run.hooks.append(run.counter)
    reporters = [hook for observer in run.observers if (hook := observer.reporter()) is not None]
    run.hooks += reporters
    if not reporters and options.log_steps is not None and options.progress is not False and jax.process_index() == 0:
        run.hooks.append(LoggingHook(every_n_steps=options.log_steps, leave_out=run.constant_metrics))
        run.logs_lines = True
    summed = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in own)
    if run.writer is not None and options.save_summaries_steps is not None and not summed:
        run.hooks.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    if (run.saver is not None or savers) and not _first(own, NanLossHook):
        run.hooks.append(NonfiniteParametersHook())
    if run.saver is not None:
        # A run that resumes from a checkpoint does not write earlier summaries and times again.
        if run.writer is not None:
            run.flushes.insert(0, run.writer.settle)
        savers.insert(0, RunSaverHook(run))
    run.hooks += savers  # last: the checkpoint of a step includes the other hooks' changes to the state
    for hook in run.hooks:
        if isinstance(hook, RunHook):
            run.closing.callback(hook.close)
            hook.use_run(run)
    if run.saver is not None:
        for flush in run.flushes:
            run.closing.enter_context(run.saver.flushing(flush))


def _first(hooks: list[Any], kind: type) -> Any:
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


def _warn_of_methods_not_called(hooks: list[Any]) -> None:
    """Warn about hooks written for jstep 0.2, some of whose methods are not called."""
    for hook in hooks:
        names = [name for name in _NOT_CALLED if callable(getattr(type(hook), name, None))]
        if names and not isinstance(hook, RunHook):
            _logger.warning(
                "hooks: %s has %s, which train does not call (jstep 0.2 did); see jstep.Hook for what it calls. "
                "Use `end`, or close what the hook opened around train: with contextlib.closing(hook)",
                name_of(hook),
                ", ".join(names),
            )


def _open_writer(run: Run) -> Any:
    if run.logdir is None:
        return None
    from jstep.summary.writer import SummaryWriter

    writer = run.closing.enter_context(SummaryWriter(run.logdir))
    # TensorBoard drops the events of earlier runs from this step on, so nothing is shown twice.
    writer.add_session_log("START", run.first + 1)
    return writer


# Compile the programs of a run ahead of time: trace them before it begins, compile them before they are due.

_HINT = "; if it is the smaller last batch of an epoch, drop_remainder=True leaves it out"


def compile_ahead(run: Run, boundaries: StageBoundaries, source: Source) -> None:
    """Trace the stages of a run whose first batch can be indexed, and compile later ones in the background.

    Args:
        run: The run.
        boundaries: The steps at which another program follows.
        source: The batches.

    Raises:
        ValueError: A stage does not fit the state or its batch; names its first step.
    """
    first, *later = boundaries.segments(run.first, run.options.last_step)
    if not later:
        return
    programs, shapes = run.programs, shapes_of(run.state)
    seen: set[Any] = set()
    jobs = []
    for segment in (first, *later):
        stage, args = programs.stages[segment.stage], None
        if not stage.is_compiled:
            continue
        is_indexed = hasattr(source.by_step, "__getitem__") and segment.is_edge and segment is not first
        if isinstance(source.by_step, BatchSequence) or is_indexed:
            args = _shapes_of_batch(source, segment.first, run.options.batch_sharding)
            if args is None:  # the batches end earlier
                break
            key = (segment.stage, trees.structure(args), tuple(jax.tree.leaves(args)), segment.stop - segment.first)
            if key in seen:
                continue
            seen.add(key)
            if segment is not first:
                _check(stage, shapes, args, segment)
        elif not segment.is_edge:
            continue
        if segment is not first:
            jobs.append(CompileJob(segment.first, stage.name, functools.partial(_compile, programs, segment, args)))
    programs.ahead_compiler = BackgroundCompiler(jobs, run.signals.is_stopping)
    run.closing.callback(programs.ahead_compiler.close)


def compile_first_program(run: Run, first: FirstBatch, shapes: Callable[[], Any] | None) -> None:
    """Compile a run's first program in the background, while the state is restored, if it is compiled at all.

    Args:
        run: The run.
        first: The first batch, being made in a thread.
        shapes: Returns the shapes of the first batch without making it; None if they are not known.
    """
    programs, start, batch_sharding = run.programs, run.first, run.options.batch_sharding
    stage = programs.stage_of(start)
    if not stage.is_compiled:
        first.forget()
        return

    def is_over() -> bool:
        return compiler.is_closed

    def make(state: Any, _: tuple[Any, ...]) -> bool:
        try:
            if shapes is not None and batch_sharding is None:
                batch = interruptible(shapes, is_over)
            else:
                batch = first.peek(is_over)
            if batch is None:
                return False
            args = _shapes_as_args(batch, batch_sharding)
            del batch
        finally:
            first.forget()
        with run.times.compiling():
            return programs.compile(start, args)

    compiler = BackgroundCompiler([CompileJob(start, stage.name, make)], run.signals.is_stopping, is_quiet=True)
    programs.first_compiler = compiler
    run.closing.callback(compiler.close)
    compiler.begin(programs.state_shapes)


def _shapes_of_batch(source: Source, step: int, batch_sharding: Any) -> tuple[Any, ...] | None:
    try:
        batch = copied(source.by_step[step], fresh=True)
    except IndexError:
        return None
    try:
        return _shapes_as_args(batch, batch_sharding)
    except ValueError as error:
        note(error, f"This is batch {step}, whose shapes are checked before the first step{_HINT}.")
        raise


def _shapes_as_args(batch: Any, batch_sharding: Any) -> tuple[Any, ...]:
    """The shapes and shardings of the arguments that a batch becomes."""
    placed = batch if batch_sharding is None else placement(as_shardings(batch_sharding))(batch)
    return shapes_of(trees.arguments_of(placed))


def _check(stage: Stage, state: Any, args: tuple[Any, ...], segment: Segment) -> None:
    """Trace a stage and check the state that it returns; JAX caches the trace for the compilation."""
    name = f"train_step[{segment.first}]" if segment.is_edge else "train_step"
    try:
        new = stage.trace(state, args).out_info[0]
    except Exception as error:
        refuse_a_loss(stage.step, state, args, error, name)
        which = ", its first one, with the state and the batch of that step"
        if not segment.is_edge:
            which = f" with batch {segment.first}, whose shapes differ from those of the batch before"
        raise ValueError(
            f"{name}: it cannot take step {segment.first}{which}: {type(error).__name__}: {error}"
            f"{'' if segment.is_edge else _HINT}"
        ) from error
    if different := difference(new, state):
        raise ValueError(
            f"{name}: all training steps of a run share one structure of the state, but this one returns a state "
            f"{different}; freeze parameters with var_list, and give all stages optimizers with the same slots"
        )


def _compile(
    programs: Programs, segment: Segment, args: tuple[Any, ...] | None, state: Any, latest: tuple[Any, ...]
) -> bool:
    return programs.compile(segment.first, latest if args is None else args)


# The start of a run: restore the state while the first batch is made and the first program is compiled.

_PROBLEM = "the batches cannot be opened"


def begin(run: Run, batches: Any) -> None:
    """Restore the state, begin the hooks, and make the calls of the run: `run.feeder`, None if it takes no step."""
    if run.saver is not None and run.latest is not None and run.start is not None:
        with contextlib.suppress(FileNotFoundError):  # `restore` takes the one that is then the newest
            run.saver.check_run(run.state, run.latest)  # before a program is compiled, which takes longer
    started = processes.on_all_processes(lambda: _begin_batches(run, batches), _PROBLEM)
    with contextlib.nullcontext() if run.latest is None else run.times.part("restore"):
        restore(run)
    for observer in run.observers:
        observer.restored(batches)
    processes.on_all_processes(lambda: build_hooks(run), "the logs cannot be opened")
    runner = run.runner = HookRunner(run)
    run.before_save = runner.before_save
    source, items = processes.on_all_processes(lambda: started or _open_batches(run, batches), _PROBLEM)
    check_owners(run.hooks)
    runner.begin()
    if run.restored is not None:
        _remember(run, runner)
    elif run.saver is not None:
        get_states(run.hooks)  # a state that cannot be kept is an error now, not at the first save
    if run.restored is None and not runner.is_done and run.first < run.options.last_step:
        runner.evaluate("evaluate_first")
    if runner.is_done or run.first >= run.options.last_step:
        _report_done(run)
        return
    if run.extra.get(STOPPED) is not None:
        _logger.info("%s stopped this run at step %d; it resumes", run.extra[STOPPED], run.first)
    look_ahead(run)
    _make_calls(run, runner, source, items)


def _report_done(run: Run) -> None:
    """Log that no step is run, and why; a last_step that lies before the state is a mistake."""
    last_step = run.options.last_step
    if run.first <= last_step:
        _logger.info("the run is at step %d already: no step is run%s", run.first, reason_done(run))
        return
    of, other = "the given state", "state"
    if run.saver is not None and run.restored is not None:
        of, other = f"{checkpoint_name(run.saver.prefix, run.first)}, the newest checkpoint", "checkpoint_dir"
    _logger.warning(
        "last_step=%d: the run is at step %d already (%s): no step is run. Give a larger last_step, or another %s",
        last_step,
        run.first,
        of,
        other,
    )


def _remember(run: Run, runner: HookRunner) -> None:
    """Restore the states of the hooks, and repeat what a signal interrupted."""
    if set_states(run.hooks, run.extra.get(HOOK_STATES)):
        runner.is_done = True
    for hook in run.savers:
        if isinstance(hook, RunSaverHook):
            hook.restored(run.first, run.state)
    runner.evaluate("evaluate_owed")


def _make_calls(run: Run, runner: HookRunner, source: Source, items: FirstBatch) -> None:
    boundaries = StageBoundaries(run.stages, source.next_change)
    compile_ahead(run, boundaries, source)
    ends = runner.ends(boundaries) if run.programs.is_looped else None
    made = run.programs.calls(iter(items), run.first, ends or (math.inf,), run.options.batch_sharding)
    run.feeder = BatchFeeder(source, made, run.signals, run.watch)
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
    if start is None or start >= run.options.last_step or isinstance(batches, StateBatches):
        return None
    if run.latest is None if own is None else not own.is_endless and start >= len(own):
        return None
    source = _source(run, batches)
    # A function of the step can be called again, if its first call failed because it needs what a hook sets up.
    again = (lambda: copied_batches(_source(run, batches), run.fetched)) if source.by_step is not None else None
    first = FirstBatch(copied_batches(source, run.fetched), run.times)
    first.start(again)
    compile_first_program(run, first, None if own is None else functools.partial(own.shapes, start))
    return source, first


def _open_batches(run: Run, batches: Any) -> tuple[Source, FirstBatch]:
    source = _source(run, batches)
    return source, FirstBatch(copied_batches(source, run.fetched), run.times)


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
    if source.position is None:
        return source
    ask = source.position
    if not source.is_of_state:
        rare = RarePosition(source.position, functools.partial(_next_save, run))
        source, ask = source._replace(position=rare), rare.before_first
    if source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # a loader may not know its position before its first batch
        before = ask()
    return source._replace(begin=lambda: before)


def _next_save(run: Run, batches: int) -> int:
    """After how many batches of the run, more than these, a checkpoint is due by steps."""
    step, interval, last = run.first + batches, run.options.save_checkpoint_steps, int(run.options.last_step)
    return (last if interval is None else min(last, (step // interval + 1) * interval)) - run.first
