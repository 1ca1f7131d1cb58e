"""Validation of arguments, and formatting for messages."""

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

# Formatting of numbers, sizes and lists.

SHOWN = 20
"""The maximum number of entries that a message lists."""


def format_bytes(number: float, digits: int = 3) -> str:
    return format_scaled(number, "B", 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), digits)


def format_scaled(
    count: float,
    unit: str,
    base: int = 1000,
    prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P"),
    digits: int = 3,
) -> str:
    power = 0
    while abs(count) >= base and power + 1 < len(prefixes):
        count /= base
        power += 1
    # `.3g` would write 1010 as 1.01e+03.
    has_no_fraction = power == 0 or abs(count) >= 10 ** (digits - 1)
    text = f"{count:.0f}" if has_no_fraction else f"{count:.{digits}g}"
    return f"{text} {prefixes[power]}{unit}"


def format_count(number: Any) -> str:
    return f"{int(number):,}".replace(",", " ")


def array_type(shape: Iterable[int], dtype: object) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def truncate_path(path: str, max_length: int = 36) -> str:
    return path if len(path) <= max_length else "…" + path[1 - max_length :]


def format_list(words: Sequence[str], max_items: int = 1, separator: str = ", ") -> str:
    others = f" and {len(words) - max_items} more" if len(words) > max_items else ""
    return separator.join(words[:max_items]) + others


def format_items(title: str, items: Sequence[str], max_items: int = SHOWN) -> str:
    return f"; {title} ({len(items)}): {format_list(items, max_items)}" if items else ""


# Argument validation. Error messages have the form `name=value: must be …, got …; what to do`.


def format_value(value: object, max_length: int = 100) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def describe_type(value: object) -> str:
    """Describe a type: 'a str', 'an array of float32 and shape (3,)', 'the class float'."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array (numpy.ma), whose mask would be lost: give array.filled(value)"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, tuple) and value and hasattr(value[0], "global_step"):
        return "the pair that a step returns; unpack it: state, metrics = train_step(state, *batch)"
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return f"{article} {name}"


def as_bool(value: object, argument: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{argument}={format_value(value)}: must be True or False, got {describe_type(value)}"
        )
    return bool(value)


def _is_traced(value: object) -> bool:
    jax = sys.modules.get("jax")  # commands that read no arrays do not import it
    return jax is not None and isinstance(value, jax.core.Tracer)


def as_int(
    value: Any,
    argument: str,
    at_least: int | None = None,
    meaning: str = "",
    *,
    if_traced: str = "call this outside of compiled functions",
) -> int:
    """Convert a Python, NumPy or concrete JAX integer; `if_traced` is the advice for a tracer."""
    if _is_traced(value):
        raise TypeError(
            f"{argument} is traced: must be an integer that is known before compilation; "
            f"{if_traced}"
        )
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument}={format_value(value)}: must be an integer, got {describe_type(value)}"
        ) from None
    if at_least is not None and number < at_least:
        hint = f", {meaning}" if meaning else ""
        raise ValueError(f"{argument}={number}: must be at least {at_least}{hint}")
    return number


class Bounds(TypedDict, total=False):
    """A range; `above` and `below` exclude its ends."""

    low: float
    high: float
    above: bool
    below: bool
    finite: bool


def as_number(
    value: Any,
    argument: str,
    *,
    expected: str = "a number",
    meaning: str = "",
    **bounds: Unpack[Bounds],
) -> float:
    """Convert a real number: Python, NumPy or concrete JAX, not a bool."""
    hint = f"; {meaning}" if meaning else ""
    if _is_traced(value):
        raise TypeError(
            f"{argument} is traced: must be {expected} that is known before compilation{hint}"
        )
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | complex | type) or np.ndim(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{argument}={format_value(value)}: must be {expected}, got "
            f"{describe_type(value)}{hint}"
        ) from None
    except OverflowError:
        raise ValueError(
            f"{argument}={format_value(value)}: must be {expected} that fits in a float{hint}"
        ) from None
    if not _is_within(number, bounds):
        raise ValueError(
            f"{argument}={np.asarray(value).item()}: must be {_describe_range(bounds)}{hint}"
        )
    return number


def _is_within(number: float, bounds: Bounds) -> bool:
    if bounds.get("finite", True) and abs(number) == math.inf:
        return False
    low = bounds.get("low", -math.inf)
    high = bounds.get("high", math.inf)
    # Not `number < low`, which would accept NaN.
    fits_low = number > low if bounds.get("above", False) else number >= low
    fits_high = number < high if bounds.get("below", False) else number <= high
    return fits_low and fits_high


def _describe_range(bounds: Bounds) -> str:
    low = bounds.get("low", -math.inf)
    high = bounds.get("high", math.inf)
    conditions: list[str] = []
    if low > -math.inf:
        conditions.append(f"{'>' if bounds.get('above', False) else '≥'} {low:g}")
    if high < math.inf:
        conditions.append(f"{'<' if bounds.get('below', False) else '≤'} {high:g}")
    if bounds.get("finite", True) and len(conditions) < 2:
        conditions.append("finite")
    return " and ".join(conditions) or "a number"


def as_function(
    value: object,
    argument: str,
    form: str = "",
    *,
    optional: bool = False,
    takes: int | None = None,
) -> Any:
    if optional and value is None:
        return value
    wanted = f"must be a function {form}".rstrip()
    if optional:
        wanted += " or None"
    if not callable(value):
        raise TypeError(f"{argument}={format_value(value)}: {wanted}, got {describe_type(value)}")
    if takes is not None and not may_take(value, takes):
        raise TypeError(
            f"{argument}={format_value(value)}: {wanted}, got one that takes "
            f"{inspect.signature(value)}"
        )
    return value


def as_mapping(value: object, argument: str, contents: str) -> Mapping[Any, Any]:
    """Check a mapping; `contents`, such as `from names to numbers`, is for the error."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{argument}={format_value(value)}: must be a mapping {contents}, got "
            f"{describe_type(value)}"
        )
    return value


