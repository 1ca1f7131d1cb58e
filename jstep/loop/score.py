"""The programs that a run needs after its first one: traced before it begins, compiled before they are due."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jstep.core import trees
from jstep.core.meshes import mesh_of, setting
from jstep.data.placement import copied, placement
from jstep.loop.ahead import Ahead, Job, shapes_of, stacked_shapes
from jstep.loop.programs import Programs, is_compiled
from jstep.loop.sources import Source
from jstep.loop.stages import Edges, Segment
from jstep.loop.start import FirstBatch, StartTimes, first_call_steps, interruptible
from jstep.loop.traced import traced
from jstep.sharding.of_batches import named
from jstep.state import TrainState


def ahead_of(
    programs: Programs,
    edges: Edges,
    source: Source,
    state: TrainState,
    start: int,
    last_step: int,
    steps_per_call: int,
    batch_sharding: Any,
    stopping: Callable[[], bool],
) -> Ahead | None:
    """Traces the stages of a run whose first batch can be indexed; None if the run needs one program alone.

    Args:
        programs: The programs of the run.
        edges: Where others follow.
        source: The batches.
        state: The state that the run begins from.
        start: Its step.
        last_step: Where the run ends.
        steps_per_call: How many steps a call takes.
        batch_sharding: Where batches go.
        stopping: Whether the run is to stop.

    Raises:
        ValueError: A stage does not fit the state or its batch; names its first step.
    """
    first, *later = edges.segments(start, last_step)
    if not later:
        return None
    shapes = shapes_of(state)
    seen: set[Any] = set()
    jobs = []
    for segment in (first, *later):
        step, args = programs.of_stage(segment.stage), None
        if not is_compiled(step) and steps_per_call == 1:
            continue
        if source.is_own or (source.at is not None and segment.is_edge and segment is not first):
            args = _shapes_of_batch(source, segment.first, batch_sharding)
            if args is None:  # the batches end before
                break
            key = (segment.stage, trees.structure(args), tuple(jax.tree.leaves(args)), segment.stop - segment.first)
            if key in seen:
                continue
            seen.add(key)
            if is_compiled(step) and segment is not first:
                _check(step, shapes, args, segment)
        elif not segment.is_edge:
            continue
        if segment is not first:
            make = functools.partial(_compile, programs, segment, steps_per_call, args)
            jobs.append(Job(segment.first, programs.name_of(segment.stage), make))
    return Ahead(jobs, stopping)


def starting(
    programs: Programs,
    edges: Edges,
    first: FirstBatch,
    shapes: Callable[[], Any] | None,
    hooks: Sequence[Any],
    cadences: Sequence[int | None],
    start: int,
    last_step: int,
    steps_per_call: int,
    batch_sharding: Any,
    times: StartTimes,
    stopping: Callable[[], bool],
) -> Ahead | None:
    """What compiles the first program of a run while its state is restored; None if it is not compiled.

    Args:
        programs: The programs of the run.
        edges: Where others follow.
        first: The first batch, on its way.
        shapes: Returns the shapes of the first batch without making it; None if they are not known.
        hooks: The user's hooks.
        cadences: How often the stock hooks are due.
        start: The first step.
        last_step: Where the run ends.
        steps_per_call: How many steps a call takes.
        batch_sharding: Where batches go.
        times: Where to measure.
        stopping: Whether the run is to stop.
    """
    (segment, *_) = edges.segments(start, last_step)
    if not is_compiled(programs.of_stage(segment.stage)) and steps_per_call == 1:
        return None
    steps = first_call_steps(hooks, start, segment.stop, steps_per_call, cadences)
    stacked = steps > 1 or programs.stacks_one
    step = programs.of_stage(segment.stage, stacked=stacked)
    closed = threading.Event()

    def make(state: Any, _: tuple[Any, ...]) -> bool:
        try:
            if shapes is not None and batch_sharding is None:
                batch = interruptible(shapes, closed.is_set)
            else:
                batch = first.peek(closed.is_set)
            if batch is None:
                return False
            args = _shapes_as_args(batch, batch_sharding)
            del batch
        finally:
            first.forget()
        with times.compiling(), setting(mesh_of(state)):
            traced(step, state, stacked_shapes(args, steps) if stacked else args).lower().compile()
        return True

    return Ahead([Job(start, programs.name_of(segment.stage), make)], stopping, is_quiet=True, closed=closed)


def _shapes_of_batch(source: Source, step: int, batch_sharding: Any) -> tuple[Any, ...] | None:
    assert source.at is not None
    try:
        batch = copied(source.at(step), fresh=True)
    except IndexError:
        return None
    return _shapes_as_args(batch, batch_sharding)


def _shapes_as_args(batch: Any, batch_sharding: Any) -> tuple[Any, ...]:
    """The shapes of the arguments that a batch becomes, where they are placed."""
    placed = batch if batch_sharding is None else placement(named(batch_sharding))(batch)
    args: tuple[Any, ...] = shapes_of(placed if isinstance(batch, tuple) else (placed,))
    return args


def _check(step: Any, state: Any, args: tuple[Any, ...], segment: Segment) -> None:
    """Traces a stage, which is kept for when it is compiled."""
    name = f"train_step[{segment.first}]" if segment.is_edge else "train_step"
    try:
        new = traced(step, state, args).out_info[0]
    except Exception as error:
        raise ValueError(
            f"{name}: it cannot take step {segment.first}, the first one of its kind, from the state and the batch "
            f"of that step: {type(error).__name__}: {error}"
        ) from error
    different = first_difference(state, new)
    if different is not None:
        raise ValueError(
            f"{name}: all training steps of a run share one structure of the state, but {different}; freeze "
            "parameters by var_list, and give all stages optimizers with the same slots"
        )


def _compile(
    programs: Programs,
    segment: Segment,
    steps_per_call: int,
    args: tuple[Any, ...] | None,
    state: Any,
    latest: tuple[Any, ...],
) -> bool:
    """Compiles what a segment needs: its program for several steps, that for one, or both."""
    args = latest if args is None else args
    many, rest = divmod(segment.stop - segment.first, steps_per_call)
    # A hook that is due in between makes calls of one step, in each stage alike.
    one = steps_per_call == 1 or not many or rest > 0 or programs.takes_single_steps
    made = False
    with setting(mesh_of(state)):
        if many and steps_per_call > 1:
            step = programs.of_stage(segment.stage, stacked=True)
            made = _compiled(programs, segment, step, state, stacked_shapes(args, steps_per_call), steps_per_call)
        if one:
            stacked = programs.stacks_one
            step = programs.of_stage(segment.stage, stacked=stacked)
            made |= _compiled(programs, segment, step, state, stacked_shapes(args, 1) if stacked else args, 1)
    return made


def _compiled(programs: Programs, segment: Segment, step: Any, state: Any, args: tuple[Any, ...], steps: int) -> bool:
    if not programs.prepare(segment.stage, steps, (trees.structure(args), tuple(jax.tree.leaves(args)))):
        return False
    traced(step, state, args).lower().compile()
    return True


def first_difference(state: Any, new: Any) -> str | None:
    """How a new state differs from the old one in structure, shapes or dtypes; None if it does not."""
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
                f"this one returns {path!r} as {other.dtype}{list(other.shape)}, and it is {one.dtype}"
                f"{list(one.shape)} in the state"
            )
    return None
