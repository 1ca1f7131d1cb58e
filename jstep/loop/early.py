"""What begins before the checkpoint is read: the first batch, and the program of the first call."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jstep.data import BatchSequence
from jstep.loop.ahead import shapes_of
from jstep.loop.beginning import Opened
from jstep.loop.feed import Fetched, owned
from jstep.loop.options import Options
from jstep.loop.positions import kept_in
from jstep.loop.programs import Programs
from jstep.loop.score import starting
from jstep.loop.sources import Source, source_of
from jstep.loop.stages import Edges, TrainSteps
from jstep.loop.start import FirstBatch, StartTimes
from jstep.state import TrainState


class Early(NamedTuple):
    """Batches whose first one is on its way.

    Attributes:
        source: The batches.
        first: The same, to be iterated over.
    """

    source: Source
    first: FirstBatch


def read_from(batches: Any, start: int, last_step: int, kept: Mapping[str, Any], *, is_kept: bool) -> Source:
    """The batches from a step on, from the position that was kept with its checkpoint."""
    source = source_of(batches, start, last_step, kept_in(kept), is_kept=is_kept)
    if not is_kept:
        return source._replace(position=None)  # nobody asks
    if source.position is None or source.begin is not None:
        return source
    before = None
    with contextlib.suppress(Exception):  # it may not know where it is before its first batch
        before = source.position()
    return source._replace(begin=lambda: before)


def early_of(
    batches: Any,
    opening: Opened,
    options: Options,
    stages: TrainSteps,
    programs: Programs,
    state: TrainState,
    fetched: Fetched,
    times: StartTimes,
    stack: contextlib.ExitStack,
    stopping: Callable[[], bool],
) -> Early | None:
    """Begins what need not wait for the checkpoint; None if there is nothing.

    Args:
        batches: The batches.
        opening: What is known of where the run begins.
        options: What `train` was given.
        stages: The training steps.
        programs: Their programs.
        state: What the checkpoint is restored into.
        fetched: Where to count the batches.
        times: Where to measure.
        stack: What closes what is begun.
        stopping: Whether the run is to stop.
    """
    start, last_step = opening.step, options.last_step
    own = batches if isinstance(batches, BatchSequence) else None
    if start is None or start >= last_step or (own is None and opening.latest is None):
        return None
    if own is not None and not own.is_endless and start >= len(own):
        return None
    make = functools.partial(read_from, batches, start, last_step, opening.kept, is_kept=opening.saver is not None)
    source = make()
    # What is a function of the step can be asked once more, should it have needed what a hook begins.
    again = (lambda: owned(make(), fetched)) if source.is_function else None
    first = FirstBatch(owned(source, fetched), times, again)
    programs.starting = starting(
        programs,
        Edges(stages, source.next_change),
        first,
        None if own is None else functools.partial(own.shapes, start),
        options.hooks,
        _cadences(options),
        start,
        last_step,
        options.steps_per_call,
        options.batch_sharding,
        times,
        stopping,
    )
    if programs.starting is None:
        first.forget()
    else:
        stack.callback(programs.starting.close)
        programs.starting.begin(shapes_of(state))
    return Early(source, first)


def _cadences(options: Options) -> list[int | None]:
    """How often the stock hooks are due, in steps."""
    return [
        options.log_steps if options.progress is not False else None,
        options.save_checkpoint_steps if options.checkpoint_dir is not None else None,
        options.save_summaries_steps if options.logdir is not None else None,
    ]
