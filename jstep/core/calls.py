"""Remembered calls, so that the `repr` of what they return is what one would type."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import jax
import numpy as np

from jstep.core.checks import array_type, cut, shown
from jstep.core.tracebacks import shortens_tracebacks

LONGEST = 200
"""The longest text of an argument that is neither an optimizer nor a schedule, such as a mask."""

_WITH_ADDRESS: Any = object.__repr__

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Call:
    """A call: its `repr` is formatted on demand, and reads no array of a device.

    Args:
        function: The function that was called.
        positional: The number of its arguments that are shown without their names.
        args: The positional arguments.
        kwargs: The others.
    """

    def __init__(
        self, function: Callable[..., Any], positional: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.function, self.positional, self.args, self.kwargs = function, positional, args, kwargs

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, those of `**kwargs` among them, with the defaults of those that were left out."""
        signature = inspect.signature(self.function)
        bound = signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_keywords = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found |= value if is_keywords else {name: value}
        return found

    def __deepcopy__(self, memo: object) -> "Call":
        return self  # immutable; an argument may be something that cannot be copied

    def __repr__(self) -> str:
        signature = inspect.signature(self.function)
        words: list[str] = []
        plain = True
        for i, (name, value) in enumerate(signature.bind(*self.args, **self.kwargs).arguments.items()):
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                words += map(typed, value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                words += [f"{key}={typed(one)}" for key, one in value.items()]
            else:
                # An argument that was left out before it would take its place.
                plain = plain and i < self.positional and list(signature.parameters)[i] == name
                words.append(typed(value) if plain else f"{name}={typed(value)}")
        return f"{self.function.__name__}({', '.join(words)})"


def remembered(
    attach: Callable[[_T, Call], _T],
    positional: int = 0,
    refused: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], TypeError], NoReturn] | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator of functions that attaches each call to its result.

    Args:
        attach: `attach(result, call)` returns the result that remembers its call.
        positional: The number of arguments that the `repr` shows without their names.
        refused: `refused(function, args, kwargs, error)` is called after a TypeError, and raises it or a better one.
    """

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
            return attach(result, Call(make, positional, args, kwargs))

        return make

    return decorate


class Made(NamedTuple):
    """The origin of an optimizer.

    Attributes:
        call: The call.
        functions: `update` and `hyperparameters` of its result: with others it is another optimizer.
    """

    call: Call
    functions: tuple[Any, ...]


def call_of(optimizer: Any) -> Call | None:
    """The call that made an optimizer of jstep, unless one of its functions was replaced since."""
    made = getattr(getattr(optimizer, "init", None), "call", None)
    if not isinstance(made, Made) or (optimizer.update, optimizer.hyperparameters) != made.functions:
        return None
    return made.call


def elements_of(optimizer: object) -> dict[str, dict[str, Any]]:
    """The optimizers that an optimizer is made of, itself first, each with its other arguments, by names of their own.

    The name of one is that of the function that made it, below its label in a `partition`, with a number if it is not
    the first one of that name.

    Example:
        >>> import jstep
        >>> from jstep.core.calls import elements_of
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.momentum(0.1, 0.9))
        >>> found = elements_of(optimizer)
        >>> list(found), found["momentum"]["learning_rate"]
        (['chain', 'clip_gradients', 'momentum'], 0.1)
    """
    found: dict[str, dict[str, Any]] = {}

    def visit(optimizer: object, prefix: str) -> None:
        call = call_of(optimizer)
        name = prefix + (typed(optimizer) if call is None else call.function.__name__)
        numbered = (f"{name} {number}" for number in itertools.count(2))
        own = found[next(one for one in itertools.chain([name], numbered) if one not in found)] = {}
        for argument, value in ({} if call is None else call.arguments()).items():
            inner = _optimizers_in(value)
            if not inner:
                own[argument] = value
            for label, one in inner:
                visit(one, f"{prefix}{label}/" if label else prefix)

    visit(optimizer, "")
    return found


def _optimizers_in(value: object) -> list[tuple[str, Any]]:
    """The optimizers of an argument, each with its label, or an empty one."""
    if has_init_and_update(value):
        return [("", value)]
    if isinstance(value, Mapping):
        return [(str(label), one) for label, one in value.items() if has_init_and_update(one)]
    return [("", one) for one in (value if isinstance(value, list | tuple) else ()) if has_init_and_update(one)]


def _remember(optimizer: Any, call: Call) -> Any:
    init: Any = optimizer.init
    if not (hasattr(init, "__dataclass_fields__") and hasattr(init, "call")):  # of a custom optimizer
        return optimizer
    functions = {name: shortens_tracebacks(getattr(optimizer, name)) for name in ("update", "hyperparameters")}
    made = Made(call, tuple(functions.values()))
    return optimizer._replace(init=dataclasses.replace(init, call=made), **functions)


def makes_optimizer(positional: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator of functions, so that the `repr` of their optimizers is the call."""
    return remembered(_remember, positional)


