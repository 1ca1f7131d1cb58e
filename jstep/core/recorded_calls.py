"""Recorded calls: the `repr` of a result is the call that one would type to create it."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import jax
import numpy as np

from jstep.core.checks import array_type, format_value, truncate
from jstep.core.tracebacks import shortens_tracebacks

MAX_TEXT_LENGTH = 200
"""The maximum length of an argument in a `repr`; optimizers and schedules are never truncated."""

_WITH_ADDRESS: Any = object.__repr__

_P = ParamSpec("_P")
_T = TypeVar("_T")


class RecordedCall:
    """A recorded call; its `repr`, formatted on demand, omits the names of the first `positional` arguments."""

    def __init__(
        self, function: Callable[..., Any], positional: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.function, self.positional, self.args, self.kwargs = function, positional, args, kwargs

    def arguments(self) -> dict[str, Any]:
        signature = inspect.signature(self.function)
        bound = signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_keywords = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments |= value if is_keywords else {name: value}
        return arguments

    def __deepcopy__(self, memo: object) -> "RecordedCall":
        return self  # immutable; an argument may be something that cannot be copied

    def __repr__(self) -> str:
        signature = inspect.signature(self.function)
        words: list[str] = []
        plain = True
        for i, (name, value) in enumerate(signature.bind(*self.args, **self.kwargs).arguments.items()):
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                words += map(as_typed, value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                words += [f"{key}={as_typed(item)}" for key, item in value.items()]
            else:
                # After an omitted argument, a nameless one would take its position.
                plain = plain and i < self.positional and list(signature.parameters)[i] == name
                words.append(as_typed(value) if plain else f"{name}={as_typed(value)}")
        return f"{self.function.__name__}({', '.join(words)})"


def record_calls(
    attach: Callable[[_T, RecordedCall], _T],
    positional: int = 0,
    refused: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], TypeError], NoReturn] | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator that attaches calls to results; `refused` turns a TypeError into a better one."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @shortens_tracebacks
        @functools.wraps(function)
        def make(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                result = function(*args, **kwargs)
            except TypeError as error:
                if refused is None:
                    raise
                refused(function, args, kwargs, error)
            return attach(result, RecordedCall(make, positional, args, kwargs))

        return make

    return decorate


class Made(NamedTuple):
    """The origin of an optimizer, void once its `functions` (`update` and `hyperparameters`) are replaced."""

    call: RecordedCall
    functions: tuple[Any, ...]


def recorded_call(optimizer: Any) -> RecordedCall | None:
    """Return the call that created an optimizer, unless a function of it was replaced since."""
    origin = getattr(getattr(optimizer, "init", None), "call", None)
    if not isinstance(origin, Made) or (optimizer.update, optimizer.hyperparameters) != origin.functions:
        return None
    return origin.call


def named_optimizers(optimizer: object) -> dict[str, dict[str, Any]]:
    """Return an optimizer and all optimizers inside it by unique names, each with its other arguments.

    A name is the function's, after its label in a `partition`; repeated names are numbered.
    """
    elements: dict[str, dict[str, Any]] = {}

    def visit(optimizer: object, prefix: str) -> None:
        call = recorded_call(optimizer)
        name = prefix + (as_typed(optimizer) if call is None else call.function.__name__)
        numbered = (f"{name} {number}" for number in itertools.count(2))
        own = elements[next(entry for entry in itertools.chain([name], numbered) if entry not in elements)] = {}
        for argument, value in ({} if call is None else call.arguments()).items():
            inner = _optimizers_in(value)
            if not inner:
                own[argument] = value
            for label, entry in inner:
                visit(entry, f"{prefix}{label}/" if label else prefix)

    visit(optimizer, "")
    return elements


def _optimizers_in(value: object) -> list[tuple[str, Any]]:
    if has_init_and_update(value):
        return [("", value)]
    if isinstance(value, Mapping):
        return [(str(label), item) for label, item in value.items() if has_init_and_update(item)]
    return [("", item) for item in (value if isinstance(value, list | tuple) else ()) if has_init_and_update(item)]


def _remember(optimizer: Any, call: RecordedCall) -> Any:
    init: Any = optimizer.init
    if not (hasattr(init, "__dataclass_fields__") and hasattr(init, "call")):  # a custom optimizer
        return optimizer
    functions = {name: shortens_tracebacks(getattr(optimizer, name)) for name in ("update", "hyperparameters")}
    origin = Made(call, tuple(functions.values()))
    return optimizer._replace(init=dataclasses.replace(init, call=origin), **functions)


def makes_optimizer(positional: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    return record_calls(_remember, positional)


class RememberedFunction:
    def __init__(self, function: Callable[..., Any], call: RecordedCall) -> None:
        functools.update_wrapper(self, function)
        self.call = call

    @shortens_tracebacks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: object) -> "RememberedFunction":
        return self  # as functions

    def __repr__(self) -> str:
        return repr(self.call)


class ShownAsTyped:
    """Base class: `repr` is the call that one would type."""

    _made: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        instance = super().__new__(cls)
        object.__setattr__(instance, "_made", (args, kwargs))
        return instance

    def __repr__(self) -> str:
        args, kwargs = self._made
        with contextlib.suppress(TypeError, ValueError):  # a copy, or a user-defined class
            return repr(RecordedCall(type(self), len(args), args, kwargs))
        return f"{type(self).__name__}(…)"


def as_typed(value: Any) -> str:
    """Format an argument as one would type it, without reading device arrays."""
    if _is_call(value):
        if type(value).__module__.partition(".")[0] == "jstep":
            return repr(value)
        # An optimizer of Optax does not know its arguments.
        return _made_by_optax(value.update) or f"{type(value).__name__}(…)"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {as_typed(item)}" for key, item in value.items()) + "}"
        return text if any(map(_is_call, value.values())) else truncate(text, MAX_TEXT_LENGTH)
    if isinstance(value, list | tuple):
        parts = ", ".join(map(as_typed, value))
        text = f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
        return text if any(map(_is_call, value)) else truncate(text, MAX_TEXT_LENGTH)
    return truncate(_plain(value), MAX_TEXT_LENGTH)


def _is_call(value: object) -> bool:
    return isinstance(value, RememberedFunction) or has_init_and_update(value)


def has_init_and_update(value: object) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _plain(value: object) -> str:
    if isinstance(value, np.generic):
        return str(value)
    if isinstance(value, jax.Array | np.ndarray):
        return array_type(value.shape, value.dtype)
    dtype = value if isinstance(value, np.dtype) else getattr(value, "dtype", None) if isinstance(value, type) else None
    if isinstance(dtype, np.dtype):  # jnp.float32 is a class with a dtype
        return repr(dtype.name)
    if isinstance(value, functools.partial):
        words = [as_typed(item) for item in (value.func, *value.args)]
        return f"partial({', '.join([*words, *(f'{key}={as_typed(item)}' for key, item in value.keywords.items())])})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _format_dataclass(value)
    if callable(value) and hasattr(value, "__name__"):
        return _made_by_optax(value) or str(value.__name__)
    has_address = type(value).__repr__ is _WITH_ADDRESS
    return f"{type(value).__name__}(…)" if has_address else format_value(value, MAX_TEXT_LENGTH)


def _format_dataclass(value: Any) -> str:
    if not value.__dataclass_params__.repr:
        return format_value(value, MAX_TEXT_LENGTH)
    fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]
    words = [f"{field.name}={as_typed(item)}" for field, item in fields if not _is_equal(item, field.default)]
    return f"{type(value).__name__}({', '.join(words)})"


def _is_equal(value: object, default: object) -> bool:
    is_plain = isinstance(value, bool | int | float | str) and type(value) is type(default)  # arrays are not compared
    return value is default or (is_plain and value == default)


def _made_by_optax(function: object) -> str:
    """Format an Optax function by its outer function, whose arguments are unknown."""
    maker, inside, _ = getattr(function, "__qualname__", "").partition(".<locals>")
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return f"optax.{maker}(…)" if inside and package == "optax" else ""
