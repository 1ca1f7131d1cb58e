"""Stack, place and prefetch batches."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import arguments_of, flatten
from jstep.data.placement import copied, placement
from jstep.data.prefetch import Reader
from jstep.loop.read_ahead import AHEAD, ReadAhead
from jstep.loop.signals import StopWaiting
from jstep.loop.sources import Source
from jstep.sharding.of_batches import named
from jstep.timeline import Stopwatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call.

    Attributes:
        args: The arguments.
        steps: The number of steps.
        first: The step at which the call begins.
        stacked: Whether the arguments are stacked over steps.
        position: The position of the source after these batches, JSON-serializable; None if not known.
        why: Why the call takes one step, if calls take several; "" if there is no special reason.
    """

    args: tuple[Any, ...]
    steps: int = dataclasses.field(metadata={"static": True})
    first: int = dataclasses.field(metadata={"static": True})
    stacked: bool = dataclasses.field(metadata={"static": True}, default=False)
    position: Any = dataclasses.field(metadata={"static": True}, default=None)
    why: str = dataclasses.field(metadata={"static": True}, default="")


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that no other code writes to, each with the position after it."""


def make_calls(
    items: CopiedBatches,
    start: int,
    lengths: Iterable[int] | None,
    sharding: Any = None,
    *,
    on_device: bool = False,
    stack_one: bool = False,
    single_step_reason: Callable[[], str] = str,
) -> Iterator[Call]:
    """Yield batches as the arguments of calls, stacked if a call takes several steps.

    Batches that cannot be stacked, because their shapes differ or the source ends, become calls of one step each.

    Args:
        items: The batches, from `copied_batches`.
        start: The step of the first batch.
        lengths: The number of steps of each call; None if each call takes one step and nothing is stacked.
        sharding: The sharding of a batch, as in `prefetch_to_device`; None does not move it.
        on_device: Whether to put batches on the default device, for a step that is not compiled: such a step would
            see NumPy arrays or JAX arrays, depending on whether batches are prefetched.
        stack_one: Whether to stack calls of one step too, for a step that is compiled only when scanned.
        single_step_reason: Returns why a call takes one step, if others take several.
    """
    one = many = placement(None) if on_device else None
    if sharding is not None:
        one, many = (placement(named(sharding, stacked=stacked)) for stacked in (False, True))

    def call(batch: Any, first: int, steps: int, stacked: bool, position: Any, why: str = "") -> Call:
        place = many if stacked else one
        placed = batch if place is None else place(batch)
        return Call(arguments_of(placed), steps, first, stacked, position, why)

    if lengths is None:
        for step, (batch, position) in enumerate(items, start):
            placed = batch if one is None else one(batch)
            yield Call(arguments_of(placed), 1, step, False, position)
        return
    step = start
    for length in lengths:
        some = list(itertools.islice(items, length))
        whole = _stacked([batch for batch, _ in some]) if len(some) == length and (length > 1 or stack_one) else None
        if whole is not None:
            yield call(whole, step, length, True, some[-1][1])
        else:
            ragged = "the batches end" if len(some) < length else "batches differ in shape, dtype or structure"
            why = single_step_reason() if length == 1 else ragged
            for i, (batch, position) in enumerate(some):
                yield call(_stacked([batch]) if stack_one else batch, step + i, 1, stack_one, position, why)
        if len(some) < length:
            return
        step += length


def copied_batches(source: Source, fetched: "FetchCounter | None" = None) -> CopiedBatches:
    """Yield each batch of a source, copied if necessary so that no other code writes to it, and the position after it.

    Args:
        source: The batches.
        fetched: A counter of the batches.
    """
    fetched = fetched or FetchCounter()
    at, fresh = source.position, source.fresh
    for batch in source.items:
        yield copied(batch, fresh=fresh), None if at is None else at()
        fetched.count += 1  # after it was placed, too: errors name the batch that was not


def _stacked(some: list[Any]) -> Any:
    """Stack the batches of several steps; None if their structures, shapes or dtypes differ."""
    flat = [flatten(one) for one in some]
    structure = flat[0][1]
    if any(other != structure for _, other in flat[1:]):
        return None
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    if any(len({_kind(leaf) for leaf in column}) > 1 for column in columns):
        return None
    return structure.unflatten([_stack(column) for column in columns])


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)


def _stack(leaves: tuple[Any, ...]) -> Any:
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
        position: The position of the source after the latest call, JSON-serializable; None if not known.
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
        self._read_ahead = ReadAhead() if read_ahead is None else read_ahead
        self._read, self._stopping = functools.partial(next, made), stopping
        self._reader, self._requested = Reader(self._read), 0
        self._waited = self._got = 0.0
        self.waiting = False
        self.steps, self._taken = 1, 0
        self._before: Any = None
        at = source.begin or source.position
        self.position = at() if at else None

    def __iter__(self) -> "BatchFeeder":
        return self

    def __next__(self) -> Call:
        self.waiting = True
        # From here on a signal interrupts the wait; check for one that arrived before.
        if self._stopping():
            raise StopWaiting
        watch = self._watch
        before = watch.current
        asked = watch.switch(watch.waiting)
        try:
            ahead = self._read_ahead.after_call(self._waited, asked - self._got, self.steps)
            if self._requested:
                call: Call = self._reader.take()
                self._requested -= 1
            else:
                call = self._read()
            if ahead:
                self._reader.request(AHEAD - self._requested)
                self._requested = AHEAD
        except StopIteration:
            self.waiting = False
            raise
        finally:
            got = watch.switch(before)
        self.waiting = False
        self._waited, self._got = got - asked, got
        # If the wait is interrupted, the position stays before the batch, however much of it was read.
        self.steps = call.steps
        self._taken += call.steps
        self._before, self.position = self.position, call.position
        return call

    def position_after(self, steps: int) -> Any:
        """The position after that many steps: all that were fetched, or all but those of the latest call."""
        return self.position if steps >= self._taken else self._before

    def close(self) -> None:
        """End the thread."""
        self._reader.close()
