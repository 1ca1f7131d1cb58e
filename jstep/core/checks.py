"""Checks of arguments that several modules take."""

import operator
from typing import Any


def as_int(value: Any, argument: str, at_least: int | None = None, meaning: str = "") -> int:
    """A whole number as an int: of Python, NumPy, or a concrete JAX scalar.

    Raises:
        TypeError: It is none, or a bool; names the argument.
        ValueError: It is below `at_least`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}={value!r}: must be an integer, got {type(value).__name__}") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{argument}={number}: must be at least {at_least}{', ' if meaning else ''}{meaning}")
    return number
