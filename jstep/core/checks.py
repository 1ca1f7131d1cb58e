"""Checks of arguments, and the words of errors: numbers, sizes and lists for people."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack

import ml_dtypes
import numpy as np

# Text for people: numbers, sizes, lists.

SHOWN = 20
"""Entries of a list in a message."""


def size(number: float, digits: int = 3) -> str:
    """Format a number of bytes."""
    return scaled(number, "B", 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), digits)


def scaled(
    count: float,
    unit: str,
    base: int = 1000,
    prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P"),
    digits: int = 3,
) -> str:
    """Format a number with a prefix of its unit: 1.5 GFLOP."""
    power = 0
    while abs(count) >= base and power + 1 < len(prefixes):
        count, power = count / base, power + 1
    text = f"{count:.0f}" if power == 0 or abs(count) >= 10 ** (digits - 1) else f"{count:.{digits}g}"
    return f"{text} {prefixes[power]}{unit}"


def count(number: Any) -> str:
    """Format an integer, with spaces between thousands."""
    return f"{int(number):,}".replace(",", " ")


def array_type(shape: Iterable[int], dtype: Any) -> str:
    """Format the shape and dtype of an array: `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def cut(text: str, longest: int) -> str:
    """Cut off the end of a long text."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def cut_path(path: str, longest: int = 36) -> str:
    """Cut off the beginning of a long path: its end tells leaves apart."""
    return path if len(path) <= longest else "…" + path[1 - longest :]


def listed(words: Sequence[str], most: int = 1, between: str = ", ") -> str:
    """Return the first words, and the number of the others."""
    others = f" and {len(words) - most} more" if len(words) > most else ""
    return between.join(words[:most]) + others


def listing(title: str, items: Sequence[str], most: int = SHOWN) -> str:
    """Format a part of a message: title, number of items, first items; the empty string if there are no items."""
    if not items:
        return ""
    more = f", … and {len(items) - most} more" if len(items) > most else ""
    return f"; {title} ({len(items)}): " + ", ".join(items[:most]) + more


# The user's exceptions: notes on them, and context managers that let them pass as they are.

_P = ParamSpec("_P")
_T = TypeVar("_T")


def scoped(make: Callable[_P, Iterator[_T]]) -> "Callable[_P, contextlib.AbstractContextManager[_T]]":
    """Make a context manager of a generator that yields once, like `contextlib.contextmanager`.

    An exception that leaves the context is not thrown into the generator, which is closed: only its `finally` runs.
    `contextlib` sets `__traceback__` of the exception, so that one of a class that refuses attributes, such as a frozen
    dataclass, would be replaced by another error. Use it around the user's code.
    """

    @functools.wraps(make)
    def scope(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return _Scope(make(*args, **kwargs))

    return scope


class _Scope(contextlib.AbstractContextManager[_T], Generic[_T]):
    __slots__ = ("_body",)

    def __init__(self, body: Any) -> None:
        self._body: Generator[_T] = body

    def __enter__(self) -> _T:
        return next(self._body)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            next(self._body, None)
        else:
            self._body.close()


@scoped
def setting(variable: contextvars.ContextVar[Any], value: _T) -> Iterator[_T]:
    """Context manager that sets a context variable."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, if its class allows it."""
    with contextlib.suppress(Exception):
        error.add_note(text)


_AXIS = re.compile("unbound axis name: (.+?)(?:\\.|$)")
_KEEPS_TYPES = re.compile("carry input and carry output must have equal types|branches must have equal output types")


def explain_jax(error: BaseException) -> None:
    """Add a note to an error of JAX in a user's function if its message does not show the way out."""
    text = str(error)
    if isinstance(error, NameError) and (found := _AXIS.search(text)):
        way_out = _UNBOUND_AXIS.format(found[1])
    elif isinstance(error, TypeError) and _KEEPS_TYPES.search(text):
        way_out = _OF_ONE_TYPE
    elif type(error).__name__ == "TraceContextError" and type(error).__module__.startswith("flax"):
        way_out = _SHARED_VARIABLES
    else:
        return
    if way_out not in getattr(error, "__notes__", ()):
        note(error, way_out)


_UNBOUND_AXIS = (
    "A model written for pmap names its axis {0!r}. A step of jstep is one program over the whole batch, also on a "
    "mesh: leave the name out (BatchNorm without axis_name, jnp.mean for lax.pmean), or bind it with "
    "jax.vmap(fn, axis_name={0!r}) over an axis of one element: x[None]."
)
_OF_ONE_TYPE = (
    "A carry keeps its dtypes from step to step, and so does what branches return. Create states with "
    "TrainState.create, whose arrays are not weakly typed, and other initial values as arrays of their final dtype "
    "(jnp.float32(0) for 0); or cast what comes out with .astype."
)
_SHARED_VARIABLES = (
    "jstep: a Flax NNX model that the loss makes must have variables of its own, which copy=True gives it: "
    "net = nnx.merge(graphdef, params, rest, copy=True). Otherwise they are those of the arguments, which belong to "
    "another trace. A model from outside the loss cannot be changed in it at all: split it, and merge it in the loss"
)


# Ranges of the numbers in NumPy arrays, without importing JAX.


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype, of NumPy or of ml_dtypes, has floating-point numbers, real or complex."""
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of the numbers in an array; for complex arrays, of their magnitudes.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        low: The lowest finite number; None if no number is finite.
        high: The highest finite number; None if no number is finite.
        nans: Number of NaNs.
        infinities: Number of infinities.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int = 0
    infinities: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return not self.nans + self.infinities

    def __str__(self) -> str:
        kind = array_type(self.shape, self.dtype)
        if self.low is None:
            finite = "empty" if self.is_finite else ""
        elif self.low == self.high:
            finite = f"all {self.low:.6g}" if self.shape else f"{self.low:.6g}"
        else:
            finite = f"from {self.low:.6g} to {self.high:.6g}"
        bad = [f"{self.nans} NaN"] * bool(self.nans) + [f"{self.infinities} infinite"] * bool(self.infinities)
        return f"{kind} {', '.join([*([finite] if finite else []), *bad])}"


def range_of(array: np.ndarray[Any, Any]) -> Range:
    """Return the range of the numbers in an array."""
    host = array
    if np.iscomplexobj(host):
        host = np.where(np.isfinite(host.real) & np.isfinite(host.imag), np.abs(host), host.real + host.imag)
    host = host.astype(np.float64) if is_inexact(host.dtype) else host
    finite = host[np.isfinite(host)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    nans = int(np.isnan(host).sum())
    return Range(str(array.dtype), array.shape, low, high, nans, host.size - finite.size - nans)


def first_beyond(integers: Any, dtype: np.dtype[Any]) -> int | None:
    """Return the first integer of an array, or a Python integer, that a dtype cannot hold; None if it holds all."""
    limits = _limits(dtype)
    if isinstance(integers, int):
        return None if limits.min <= integers <= limits.max else int(integers)
    if not integers.size or (integers.max() <= limits.max and integers.min() >= limits.min):
        return None
    array = np.asarray(integers)
    return int(array[(array < limits.min) | (array > limits.max)][0])


_limits = functools.cache(np.iinfo)


# Argument validation. Error messages have the form `name=value: must be …, got …; what to do`.


def shown(value: Any, longest: int = 100) -> str:
    """Return the repr of a value for an error message: truncated if long; never raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def kind(value: Any) -> str:
    """Describe the type of a value: 'a str', 'an array of float32 and shape (3,)', 'the class float'."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def as_bool(value: Any, argument: str) -> bool:
    """Convert a Python or NumPy bool to a bool; other truthy or falsy values are rejected.

    Args:
        value: The user's value.
        argument: The name of the argument, for the error.

    Raises:
        TypeError: The value is not a bool, such as the string "no" from a configuration file.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{argument}={shown(value)}: must be True or False, got {kind(value)}")
    return bool(value)


def as_int(value: Any, argument: str, at_least: int | None = None, meaning: str = "") -> int:
    """Convert an integer (Python, NumPy, or a concrete JAX scalar) to an int.

    Args:
        value: The user's value.
        argument: The name of the argument, for the error.
        at_least: The smallest valid value.
        meaning: What the number counts, or what to do, for the error.

    Raises:
        TypeError: The value is not an integer, or is a bool; names the argument.
        ValueError: The value is below `at_least`.
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


class Bounds(TypedDict, total=False):
    """The range of a number, as keyword arguments.

    Attributes:
        low: The smallest valid value.
        high: The largest valid value.
        above: Whether `low` itself is rejected.
        below: Whether `high` itself is rejected.
        finite: Whether infinities are rejected, as by default; NaN always is.
    """

    low: float
    high: float
    above: bool
    below: bool
    finite: bool


def as_number(
    value: Any, argument: str, *, expected: str = "a number", meaning: str = "", **bounds: Unpack[Bounds]
) -> float:
    """Convert a real number (Python, NumPy, or a concrete JAX scalar) to a float.

    For arguments that may be traced see `jstep.core.placement.as_scalar`.

    Args:
        value: The user's value.
        argument: The name of the argument, for the error.
        expected: What the value must be, for the error.
        meaning: What to do, for the error.
        **bounds: The valid range.

    Raises:
        TypeError: The value is not a real number (a bool is not one); names the argument.
        ValueError: The value is out of range.
    """
    hint = f"; {meaning}" if meaning else ""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | complex | type) or np.ndim(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{argument}={shown(value)}: must be {expected}, got {kind(value)}{hint}") from None
    except OverflowError:
        raise ValueError(f"{argument}={shown(value)}: must be {expected} that fits in a float{hint}") from None
    problem = out_of_range(number, **bounds)
    if problem:
        raise ValueError(f"{argument}={np.asarray(value).item()}: {problem}{hint}")
    return number


def out_of_range(
    number: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    below: bool = False,
    finite: bool = True,
) -> str:
    """Return what a number must be, "must be ≥ 0 and finite", if it is not; an empty string if it is. See `Bounds`."""
    fits = (number > low if above else number >= low) and (number < high if below else number <= high)
    if fits and not (finite and abs(number) == math.inf):
        return ""
    wanted = [f"{'>' if above else '≥'} {low:g}"] * (low > -math.inf)
    wanted += [f"{'<' if below else '≤'} {high:g}"] * (high < math.inf)
    wanted += ["finite"] * (finite and len(wanted) < 2)
    return f"must be {' and '.join(wanted) or 'a number'}"


def as_function(value: Any, argument: str, form: str = "", *, optional: bool = False, takes: int | None = None) -> Any:
    """Return a function or any other callable; None is also accepted if `optional`.

    Args:
        value: The user's value.
        argument: The name of the argument, for the error.
        form: The expected signature, such as `(params, *args) -> loss`, for the error.
        optional: Whether None is accepted.
        takes: The number of arguments that it will be called with; None to leave that to the call.

    Raises:
        TypeError: The value is not callable, or not with so many arguments.
    """
    if optional and value is None:
        return value
    wanted = f"must be a function{' ' if form else ''}{form}{' or None' if optional else ''}"
    if not callable(value):
        raise TypeError(f"{argument}={shown(value)}: {wanted}, got {kind(value)}")
    if takes is not None and not may_take(value, takes):
        raise TypeError(f"{argument}={shown(value)}: {wanted}, got one that takes {inspect.signature(value)}")
    return value


def may_take(fn: Callable[..., Any], arguments: int) -> bool:
    """Like `can_take`; true for decorated functions: a decorator may supply arguments, and hides its own signature."""
    return hasattr(fn, "__wrapped__") or can_take(fn, arguments)


def can_take(fn: Callable[..., Any], arguments: int) -> bool:
    """Return whether a function can be called with so many positional arguments; true if its signature is not known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in without one
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def as_text(value: Any, argument: str, meaning: str = "") -> str:
    """Return a nonempty string.

    Raises:
        TypeError: The value is not a string.
        ValueError: The string is empty.
    """
    hint = f"; {meaning}" if meaning else ""
    if not isinstance(value, str):
        raise TypeError(f"{argument}={shown(value)}: must be a string, got {kind(value)}{hint}")
    if not value:
        raise ValueError(f"{argument}={value!r}: must not be empty{hint}")
    return value


def one_of(value: Any, argument: str, choices: Any) -> Any:
    """Return the value, which must be one of `choices`.

    Raises:
        ValueError: The value is not one of them; lists them.
    """
    # Not `value in choices`: a value may be unhashable, or compare to an array.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument}={shown(value)}: must be one of {', '.join(map(repr, choices))}")
    return value


# Public names of packages: `__module__` of exported objects.


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of the functions and classes that a package exports to their public location.

    This is `jstep` for names exported at the root, and the package for the rest. Errors, reprs and documentation then
    show the public name.

    Args:
        namespace: The `globals()` of the package, with `__all__`.
    """
    package = namespace["__name__"]
    root = sys.modules[package.partition(".")[0]]
    for name in namespace["__all__"]:
        value = namespace.get(name)
        if isinstance(value, type | types.FunctionType) and value.__module__.startswith("jstep"):
            value.__module__ = root.__name__ if name in root.__all__ else package
