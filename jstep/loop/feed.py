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

from jstep.core import trees
from jstep.data.placement import placement
from jstep.data.prefetch import PrefetchIterator, prefetch_to_device
from jstep.loop.signals import StopWaiting
from jstep.loop.sources import Source
from jstep.sharding.of_batches import named

# Handing an item from thread to thread costs some 20 µs: making a cheaper one ahead would only slow the loop.
_WORTH_A_THREAD_SECS = 50e-6
_TRIALS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)  # not frozen, which takes four times as long to make
class Call:
    """The arguments of one call, how many steps it makes, and whether they are stacked for that."""

    args: tuple[Any, ...]
    steps: int = dataclasses.field(metadata={"static": True})
    stacked: bool = dataclasses.field(metadata={"static": True}, default=False)


def calls(
    source: Source, lengths: Iterable[int] | None, sharding: Any = None, *, on_device: bool = False
) -> Iterator[Call]:
    """The batches as arguments of calls, stacked where a call makes several steps.

    Args:
        source: The batches.
        lengths: How many steps each call makes; None where each makes one and nothing is stacked.
        sharding: Where a batch goes, as in `prefetch_to_device`; None leaves it where it is.
        on_device: Whether batches are put on the default device, for a step that is not compiled and so sees
            whether they are NumPy arrays: it is to see the same whether they were made ahead or not.
    """
    place = None
    if sharding is not None:
        place = placement(named(sharding, stacked=lengths is not None))
    elif on_device:
        place = placement(None)

    for batch, steps in ((batch, 1) for batch in source.items) if lengths is None else _stacks(source.items, lengths):
        placed = batch if place is None else place(batch)
        yield Call(placed if isinstance(batch, tuple) else (placed,), steps, lengths is not None)


def _stacks(items: Iterator[Any], lengths: Iterable[int]) -> Iterator[tuple[Any, int]]:
    for length in lengths:
        some = list(itertools.islice(items, length))
        if some:
            yield _stacked(some), len(some)
        if len(some) < length:
            return


def _stacked(some: list[Any]) -> Any:
    def stack(keys: Any, *leaves: Any) -> Any:
        shapes = sorted({np.shape(leaf) for leaf in leaves})
        if len(shapes) > 1:
            raise ValueError(
                f"steps_per_call: batches of different shapes {shapes} at {trees.quoted(trees.path_str(keys))} cannot "
                "be stacked; let the source drop the remainder, or use steps_per_call=1"
            )
        return _stack_arrays(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)

    structures: list[Any] = [jax.tree.structure(one) for one in some]
    first, *others = structures
    if (other := next((one for one in others if one != first), None)) is not None:
        raise ValueError(
            f"steps_per_call: batches of different structures cannot be stacked, {first} and {other}; let the source "
            "give the same, or use steps_per_call=1"
        )
    return jax.tree_util.tree_map_with_path(stack, *some)


_stack_arrays = jax.jit(jnp.stack)  # in one dispatch, not one for each of them


class Feed:
    """The calls of a run, made ahead in a thread where that pays.

    Args:
        source: The batches.
        made: The calls made of them.
        stopping: Whether the run is to stop, so that no batch is to be waited for.
        clock: Seconds; for tests.

    Attributes:
        waiting: Whether the loop waits for a batch right now and may be interrupted without losing one.
        steps: How many steps the call handed out last makes.
        position: Where the source is after the calls handed out, as JSON can hold it; None where nobody can tell.
    """

    def __init__(
        self,
        source: Source,
        made: Iterator[Call],
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._at, self._made, self._stopping, self._clock = source.position, made, stopping, clock
        self._ahead: PrefetchIterator | None = None
        self.waiting = False
        self.steps, self._taken = 1, 0
        self._before: Any = None
        self.position = self._at() if self._at else None

    def __iter__(self) -> Iterator[Call]:
        # The first call opens files and compiles; it says nothing about the others.
        fastest = math.inf
        for trial in range(_TRIALS):
            then = self._clock()
            call = self._next(self._made, self._at)
            if call is None:
                return
            if trial:
                fastest = min(fastest, self._clock() - then)
            yield call
        items: Iterator[Call] = self._made
        at = self._at
        if fastest >= _WORTH_A_THREAD_SECS:
            items = ahead = self._ahead = prefetch_to_device(self._made, 2, state_fn=self._at)
            at = at and (lambda: ahead.state)
        while (call := self._next(items, at)) is not None:
            yield call

    def _next(self, items: Iterator[Call], at: Callable[[], Any] | None) -> Call | None:
        self.waiting = True
        # A signal from here on interrupts the wait; one that came before has to be looked for.
        if self._stopping():
            raise StopWaiting
        call = next(items, None)
        self.waiting = False
        # Where the wait is interrupted, the position stays that before the batch, whatever was read of it.
        if call is not None:
            self.steps = call.steps
            self._taken += call.steps
            if at is not None:
                self._before, self.position = self.position, at()
        return call

    def position_after(self, steps: int) -> Any:
        """Where the source was when so many steps had been made: all handed out, or all but those of the last call."""
        return self.position if steps >= self._taken else self._before

    def close(self) -> None:
        """Ends the thread."""
        if self._ahead is not None:
            self._ahead.close()
