"""Opens all kinds of batches, whose kind is asked only here; `from_state` and `replayed`."""

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
from jstep.core.exceptions import note, until_end
from jstep.core.logs import logger
from jstep.core.trees import Tree
from jstep.data.batch_sources import BatchSource, FromLoop, FromState, Indexed, Loader, Unseekable, untrained_batches
from jstep.data.loop_batches import LoopBatches
from jstep.data.positions import (
    OWN_STATE,
    STATE_DICT,
    RarePosition,
    SavedPosition,
    batches_since,
    decode_position,
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
        saved: The position in the checkpoint that the run resumes from; None without one.
        is_saved: Whether the run saves checkpoints.
        next_save: After how many batches, more than these, a save is due.
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
    """Open the batches from a step on, at their saved position. Only here it is asked of which kind batches are."""
    opening = _Opening(start, last_step, saved, is_saved, next_save)
    if isinstance(batches, LoopBatches):
        return _open_loop_batches(batches, opening)
    if isinstance(batches, StateBatches):
        return _open_state_batches(batches, opening, state)
    if keeps_position(batches):
        return _open_loader(batches, batches, opening)
    items = _by_step(batches, start, last_step)
    if items is not None:
        return Indexed(batches, items)
    iterator = iter(batches)
    if keeps_position(iterator):
        return _open_loader(batches, iterator, opening)
    if not _warn_of_untrained(batches):
        _warn_without_position(type(batches).__name__, opening)
    return Unseekable(batches, itertools.islice(iterator, opening.steps_left))


def are_made_one_by_one(batches: Tree) -> bool:
    """Whether each batch is made for its step, with the state or by the body of a loop, and never ahead of it."""
    return isinstance(batches, StateBatches | LoopBatches)


def _open_loop_batches(batches: LoopBatches, opening: _Opening) -> BatchSource:
    ask: Callable[[], Any] | None = None
    if batches.kept:
        ask = functools.partial(loader_position, batches)
        # Restored also where no step is left: the loop may go on to use the objects.
        _restore_position(batches, opening._replace(last_step=opening.start + 1))
    if ask is None or not opening.is_saved:
        return FromLoop(batches, iter(batches), None)
    ask()  # raises now if it cannot be saved
    batches.begin()
    return FromLoop(batches, iter(batches), ask)


def _open_state_batches(batches: "StateBatches", opening: _Opening, state: Callable[[], Any]) -> BatchSource:
    make = batches.make
    steps = range(opening.start, opening.last_step)
    made = map(lambda step: make(step, state()), steps)
    if position_methods(make) is None:
        if not (isinstance(make, _STATELESS) or hasattr(make, "__wrapped__")):  # a method, or an object with __call__
            _warn_without_position(getattr(make, "__qualname__", type(make).__name__), opening)
        return FromState(batches, made)
    _restore_position(make, opening)
    ask = functools.partial(loader_position, make)
    start = _position_at_start(ask, opening) if opening.is_saved else None
    return FromState(batches, made, ask=ask, start=start, is_saved=opening.is_saved)


def _open_loader(batches: Tree, owner: Any, opening: _Opening) -> BatchSource:
    """Open batches whose position is that of `owner`: the batches, or their iterator."""
    _restore_position(owner, opening)
    # Some iterators have `__next__` but no `__iter__`. The position was set before: loaders read it in `iter`.
    items = iter(owner) if hasattr(owner, "__iter__") else map(next, itertools.repeat(owner))
    since = batches_since(None if opening.saved is None else opening.saved.value)
    ask = functools.partial(loader_position, owner)
    read_position: Callable[[], Any] | None = None
    start: Any = None
    if opening.is_saved:
        read_position = RarePosition(ask, opening.next_save)
        start = _position_at_start(read_position.read, opening)
    elif hasattr(batches, "__next__"):
        with contextlib.suppress(Exception):  # only `set_back` needs it, and works without
            start = _position_at_start(ask, opening)
    return Loader(
        batches,
        itertools.islice(items, since, since + opening.steps_left),
        start=start,
        read_position=read_position,
        set_position=functools.partial(set_position, batches),
        is_fresh=isinstance(owner, BatchIterator),
    )


def _position_at_start(ask: Callable[[], Any], opening: _Opening) -> Any:
    """Return the position before the first batch, which is saved if the run ends there.

    An error is raised now: it would be raised again at the first save, after hours of training.
    """
    if opening.saved is not None:
        return opening.saved.value
    try:
        return ask()
    except Exception as error:
        note(error, "jstep: batches: their position before the first batch, which checkpoints need, could not be read")
        raise


def _by_step(batches: Tree, start: int, last_step: int) -> Iterator[Any] | None:
    if hasattr(batches, "__getitem__"):
        if isinstance(batches, _SEQUENCE) or not hasattr(batches, "__iter__"):
            return _indexed(batches, start, last_step)
        # Some iterables define `__getitem__` for other keys: data frames for columns, PyTorch's iterable datasets only
        # by inheritance.
        try:
            first = list(
                until_end(_item(batches, batches.__getitem__, n) for n in range(start, min(start + 1, last_step)))
            )
        except IndexError:
            first = []
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
            first = None
        if first is not None:
            refuse_rows(batches, first)
            return itertools.chain(first, _indexed(batches, start + len(first), last_step))
    is_function = not hasattr(batches, "__iter__") and callable(batches)
    return map(functools.partial(_item, batches, batches), range(start, last_step)) if is_function else None


def _item(batches: Tree, fetch: Callable[[int], Any], step: int) -> Any:
    """Fetch a batch; a StopIteration, which would end the run silently, becomes an error."""
    try:
        return fetch(step)
    except StopIteration as error:
        raise RuntimeError(
            f"batches={format_value(batches)}: StopIteration was raised for step {step}; raise jstep.OutOfRangeError"
        ) from error


def _warn_without_position(name: str, opening: _Opening) -> None:
    if opening.start:
        at = f"The run resumes at step {opening.start}"
        what = f"{at}, but a {name} has no position to resume from: it starts where it is."
    elif opening.is_saved:
        what = f"A {name} has no position to resume from: a restart of this run would continue from where it is then."
    else:
        return
    logger.warning("%s Use jstep.batches, a function of the step, or an object with get_state and set_state.", what)


def check_batches(batches: Tree) -> None:
    if _is_array(batches) or (isinstance(batches, tuple) and batches and all(map(_is_array, batches))):
        raise TypeError("batches: must be a source of batches, got arrays; use jstep.batches(arrays, batch_size)")
    if isinstance(batches, Mapping | str | bytes):
        what = f"batches: must be a source of batches, got a {type(batches).__name__}"
        raise TypeError(f"{what}; to repeat one batch, give itertools.repeat(batch)")
    if are_made_one_by_one(batches):
        return
    if callable(batches) and not hasattr(batches, "__iter__") and not may_take(batches, 1):
        raise TypeError(
            f"batches={format_value(batches)}: must be a function of the step; see jstep.from_state and jstep.replayed"
        )
    if isinstance(batches, type) or not (
        callable(batches)
        or has_methods(batches, *OWN_STATE, "__next__")
        or any(hasattr(batches, n) for n in ("__getitem__", "__iter__"))
    ):
        what = "must have batches[N], be a function of the step, or be iterable"
        raise TypeError(f"batches={format_value(batches)}: {what}")


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array) or (
        hasattr(value, "__dlpack__") and hasattr(value, "shape")
    )


