"""Context managers around the user's code, whose exceptions pass through as they are."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

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
