"""Opening batches, the only place that checks their kind; `from_state` and `replayed`."""

import contextlib
import functools
import itertools
import math
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.checks import as_function, can_take, describe_type, format_value, may_take
from jstep.core.exceptions import items_until_end, note
from jstep.core.logs import logger
from jstep.core.trees import Tree
from jstep.data.batch_sources import (
    BatchSource,
    FromLoop,
    FromState,
    Indexed,
    Loader,
    Unseekable,
    untrained_batches,
)
from jstep.data.loop_batches import LoopBatches
from jstep.data.positions import (
    OWN_STATE,
    STATE_DICT,
    PositionMethods,
    SavedPosition,
    ThrottledPosition,
    batches_since,
    decode_position,
    fetch_again,
    has_methods,
    position_methods,
)
from jstep.data.sequence import BatchIterator, BatchSequence
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import UnsupportedError

_SEQUENCE = (Sequence, BatchSequence)
_STATELESS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_USED = "batches"
"""The key of the position of `replayed`: the number of batches that were used."""


class _Opening(NamedTuple):
    """Where batches begin, and what happens to their position.

    Attributes:
        start: The step whose batch is the first.
        last_step: The step after the last batch's.
        saved: The position in the checkpoint that the run resumes from; None without one.
        is_saved: Whether the run saves checkpoints.
        next_save: `next_save(number)` returns the next number of batches at which a save is due.
    """

    start: int
    last_step: int
    saved: SavedPosition | None
    is_saved: bool
    next_save: Callable[[int], float]

    @property
    def steps_left(self) -> int:
        return max(0, self.last_step - self.start)


def open_source(
    batches: Tree,
    start: int,
    last_step: int,
    saved: SavedPosition | None = None,
    *,
    is_saved: bool = False,
    next_save: Callable[[int], float] = lambda number: math.inf,
    state: Callable[[], Any] = lambda: None,
) -> BatchSource:
    """Open batches from a step on, at their saved position: the only place that checks their kind.

    Args:
        batches: What the user passed.
        start: The step whose batch is the first.
        last_step: The step after the last batch's.
        saved: The position in the checkpoint that the run resumes from.
        is_saved: Whether the run saves checkpoints.
        next_save: `next_save(number)` returns the next number of batches at which a save is due.
        state: Returns the newest state, for `from_state`.
    """
    opening = _Opening(start, last_step, saved, is_saved, next_save)
    if isinstance(batches, LoopBatches):
        return _open_loop_batches(batches, opening)
    if isinstance(batches, StateBatches):
        return _open_state_batches(batches, opening, state)
    if keeps_position(batches):
        return _open_loader(batches, batches, opening)
    items = _indexable_items(batches, start, last_step)
    if items is not None:
        return Indexed(batches, items)
    iterator = iter(batches)
    if keeps_position(iterator):
        return _open_loader(batches, iterator, opening)
    if not _warn_of_untrained(batches):
        _warn_without_position(type(batches).__name__, opening)
    return Unseekable(batches, itertools.islice(iterator, opening.steps_left))


def are_made_one_by_one(batches: Tree) -> bool:
    """Whether each batch is made at its step, with the state or by a loop's body, never ahead."""
    return isinstance(batches, StateBatches | LoopBatches)


def _open_loop_batches(batches: LoopBatches, opening: _Opening) -> BatchSource:
    if not batches.kept:
        return FromLoop(batches, iter(batches), None)
    # Restored even if no step is left: the program may use the objects after the loop.
    _restore_position(batches, opening._replace(last_step=opening.start + 1))
    if not opening.is_saved:
        return FromLoop(batches, iter(batches), None)
    read = functools.partial(loader_position, batches)
    read()  # raises now if it cannot be saved, and not at the first save, after hours of training
    batches.begin()
    return FromLoop(batches, iter(batches), read)


