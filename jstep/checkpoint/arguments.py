"""What a Saver is given: checked, with errors that name the argument."""

import json
import math
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jstep.stores import absolute, is_url, location


def directory(directory: Any) -> str:
    """An absolute path, or the URL of an object store."""
    path = absolute(location(directory, "directory"))
    if not is_url(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"directory={path!r}: there is a file of that name")
    return path


def prefix(prefix: Any) -> str:
    """The beginning of a file name."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r}: must be a string")
    if not prefix or prefix in (".", "..") or any(c in prefix for c in ("/", os.sep, "\0")):
        raise ValueError(f"prefix={prefix!r}: must be the beginning of a file name; directories go into `directory`")
    return prefix


def step(step: Any, name: str = "step") -> int:
    """An int ≥ 0."""
    try:
        number = operator.index(step if isinstance(step, int) else np.asarray(step).item())
    except (TypeError, ValueError):
        raise TypeError(f"{name}={step!r}: must be an integer, and a scalar") from None
    if isinstance(step, bool):
        raise TypeError(f"{name}={step!r}: must be an integer")
    if number < 0:
        raise ValueError(f"{name}={number}: must be ≥ 0")
    return number


def max_to_keep(max_to_keep: Any) -> int | None:
    """An int > 0, or None for all."""
    if max_to_keep is None:
        return None
    if isinstance(max_to_keep, bool) or not isinstance(max_to_keep, int | np.integer):
        raise TypeError(f"max_to_keep={max_to_keep!r}: must be an integer, or None to keep all")
    if max_to_keep < 0:
        raise ValueError(f"max_to_keep={max_to_keep}: must be ≥ 0, and None or 0 keeps all")
    return int(max_to_keep) or None


def hours(hours: Any) -> float | None:
    """A finite float > 0, or None."""
    if hours is None:
        return None
    if isinstance(hours, bool) or not isinstance(hours, int | float | np.number):
        raise TypeError(f"keep_checkpoint_every_n_hours={hours!r}: must be a number of hours, or None")
    if not 0 < float(hours) < math.inf:
        raise ValueError(f"keep_checkpoint_every_n_hours={hours}: must be > 0 and finite, or None")
    return float(hours)


def clock(clock: Any) -> Callable[[], float] | None:
    """A function, or None."""
    if clock is not None and not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.time")
    return clock


def json_copy(value: Any, name: str) -> Any:
    """The value as it will come back from JSON: tuples become lists.

    Raises:
        TypeError: It is no JSON value (names where).
    """
    _check_json(value, name)
    return json.loads(json.dumps(value))


def _check_json(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name}: the key {key!r} is {type(key).__name__}; keys of JSON are strings")
            _check_json(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{name}[{i}]")
    elif not isinstance(value, str | int | float | None):
        hint = "; convert it with .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(
            f"{name}: {type(value).__name__} is no JSON value{hint}. extra takes dicts with string keys, lists, "
            "strings, numbers, booleans and None; arrays belong into the state"
        )
