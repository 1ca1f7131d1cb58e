"""Reading and comparing metric values, and the checkpointed state of metric callbacks."""

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
    """Validate the name of a metric and its mode.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, or the mode is neither `"min"` nor `"max"`.
    """
    as_text(metric, "metric", "the name of a metric that evaluate returns")
    one_of(mode, "mode", MODES)
    return metric, mode


def checked_key(key: Any) -> str | None:
    """Validate the name of a callback's state in checkpoints, or None.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty.
    """
    return None if key is None else as_text(key, "key", "the name of its state in checkpoints, or None")


def score(results: Mapping[str, Any], metric: str, by: str) -> float:
    """Return the value of a metric.

    Raises:
        KeyError: `results` has no metric of that name. The message lists its metrics.
        TypeError: The value is not a number.
    """
    if metric not in results:
        raise KeyError(f"{by}: metric={metric!r}: evaluate does not return it; it returns {list(results)}")
    if not is_number(results[metric]):
        raise TypeError(f"{by}: metric={metric!r}: must be a number, evaluate returned {results[metric]!r}")
    return float(read({metric: results[metric]})[metric])


def is_better(value: float, than: float | None, mode: str, margin: float = 0.0) -> bool:
    """Return whether a value is better than another by more than a margin; NaN never is, any other beats None."""
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - margin if mode == "min" else value > than + margin


def serialized(value: float | None) -> float | str | None:
    """Convert a number to a JSON value; the inverse of `deserialized`."""
    return value if value is None or math.isfinite(value) else str(value)


def deserialized(value: Any) -> float | None:
    """Convert a JSON value to a number; the inverse of `serialized`.

    Raises:
        ValueError: The value is something else.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def as_count(value: Any) -> int:
    """Validate a number of evaluations from a checkpoint.

    Raises:
        ValueError: The value is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of evaluations")
    return value


def is_compatible_state(one: Any, value: Any, watched: Mapping[str, Any]) -> bool:
    """Return whether a state from a checkpoint was written by an object with the same settings; log a warning if not.

    Args:
        one: The object to restore.
        value: The state in the checkpoint.
        watched: The settings of the object, such as its metric and mode.
    """
    if not isinstance(value, Mapping) or not watched.keys() <= value.keys():
        warn_starts_fresh(one, "was written by another version of it")
        return False
    for name, here in watched.items():
        if value[name] != here:
            warn_starts_fresh(one, f"is for {name}={value[name]!r}, but it has {name}={here!r}")
            return False
    return True


def warn_starts_fresh(one: Any, why: str) -> None:
    """Log that an object cannot use its state from the checkpoint."""
    _logger.warning("%s starts fresh: its state in the checkpoint %s", key_of(one), why)
