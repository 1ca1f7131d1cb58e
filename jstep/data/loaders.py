"""Sources of batches that users pass: a function, a sequence, an iterator, a loader with a position of its own."""

import collections
import contextlib
import functools
import inspect
import itertools
import json
import logging
import math
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jstep.core.checks import can_take, kind, may_take, shown
from jstep.core.exceptions import note
from jstep.data.from_state import StateBatches
from jstep.data.sequence import BatchIterator, BatchSequence
from jstep.distributed import processes
from jstep.queues.queues import until_end
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import LARGE, UnsupportedError
from jstep.stores.tagged_json import FILE, Files, LargeBytes

T = TypeVar("T")

# Saving and restoring the position of a data loader, on each process.

POSITION, POSITIONS = "batches", "batches_of_processes"
"""Keys of a checkpoint's `extra`: the position of process 0, and those of all processes if there are several."""
_PROCESSES = "processes"
_BYTES = "base64"
"""The key of a position that is nothing but bytes."""
_WITHOUT = "(batch for batch in batches)"
"""What to pass to `train` instead of a loader whose position cannot be kept."""


class SavedPosition(NamedTuple):
    """The position of this process's loader in a checkpoint.

    Attributes:
        value: The position, as JSON, or as `position_of` returns it; None if there is no position.
        error: Why the position is not available; "" if it is.
        warning: A warning to log when the position is used; "" for no warning.
    """

    value: Any
    error: str = ""
    warning: str = ""


class LivePosition:
    """The position of batches that are made one at a time, after the hooks of the step before: those of `from_state`.

    Hooks tell the object that makes them what a step found, so its position is taken when a checkpoint is written. If a
    batch could not be made, or its step failed, it is the position before that batch, which a restart makes again.

    A large position is not copied before each batch, only when a checkpoint needs it. Once large, it counts as large.

    Args:
        ask: Returns the current position, from `position_of`.
        begin: Returns the position before the first batch, if the object does not know it yet; None if nothing does.

    Attributes:
        before: The position before the latest batch, and after what hooks changed before that; None if it is large.
        is_large: Whether the position is large.
        is_moving: Whether a batch is being made that must not be interrupted, as the position before it is not known.
    """

    def __init__(self, ask: Callable[[], Any], begin: Callable[[], Any] | None) -> None:
        self._ask = ask
        self.before = None if begin is None else begin()
        self.is_large = tagged_json.size_of(self.before) > LARGE
        self.is_moving = self._is_fixed = self._is_known = False
        self._at_end: Any = None

    def is_lost(self, is_before: bool) -> bool:
        """Whether the position that a checkpoint needs was not copied.

        Args:
            is_before: Whether it needs the one before the latest batch, which was made.
        """
        return self.is_large and self.before is None and (is_before or self._is_fixed)

    def prepare(self) -> None:
        """Take the position before a batch, if it is small; a signal may interrupt this."""
        if not self.is_large:
            # An object may not know its position before its first batch.
            with contextlib.nullcontext() if self._is_known else contextlib.suppress(Exception):
                self.before = self._ask()
                self._is_known = True
                self.is_large = tagged_json.size_of(self.before) > LARGE

    def take(self, made: Iterator[T]) -> T:
        """Return the next of what is made of one batch, after `prepare`, or raise StopIteration.

        A signal may interrupt this if the position is small. A position that cannot be kept is refused after the first
        batch.
        """
        if self.is_large:
            self.is_moving = True
            self.before = None
        self._is_fixed = True
        try:
            found = next(made)
        except StopIteration:
            if self.is_large:
                self._is_fixed, self._is_known = False, True
            elif self._is_known:  # the search for a batch may have changed the object
                self._at_end, self._is_fixed = tagged_json.as_json(self._ask()), False
            raise
        finally:
            self.is_moving = False
        if not self._is_known:
            self.is_large = self.is_large or tagged_json.size_of(self._ask()) > LARGE
            self._is_known = True
        return found

    def after_batch(self) -> None:
        """The batch was made, and no signal interrupts the loop before its step and hooks are over."""
        self._is_fixed = False

    def fix(self) -> None:
        """Take the position now, without what is changed later."""
        self.before, self._is_fixed = self.now(), True

    def now(self) -> Any:
        """The position for a checkpoint of the latest state."""
        if self._is_fixed or not self._is_known:
            return self.before
        position = self._ask()
        is_at_end = self._at_end is not None and tagged_json.as_json(position) == self._at_end
        return self.before if is_at_end else position


