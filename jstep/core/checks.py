"""Checks of arguments, in one dialect: `name=value: must be …, got …; what to do`."""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def shown(value: Any, longest: int = 100) -> str:
    """The repr of a value as error messages show it: cut where it is long, and never an error itself."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def kind(value: Any) -> str:
    """What a value is, in two words: 'a str', 'an array of shape (3,)', 'the class float'."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def as_bool(value: Any, argument: str) -> bool:
    """True or False, of Python or NumPy, and nothing that merely counts as true.

    Args:
        value: What the user gave.
        argument: Its name, for the error.

    Raises:
        TypeError: It is no bool, such as the text "no" from a configuration file.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{argument}={shown(value)}: must be True or False, got {kind(value)}")
    return bool(value)


def as_int(value: Any, argument: str, at_least: int | None = None, meaning: str = "") -> int:
    """A whole number as an int: of Python, NumPy, or a concrete JAX scalar.

    Args:
        value: What the user gave.
        argument: Its name, for the error.
        at_least: The least that it may be.
        meaning: What it counts or what to do, for the error.

    Raises:
        TypeError: It is none, or a bool; names the argument.
        ValueError: It is below `at_least`.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}={shown(value)}: must be an integer, got {type(value).__name__}") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{argument}={number}: must be at least {at_least}{', ' if meaning else ''}{meaning}")
    return number


def as_number(
    value: Any,
    argument: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    below: bool = False,
    finite: bool = True,
    meaning: str = "",
) -> float:
    """A real number as a float: of Python, NumPy, or a concrete JAX scalar.

    Args:
        value: What the user gave.
        argument: Its name, for the error.
        low: The smallest value.
        high: The largest value.
        above: Whether `low` itself is refused.
        below: Whether `high` itself is refused.
        finite: Whether infinities are refused; NaN always is.
        meaning: What to do, for the error.

    Raises:
        TypeError: It is no real number (a bool is none); names the argument.
        ValueError: It is out of range.
    """
    hint = f"; {meaning}" if meaning else ""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | complex | type) or np.ndim(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{argument}={shown(value)}: must be a number, got {kind(value)}{hint}") from None
    except OverflowError:
        raise ValueError(f"{argument}={shown(value)}: must be a number that a float holds{hint}") from None
    fits = (number > low if above else number >= low) and (number < high if below else number <= high)
    if not fits or (finite and math.isinf(number)):
        wanted = ["finite"] * (finite and math.isinf(number))
        wanted += [f"{'>' if above else '≥'} {low:g}"] * (low > -math.inf)
        wanted += [f"{'<' if below else '≤'} {high:g}"] * (high < math.inf)
        raise ValueError(f"{argument}={number}: must be {' and '.join(wanted) or 'a number'}{hint}")
    return number


def as_function(value: Any, argument: str, form: str = "", *, optional: bool = False) -> Any:
    """A function, or anything else that can be called; None too where it is optional.

    Args:
        value: What the user gave.
        argument: Its name, for the error.
        form: How it is called, such as `(params, *args) -> loss`, for the error.
        optional: Whether None may stand in its place.

    Raises:
        TypeError: It cannot be called.
    """
    if (optional and value is None) or callable(value):
        return value
    raise TypeError(
        f"{argument}={shown(value)}: must be a function{' ' if form else ''}{form}"
        f"{' or None' if optional else ''}, got {kind(value)}"
    )


def as_text(value: Any, argument: str, meaning: str = "") -> str:
    """A text that is not empty.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    hint = f"; {meaning}" if meaning else ""
    if not isinstance(value, str):
        raise TypeError(f"{argument}={shown(value)}: must be a text, got {kind(value)}{hint}")
    if not value:
        raise ValueError(f"{argument}={value!r}: must not be empty{hint}")
    return value


def one_of(value: Any, argument: str, choices: Any, spelled: Callable[[Any], str] = repr) -> Any:
    """The value, which must be one of a few.

    Raises:
        ValueError: It is none of them; names them.
    """
    # Compared one by one: what cannot be hashed, or answers == with an array, is simply none of them.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument}={shown(value)}: must be one of {', '.join(map(spelled, choices))}")
    return value
