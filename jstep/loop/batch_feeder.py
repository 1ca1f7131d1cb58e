"""The batches as arguments of calls: alone or K at a time, placed or not, made ahead or not."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import flatten
from jstep.data.placement import copied, placement
from jstep.data.prefetch import PrefetchIterator
from jstep.loop.signals import StopWaiting
from jstep.loop.sources import Source
from jstep.sharding.of_batches import named
from jstep.timeline import Stopwatch

# Handing an item from thread to thread costs some 20 µs: making a cheaper one ahead would only slow the loop.
_WORTH_A_THREAD_SECS = 50e-6
_TRIALS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)  # not frozen, which takes four times as long to make
class Call:
    """What one call takes.

    Attributes:
        args: Its arguments.
        steps: How many steps it takes.
        first: The step that it begins from.
        stacked: Whether the arguments are stacked for that.
        position: Where the source is after its batches, as JSON can hold it; None where nobody can tell.
        why: Why it is a call of one step, where calls have several; "" where there is no special reason.
    """

    args: tuple[Any, ...]
    steps: int = dataclasses.field(metadata={"static": True})
    first: int = dataclasses.field(metadata={"static": True})
    stacked: bool = dataclasses.field(metadata={"static": True}, default=False)
    position: Any = dataclasses.field(metadata={"static": True}, default=None)
    why: str = dataclasses.field(metadata={"static": True}, default="")


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that nobody else writes into any more, each with the position after it."""


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
    """The batches as arguments of calls, stacked if a call takes several steps.

    Batches that cannot be stacked, as their shapes differ or the source ends, are calls of one step each.

    Args:
        items: The batches, as `copied_batches` makes them of a source.
        start: The step of the first one.
        lengths: How many steps each call takes; None if each takes one and nothing is stacked.
        sharding: Where a batch goes, as in `prefetch_to_device`; None leaves it where it is.
        on_device: Whether batches are put on the default device, for a step that is not compiled and so sees
            whether they are NumPy arrays: it is to see the same whether they were made ahead or not.
        stack_one: Whether calls of one step are stacked too, for a step that is compiled for that alone.
        single_step_reason: Why a call takes one step, where others take several.
    """
    one = many = placement(None) if on_device else None
    if sharding is not None:
        one, many = (placement(named(sharding, stacked=stacked)) for stacked in (False, True))

    def call(batch: Any, first: int, steps: int, stacked: bool, position: Any, why: str = "") -> Call:
        place = many if stacked else one
        placed = batch if place is None else place(batch)
        return Call(placed if isinstance(batch, tuple) else (placed,), steps, first, stacked, position, why)

    if lengths is None:
        for step, (batch, position) in enumerate(items, start):
            placed = batch if one is None else one(batch)
            yield Call(placed if isinstance(batch, tuple) else (placed,), 1, step, False, position)
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
    """Each batch of a source in arrays that nobody else writes into, and the position after it.

    Args:
        source: The batches.
        fetched: Where to count them.
    """
    fetched = fetched or FetchCounter()
    at, fresh = source.position, source.fresh
    for batch in source.items:
        own = copied(batch, fresh=fresh)
        fetched.count += 1
        yield own, None if at is None else at()


def _stacked(some: list[Any]) -> Any:
    """The batches of several steps as one; None if their structures, shapes or dtypes differ."""
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


_stack_arrays = jax.jit(jnp.stack)  # in one dispatch, not one for each of them


@dataclasses.dataclass(slots=True)
class FetchCounter:
    """How many batches were fetched."""

    count: int = 0


class BatchFeeder:
    """The calls of a run, made ahead in a thread if that pays.

    Args:
        source: The batches.
        made: The calls made of them.
        stopping: Whether the run is to stop, so that no batch is to be waited for.
        clock: Seconds; for tests.
        watch: Where the time goes.

    Attributes:
        waiting: Whether the loop waits for a batch right now and may be interrupted without losing one.
        steps: How many steps the call handed out last takes.
        position: Where the source is after the calls handed out, as JSON can hold it; None where nobody can tell.
    """

    def __init__(
        self,
        source: Source,
        made: Iterator[Call],
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        watch: Stopwatch | None = None,
    ) -> None:
        self._watch = Stopwatch() if watch is None else watch
        self._made, self._stopping, self._clock = made, stopping, clock
        self._prefetch: PrefetchIterator | None = None
        self.waiting = False
        self.steps, self._taken = 1, 0
        self._before: Any = None
        at = source.begin or source.position
        self.position = at() if at else None

    def __iter__(self) -> Iterator[Call]:
        # The first call opens files and compiles; it says nothing about the others.
        fastest = math.inf
        for trial in range(_TRIALS):
            then = self._clock()
            call = self._next(self._made)
            if call is None:
                return
            if trial:
                fastest = min(fastest, self._clock() - then)
            yield call
        items: Iterator[Call] = self._made
        if fastest >= _WORTH_A_THREAD_SECS:
            items = self._prefetch = PrefetchIterator(self._made, 2, _on_device, None)
        while (call := self._next(items)) is not None:
            yield call

    def _next(self, items: Iterator[Call]) -> Call | None:
        self.waiting = True
        # A signal from here on interrupts the wait; one that came before has to be looked for.
        if self._stopping():
            raise StopWaiting
        watch = self._watch
        before = watch.current
        watch.switch(watch.waiting)
        try:
            call = next(items, None)
        finally:
            watch.switch(before)
        self.waiting = False
        # Where the wait is interrupted, the position stays that before the batch, whatever was read of it.
        if call is not None:
            self.steps = call.steps
            self._taken += call.steps
            self._before, self.position = self.position, call.position
        return call

    def position_after(self, steps: int) -> Any:
        """Where the source was when so many steps had been taken: all handed out, or all but those of the last call."""
        return self.position if steps >= self._taken else self._before

    def close(self) -> None:
        """Ends the thread."""
        if self._prefetch is not None:
            self._prefetch.close()


def _on_device(call: Call) -> Call:
    return dataclasses.replace(call, args=placement(None)(call.args))