_SHARE = 0.02
"""The share of the time that reading the position of a loader may take."""
_QUICK = 5e-5
"""Seconds within which a position is read that is read after each batch, whatever a batch takes."""
_AFTER = "after"
"""The key of the number of batches since a position was read; absent for none."""


class RarePosition:
    """The position of a loader after each batch, read so rarely that it takes a small share of the time.

    In between it is the position that was read last, with the number of batches since: a restart fetches these again.

    Args:
        ask: Returns the position, from `position_of`.
        next_due: `next_due(number)`: after how many batches, more than that many, to read it in any case, because a
            checkpoint is due.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, ask: Callable[[], Any], next_due: Callable[[int], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._next_due, self._clock = ask, next_due, clock
        self._due = next_due(0)
        self._took: collections.deque[float] = collections.deque(maxlen=2)
        self._last: Any = None
        self._number = self._since = 0
        self._next = -math.inf

    def __call__(self) -> Any:
        """The position after the batch that was just made; must be called once after each."""
        self._number += 1
        if self._number >= self._due or self._last is None or self._clock() >= self._next:
            self._last, self._since = self.read(), 0
            self._due = self._next_due(self._number)
            return self._last
        self._since += 1
        return {**self._last, _AFTER: self._since}

    def read(self) -> Any:
        """The position now, such as that before the first batch; how long this takes says when it is read again."""
        began = self._clock()
        position = self._ask()
        now = self._clock()
        took = now - began
        self._took.append(took)
        is_quick = min(self._took) < _QUICK  # one of two may have been interrupted by another process
        self._next = -math.inf if is_quick else now + took * (1 / _SHARE - 1)
        return position


def decode_position(kept: Any, owner: str) -> Any:
    """Decode a position from `position_of`, or from `as_json` of it; it runs no code that the checkpoint brings.

    Raises:
        ValueError: The position cannot be decoded, or was pickled by an older version of jstep; names the loader.
    """
    what = f"batches: the checkpoint's position for the {owner}"
    if not isinstance(kept, Mapping):
        raise ValueError(f"{what} must be a position, got {kind(kept)}")
    if "pickle" in kept:
        raise ValueError(
            f"{what} was pickled by an older version of jstep, and nothing in a checkpoint is unpickled, because that "
            f"could run code of whoever wrote it. To continue from its state, with a {owner} that starts from its "
            "current position: state = jstep.Saver(old_directory).restore(state), and jstep.train(…, "
            "checkpoint_dir=new_directory)"
        )
    try:
        return tagged_json.decode({"$bytes": kept[_BYTES]} if _BYTES in kept else kept["value"])
    except KeyError as error:
        raise ValueError(f"{what} is not a position (it has no {error})") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be decoded ({error}); it was not saved by jstep, or was changed") from None


def saved_position(extra: Mapping[str, Any]) -> SavedPosition | None:
    """The position of this process's loader in a checkpoint's `extra`; None if there is no position."""
    of_all, first, count = extra.get(POSITIONS), extra.get(POSITION), jax.process_count()
    if of_all is None:
        only_one = (
            f"The checkpoint has one position of a loader for {count} processes: it was saved by one process, or by a "
            "version of jstep that saved only the position of process 0. Every process resumes from it, which is wrong "
            "if their loaders do not advance together."
        )
        return None if first is None else SavedPosition(first, warning=only_one if count > 1 else "")
    before, positions = of_all[_PROCESSES], of_all["positions"]
    if len(positions) == 1:  # they were all equal
        return SavedPosition(positions[0])
    if before == count:
        mine = positions[jax.process_index()]
        return None if mine is None else SavedPosition(mine)
    return SavedPosition(
        None,
        f"the checkpoint was saved by {before} processes, whose loaders had different positions, and this run has "
        f"{count}: the position of one process does not determine the share of another. Start the run with {before} "
        "processes; or give batches whose position is the step (jstep.batches, a function of the step); or resume with "
        "the loader as it is now: restore the state with Saver.restore, and train it with another checkpoint_dir",
    )


def gather_positions(position: Any, files: Files) -> dict[str, Any]:
    """Gather the positions of all processes, for a checkpoint's `extra`. Must be called on every process.

    Args:
        position: The position of this process, from `position_of`; None if not known.
        files: Where to put large arrays of the position of this process, which become files.
    """
    index, count = jax.process_index(), jax.process_count()
    mine = Files(by_content=count > 1)
    gathered = [tagged_json.as_json(position, mine)]
    if count > 1:
        gathered = [json.loads(text) for text in processes.gather_texts(json.dumps(gathered[0]))]
    if all(one is None for one in gathered):
        return {}
    are_equal = all(one == gathered[0] for one in gathered)
    if index == 0 or not are_equal:
        files |= {f"{_file_stem(index)}{name}": one for name, one in mine.items()}
    positions = [
        tagged_json.with_files(one, functools.partial(_reference, _file_stem(process)))
        for process, one in enumerate(gathered)
    ]
    first = {} if positions[0] is None else {POSITION: positions[0]}
    if count == 1:
        return first
    distinct = positions[:1] if are_equal else positions
    return first | {POSITIONS: {_PROCESSES: count, "positions": distinct}}


def kept_positions(extra: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Return the positions in another checkpoint's `extra`, from `with_files`, as `gather_positions` does.

    Args:
        extra: That `extra`.
        files: Where the first process puts the files of all processes.
    """
    found = Files(_file_stem(0))
    kept: dict[str, Any] = tagged_json.as_json(
        {key: extra[key] for key in (POSITION, POSITIONS) if key in extra}, found
    )
    if jax.process_index() == 0:
        files |= found
    return kept


