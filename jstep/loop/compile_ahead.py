"""Compile the programs of a run ahead of time: trace them before it begins, compile them before they are due."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import note
from jstep.data.loaders import Source
from jstep.data.prefetch import copied, placement
from jstep.loop.background_compiler import BackgroundCompiler, CompileJob, shapes_of
from jstep.loop.programs import Programs, is_compiled, trace_step
from jstep.loop.run import Run
from jstep.loop.stages import Segment, StageBoundaries
from jstep.loop.start_times import FirstBatch, interruptible
from jstep.state.sharding import as_shardings

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
        if not is_compiled(stage.single):
            continue
        if source.is_own or (source.at is not None and segment.is_edge and segment is not first):
            args = _shapes_of_batch(source, segment.first, run.options.batch_sharding)
            if args is None:  # the batches end earlier
                break
            key = (segment.stage, trees.structure(args), tuple(jax.tree.leaves(args)), segment.stop - segment.first)
            if key in seen:
                continue
            seen.add(key)
            if segment is not first:
                _check(stage.single, shapes, args, segment)
        elif not segment.is_edge:
            continue
        if segment is not first:
            jobs.append(CompileJob(segment.first, stage.name, functools.partial(_compile, programs, segment, args)))
    programs.ahead_compiler = BackgroundCompiler(jobs, run.is_stopping)
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
    if not is_compiled(stage.single):
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

    compiler = BackgroundCompiler([CompileJob(start, stage.name, make)], run.is_stopping, is_quiet=True)
    programs.first_compiler = compiler
    run.closing.callback(compiler.close)
    compiler.begin(programs.state_shapes)


def _shapes_of_batch(source: Source, step: int, batch_sharding: Any) -> tuple[Any, ...] | None:
    assert source.at is not None
    try:
        batch = copied(source.at(step), fresh=True)
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
    args: tuple[Any, ...] = shapes_of(trees.arguments_of(placed))
    return args


def _check(step: Any, state: Any, args: tuple[Any, ...], segment: Segment) -> None:
    """Trace a stage and check the state that it returns; JAX caches the trace for the compilation."""
    name = f"train_step[{segment.first}]" if segment.is_edge else "train_step"
    try:
        new = trace_step(step, state, args).out_info[0]
    except Exception as error:
        which = ", its first one, with the state and the batch of that step"
        if not segment.is_edge:
            which = f" with batch {segment.first}, whose shapes differ from those of the batch before"
        raise ValueError(
            f"{name}: it cannot take step {segment.first}{which}: {type(error).__name__}: {error}"
            f"{'' if segment.is_edge else _HINT}"
        ) from error
    different = first_difference(state, new)
    if different is not None:
        raise ValueError(
            f"{name}: all training steps of a run share one structure of the state, but {different}; freeze "
            "parameters with var_list, and give all stages optimizers with the same slots"
        )


def _compile(
    programs: Programs, segment: Segment, args: tuple[Any, ...] | None, state: Any, latest: tuple[Any, ...]
) -> bool:
    return programs.compile(segment.first, latest if args is None else args)


def first_difference(state: Any, new: Any) -> str | None:
    """Describe the first difference of two states in structure, shapes or dtypes; None if they agree."""
    before = dict(trees.leaves_with_paths(state))
    after = dict(trees.leaves_with_paths(new))
    for path in [*before, *(path for path in after if path not in before)]:
        if path not in after:
            return f"this one returns a state without {path!r}"
        if path not in before:
            return f"this one returns a state with {path!r}, which the state does not have"
        one, other = before[path], after[path]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return (
                f"this one returns {path!r} as {other.dtype}{list(other.shape)}, but it is {one.dtype}"
                f"{list(one.shape)} in the state"
            )
    return None