class RememberedFunction:
    """A function that remembers the call that made it.

    Args:
        function: The function.
        call: The call.
    """

    def __init__(self, function: Callable[..., Any], call: Call) -> None:
        functools.update_wrapper(self, function)
        self.call = call

    @shortens_tracebacks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: object) -> "RememberedFunction":
        return self  # as functions

    def __repr__(self) -> str:
        return repr(self.call)


_DOCUMENTED = frozenset(
    "begin before_step after_step end next_due get_state set_state deliver flush close key "  # noqa: SIM905
    "read plot to_pandas".split()
)
"""The methods of jstep's own classes that users call or define, besides the attributes of their docstrings."""


class ShownAsTyped:
    """Base class of objects whose `repr` is what one would type; `dir` has the names that users need."""

    _made: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        object.__setattr__(made, "_made", (args, kwargs))
        return made

    def __repr__(self) -> str:
        args, kwargs = self._made
        with contextlib.suppress(TypeError, ValueError):  # of a copy, or of a class of the user's
            return repr(Call(type(self), len(args), args, kwargs))
        return f"{type(self).__name__}(…)"

    def __dir__(self) -> list[str]:
        names, documented = set(object.__dir__(self)), set(_DOCUMENTED)
        for cls in type(self).__mro__:
            if cls.__module__.partition(".")[0] == "jstep":
                _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
                documented |= set(re.findall(r"^    (\w+):", attributes.partition("\n\n")[0], re.MULTILINE))
            else:
                documented |= set(vars(cls))
        if type(self).__module__.partition(".")[0] != "jstep":
            documented |= set(vars(self))
        return sorted(name for name in names if name in documented or name.startswith("__"))


def typed(value: Any) -> str:
    """Format an argument as one would type it, without addresses, and without reading arrays of devices."""
    if _is_call(value):
        if type(value).__module__.partition(".")[0] == "jstep":
            return repr(value)
        # An optimizer of Optax does not know its arguments.
        return _made_by_optax(value.update) or f"{type(value).__name__}(…)"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {typed(one)}" for key, one in value.items()) + "}"
        return text if any(map(_is_call, value.values())) else cut(text, LONGEST)
    if isinstance(value, list | tuple):
        parts = ", ".join(map(typed, value))
        text = f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
        return text if any(map(_is_call, value)) else cut(text, LONGEST)
    return cut(_plain(value), LONGEST)


def _is_call(value: object) -> bool:
    """Whether a value is a schedule or an optimizer, of jstep or of Optax, which are never cut off."""
    return isinstance(value, RememberedFunction) or has_init_and_update(value)


def has_init_and_update(value: object) -> bool:
    """Whether a value has two functions `init` and `update`, as optimizers of jstep and of Optax do."""
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
        words = [typed(one) for one in (value.func, *value.args)]
        return f"partial({', '.join([*words, *(f'{key}={typed(one)}' for key, one in value.keywords.items())])})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_dataclass(value)
    if callable(value) and hasattr(value, "__name__"):
        return _made_by_optax(value) or str(value.__name__)
    has_address = type(value).__repr__ is _WITH_ADDRESS
    return f"{type(value).__name__}(…)" if has_address else shown(value, LONGEST)


def _of_dataclass(value: Any) -> str:
    if not value.__dataclass_params__.repr:
        return shown(value, LONGEST)
    fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]
    words = [f"{field.name}={typed(one)}" for field, one in fields if not _is_equal(one, field.default)]
    return f"{type(value).__name__}({', '.join(words)})"


def _is_equal(value: object, default: object) -> bool:
    is_plain = isinstance(value, bool | int | float | str) and type(value) is type(default)  # arrays are not compared
    return value is default or (is_plain and value == default)


def _made_by_optax(function: object) -> str:
    """Format a function inside of one of Optax by the name of the outer one: its arguments are not known."""
    maker, inside, _ = getattr(function, "__qualname__", "").partition(".<locals>")
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return f"optax.{maker}(…)" if inside and package == "optax" else ""
