"""Exceptions: jstep's own, which survive pickling; context managers that let the user's pass unchanged; notes."""

import contextlib
import contextvars
import functools
import pickle
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Picklable(BaseException):
    """Base of jstep's exceptions, which survive pickling and copying: class, arguments, attributes, notes, exit code.

    By default Python calls the class with `args`, in the process of a `multiprocessing.Pool` that waits for a worker:
    where the constructor takes something else, that process hangs. Here the constructor is not called. An attribute
    that cannot be pickled, such as a `state` that was donated or is traced, is None afterwards.
    """

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self._args(), {name: _or_none(value) for name, value in vars(self).items()})

    def __copy__(self) -> Any:
        return _rebuilt(type(self), self._args(), vars(self))

    def _args(self) -> Any:
        return super().__reduce__()[1]  # with the file's name of an OSError


def _rebuilt(cls: type[BaseException], args: Any, attributes: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    built_in: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    built_in.__init__(error, *args)  # sets what is not in `vars`, such as the code of a SystemExit
    vars(error).update(attributes)
    return error


def _or_none(value: object) -> Any:
    """Return a value, or None if it cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception:
        return None
    return value


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


class _Scope(contextlib.AbstractContextManager[_T]):
    def __init__(self, body: Any) -> None:
        self._body: Generator[_T] = body

    def __enter__(self) -> _T:
        return next(self._body)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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


def forget_frames(error: BaseException) -> None:
    """Forget where an error was raised that is not shown: raised again, as the same object, it would show that, too."""
    BaseException.with_traceback(error, None)  # also of a class that refuses attributes


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
