"""Batches from one step on, as a run sees them: `BatchSource`, and a class for each kind of them.

| class | batches | a restart continues | read ahead | a signal may interrupt the wait for a batch |
|---|---|---|---|---|
| `Indexed` | a function of the step | at the step | yes | yes |
| `Loader` | an iterator with a position | at the position that was read after a batch | yes | yes |
| `FromState` | `from_state` | at the position before a batch, after it if large | no | if small |
| `FromLoop` | `from_loop` | at the objects' states between iterations | no | no: the body used it |
| `Unseekable` | any other iterator | where the iterator is | yes | yes, but it is lost (warning) |

`loaders.open_source` chooses the class, and is the only function that checks the kind of batches.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jstep.data.positions import batches_since, fetch_again
from jstep.data.sequence import BatchSequence, next_change
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import LARGE

untrained_batches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Iterators with batches that no step was trained on, and their numbers; 0 if one only began."""


class BatchSource:
    """Batches from one step on. A run checks what can be done with them, never their kind.

    The loop, or a thread ahead of it, takes batches from `items` and calls `read_position` after
    each. All other methods are the loop's: it calls `end_fetch` when it takes the batches of a
    call, so that `position_after` can tell the position before that call from the one after it.

    Args:
        given: What the user passed.
        items: The batches.
        is_fresh: Whether each batch is in new arrays that no other code writes to.

    Attributes:
        has_position: Whether it has a position of its own, beside the step.
        is_seekable: Whether a restart continues with the batch of its step.
        may_be_opened_again: Whether opening it again fetches the same batches, as they are a
            function of the step.
        may_be_read_ahead: Whether a thread may fetch batches before their step.
        can_interrupt: Whether a signal may end the wait for a batch, or leave one untrained: it can
            be made again.
        follows_calls: Whether it needs `end_fetch`, to know its position.
        moves_between_steps: Whether hooks may change its position after a step, so that
            `begin_fetch` has to read it.
        knows_shapes: Whether `item` tells the shapes of any batch, at any time.
        has_items: Whether `item` returns any batch; it may take as long as making one.
        read_position: Returns the position after the latest batch; None if nobody needs it.
    """

    has_position = False
    is_seekable = True
    may_be_opened_again = False
    may_be_read_ahead = True
    can_interrupt = True
    follows_calls = False
    moves_between_steps = False
    knows_shapes = False
    has_items = False
    read_position: Callable[[], Any] | None = None

    def __init__(self, given: Any, items: Iterator[Any], *, is_fresh: bool = False) -> None:
        self.given = given
        self.items = items
        self.is_fresh = is_fresh

    def item(self, step: int) -> Any:
        raise NotImplementedError

    def next_change(self, step: int) -> int | None:
        """Return the next step whose batch has other shapes, if that is known."""
        return None

    # The loop takes the batches of a call.

    def begin_fetch(self) -> None:
        """Called before a batch is made, if `moves_between_steps`."""

    def end_fetch(self, steps: int, position: Any) -> None:
        """Called when the loop has the batches of a call, with the position read after them."""

    def end(self) -> None:
        """Called when there are no more batches."""

    # What a checkpoint needs.

    def position_after(self, steps: int) -> Any:
        """Return the position after so many steps; the loop may be ahead by one call's batches."""
        return None

    def is_lost_after(self, steps: int) -> bool:
        """Whether that position is not known any more."""
        return False

    def freeze(self) -> None:
        """Keep the current position: what hooks do from now on is not part of a checkpoint."""

    def set_back(self, trained: int, fetched: int, *, is_idle: bool) -> None:
        """Undo at the end, as far as possible, the fetches of batches that were not trained on.

        `is_idle`: whether no thread is still using it.
        """


class Indexed(BatchSource):
    """Batches that are functions of the step, which is their position."""

    may_be_opened_again = True

    def __init__(self, batches: Any, items: Iterator[Any]) -> None:
        is_sequence = isinstance(batches, BatchSequence)
        super().__init__(batches, items, is_fresh=is_sequence)
        self.knows_shapes = is_sequence
        self.has_items = hasattr(batches, "__getitem__")

    def item(self, step: int) -> Any:
        return self.given[step]

    def next_change(self, step: int) -> int | None:
        try:
            return next_change(self.given, step) if self.knows_shapes else None
        except IndexError:  # they end before the run does
            return None


