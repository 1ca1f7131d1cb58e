"""Validation of the arguments of `Saver`."""

import json
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jstep.core.checks import as_function, as_int, as_number, as_text, kind, shown
from jstep.stores.objects import absolute, is_url, location

_LONGEST = 180  # file names have at most 255 bytes; the step and temporary suffixes take some of them
_DEEPEST = 100  # levels of nesting; Python parses JSON recursively, and the stack may be deep already


def directory(directory: Any) -> str:
    """Return an absolute path, or the URL of an object store."""
    path = absolute(location(directory, "directory"))
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"directory={path!r}: must be encodable as UTF-8, or tensorstore cannot write there; give another one"
        ) from None
    if "\\" in path and os.sep != "\\":
        raise ValueError(
            f"directory={path!r}: must not contain a backslash, which tensorstore reads as a slash; give another one"
        )
    if not is_url(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"directory={path!r}: must be a directory, but there is a file of that name")
    return path


def prefix(prefix: Any, name: str = "prefix") -> str:
    """Return a valid prefix of checkpoint names."""
    hint = "the beginning of a file name, such as 'model'"
    text = as_text(prefix, name, hint)
    if text in (".", "..") or any(c in text for c in ("/", "\\", os.sep, "\0")):
        raise ValueError(f"{name}={text!r}: must be {hint}; pass directories as `directory`")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name}={text!r}: must be encodable as UTF-8") from None
    if length > _LONGEST:
        raise ValueError(
            f"{name}={shown(text)}: must be at most {_LONGEST} bytes, got {length}; file systems refuse it"
        )
    return text


def step(step: Any, name: str = "step") -> int:
    """Return a step as an int ≥ 0; accepts scalars of any integer type."""
    try:
        array = np.asarray(step)
        if array.ndim or array.dtype == bool:
            raise TypeError
        number = operator.index(step if isinstance(step, int) else array.item())
    except (TypeError, ValueError):
        raise TypeError(f"{name}={shown(step)}: must be an integer scalar, got {kind(step)}") from None
    if number < 0:
        raise ValueError(f"{name}={number}: must be ≥ 0")
    return number


def max_to_keep(max_to_keep: Any) -> int | None:
    """Return an int > 0, or None to keep all checkpoints."""
    if max_to_keep is None:
        return None
    return as_int(max_to_keep, "max_to_keep", 0, "and None or 0 keeps all") or None


def hours(hours: Any) -> float | None:
    """Return a finite float > 0, or None."""
    if hours is None:
        return None
    return as_number(hours, "keep_checkpoint_every_n_hours", low=0.0, above=True, meaning="None keeps none permanently")


def clock(clock: Any) -> Callable[[], float] | None:
    """Return a function, or None."""
    return as_function(clock, "clock", "() -> seconds, such as time.time", optional=True)


def json_copy(value: Any, name: str) -> Any:
    """Return the value as JSON decodes it: tuples become lists.

    Raises:
        TypeError: The value is not a JSON value (the message says where), or contains itself.
    """
    _check_json(value, name, ())
    return json.loads(json.dumps(value))


def _check_json(value: Any, name: str, above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise TypeError(f"{name}: contains itself, which JSON cannot represent; leave that part out")
    if len(above) > _DEEPEST:
        raise TypeError(f"{name[:100]}…: is nested deeper than {_DEEPEST} levels; flatten it")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name}: the key {shown(key)} is {type(key).__name__}; JSON keys must be strings")
            _check_json(item, f"{name}[{key!r}]", (*above, id(value)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{name}[{i}]", (*above, id(value)))
    elif not isinstance(value, str | int | float | None):
        hint = "; convert it with .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(
            f"{name}: {type(value).__name__} is not a JSON value{hint}. extra takes dicts with string keys, lists, "
            "strings, numbers, booleans and None; put arrays into the state"
        )