def _restore_position(owner: object, opening: _Opening) -> None:
    """Set a loader to its saved position, or warn that there is none."""
    name = _name_of(owner)
    saved = opening.saved
    start = opening.start
    if saved is None:
        if not _warn_of_untrained(owner) and start:
            what = f"The run begins at step {start}, and there is no checkpoint with a position of the {name}"
            logger.warning("%s: it starts where it is now, perhaps after a batch that was not trained on.", what)
        return
    if start >= opening.last_step:
        return
    if saved.error:
        raise ValueError(f"batches: the position of the {name} is not known: {saved.error}")
    if saved.warning:
        logger.warning("%s (the %s of process %d)", saved.warning, name, jax.process_index())
    if saved.value is None:
        return
    value = decode_position(saved.value, name)
    try:
        _methods(owner)[1](value)
    except Exception as error:
        note(error, f"jstep: the {name} did not accept the position in the checkpoint of step {start}")
        raise


def keeps_position(batches: Tree) -> bool:
    if has_methods(batches, *OWN_STATE, "__next__"):
        return True
    # `state_dict` must take no arguments: some data sets require the number of examples that were read.
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__next__")
    is_stateful = is_iterable and not isinstance(batches, _SEQUENCE) and has_methods(batches, *STATE_DICT)
    return is_stateful and can_take(batches.state_dict, 0)


def position_owner(batches: Tree) -> Any:
    if isinstance(batches, StateBatches):
        return batches.make if position_methods(batches.make) is not None else None
    if isinstance(batches, LoopBatches):
        return batches if batches.kept else None
    return batches if keeps_position(batches) else None


def loader_position(owner: object) -> Any:
    # Copied, because loaders may return a dict that they keep changing; as JSON only for a checkpoint, because the text
    # of a replay buffer takes much longer.
    position = _methods(owner)[0]()
    if position is None:
        return None
    try:
        return {"value": tagged_json.copy_encodable(position)}
    except UnsupportedError as error:
        whose = f"batches: the position of the {_name_of(owner)} cannot be saved: state{error.path}"
        raise TypeError(f"{whose} {error.what}; convert it, see docs: help/errors#positions") from None


