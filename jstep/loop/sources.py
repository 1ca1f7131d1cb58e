"""What batches are taken from, made one: indexed, called, or iterated; with a position or without."""

import base64
import collections.abc
import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jstep.core.checks import shown
from jstep.data import BatchIterator, BatchSequence

_logger = logging.getLogger("jstep")


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
    """An iterator over batches.

    Attributes:
        items: The batches.
        position: Where it is; None where nobody can tell.
        seekable: Whether it can go on from any step after a restart.
        fresh: Whether each batch is in new arrays, which nobody else writes into.
        at: The batch of any step, if batches can be indexed.
        is_own: Whether they are jstep's.
        next_change: From a step to the next one at which the shapes of the batches change; None if nobody knows.
        is_function: Whether each batch is a function of its step, and can be asked for again.
    """

    items: Iterator[Any]
    position: Callable[[], Any] | None = None
    seekable: bool = True
    fresh: bool = False
    at: Callable[[int], Any] | None = None
    is_own: bool = False
    next_change: Callable[[int], int | None] | None = None
    is_function: bool = False


def source_of(batches: Any, start: int, last_step: int, position: Any = None, *, is_kept: bool = False) -> Source:
    """The batches from step `start` on.

    Args:
        batches: An object with `batches[N]`, a function of the step, an iterator with `get_state` and
            `set_state`, or any iterable. Where one can be indexed and iterated over and is no sequence, it is indexed
            if it has an item for the first step.
        start: The first step number.
        last_step: Where to end.
        position: What `encoded` made of an iterator's position in an earlier run; None in a fresh one.
        is_kept: Whether the run keeps checkpoints, from which it may be resumed later.
    """
    check_batches(batches)
    if isinstance(batches, HasState):
        return _stateful(batches, position, start)
    if hasattr(batches, "__getitem__"):
        if _is_sequence(batches) or not hasattr(batches, "__iter__"):
            is_own = isinstance(batches, BatchSequence)
            return Source(
                _indexed(batches, start, last_step),
                fresh=is_own,
                at=batches.__getitem__,
                is_function=True,
                is_own=is_own,
                next_change=functools.partial(_next_change, batches) if is_own else None,
            )
        first = _first(batches, start, last_step)
        if first is not None:
            items = itertools.chain(first, _indexed(batches, start + len(first), last_step))
            return Source(items, at=batches.__getitem__, is_function=True)
    if not hasattr(batches, "__iter__") and callable(batches):
        return Source(map(batches, range(start, last_step)), is_function=True)
    iterator = iter(batches)
    if isinstance(iterator, HasState):
        return _stateful(iterator, position, start)
    ways_out = "Use jstep.batches, a function of the step, or an iterator with get_state and set_state."
    name = type(batches).__name__
    if start:
        _logger.warning(
            "The run goes on at step %d, but a %s has no position to go on from: its batches start where it is. %s",
            start,
            name,
            ways_out,
        )
    elif is_kept:
        _logger.warning(
            "A %s has no position to go on from: if this run is stopped and resumed from its checkpoint, the batches "
            "start where the %s is then, not where the run stopped. %s",
            name,
            name,
            ways_out,
        )
    return Source(iterator, None, seekable=False, fresh=isinstance(iterator, BatchIterator))


def check_batches(batches: Any) -> None:
    """Refuses what cannot be a source of batches."""
    if _is_array(batches) or (isinstance(batches, tuple) and batches and all(map(_is_array, batches))):
        what = "a tuple of arrays" if isinstance(batches, tuple) else "an array"
        raise TypeError(
            f"batches is {what}, which would give one row, or one array, as each batch. For batches of rows, "
            "jstep.batches(arrays, batch_size); for the same batch again and again, itertools.repeat(batch)."
        )
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            f"batches is a {type(batches).__name__}, which may be one batch, not a source of them. Give an object "
            "with batches[N], a function of the step, or an iterable; for the same batch again and again, "
            "itertools.repeat(batch)."
        )
    if isinstance(batches, type) or not (
        callable(batches)
        or isinstance(batches, HasState)
        or any(hasattr(batches, n) for n in ("__getitem__", "__iter__"))
    ):
        raise TypeError(f"batches={shown(batches)}: must have batches[N], be a function of the step, or be iterable")


def _next_change(batches: BatchSequence, step: int) -> int | None:
    try:
        return batches.next_change(step)
    except IndexError:  # they end before the run does
        return None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array) or (
        hasattr(value, "__dlpack__") and hasattr(value, "shape")
    )


def _is_sequence(batches: Any) -> bool:
    return isinstance(batches, collections.abc.Sequence | BatchSequence)


def _first(batches: Any, start: int, last_step: int) -> list[Any] | None:
    """The first batch where it can be indexed by steps; none where no step is to be made; None where it cannot.

    Much has `__getitem__` for something else, and iterates over its batches: frames by columns, PyTorch's iterable
    datasets by inheritance alone.
    """
    if start >= last_step:
        return []
    try:
        return [batches[start]]
    except IndexError:
        return []
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        return None


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
    except (TypeError, NotImplementedError):  # it has no end, or does not know it
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