def _open_state_batches(
    batches: "StateBatches", opening: _Opening, state: Callable[[], Any]
) -> BatchSource:
    make = batches.make
    steps = range(opening.start, opening.last_step)
    # Not a generator expression, in which a StopIteration of `make`, which ends the batches,
    # becomes a RuntimeError.
    made = map(lambda step: make(step, state()), steps)
    if position_methods(make) is None:
        is_function = isinstance(make, _STATELESS) or hasattr(make, "__wrapped__")
        if not is_function:  # a method, or an object with __call__, may have a state that is lost
            _warn_without_position(getattr(make, "__qualname__", type(make).__name__), opening)
        return FromState(batches, made)
    _restore_position(make, opening)
    read = functools.partial(loader_position, make)
    start = _position_at_start(read, opening) if opening.is_saved else None
    return FromState(batches, made, read=read, start=start, is_saved=opening.is_saved)


def _open_loader(batches: Tree, owner: Any, opening: _Opening) -> BatchSource:
    """Open batches whose position `owner` has: the batches, or their iterator."""
    # Before `iter`, which is when loaders read the position that they were set to.
    _restore_position(owner, opening)
    if hasattr(owner, "__iter__"):
        items = iter(owner)
    else:  # some iterators have only `__next__`
        items = map(next, itertools.repeat(owner))
    count = batches_since(None if opening.saved is None else opening.saved.value)

    read = functools.partial(loader_position, owner)
    read_position: Callable[[], Any] | None = None
    start: Any = None
    if opening.is_saved:
        read_position = ThrottledPosition(read, opening.next_save)
        start = _position_at_start(read_position.read, opening)
    elif hasattr(batches, "__next__"):
        with contextlib.suppress(Exception):  # only `set_back` needs it, and works without
            start = _position_at_start(read, opening)
    return Loader(
        batches,
        itertools.chain(_fetched_again(items, count), itertools.islice(items, opening.steps_left)),
        start=start,
        read_position=read_position,
        set_position=functools.partial(set_position, batches),
        is_fresh=isinstance(owner, BatchIterator),
    )


