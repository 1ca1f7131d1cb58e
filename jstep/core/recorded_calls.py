"""Recorded calls: the `repr` of a result, and its pickle, are the call that creates it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

import jax
import numpy as np

from jstep.core.checks import array_type, format_list, format_value
from jstep.core.public_names import explains_attributes
from jstep.core.tracebacks import shortens_tracebacks

MAX_TEXT_LENGTH = 200
"""The maximum length of an argument in a `repr`."""
MAX_ITEMS = 50
"""The maximum number of items of a container in a `repr`."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclasses.dataclass(eq=False, repr=False)
class RecordedCall:
    """A recorded call; its `repr` omits the names of the first `positional` arguments.

    `made` is the optimizer that the call made; mutable arguments are copied.
    """

    function: Callable[..., Any]
    positional: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.args = _copied(self.args)
        self.kwargs = _copied(self.kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _call, (self.function, self.args, self.kwargs)

    def __deepcopy__(self, memo: object) -> "RecordedCall":
        return self  # immutable; an argument may be something that cannot be copied

    def __repr__(self) -> str:
        words = list(map(as_typed, self.args))
        parameters = list(inspect.signature(self.function).parameters.values())
        for i, parameter in enumerate(parameters[: len(words)]):
            if i >= self.positional and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                words[i] = f"{parameter.name}={words[i]}"
        words += [f"{name}={as_typed(value)}" for name, value in self.kwargs.items()]
        return f"{self.function.__name__}({', '.join(words)})"


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def record_calls(
    attach: Callable[[_T, RecordedCall], _T],
    positional: int = 0,
    refused: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], TypeError], NoReturn]
    | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator that attaches calls to results; `refused` raises a better TypeError."""

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


def _remember(optimizer: Any, call: RecordedCall) -> Any:
    if not hasattr(optimizer.init, "call"):  # a custom optimizer
        return optimizer
    call.made = optimizer._replace(
        init=dataclasses.replace(optimizer.init, call=call),
        update=shortens_tracebacks(optimizer.update, typed="Optimizer.update"),
        hyperparameters=shortens_tracebacks(optimizer.hyperparameters),
    )
    return call.made


def makes_optimizer(positional: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    return record_calls(_remember, positional)


class RememberedFunction:
    """A schedule: the function, which is called with a step, and the call that made it."""

    def __init__(self, function: Callable[..., Any], call: RecordedCall) -> None:
        # This also copies the attributes of a function that is already remembered.
        functools.update_wrapper(self, function)
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call.__reduce__()

    def __deepcopy__(self, memo: object) -> "RememberedFunction":
        return self  # immutable, as its call

    def __repr__(self) -> str:
        return repr(self._call)

    @shortens_tracebacks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


explains_attributes(RememberedFunction, owner="a schedule", typed="Schedule")


class ShownAsTyped:
    """An object whose `repr` is the call that made it."""

    _made: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        instance = super().__new__(cls)
        object.__setattr__(instance, "_made", (args, kwargs))
        return instance

    def __repr__(self) -> str:
        args, kwargs = self._made
        return repr(RecordedCall(type(self), len(args), args, kwargs))


def as_typed(value: Any) -> str:
    """Show a value as one would type it, cut to `MAX_ITEMS` and `MAX_TEXT_LENGTH`."""
    if isinstance(value, Mapping):
        items = [f"{key!r}: {as_typed(item)}" for key, item in value.items()]
        return f"{{{format_list(items, MAX_ITEMS)}}}"
    if type(value) in (list, tuple):
        text = format_list(list(map(as_typed, value)), MAX_ITEMS)
        if isinstance(value, list):
            return f"[{text}]"
        return f"({text},)" if len(value) == 1 else f"({text})"
    if isinstance(value, RememberedFunction) or hasattr(value, "hyperparameters"):
        # A schedule or an optimizer.
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray):
        return array_type(value.shape, value.dtype)
    name = getattr(value, "__name__", None)
    if callable(value) and isinstance(name, str):
        text = name
    else:
        text = format_value(value, MAX_TEXT_LENGTH)
    # A default `repr` has the address of the object.
    return f"{type(value).__name__}(…)" if " at 0x" in text else text


def has_init_and_update(value: object) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))
