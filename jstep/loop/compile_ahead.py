"""Ahead-of-time compilation: all stages are traced before a run begins, and compiled before they are due."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.exceptions import note
from jstep.core.threads import READER_EXIT_SECS, in_background, wait_until_done
from jstep.data.loaders import Source
from jstep.data.placement import as_shardings, copy_batch, make_placer
from jstep.data.sequence import BatchSequence
from jstep.loop.compiler import CompileJob, shapes_of
from jstep.loop.dispatch import Dispatch
from jstep.loop.feeder import FirstBatch
from jstep.loop.run import Run
from jstep.loop.setup import Setup
from jstep.loop.stages import Segment, Stage, StageBoundaries
from jstep.slots.matching import describe_difference

_HINT = "; if it is the smaller last batch of an epoch, drop_remainder=True leaves it out"


def compile_ahead(run: Run) -> None:
    """Trace all stages whose first batch can be indexed, and compile later ones in the background."""
    source, table, shapes = run.source, run.dispatch.table, shapes_of(run.state)
    boundaries = StageBoundaries(run.setup.train_steps, source.next_change)
    first, *later = boundaries.segments(run.setup.loop.first, run.setup.options.stop_step)
    if not later:
        return
    seen: set[Any] = set()
    for segment in (first, *later):
        stage, args = table.stages[segment.stage], None
        if not stage.is_compiled:
            continue
        is_indexed = hasattr(source.by_step, "__getitem__") and segment.is_edge and segment is not first
        if isinstance(source.by_step, BatchSequence) or is_indexed:
            args = shapes_of_batch(source, segment.first, run.setup.options.batch_sharding)
            if args is None:  # the batches end earlier
                break
            key = (segment.stage, trees.structure(args), tuple(jax.tree.leaves(args)))
            if key in seen:
                continue
            seen.add(key)
            if segment is not first:
                _check(stage, shapes, args, segment)
        elif not segment.is_edge:
            continue
        if segment is not first:
            make = functools.partial(table.compile, segment.first)
            run.dispatch.compiler.jobs.append(CompileJob(segment.first, stage.name, make, args))


def compile_first_program(
    setup: Setup, dispatch: Dispatch, start: int, first: FirstBatch, shapes: Callable[[], Any] | None
) -> None:
    """Compile a run's first program in the background; `shapes` gives those of the first batch without making it."""
    compiler, batch_sharding = dispatch.compiler, setup.options.batch_sharding
    stage = dispatch.table.stage_of(start)
    if not stage.is_compiled:
        return

    def make(_: tuple[Any, ...]) -> None:
        if shapes is not None and batch_sharding is None:
            # A daemon, because the user's reader may hang; it may also compile.
            future = in_background(shapes, name="jstep-shapes", daemon=True, exit_secs=READER_EXIT_SECS)
            batch = future.result() if wait_until_done(future, compiler.closed.is_set) else None
        else:
            batch = first.peek(compiler.closed.is_set)
        if batch is None:
            return
        args = _shapes_as_args(batch, batch_sharding)
        del batch  # so that only the loop holds it
        with setup.times.compiling():
            dispatch.table.compile(start, args)

    compiler.begin(CompileJob(start, stage.name, make, is_quiet=True))


def shapes_of_batch(source: Source, step: int, batch_sharding: object) -> tuple[Any, ...] | None:
    """Return the shapes of the arguments of a step; None if its batch cannot be made apart from the others."""
    fetch = getattr(source.by_step, "__getitem__", source.by_step)
    try:
        batch = None if fetch is None else copy_batch(fetch(step), fresh=True)
    except IndexError:
        return None
    if fetch is None:
        return None
    try:
        return _shapes_as_args(batch, batch_sharding)
    except ValueError as error:
        note(error, f"This is batch {step}, whose shapes are checked before the first step{_HINT}.")
        raise


def _shapes_as_args(batch: Tree, batch_sharding: object) -> tuple[Any, ...]:
    placed = batch if batch_sharding is None else make_placer(as_shardings(batch_sharding))(batch)
    return shapes_of(trees.batch_to_args(placed))


def _check(stage: Stage, state: Tree, args: tuple[Any, ...], segment: Segment) -> None:
    """Trace a stage and check the state that it returns; JAX caches the trace for the compilation."""
    name = f"train_step[{segment.first}]" if segment.is_edge else "train_step"
    try:
        new = stage.trace(state, args).out_info[0]
    except Exception as error:
        which = ", its first one, with the state and the batch of that step"
        if not segment.is_edge:
            which = f" with batch {segment.first}, whose shapes differ from those of the batch before"
        raise ValueError(
            f"{name}: it cannot take step {segment.first}{which}: {type(error).__name__}: {error}"
            f"{'' if segment.is_edge else _HINT}"
        ) from error
    if different := describe_difference(new, state):
        raise ValueError(
            f"{name}: all training steps of a run share one structure of the state, but this one returns a state "
            f"{different}; freeze parameters with var_list, and give all stages optimizers with the same slots"
        )
