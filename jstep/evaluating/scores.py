"""Scores: a metric by name, which of two is better, and what is remembered of them."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from jstep.core.checks import as_text, one_of
from jstep.hooks.hook_state import key_of
from jstep.hooks.values import is_number, read

_logger = logging.getLogger("jstep")

MODES = ("min", "max")


def checked_metric(metric: Any, mode: Any) -> tuple[str, str]:
    """A metric's name, and whether less or more of it is better.

    Raises:
        TypeError: The name is no text.
        ValueError: It is empty, or the mode is neither `"min"` nor `"max"`.
    """
    as_text(metric, "metric", "the name of a metric that evaluate returns")
    one_of(mode, "mode", MODES)
    return metric, mode


def checked_key(key: Any) -> str | None:
    """The name that memories are kept under, or None.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty.
    """
    return None if key is None else as_text(key, "key", "the name that checkpoints keep its memory under, or None")


def score(results: Mapping[str, Any], metric: str, by: str) -> float:
    """The value of a metric.

    Raises:
        KeyError: There is none of that name; names those there are.
        TypeError: It is no number.
    """
    if metric not in results:
        raise KeyError(f"{by}: metric={metric!r}: evaluate does not return it; it returns {list(results)}")
    if not is_number(results[metric]):
        raise TypeError(f"{by}: metric={metric!r}: must be a number, evaluate returned {results[metric]!r}")
    return float(read({metric: results[metric]})[metric])


def is_better(value: float, than: float | None, mode: str, margin: float = 0.0) -> bool:
    """Whether a value is better than another by more than a margin; NaN never is, and any other is better than None."""
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - margin if mode == "min" else value > than + margin


def serialized(value: float | None) -> float | str | None:
    """A number as JSON can hold it; `deserialized` gives it back."""
    return value if value is None or math.isfinite(value) else str(value)


def deserialized(value: Any) -> float | None:
    """The number that `serialized` was given.

    Raises:
        ValueError: It is something else.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def as_count(value: Any) -> int:
    """A number of evaluations that was remembered.

    Raises:
        ValueError: It is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of evaluations")
    return value


def is_compatible_state(one: Any, value: Any, watched: Mapping[str, Any]) -> bool:
    """Whether what a checkpoint remembers was written by an object that watched the same; a log line if not.

    Args:
        one: The object whose memory it would be.
        value: What the checkpoint remembers.
        watched: What the object watches: its metric, its mode.
    """
    if not isinstance(value, Mapping) or not watched.keys() <= value.keys():
        warn_starts_fresh(one, "was written by another version of it")
        return False
    for name, here in watched.items():
        if value[name] != here:
            warn_starts_fresh(one, f"is that of {name}={value[name]!r}, and it has {name}={here!r}")
            return False
    return True


def warn_starts_fresh(one: Any, why: str) -> None:
    """The log line of an object that cannot use what a checkpoint remembers of it."""
    _logger.warning("%s starts fresh: what the checkpoint remembers of it %s", key_of(one), why)