def as_functions(functions: Any, argument: str, form: str) -> tuple[Any, ...]:
    if callable(functions) or not isinstance(functions, Iterable):
        raise TypeError(
            f"{argument}: must be a list of functions {form}, got {describe_type(functions)}"
        )
    items = tuple(functions)
    for i, function in enumerate(items):
        if isinstance(function, type) or not callable(function):
            what = f"{argument}[{i}]={format_value(function)}: must be a function {form}"
            raise TypeError(f"{what}, got {describe_type(function)}")
    return items


def may_take(fn: Callable[..., Any], arguments: int) -> bool:
    """Like `can_take`, but True for decorated functions: a decorator may supply arguments."""
    return hasattr(fn, "__wrapped__") or can_take(fn, arguments)


def can_take(fn: Callable[..., Any], arguments: int) -> bool:
    """Whether a function accepts that many positional arguments, or has no known signature."""
    try:
        inspect.signature(fn).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in without a known signature
        return True
    return True


def as_string(value: object, argument: str, meaning: str = "") -> str:
    hint = f"; {meaning}" if meaning else ""
    if not isinstance(value, str):
        raise TypeError(
            f"{argument}={format_value(value)}: must be a string, got {describe_type(value)}{hint}"
        )
    if not value:
        raise ValueError(f"{argument}={value!r}: must not be empty{hint}")
    return value


def as_choice(value: Any, argument: str, choices: Any) -> Any:
    # Not `value in choices`: a value may be unhashable, or compare to an array.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(
            f"{argument}={format_value(value)}: must be one of {', '.join(map(repr, choices))}"
        )
    return value


def hook_name(hook: object) -> str:
    name = getattr(hook, "name", None)
    if isinstance(name, str):
        return name
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def shortest_digits(value: float) -> float:
    """Return a float with the shortest digits of its own precision: 0.9 for 0.8999999761581421."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    is_single = float(single) == value and value % 1 != 0
    return float(str(single)) if is_single else float(value)
