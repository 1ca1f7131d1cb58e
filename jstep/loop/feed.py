"""What the loop takes its batches from, made one: indexed, called, iterated; alone or K at a time; ahead or not."""

import base64
import copy
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.data.placement import placement
from jstep.data.prefetch import PrefetchIterator, prefetch_to_device
from jstep.loop.signals import StopWaiting
from jstep.sharding.layout import auto_mesh

_logger = logging.getLogger("jstep")

# Handing an item from thread to thread costs some 20 µs: making a cheaper one ahead would only slow the loop.
_WORTH_A_THREAD_SECS = 50e-6
_TRIALS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)  # not frozen, which takes four times as long to make
class Call:
    """The arguments of one call, and how many steps it makes."""

    args: tuple[Any, ...]
    steps: int = dataclasses.field(metadata={"static": True})


@runtime_checkable
class HasState(Protocol):
    """An iterator that knows its position and can be set back to one."""

    def __next__(self) -> Any:
        """The next batch."""
        ...

    def get_state(self) -> Any:
        """The position, as bytes or as JSON can hold it."""
        ...

    def set_state(self, state: Any, /) -> Any:
        """Goes to a position."""
        ...


class Source(NamedTuple):
    """An iterator over batches, and where it is: None where nobody can tell."""

    items: Iterator[Any]
    position: Callable[[], Any] | None


def source_of(batches: Any, start: int, last_step: int, position: Any) -> Source:
    """The batches from step `start` on.

    Args:
        batches: An object with `batches[N]`, a function of the step, an iterator with `get_state` and
            `set_state`, or any iterable.
        start: The first step number.
        last_step: Where to end.
        position: What `encoded` made of an iterator's position in an earlier run; None in a fresh one.

    Raises:
        TypeError: `batches` is none of these.
    """
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            f"batches is a {type(batches).__name__}, which may be one batch, not a source of them. Give an object "
            "with batches[N], a function of the step, or an iterable; for the same batch again and again, "
            "itertools.repeat(batch)."
        )
    if isinstance(batches, HasState):
        return _stateful(batches, position, start)
    if hasattr(batches, "__getitem__"):
        return Source(_indexed(batches, start, last_step), None)
    if not hasattr(batches, "__iter__") and callable(batches):
        return Source(map(batches, range(start, last_step)), None)
    try:
        iterator = iter(batches)
    except TypeError:
        raise TypeError(
            f"batches={batches!r}: must have batches[N], be a function of the step, or be iterable"
        ) from None
    if isinstance(iterator, HasState):
        return _stateful(iterator, position, start)
    if start:
        _logger.warning(
            "The run goes on at step %d, but a %s has no position to go on from: its batches start where it is. Use "
            "jstep.batches, a function of the step, or an iterator with get_state and set_state.",
            start,
            type(batches).__name__,
        )
    return Source(iterator, None)


def is_seekable(batches: Any) -> bool:
    """Whether batches can go on from any step after a restart."""
    if hasattr(batches, "__getitem__") or isinstance(batches, HasState):
        return True
    return isinstance(iter(batches), HasState) if hasattr(batches, "__iter__") else callable(batches)


def _stateful(iterator: Any, position: Any, start: int) -> Source:
    if position is not None:
        iterator.set_state(decoded(position))
    elif start:
        _logger.warning(
            "The run goes on at step %d, but there is no position for the %s with what was restored: its batches start "
            "where it is.",
            start,
            type(iterator).__name__,
        )
    # Some of them can be asked for the next item, but not be iterated over.
    items = iterator if hasattr(iterator, "__iter__") else map(next, itertools.repeat(iterator))
    return Source(items, lambda: encoded(iterator.get_state()))


def encoded(position: Any) -> Any:
    """A position as JSON can hold it; bytes become text. A copy: some iterators give the one they go on changing."""
    if isinstance(position, bytes):
        return {"base64": base64.b64encode(position).decode()}
    return {"value": copy.deepcopy(position)}


def decoded(kept: Any) -> Any:
    """The position that `encoded` was given."""
    return base64.b64decode(kept["base64"]) if "base64" in kept else kept["value"]


def _indexed(batches: Any, start: int, last_step: int) -> Iterator[Any]:
    try:
        size = len(batches)
    except TypeError:  # it has no end, or does not know it
        size = None
    stop = last_step if size is None else min(size, last_step)
    for step in range(start, stop):
        try:
            item = batches[step]
        except IndexError:
            # Without a length this is how an object says that it is at its end; with one it is a defect.
            if size is not None:
                raise
            return
        yield item


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
        place = placement(_as_states_lie(sharding, stacked=lengths is not None))
    elif on_device:
        place = placement(None)

    for batch, steps in ((batch, 1) for batch in source.items) if lengths is None else _stacks(source.items, lengths):
        placed = batch if place is None else place(batch)
        yield Call(placed if isinstance(batch, tuple) else (placed,), steps)


def _stacks(items: Iterator[Any], lengths: Iterable[int]) -> Iterator[tuple[Any, int]]:
    for length in lengths:
        some = list(itertools.islice(items, length))
        if some:
            yield _stacked(some), len(some)
        if len(some) < length:
            return


def _as_states_lie(sharding: Any, *, stacked: bool) -> Any:
    """The shardings over Auto axes, as those of a state are; stacked batches have the steps in front."""

    def leaf(one: Any) -> Any:
        spec = one.spec if isinstance(one, NamedSharding) else one
        if not isinstance(spec, PartitionSpec):
            return one
        spec = PartitionSpec(None, *spec) if stacked else spec
        mesh = one.mesh if isinstance(one, NamedSharding) else jax.sharding.get_mesh()
        return spec if mesh.empty else NamedSharding(auto_mesh(mesh), spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


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
        if at is not None and call is not None:
            self.position = at()
        return call

    def close(self) -> None:
        """Ends the thread."""
        if self._ahead is not None:
            self._ahead.close()
