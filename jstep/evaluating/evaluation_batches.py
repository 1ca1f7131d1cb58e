"""Iteration over all batches of an evaluation, from the start each time."""

import copy
import itertools
import logging
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from jstep.core.checks import shown
from jstep.data import Batches, BatchSequence
from jstep.queues.errors import until_end

_logger = logging.getLogger("jstep")

MOST = 1_000_000
"""A source without a length that gives more batches than this counts as endless."""

_ENDLESS = (
    "an evaluation reads all batches; give batches that end, such as jstep.batches(…, num_epochs=1, shuffle=False, "
    "drop_remainder=False)"
)


class EvaluationBatches:
    """The batches of an evaluation, which can be iterated over repeatedly.

    Args:
        batches: Any finite iterable or sequence of batches. An iterator with `get_state` and `set_state` is reset
            before each pass; any other iterator can be used only once.

    Raises:
        TypeError: `batches` is a single batch, or not a source of batches.
        ValueError: `batches` has no end.
    """

    def __init__(self, batches: Any) -> None:
        _check(batches)
        _warn_of_dropped_rows(batches)
        self._batches = batches
        self._is_iterator = hasattr(batches, "__next__")
        self._has_state = self._is_iterator and hasattr(batches, "get_state") and hasattr(batches, "set_state")
        self._beginning = copy.deepcopy(batches.get_state()) if self._has_state else None
        self._used = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all batches from the first.

        Raises:
            ValueError: An iterator is exhausted, there are no batches, or they have no end.
        """
        if self._used and self._has_state:
            self._batches.set_state(copy.deepcopy(self._beginning))
        elif self._used and self._is_iterator:
            raise ValueError(
                f"batches={shown(self._batches)}: an iterator, which the first evaluation has exhausted; give batches "
                "that can be iterated over again, such as a list or jstep.batches"
            )
        self._used = True
        number = 0
        for number, batch in enumerate(until_end(self._items()), 1):
            if number > MOST:
                raise ValueError(f"batches: no end after {MOST} of them; {_ENDLESS}")
            yield batch
        if number == 0:
            raise ValueError(f"batches={shown(self._batches)}: empty, there is nothing to evaluate")

    def _items(self) -> Iterator[Any]:
        if self._is_iterator and not hasattr(self._batches, "__iter__"):  # some have __next__ alone
            return map(next, itertools.repeat(self._batches))
        return iter(self._batches)  # also by __getitem__, until IndexError


def _check(batches: Any) -> None:
    """Refuse a value that cannot be a source of batches, or that has no end."""
    if isinstance(batches, Mapping | str | bytes):
        raise TypeError(
            f"batches is a {type(batches).__name__}, which may be one batch, not a source of them; give [batch]"
        )
    is_iterable = any(hasattr(batches, method) for method in ("__iter__", "__next__", "__getitem__"))
    if isinstance(batches, type) or not (is_iterable or callable(batches)):
        raise TypeError(f"batches={shown(batches)}: must be an iterable or a sequence of batches")
    if not is_iterable:
        raise ValueError(f"batches={shown(batches)}: a function of the step has no end; {_ENDLESS}")
    whole = _whole(batches)
    has_length_if_finite = isinstance(whole, itertools.count | itertools.cycle | itertools.repeat | BatchSequence)
    if has_length_if_finite and operator.length_hint(whole, -1) < 0:
        raise ValueError(f"batches={shown(batches)}: has no end; {_ENDLESS}")


def _whole(batches: Any) -> Any:
    """Return the `jstep.batches`, or the slice of it, behind an iterator; return anything else unchanged."""
    return getattr(batches, "_batches", batches)


def _warn_of_dropped_rows(batches: Any) -> None:
    """Warn that rows are dropped, if whole epochs are evaluated; a slice of other steps omits rows on purpose."""
    whole = _whole(batches)
    if not isinstance(whole, Batches):
        return
    size = whole.batch_size
    if not isinstance(size, int) or len(whole) % whole.steps_per_epoch:
        return
    dropped = whole.num_rows - whole.steps_per_epoch * size
    if dropped > 0:
        _logger.warning(
            "evaluator: batches=%s: %d of %d rows are not evaluated: they do not fill a batch, and drop_remainder=True "
            "drops them; give jstep.batches(…, drop_remainder=False)",
            whole,
            dropped,
            whole.num_rows,
        )