def _name_of(owner: object) -> str:
    return "objects of from_loop" if isinstance(owner, LoopBatches) else type(owner).__name__


def set_position(owner: object, position: object) -> None:
    _methods(owner)[1](decode_position(position, _name_of(owner)))


def _warn_of_untrained(batches: object) -> bool:
    count = None
    name = type(batches).__name__
    with contextlib.suppress(TypeError):
        count = untrained_batches.pop(batches, None)
    if count is None:
        return False
    what = f"{count} of this {name} were fetched by an earlier run without being trained on, and are lost"
    logger.warning(
        "batches: %s: this run begins where it is now. Use jstep.batches, a function of the step, or, with a "
        "checkpoint_dir, an iterator that has get_state and set_state.",
        what if count else f"an earlier run ended while this {name} fetched one, which may be lost",
    )
    return True


def _methods(owner: object) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
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
            refuse_rows(batches, [item])
        yield item


def refuse_rows(batches: Tree, first: Sequence[Any]) -> None:
    """Reject a data set of rows given as batches, by its first item; warn if that may be a batch, too."""
    if not first or isinstance(batches, BatchSequence | list | tuple) or not hasattr(batches, "__len__"):
        return
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(first[0])}
    name = type(batches).__name__
    what = f"batches: each item of the {name} is taken as the batch of a step"
    is_row = len(sizes) > 1 or () in sizes
    if is_row and isinstance(first[0], Mapping | tuple):  # others may be batches that are a number
        raise ValueError(
            f"{what}, and its leaves have no common first axis: for rows give jstep.batches(dataset, batch_size), else "
            "a function of the step"
        )
    if "Dataset" in {kind.__name__ for kind in type(batches).__mro__}:  # of Hugging Face, or of PyTorch
        logger.warning("%s; if it is a row, give jstep.batches(dataset, batch_size)", what)


# Batches made with the state of the run.


def from_state(fn: Callable[[int, Any], Any]) -> "StateBatches":
    """Return batches for `train` that are made with the state that the step will get.

    `fn(step, state)` is called in the main thread, after the hooks of the previous step, and never ahead. It must not
    keep arrays of the state, which are donated to the step.

    Args:
        fn: `fn(step, state) -> batch`, which ends the batches by raising StopIteration or `OutOfRangeError`. If it is
            an object with `state_dict` and `load_state_dict`, or `get_state` and `set_state`, its position is saved
            with each checkpoint.

    Returns:
        Batches for `train`, `replay` and `verify_resume`. `train` rejects steps_per_call > 1 with them.

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
    def __init__(self, make: Callable[[int, Any], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return f"<jstep.from_state({getattr(self.make, '__qualname__', type(self.make).__qualname__)})>"


# Batches of an iterable without a position, which a restart reads again up to the restored step.


def replayed(make: Callable[[], Iterable[Any]]) -> "ReplayedBatches":
    """Return batches for `train` that a restart reads again from the beginning, dropping the used ones.

    Dropping takes as long as reading. `make` must return the same batches each time; nothing detects it if it does not.

    Args:
        make: `make()` returns an iterable of batches: a generator, or a shuffling loader with a fixed seed.

    Returns:
        An iterable of batches, whose iterators have `get_state` and `set_state`.

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
    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> "ReplayedIterator":
        return ReplayedIterator(self.make)

    def __repr__(self) -> str:
        return f"<jstep.replayed({getattr(self.make, '__qualname__', type(self.make).__qualname__)})>"


class ReplayedIterator(Iterator[Any]):
    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make
        self._items: Iterator[Any] | None = None
        self._count = 0

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._begin()
        item = next(self._items)
        self._count += 1
        return item

    def _begin(self) -> Iterator[Any]:
        iterable = self._make()
        if not isinstance(iterable, Iterable):
            raise TypeError(f"replayed: make() must return an iterable of batches, got {describe_type(iterable)}")
        items = until_end(iterable)
        used = self._count
        if not used:
            return items
        began = time.perf_counter()
        dropped = sum(1 for _ in itertools.islice(items, used))
        if dropped < used:
            raise ValueError(
                f"replayed: make() returned {dropped} batches, and the run has used {used}; it must repeat them"
            )
        logger.info("replayed: %d batches were read again in %.1f s", used, time.perf_counter() - began)
        return items

    def get_state(self) -> dict[str, int]:
        return {_USED: self._count}

    def set_state(self, state: dict[str, int]) -> None:
        self._count = state[_USED]
        self._items = None
