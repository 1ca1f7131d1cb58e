"""Exceptions that survive pickling, context managers that pass on the user's exceptions unchanged, and notes."""

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
    """Base of jstep's exceptions, which survive pickling and copying; unpicklable attributes become None."""

    # By default Python calls the class with `args`: if the constructor has another signature, a `multiprocessing.Pool`
    # that waits for a worker hangs. Here the constructor is not called.
    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self._args(), {name: _or_none(value) for name, value in vars(self).items()})

    def __copy__(self) -> Any:
        return _rebuilt(type(self), self._args(), vars(self))

    def _args(self) -> Any:
        return super().__reduce__()[1]  # includes the file name of an OSError


def _rebuilt(cls: type[BaseException], args: Any, attributes: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    built_in: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    built_in.__init__(error, *args)  # sets state outside `vars`, such as the code of a SystemExit
    vars(error).update(attributes)
    return error


def _or_none(value: object) -> Any:
    try:
        pickle.dumps(value)
    except Exception:
        return None
    return value


def context_manager(make: Callable[_P, Iterator[_T]]) -> "Callable[_P, contextlib.AbstractContextManager[_T]]":
    """Like `contextlib.contextmanager`, but for user code: an exception passes unchanged, and closes the generator."""

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
            # Throwing it in would set `__traceback__`, which fails for classes that reject attributes.
            self._body.close()


@context_manager
def setting(variable: contextvars.ContextVar[Any], value: _T) -> Iterator[_T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def note(error: BaseException, text: str) -> None:
    """Add a note, if the class of the exception allows it."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def note_other(error: BaseException, other: BaseException) -> None:
    """Note another error, with its notes, on the one that is raised."""
    if other is not error:
        notes = getattr(other, "__notes__", ())
        note(error, "\n".join([f"Additionally, {type(other).__name__}: {other}", *notes]))


def with_path(error: OSError, path: str) -> OSError:
    """Return an error that names the file."""
    if error.filename is not None:
        return error
    return OSError(f"{path}: {error}") if error.errno is None else OSError(error.errno, error.strerror, path)


def forget_frames(error: BaseException) -> None:
    """Drop the traceback of an error that will be raised again."""
    BaseException.with_traceback(error, None)  # also of a class that rejects attributes


_AXIS = re.compile("unbound axis name: (.+?)(?:\\.|$)")
_KEEPS_TYPES = re.compile("carry input and carry output must have equal types|branches must have equal output types")


def explain_jax(error: BaseException) -> None:
    """Add a note to an error of JAX whose message does not say how to fix it."""
    text = str(error)
    if isinstance(error, NameError) and (match := _AXIS.search(text)):
        way_out = _UNBOUND_AXIS.format(match[1])
    elif isinstance(error, TypeError) and _KEEPS_TYPES.search(text):
        way_out = _OF_ONE_TYPE
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