def _file_stem(process: int) -> str:
    """Return what the names of the files begin with that a process writes for positions."""
    return f"position.process_{process}."


def _reference(stem: str, name: str) -> dict[str, str]:
    return {FILE: f"{stem}{name}"}


def with_files(extra: dict[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return the `extra` of a checkpoint with large bytes, which are read when they are needed, in place of references.

    Args:
        extra: As `train` saved it.
        read: Reads a file of that checkpoint, by its name.
    """
    found: dict[str, Any] = tagged_json.with_files(extra, lambda name: LargeBytes(load=functools.partial(read, name)))
    return found


# One iterator interface to all sources of batches: sequences, functions, iterables and stateful loaders.

_logger = logging.getLogger("jstep")


_SEQUENCE = (Sequence, BatchSequence)
_OWN_STATE, _STATE_DICT = ("get_state", "set_state"), ("state_dict", "load_state_dict")
"""The methods that return and restore a position: of an object of any kind, and of loaders such as torchdata's."""


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


class Source(NamedTuple):
    """An iterator over batches, and what is known of them.

    Attributes:
        items: The batches.
        position: Returns the current position, from `position_of`; None if the source has no position.
        begin: Returns the position before the first batch; None if `position` does.
        by_step: The sequence or function that each batch can be fetched from again, by its step; None if there is none.
        fresh: Whether each batch is in new arrays that no other code writes to.
        is_of_state: Whether batches are made with the state of the run, so that none may be made ahead.
    """

    items: Iterator[Any]
    position: Callable[[], Any] | None = None
    begin: Callable[[], Any] | None = None
    by_step: Any = None
    fresh: bool = False
    is_of_state: bool = False

    @property
    def seekable(self) -> bool:
        """Whether it can resume at any step after a restart."""
        return self.by_step is not None or self.position is not None or self.is_of_state

    def next_change(self, step: int) -> int | None:
        """The next step at which the shapes of the batches change; None if there is none, or it is not known."""
        try:
            return self.by_step.next_change(step) if isinstance(self.by_step, BatchSequence) else None
        except IndexError:  # they end before the run does
            return None


_DELETED = re.compile("(?:Array|Buffer) has been deleted")
_KEPT = (
    "jstep: the function of jstep.from_state uses arrays of an earlier state, which were donated to the step after it: "
    "their memory is reused. To keep arrays of a state, copy them: target = jax.tree.map(jnp.copy, state.params)"
)


def source_of(
    batches: Any,
    start: int,
    last_step: int,
    position: SavedPosition | None = None,
    *,
    resumable: bool = False,
    state: Callable[[], Any] = lambda: None,
) -> Source:
    """The batches from step `start`.

    Args:
        batches: What `check_batches` accepts: an object with `batches[N]`, a function of the step, an iterator with
            `get_state` and `set_state`, a loader or iterator with `state_dict` and `load_state_dict`, or any iterable.
            An object that is not a sequence but can be indexed and iterated over is indexed if it has an item for the
            first step.
        start: The first step.
        last_step: The step at which to end.
        position: The position of an earlier run; None in a fresh run.
        resumable: Whether the run saves checkpoints, from which it may be resumed later.
        state: Returns the current state of the run, for batches that are made with it.
    """
    owner = owner_of(batches)
    if isinstance(batches, StateBatches):
        make, where, begin = batches.make, None, None

        def batch(step: int) -> Any:
            try:
                return make(step, state())
            except (RuntimeError, ValueError) as error:  # JAX raises either one
                if _DELETED.search(str(error)):
                    note(error, _KEPT)
                raise

        if owner is not None:
            without = "jstep.from_state(lambda step, state: fn(step, state))"
            where, begin = _resumed(owner, position, start, last_step, without)
        elif _may_keep_something(make):
            ways_out = (
                "If it keeps something between its calls, give jstep.from_state an object with __call__, state_dict "
                "and load_state_dict; if not, a function."
            )
            name = getattr(make, "__qualname__", type(make).__name__)
            _warn_without_position(name, start, ways_out, resumable=resumable)
        return Source(map(batch, range(start, last_step)), where, begin, is_of_state=True)
    if owner is None:
        items = _by_step(batches, start, last_step)
        if items is not None:
            return Source(items, by_step=batches, fresh=isinstance(batches, BatchSequence))
        items = iter(batches)
        if not keeps_position(items):
            ways_out = (
                "Use jstep.batches, a function of the step, or a loader or iterator with get_state and set_state, or "
                "with state_dict and load_state_dict."
            )
            _warn_without_position(type(batches).__name__, start, ways_out, resumable=resumable)
            return Source(items, fresh=isinstance(items, BatchIterator))
        owner = items
    where, begin = _resumed(owner, position, start, last_step)
    # Some iterators have `__next__` but no `__iter__`.
    items = iter(owner) if hasattr(owner, "__iter__") else map(next, itertools.repeat(owner))
    since = _fetched_since(position)
    return Source(itertools.islice(items, since, None) if since else items, where, begin)


def _fetched_since(position: SavedPosition | None) -> int:
    """The number of batches that were fetched after a position was read, from `RarePosition`."""
    number = position.value.get(_AFTER, 0) if position and isinstance(position.value, Mapping) else 0
    if type(number) is not int or number < 0:
        raise ValueError(f"batches: the checkpoint's position has {_AFTER}={number!r:.50}: must be a number of batches")
    return number


def _by_step(batches: Any, start: int, last_step: int) -> Iterator[Any] | None:
    """The batches of a sequence or of a function of the step; None if they can only be iterated over."""
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
            return itertools.chain(first, _indexed(batches, start + len(first), last_step))
    is_function = not hasattr(batches, "__iter__") and callable(batches)
    return map(functools.partial(_item, batches, batches), range(start, last_step)) if is_function else None


def _item(batches: Any, fetch: Callable[[int], Any], step: int) -> Any:
    """Fetch the batch of a step. A StopIteration out of it, which would end the run in silence, is an error."""
    try:
        return fetch(step)
    except StopIteration as error:
        raise RuntimeError(
            f"batches={shown(batches)}: StopIteration was raised for step {step}, perhaps by a next() of an iterator "
            "that is exhausted; must return the batch of each step. If the data end there, raise jstep.OutOfRangeError"
        ) from error


def _may_keep_something(make: Callable[..., Any]) -> bool:
    """Whether a callable is a method of an object, or an object with `__call__` that does not decorate a function."""
    if isinstance(make, types.MethodType):
        return not isinstance(make.__self__, type)
    call = inspect.getattr_static(type(make), "__call__", None)
    return isinstance(call, types.FunctionType) and not hasattr(make, "__wrapped__")


def _warn_without_position(name: str, start: int, ways_out: str, *, resumable: bool) -> None:
    """Warn that batches do not resume where a run stopped: when it resumes, or before it can be stopped."""
    if start:
        what = (
            f"The run resumes at step {start}, but a {name} has no position to resume from: its batches start from its "
            "current position."
        )
    elif resumable:
        what = (
            f"A {name} has no position to resume from: if this run is stopped and resumed from its checkpoint, the "
            f"batches start where the {name} is then, not where the run stopped."
        )
    else:
        return
    _logger.warning("%s %s", what, ways_out)


def check_batches(batches: Any) -> None:
    """Refuse a value that cannot be a source of batches."""
    if _is_array(batches) or (isinstance(batches, tuple) and batches and all(map(_is_array, batches))):
        what = "a tuple of arrays" if isinstance(batches, tuple) else "an array"
        raise TypeError(
            f"batches is {what}, which would give one row, or one array, as each batch. For batches of rows, use "
            "jstep.batches(arrays, batch_size); to repeat the same batch, itertools.repeat(batch)."
        )
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            f"batches is a {type(batches).__name__}, which may be one batch, not a source of them. Give an object "
            "with batches[N], a function of the step, or an iterable; to repeat one batch, "
            "itertools.repeat(batch)."
        )
    if isinstance(batches, StateBatches):
        return
    if callable(batches) and not hasattr(batches, "__iter__") and not may_take(batches, 1):
        ways_out = {2: "jstep.from_state(fn)", 0: "jstep.replayed(fn), or what fn() returns"}
        found = next((f"give {way}" for count, way in ways_out.items() if can_take(batches, count)), "wrap it")
        raise TypeError(f"batches={shown(batches)}: a function must take the step alone; {found}")
    if isinstance(batches, type) or not (
        callable(batches)
        or _has(batches, *_OWN_STATE, "__next__")
        or any(hasattr(batches, n) for n in ("__getitem__", "__iter__"))
    ):
        raise TypeError(
            f"batches={shown(batches)}: must have batches[N], be a function of the step, or be iterable"
            + ("; for a step without a batch, give lambda step: ()" if batches is None else "")
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array) or (
        hasattr(value, "__dlpack__") and hasattr(value, "shape")
    )


def _resumed(
    owner: Any, kept: SavedPosition | None, start: int, last_step: int, without: str = _WITHOUT
) -> tuple[Any, Any]:
    """Set the position of an earlier run, if there is one; return `Source.position` and `Source.begin`."""
    name, where = type(owner).__name__, functools.partial(position_of, owner, without)
    if kept is None:
        if start:
            _logger.warning(
                "The run resumes at step %d, but there is no position for the %s in the checkpoint: its batches start "
                "from its current position.",
                start,
                name,
            )
        return where, None
    if start < last_step:
        if kept.error:
            raise ValueError(f"batches: the position of the {name} is not known: {kept.error}")
        if kept.warning:
            _logger.warning("%s (the %s of process %d)", kept.warning, name, jax.process_index())
        if kept.value is not None:
            value = decode_position(kept.value, name)
            try:
                _methods(owner)[1](value)  # before iter(), which is when loaders read it
            except Exception as error:
                note(
                    error,
                    f"jstep: the {name} refuses the position that the checkpoint of step {start} has for it; was it "
                    "saved by another loader, or by one with other options?",
                )
                raise
    return where, lambda: kept.value


def keeps_position(batches: Any) -> bool:
    """Whether a loader or iterator can save and restore its position.

    `state_dict` must take no arguments: some data sets require the number of examples that were read.
    """
    if _has(batches, *_OWN_STATE, "__next__"):
        return True
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__next__")
    is_stateful = is_iterable and not isinstance(batches, _SEQUENCE) and _has(batches, *_STATE_DICT)
    return is_stateful and can_take(batches.state_dict, 0)


def owner_of(batches: Any) -> Any:
    """The object that keeps the position of batches: a loader, or what makes batches with the state; None if none."""
    if isinstance(batches, StateBatches):
        return batches.make if _has(batches.make, *_OWN_STATE) or _has(batches.make, *_STATE_DICT) else None
    return batches if keeps_position(batches) else None


def position_of(owner: Any, without: str = _WITHOUT) -> Any:
    """The current position of a loader that keeps it, copied for `as_json`; None if it does not know it yet.

    Loaders may return a dict that they keep changing. There is a copy for each batch, and JSON only for a checkpoint:
    the text of a replay buffer takes much longer.

    Args:
        owner: The loader.
        without: What to pass to `train` instead if no position has to be kept, for the error.

    Raises:
        TypeError: The position holds a value of an unsupported type; names the loader, the path and the type.
    """
    position = _methods(owner)[0]()
    if position is None:
        return None
    if isinstance(position, bytes):
        return {_BYTES: bytes(position)}
    try:
        return {"value": tagged_json.copied(position)}
    except UnsupportedError as error:
        name = type(owner).__name__
        raise TypeError(
            f"batches: the state of the {name} cannot be kept with a checkpoint: state{error.path} {error.what}, and "
            f"a position may hold only {tagged_json.SUPPORTED}. Convert that value where the state is returned "
            "(state_dict or get_state) and back where it is taken (load_state_dict or set_state), in a subclass of "
            f"the {name} or a class around it; or pass {without}, which has no position to keep"
        ) from None


def set_position(owner: Any, position: Any) -> None:
    """Set a loader to a position from `position_of`."""
    _methods(owner)[1](decode_position(position, type(owner).__name__))


def _methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    get, set_to = _OWN_STATE if _has(owner, *_OWN_STATE) else _STATE_DICT
    return getattr(owner, get), getattr(owner, set_to)


def _indexed(batches: Any, start: int, last_step: int) -> Iterator[Any]:
    try:
        size = len(batches)
    except (TypeError, NotImplementedError):  # it is endless, or its length is not known
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
        yield item
