"""Make the first batch and compile the first program while the checkpoint is read."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jstep.data import BatchSequence
from jstep.loop.background_compiler import shapes_of
from jstep.loop.batch_feeder import FetchCounter, copied_batches
from jstep.loop.compile_ahead import compile_first_program
from jstep.loop.options import Options
from jstep.loop.positions import saved_position
from jstep.loop.programs import Programs
from jstep.loop.restore_or_init import CheckpointInfo
from jstep.loop.sources import Source, source_of
from jstep.loop.stages import StageBoundaries, TrainSteps
from jstep.loop.start_times import FirstBatch, StartTimes
from jstep.state import TrainState


class OverlappedStart(NamedTuple):
    """Batches, the first of which is being made in a thread.

    Attributes:
        source: The source of the batches.
        first: The batches, to iterate over.
    """

    source: Source
    first: FirstBatch


def open_source(batches: Any, start: int, last_step: int, extra: Mapping[str, Any], *, resumable: bool) -> Source:
    """The batches from a step, at the position that was saved with its checkpoint."""
    source = source_of(batches, start, last_step, saved_position(extra), resumable=resumable)
    if not resumable:
        return source._replace(position=None)  # the position is never saved
    if source.position is None or source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # a loader may not know its position before its first batch
        before = source.position()
    return source._replace(begin=lambda: before)


def overlap_start(
    batches: Any,
    checkpoints: CheckpointInfo,
    options: Options,
    stages: TrainSteps,
    programs: Programs,
    state: TrainState,
    fetched: FetchCounter,
    times: StartTimes,
    stack: contextlib.ExitStack,
    stopping: Callable[[], bool],
) -> OverlappedStart | None:
    """Start the first batch and the first compilation before the checkpoint is read; None if that is not possible.

    Args:
        batches: The batches.
        checkpoints: The starting point of the run, as far as it is known.
        options: The arguments of `train`.
        stages: The training steps.
        programs: Their programs.
        state: The template that the checkpoint is restored into.
        fetched: A counter of the batches.
        times: Measures the parts of the start.
        stack: Closes the background compiler.
        stopping: Returns whether the run is stopping.
    """
    start, last_step = checkpoints.step, options.last_step
    own = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= last_step or (own is None and checkpoints.latest is None):
        return None
    if own is not None and not own.is_endless and start >= len(own):
        return None
    make = functools.partial(
        open_source, batches, start, last_step, checkpoints.extra, resumable=checkpoints.saver is not None
    )
    source = make()
    # A function of the step can be called again, if its first call failed because it needs what a hook sets up.
    again = (lambda: copied_batches(make(), fetched)) if source.is_function else None
    first = FirstBatch(copied_batches(source, fetched), times, again)
    programs.first_compiler = compile_first_program(
        programs,
        StageBoundaries(stages, source.next_change),
        first,
        None if own is None else functools.partial(own.shapes, start),
        start,
        last_step,
        options.batch_sharding,
        times,
        stopping,
    )
    if programs.first_compiler is None:
        first.forget()
    else:
        stack.callback(programs.first_compiler.close)
        programs.first_compiler.begin(shapes_of(state))
    return OverlappedStart(source, first)
