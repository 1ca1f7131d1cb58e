"""Stack, place and prefetch batches."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import arguments_of, flatten
from jstep.data.loaders import LivePosition, Source
from jstep.data.prefetch import Reader, copied, placement
from jstep.hooks.timeline import Stopwatch
from jstep.loop.read_ahead import AHEAD, NeverAhead, ReadAhead
from jstep.loop.signals import StopWaiting
from jstep.state.sharding import as_shardings


class Plan(NamedTuple):
    """The form of calls with batches of some shapes.

    Attributes:
        most: The most steps of a call.
        looped: What runs calls of up to that many steps; None if each call is one call of the training step.
        is_stacked: Whether the arguments of the steps are stacked.
    """

    most: int = 1
    looped: Any = None
    is_stacked: bool = False


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call.

    Attributes:
        args: The arguments of one step; if `is_stacked`, those of `most` steps, the last ones being padding.
        steps: The number of steps.
        first: The step at which the call begins.
        position: The position of the source after these batches, from `copied_position`; None if not known.
        looped: As in `Plan`.
        most: As in `Plan`.
        is_stacked: As in `Plan`.
    """

    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None
    looped: Any = None
    most: int = 1
    is_stacked: bool = False


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that no other code writes to, each with the position after it."""
PlanOf = Callable[[int, Any, Callable[[], tuple[Any, ...]]], Plan]
"""`plan(step, shapes, args)`, as `Programs.plan`."""


def make_calls(
    items: CopiedBatches,
    start: int,
    sharding: Any = None,
    *,
    on_device: bool = False,
    plan: PlanOf | None = None,
    ends: Iterable[int] = (),
) -> Iterator[Call]:
    """Yield batches as the arguments of calls.

    A call of several steps ends where its plan, the shapes of the batches or `ends` require it.

    Args:
        items: The batches, from `copied_batches`.
        start: The step of the first batch.
        sharding: The sharding of a batch, as in `prefetch_to_device`; None does not move it.
        on_device: Whether to put batches on the default device, for a step that is not compiled: such a step would
            see NumPy arrays or JAX arrays, depending on whether batches are prefetched.
        plan: Returns how calls are made; None if each takes one step.
        ends: The steps at which calls must end, in order; the last one ends the run.
    """
    one = placement(None) if on_device else None if sharding is None else placement(as_shardings(sharding))
    many = None if sharding is None else placement(as_shardings(sharding, stacked=True))
    if plan is None:
        for step, (batch, position) in enumerate(items, start):
            placed = batch if one is None else one(batch)
            yield Call(placed if type(placed) is tuple else arguments_of(placed), 1, step, position)
        return
    step = start
    some: list[tuple[Any, Any]] = []
    for end in ends:
        while step < end:
            some = some or list(itertools.islice(items, 1))
            if not some:
                return
            batch, shapes = some[0][0], _shapes_of(some[0][0])
            most, looped, is_stacked = plan(step, shapes, functools.partial(_args_of, batch, one))
            later: list[tuple[Any, Any]] = []
            while len(some) < min(most, end - step) and not later and (item := next(items, None)) is not None:
                (some if _shapes_of(item[0]) == shapes else later).append(item)
            if not is_stacked:
                placed = batch if one is None else one(batch)
            else:
                whole = _stacked([batch for batch, _ in some], most)
                placed = whole if many is None else many(whole)
            yield Call(arguments_of(placed), len(some), step, some[-1][1], looped, most, is_stacked)
            step += len(some)
            some = later


def _args_of(batch: Any, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    args: tuple[Any, ...] = arguments_of(batch if place is None else place(batch))
    return args


def copied_batches(source: Source, fetched: "FetchCounter | None" = None) -> CopiedBatches:
    """Yield each batch of a source, copied if necessary so that no other code writes to it, and the position after it.

    Args:
        source: The batches. The position of those that are made with the state is not taken here: see `LivePosition`.
        fetched: A counter of the batches.
    """
    fetched = fetched or FetchCounter()
    at, fresh = None if source.is_of_state else source.position, source.fresh
    for batch in source.items:
        yield copied(batch, fresh=fresh), None if at is None else at()
        fetched.count += 1  # after it was placed, too: errors name the batch that was not


def _shapes_of(batch: Any) -> Any:
    """The structure, shapes and dtypes of a batch; batches that can be stacked agree in them."""
    leaves, structure = flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf) for leaf in leaves)


def _stacked(some: list[Any], most: int) -> Any:
    """Stack batches of the same shapes; the last one is repeated where there are fewer than `most`."""
    flat = [flatten(one) for one in some]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return flat[0][1].unflatten([_stack([*column, *[column[-1]] * (most - len(some))]) for column in columns])


def _stack(leaves: list[Any]) -> Any:
    return _stack_arrays(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


_stack_arrays = jax.jit(jnp.stack)  # one dispatch for all leaves of a column


@dataclasses.dataclass(slots=True)
class FetchCounter:
    """The number of batches that were fetched."""

    count: int = 0


class BatchFeeder:
    """Iterator over the calls of a run. Their batches are read by the loop, or ahead of it by a thread.

    Whoever reads, the calls are the same, in the same order: the thread reads on request only, and the loop reads only
    when it has taken all that it requested.

    Args:
        source: The batches.
        made: The calls, from `make_calls`.
        stopping: Returns whether the run is stopping and must not wait for a batch.
        watch: The stopwatch of the run.
        read_ahead: Decides after each call whether the thread reads.

    Attributes:
        waiting: Whether the loop is waiting for a batch and may be interrupted without losing one.
        steps: The number of steps of the latest call.
        got: When the loop got it, in seconds of the stopwatch.
        live: The position of a source whose batches are made with the state; None for any other.
        position: The position of any other source after the latest call, from `copied_position`; None if not known.
    """

    def __init__(
        self,
        source: Source,
        made: Iterator[Call],
        stopping: Callable[[], bool] = lambda: False,
        watch: Stopwatch | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._watch = Stopwatch() if watch is None else watch
        self._read_ahead: ReadAhead = read_ahead or (NeverAhead() if source.is_of_state else ReadAhead())
        self._made, self._stopping = made, stopping
        self._reader, self._requested = Reader(functools.partial(next, made)), 0
        self._waited = self.got = 0.0
        self.waiting = False
        self.steps, self._taken = 1, 0
        self._before: Any = None
        self.live = LivePosition(source.position, source.begin) if source.is_of_state and source.position else None
        at = None if source.is_of_state else source.begin or source.position
        self.position = at() if at else None

    def __iter__(self) -> "BatchFeeder":
        return self

    def __next__(self) -> Call:
        self.waiting = True
        # From here on a signal interrupts the wait; check for one that arrived before.
        if self._stopping():
            raise StopWaiting
        watch = self._watch
        clock, mark, before, waiting = watch.clock, watch.mark, watch.current, watch.waiting
        asked = clock()
        mark((waiting, asked))  # `watch.switch`, without the calls, which cost as much as a small batch
        watch.current = waiting
        try:
            ahead = self._read_ahead.after_call(self._waited, asked - self.got, self.steps)
            if self._requested:
                call: Call = self._reader.take()
                self._requested -= 1
            elif self.live is None:
                call = next(self._made)
            else:
                call = self._read_live(self.live)
            if ahead:
                self._reader.request(AHEAD - self._requested)
                self._requested = AHEAD
        except StopIteration:
            self.waiting = False
            raise
        finally:
            got = clock()
            mark((before, got))
            watch.current = before
        self.waiting = False
        if self.live is not None:
            self.live.after_batch()
        self._waited, self.got = got - asked, got
        # If the wait is interrupted, the position stays before the batch, however much of it was read.
        self.steps = steps = call.steps
        self._taken += steps
        self._before, self.position = self.position, call.position
        return call

    def _read_live(self, live: LivePosition) -> Call:
        live.before_batch()
        try:
            call = next(self._made)
        except StopIteration:
            live.no_batch()
            raise
        live.check()
        return call

    def position_after(self, steps: int) -> Any:
        """The position after that many steps: all that were fetched, or all but those of the latest call."""
        if self.live is not None:
            return self.live.now() if steps >= self._taken else self.live.before
        return self.position if steps >= self._taken else self._before

    def close(self) -> None:
        """End the thread."""
        self._reader.close()
