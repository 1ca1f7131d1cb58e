"""Scores: a metric by name, and which of two is better."""

import math
from collections.abc import Mapping
from typing import Any

from jstep.core.checks import as_text, one_of
from jstep.hooks.values import is_number, read

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


def kept(value: float | None) -> float | str | None:
    """A number as JSON can hold it; `found` gives it back."""
    return value if value is None or math.isfinite(value) else str(value)


def found(value: Any) -> float | None:
    """The number that `kept` was given."""
    return None if value is None else float(value)