class Loader(BatchSource):
    """The batches of an iterator or loader that can tell its position, and be set to it.

    A thread may be batches ahead of the loop, so each batch comes with the position after it, and
    the source keeps those before and after the latest call. In a run that saves nothing, only the
    one before the first batch is known.

    Args:
        start: The position before the first batch.
        read_position: Reads the position of the loader; None if it is never saved.
        set_position: Sets it.
    """

    has_position = True
    follows_calls = True

    def __init__(
        self,
        given: Any,
        items: Iterator[Any],
        *,
        start: Any,
        read_position: Callable[[], Any] | None,
        set_position: Callable[[Any], None],
        is_fresh: bool,
    ) -> None:
        super().__init__(given, items, is_fresh=is_fresh)
        self.read_position = read_position
        self._set_position = set_position
        # The loop has taken `_taken` batches: the position after them, and the one before the
        # latest call.
        self._taken = 0
        self._newest_position = start
        self._previous_position: Any = None

    def end_fetch(self, steps: int, position: Any) -> None:
        self._taken += steps
        self._previous_position = self._newest_position
        self._newest_position = position

    def position_after(self, steps: int) -> Any:
        return self._newest_position if steps >= self._taken else self._previous_position

    def set_back(self, trained: int, fetched: int, *, is_idle: bool) -> None:
        if not hasattr(self.given, "__next__"):
            return  # the next run begins another pass over it
        position = self.position_after(trained) if is_idle else None
        count = batches_since(position)
        # If none was fetched, a signal ended the wait for `count` batches to be fetched again, and
        # that wait must not be repeated here.
        was_interrupted = count > 0 and fetched == 0
        if position is not None and not was_interrupted:
            with contextlib.suppress(Exception):  # what cannot be set is warned about
                self._set_position(position)
                fetch_again(self.given, count)
                return
        note_untrained(self.given, fetched - trained)


class FromState(BatchSource):
    """The batches of `from_state`, made one by one with the state, after the previous step's hooks.

    Hooks may change what they are made of, such as the level of a game, so the position is read at
    the last moment: before each batch. A batch that no step was trained on is then made again. A
    large position, such as a replay buffer, is not copied for each batch, but read once a
    checkpoint is due; then a batch must be trained on.

    Args:
        read: Reads the position; None if there is none.
        start: The position before the first batch.
        is_saved: Whether the position is ever saved.
    """

    may_be_read_ahead = False

    def __init__(
        self,
        given: Any,
        items: Iterator[Any],
        *,
        read: Callable[[], Any] | None = None,
        start: Any = None,
        is_saved: bool = False,
    ) -> None:
        super().__init__(given, items)
        self.has_position = read is not None
        self.follows_calls = self.has_position and is_saved
        self.moves_between_steps = self.follows_calls
        self._read = read if read is not None else _no_position
        self._taken = 0
        # The position before the latest batch or, if `_is_frozen`, the one that a checkpoint gets.
        # None if it is large and was not read.
        self._previous_position = start
        self._is_large = _is_large(start)
        self._is_frozen = True  # nothing can have changed since `_previous_position` was read

    def begin_fetch(self) -> None:
        if not self._is_large:
            self._previous_position = self._read()
            self._is_large = _is_large(self._previous_position)
        self._is_frozen = True
        self.can_interrupt = not self._is_large

    def end_fetch(self, steps: int, position: Any) -> None:
        self._taken += steps
        self._is_frozen = False
        self.can_interrupt = True
        if self._is_large:
            self._previous_position = None  # from here on, only the position after the batch exists

    def end(self) -> None:
        # `begin_fetch` has just read a small position. A large one is read once it is needed.
        self._is_frozen = not self._is_large

    def position_after(self, steps: int) -> Any:
        if steps < self._taken or self._is_frozen:
            return self._previous_position
        return self._read()

    def is_lost_after(self, steps: int) -> bool:
        is_before = steps < self._taken or self._is_frozen
        return self._is_large and self._previous_position is None and is_before

    def freeze(self) -> None:
        if not self._is_frozen:
            self._previous_position = self._read()
        self._is_frozen = True


class FromLoop(BatchSource):
    """The batches that the body of a loop makes, out of objects that a checkpoint keeps.

    The objects change only within an iteration. Their states are read only when a checkpoint is
    saved, as a replay buffer may be large. So there is no position before a batch.
    """

    may_be_read_ahead = False
    can_interrupt = False

    def __init__(self, given: Any, items: Iterator[Any], read: Callable[[], Any] | None) -> None:
        super().__init__(given, items)
        self.has_position = read is not None
        self._read = read if read is not None else _no_position

    def position_after(self, steps: int) -> Any:
        return self._read()

    def freeze(self) -> None:
        position = self._read()
        # From now on the objects are no longer read.
        self._read = lambda: position


class Unseekable(BatchSource):
    """An iterator without a position: a restart continues where it is."""

    is_seekable = False

    def set_back(self, trained: int, fetched: int, *, is_idle: bool) -> None:
        if hasattr(self.given, "__next__"):
            note_untrained(self.given, fetched - trained)


def _no_position() -> None:
    return None


def _is_large(position: Any) -> bool:
    return tagged_json.encoded_size(position) > LARGE


def note_untrained(batches: Any, count: int) -> None:
    """Let the next run over this iterator warn of the batches that it has lost."""
    with contextlib.suppress(TypeError):  # an object without weak references or a hash
        untrained_batches[batches] = count