def _fetched_again(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Fetch batches again at the first `next`; yield none of them."""
    fetch_again(items, count)
    yield from ()


def _position_at_start(read: Callable[[], Any], opening: _Opening) -> Any:
    """Return the position before the first batch, which is saved if the run ends there.

    An error is raised now: it would be raised again at the first save, after hours of training.
    """
    if opening.saved is not None:
        return opening.saved.value
    try:
        return read()
    except Exception as error:
        note(
            error,
            "jstep: batches: their position before the first batch, which checkpoints need, could "
            "not be read",
        )
        raise


def _indexable_items(batches: Tree, start: int, last_step: int) -> Iterator[Any] | None:
    """Return batches fetched by step, by index or by a function, from a step on; else None."""
    if hasattr(batches, "__getitem__"):
        if isinstance(batches, _SEQUENCE) or not hasattr(batches, "__iter__"):
            return _indexed(batches, start, last_step)
        # Some iterables define `__getitem__` for other keys: data frames for columns, PyTorch's
        # iterable datasets only by inheritance. So it is tried, with the first step.
        try:
            first = _try_first(batches, start, last_step)
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
            pass
        else:
            check_row_counts(batches, first)
            return itertools.chain(first, _indexed(batches, start + len(first), last_step))
    if callable(batches) and not hasattr(batches, "__iter__"):
        return map(functools.partial(_item, batches, batches), range(start, last_step))
    return None


def _try_first(batches: Tree, start: int, last_step: int) -> list[Any]:
    """Return a list of the first batch; an empty one if there is none."""
    steps = range(start, min(start + 1, last_step))
    try:
        return list(items_until_end(_item(batches, batches.__getitem__, step) for step in steps))
    except IndexError:
        return []


def _item(batches: Tree, fetch: Callable[[int], Any], step: int) -> Any:
    """Fetch a batch; a StopIteration, which would end the run silently, becomes an error."""
    try:
        return fetch(step)
    except StopIteration as error:
        raise RuntimeError(
            f"batches={format_value(batches)}: StopIteration was raised for step {step}; raise "
            "jstep.OutOfRangeError"
        ) from error


def _warn_without_position(name: str, opening: _Opening) -> None:
    """Warn on resuming, or before a run that saves, that batches do not resume where it stopped."""
    if opening.start:
        resumes = f"The run resumes at step {opening.start}"
        what = f"{resumes}, but a {name} has no position to resume from: it starts where it is."
    elif opening.is_saved:
        what = (
            f"A {name} has no position to resume from: a restart of this run would continue from "
            "where it is then."
        )
    else:
        return
    logger.warning(
        "%s Use jstep.batches, a function of the step, or an object with get_state and set_state.",
        what,
    )


def check_batches(batches: Tree) -> None:
    has_items = isinstance(batches, tuple) and len(batches) > 0
    if _is_array(batches) or (has_items and all(map(_is_array, batches))):
        raise TypeError(
            "batches: must be a source of batches, got arrays; use jstep.batches(x, batch_size), "
            "or lambda step: x to train on all of x at each step"
        )
    if isinstance(batches, Mapping | str | bytes):
        what = f"batches: must be a source of batches, got a {type(batches).__name__}"
        # Not itertools.repeat(batch): an iterator has no position to resume from.
        raise TypeError(
            f"{what}; use jstep.batches(x, batch_size), or lambda step: x to train on x at each "
            "step"
        )
    if are_made_one_by_one(batches):
        return
    if callable(batches) and not hasattr(batches, "__iter__") and not may_take(batches, 1):
        raise TypeError(
            f"batches={format_value(batches)}: must be a function of the step; see "
            "jstep.from_state and jstep.replayed"
        )
    if isinstance(batches, type) or not _has_batches(batches):
        # A class, too, has the methods of its objects.
        what = "must have batches[N], be a function of the step, or be iterable"
        raise TypeError(f"batches={format_value(batches)}: {what}")


def _has_batches(batches: Tree) -> bool:
    if callable(batches) or hasattr(batches, "__getitem__") or hasattr(batches, "__iter__"):
        return True
    return has_methods(batches, *OWN_STATE, "__next__")


def _is_array(value: object) -> bool:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return True
    return hasattr(value, "__dlpack__") and hasattr(value, "shape")


def _restore_position(owner: object, opening: _Opening) -> None:
    """Set a loader to its saved position, or warn that there is none."""
    name = _name_of(owner)
    saved = opening.saved
    start = opening.start
    if saved is None:
        has_warned = _warn_of_untrained(owner)
        if start and not has_warned:
            what = (
                f"The run begins at step {start}, and there is no checkpoint with a position of "
                f"the {name}"
            )
            logger.warning(
                "%s: it starts where it is now, perhaps after a batch that was not trained on.",
                what,
            )
        return
    if start >= opening.last_step:  # no batch is needed, so no position is, either
        return
    if saved.error:
        raise ValueError(f"batches: the position of the {name} is not known: {saved.error}")
    if saved.warning:
        logger.warning("%s (the %s of process %d)", saved.warning, name, jax.process_index())
    if saved.value is None:
        return
    value = decode_position(saved.value, name, saved.source)
    try:
        _methods(owner).restore(value)
    except Exception as error:
        note(
            error,
            f"jstep: the {name} did not accept the position in the checkpoint of step {start}",
        )
        raise


def keeps_position(batches: Tree) -> bool:
    """Return whether batches are an iterator or loader whose position can be read and set."""
    if has_methods(batches, *OWN_STATE, "__next__"):
        return True
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__next__")
    if not is_iterable or isinstance(batches, _SEQUENCE) or not has_methods(batches, *STATE_DICT):
        return False
    # `state_dict` must take no arguments: some data sets require the number of examples read.
    return can_take(batches.state_dict, 0)


def position_owner(batches: Tree) -> Any:
    """Return the object that has the position of batches; None if they have no position."""
    if isinstance(batches, StateBatches):
        return batches.make if position_methods(batches.make) is not None else None
    if isinstance(batches, LoopBatches):
        return batches if batches.kept else None
    return batches if keeps_position(batches) else None


def loader_position(owner: object) -> Any:
    """Return the current position of a loader, copied; None if it is not known yet.

    Raises:
        TypeError: It has a value that no checkpoint can hold.
    """
    position = _methods(owner).read()
    if position is None:
        return None
    # Copied, because loaders may return a dict that they keep changing; as JSON only for a
    # checkpoint, because the text of a replay buffer takes much longer.
    try:
        return {"value": tagged_json.copy_encodable(position)}
    except UnsupportedError as error:
        whose = f"batches: the position of the {_name_of(owner)} cannot be saved: state{error.path}"
        raise TypeError(
            f"{whose} {error.what}; convert it, see docs: help/errors#positions"
        ) from None


def _name_of(owner: object) -> str:
    return "objects of from_loop" if isinstance(owner, LoopBatches) else type(owner).__name__


def set_position(owner: object, position: object) -> None:
    _methods(owner).restore(decode_position(position, _name_of(owner)))


def _warn_of_untrained(batches: object) -> bool:
    """Warn of batches that an earlier run fetched from this iterator, and did not train on.

    Return whether there was such a run.
    """
    count = None
    with contextlib.suppress(TypeError):  # an object without weak references or a hash
        count = untrained_batches.pop(batches, None)
    if count is None:
        return False
    name = type(batches).__name__
    if count:
        what = (
            f"{count} of this {name} were fetched by an earlier run without being trained on, and "
            "are lost"
        )
    else:
        what = f"an earlier run ended while this {name} fetched one, which may be lost"
    logger.warning(
        "batches: %s: this run begins where it is now. Use jstep.batches, a function of the step, "
        "or, with a checkpoint_dir, an iterator that has get_state and set_state.",
        what,
    )
    return True


def _methods(owner: object) -> PositionMethods:
    methods = position_methods(owner)
    assert methods is not None
    return methods


def _indexed(batches: Tree, start: int, last_step: int) -> Iterator[Any]:
    try:
        size = len(batches)
    except (TypeError, NotImplementedError):  # it is endless, or its length is unknown
        size = None
    stop = last_step if size is None else min(size, last_step)
    for step in range(start, stop):
        try:
            item = _item(batches, batches.__getitem__, step)
        except IndexError:
            # Without a length, IndexError marks the end; with one, it is an error.
            if size is not None:
                raise
            return
        if step == start:
            check_row_counts(batches, [item])
        yield item


def check_row_counts(batches: Tree, first: Sequence[Any]) -> None:
    """Reject a data set of rows given as batches, by its first item; warn if it may be a batch."""
    if (
        not first
        or isinstance(batches, BatchSequence | list | tuple)
        or not hasattr(batches, "__len__")
    ):
        return
    item = first[0]
    what = f"batches: each item of the {type(batches).__name__} is taken as the batch of a step"
    leading_axes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(item)}
    have_common_axis = len(leading_axes) <= 1 and () not in leading_axes
    if not have_common_axis and isinstance(item, Mapping | tuple):
        # Other items may be batches that are a number.
        raise ValueError(
            f"{what}, and its leaves have no common first axis: for rows give "
            "jstep.batches(dataset, batch_size), else a function of the step"
        )
    names = {kind.__name__ for kind in type(batches).__mro__}
    if "Dataset" in names:
        # Of Hugging Face or PyTorch: these have rows, and a row looks like a batch.
        logger.warning("%s; if it is a row, give jstep.batches(dataset, batch_size)", what)


# Batches made with the state of the run.


def from_state(fn: Callable[[int, Any], Any]) -> "StateBatches":
    """Return batches for `train` that are made with the state that the step will get.

    `fn(step, state)` is called in the main thread, after the hooks of the previous step, and never
    ahead. So batches made with the newest parameters (environments on the host, self-play, hard
    examples) are a function of the run, not of timing. The time of the calls counts as `waiting`
    (`jstep goodput`).

    `fn` must not keep arrays of the state, which are donated to the step; NumPy copies may be kept.

    Args:
        fn: `fn(step, state) -> batch`, which ends the batches by raising StopIteration or
            `OutOfRangeError`. If it is an object with `state_dict` and `load_state_dict`, or
            `get_state` and `set_state`, its position is saved with each checkpoint, after all hooks
            of that step: it includes their feedback to `fn`. A position above 64 kB, such as a
            replay buffer, is only read when a checkpoint is saved: if `fn` raises then, the run
            resumes from the newest checkpoint.

    Returns:
        Batches for `train`, `replay` and `verify_resume`. `train` rejects steps_per_call > 1 with
        them.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def nearest(step, state):  # a batch that depends on the parameters
        ...     return jnp.round(state.params["w"]) + 1
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.train(train_step, state, jstep.from_state(nearest), last_step=3)
        >>> print(state.params["w"])
        3.0
    """
    return StateBatches(as_function(fn, "fn", "(step, state) -> batch", takes=2))


class StateBatches:
    """What `from_state` returns; `make(step, state)` returns a batch."""

    def __init__(self, make: Callable[[int, Any], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        name = getattr(self.make, "__qualname__", type(self.make).__qualname__)
        return f"<jstep.from_state({name})>"


# Batches of an iterable without a position, which a restart reads again up to the restored step.


def replayed(make: Callable[[], Iterable[Any]]) -> "ReplayedBatches":
    """Return batches for `train` that a restart reads again from the start, dropping used ones.

    After a restart `make()` is called again and the batches that the run has used are dropped, with
    one log line. This is exact if `make` returns the same batches each time; nothing detects it if
    it does not. The restart takes as long as reading those batches: a loader with a position, or
    `jstep.batches`, resumes immediately.

    Args:
        make: `make()` returns an iterable of batches: a generator, or a shuffling loader with a
            fixed seed. Each of several processes reads, and drops, its own.

    Returns:
        An iterable of batches, whose iterators have `get_state` and `set_state`; each run reads it
        from its beginning.

    Raises:
        ValueError: After a restart, there are fewer batches than the run had used.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> directory = tempfile.mkdtemp()
        >>> for last_step in (3, 6):  # the second run is a restart
        ...     state = jstep.TrainState.create({"w": 0.0}, optimizer)
        ...     batches = jstep.replayed(lambda: map(jnp.float32, range(100)))
        ...     state = jstep.train(train_step, state, batches, last_step, checkpoint_dir=directory)
        >>> print(state.params["w"])
        4.03125
    """
    return ReplayedBatches(as_function(make, "make", "() -> an iterable of batches", takes=0))


class ReplayedBatches(Iterable[Any]):
    """What `replayed` returns: each run reads it from its beginning."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> "ReplayedIterator":
        return ReplayedIterator(self.make)

    def __repr__(self) -> str:
        name = getattr(self.make, "__qualname__", type(self.make).__qualname__)
        return f"<jstep.replayed({name})>"


class ReplayedIterator(Iterator[Any]):
    """An iterator that resumes by dropping the batches that the run has used."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make
        self._items: Iterator[Any] | None = None  # opened at the first `next`, after `set_state`
        self._count = 0  # of batches that were used

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._begin()
        item = next(self._items)
        self._count += 1
        return item

    def _begin(self) -> Iterator[Any]:
        iterable = self._make()
        if not isinstance(iterable, Iterable):
            raise TypeError(
                "replayed: make() must return an iterable of batches, got "
                f"{describe_type(iterable)}"
            )
        items = items_until_end(iterable)
        if not self._count:
            return items
        began = time.perf_counter()
        dropped = sum(1 for _ in itertools.islice(items, self._count))
        if dropped < self._count:
            raise ValueError(
                f"replayed: make() returned {dropped} batches, and the run has used {self._count}; "
                "it must repeat them"
            )
        logger.info(
            "replayed: %d batches were read again in %.1f s", dropped, time.perf_counter() - began
        )
        return items

    def get_state(self) -> dict[str, int]:
        return {_USED: self._count}

    def set_state(self, state: dict[str, int]) -> None:
        self._count = state[_USED]
        self._items = None
