"""Batches of an iterable without a position, which a restart reads again up to where the run was."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jstep.core.checks import as_function, kind, shown
from jstep.queues.queues import until_end

_logger = logging.getLogger("jstep")
_COUNT = "batches"


def replayed(make: Callable[[], Iterable[Any]]) -> "ReplayedBatches":
    """Return batches for `train` that a restart reads again from their beginning, without those that were used.

    After a restart `make()` is called anew and the batches that the run has used are dropped, with one log line. This
    is exact if `make` returns the same batches each time; nothing detects it if it does not. It takes the time that
    reading those batches takes: a loader with a position, or `jstep.batches`, resumes at once.

    Args:
        make: `make()` returns an iterable of batches: a generator, or a shuffling loader with a fixed seed. Each of
            several processes reads, and drops, its own.

    Returns:
        An iterable of batches, whose iterators have `get_state` and `set_state`; each run reads it from its beginning.

    Raises:
        TypeError: `make` is not a function without arguments.
        ValueError: After a restart, there are fewer batches than the run had used.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> def make():
        ...     for n in range(100):
        ...         yield jnp.float32(n)
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> directory = tempfile.mkdtemp()
        >>> for last_step in (3, 6):  # the second run is a restart
        ...     state = jstep.TrainState.create({"w": 0.0}, optimizer)
        ...     state = jstep.train(train_step, state, jstep.replayed(make), last_step, checkpoint_dir=directory)
        >>> print(state.params["w"])
        4.03125
    """
    return ReplayedBatches(as_function(make, "make", "() -> an iterable of batches", takes=0))


class ReplayedBatches(Iterable[Any]):
    """The batches of `replayed`.

    Attributes:
        make: `make()` returns an iterable of batches.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> "ReplayedIterator":
        return ReplayedIterator(self.make)

    def __repr__(self) -> str:
        return f"<jstep.replayed({getattr(self.make, '__qualname__', type(self.make).__qualname__)})>"


class ReplayedIterator(Iterator[Any]):
    """An iterator over the batches of `replayed`.

    Args:
        make: `make()` returns an iterable of batches.
    """

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
        made = self._make()
        if not isinstance(made, Iterable):
            raise TypeError(f"replayed: make() must return an iterable of batches, got {kind(made)}")
        items, used = until_end(made), self._count
        if not used:
            return items
        began = time.perf_counter()
        dropped = sum(1 for _ in itertools.islice(items, used))
        if dropped < used:
            raise ValueError(
                f"replayed: make() returned {dropped} batches, and the run has used {used}: it must return the same "
                "batches after a restart"
            )
        _logger.info("replayed: %d batches were read again in %.1f s", used, time.perf_counter() - began)
        return items

    def get_state(self) -> dict[str, int]:
        """Return the number of batches that were used."""
        return {_COUNT: self._count}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue after so many batches."""
        if not (isinstance(state, dict) and isinstance(state.get(_COUNT), int)):
            raise ValueError(
                f"state={shown(state)}: must be a position of jstep.replayed, a dict with the number of {_COUNT!r}; it "
                "is that of another loader"
            )
        self._count, self._items = state[_COUNT], None
