"""Tracebacks without jstep's inner frames, as JAX leaves out its own.

Functions that users call have the decorator `shortens_tracebacks`: of each row of jstep's frames,
only the first one, which the user called, and the last one, which called the user's function,
remain. JAX's setting `jax_traceback_filtering` applies.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

from jstep.core.exceptions import explain_jax
from jstep.core.public_names import explain_call, rename_arguments

_P = ParamSpec("_P")
_T = TypeVar("_T")

_JSTEP = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PASSED: tuple[str, ...] = (
    os.path.join(os.path.dirname(jax.__file__), ""),
    os.path.join(os.path.dirname(concurrent.futures.__file__), ""),
    contextlib.__file__,
    functools.__file__,
)


def shortens_tracebacks(fn: Callable[_P, _T], *, typed: str = "") -> Callable[_P, _T]:
    """Decorator of public functions: short tracebacks, and hints for calls of other libraries.

    `typed` is what a user calls a function that has another name inside of jstep, such as
    `Optimizer.update`.
    """

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            renamed = rename_arguments(fn, kwargs, typed) if isinstance(error, TypeError) else None
            if renamed is None:
                if isinstance(error, TypeError):
                    hint = explain_call(fn, args, kwargs, error, typed)
                    # It is there already if a decorated function has called another one.
                    if hint and hint not in str(error):
                        # Not Python 3.13's own suggestion, which is less strict: `log_steps` for
                        # `max_steps`.
                        message = str(error).split(". Did you mean ")[0]
                        raise TypeError(f"{message}{hint}") from None
                original = original_error(error)
                explain_jax(error)
                shorten(original)
                try:
                    if original is not error:
                        raise original from None
                    raise  # without another frame
                finally:
                    # This breaks the reference cycle with this frame, which its traceback holds.
                    del original
        # Not in the block above: an error of this call does not follow from the old name.
        return call(*args, **renamed)

    return call


def explains_arguments(cls: type[_T]) -> type[_T]:
    """Class decorator: as `shortens_tracebacks`, for an `__init__` that a dataclass generates."""
    cls.__init__ = shortens_tracebacks(cls.__init__)  # type: ignore[method-assign]
    return cls


def original_error(error: BaseException) -> BaseException:
    """Return the user's error in place of its class's refusal of contextlib's traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-2:]
    if error.__context__ is None or not frames:
        return error
    is_assignment = frames[-1].f_code.co_name == "__setattr__"
    is_of_contextlib = frames[0].f_code.co_filename == contextlib.__file__
    if is_assignment and is_of_contextlib:
        return error.__context__
    return error


def shorten(error: BaseException) -> None:
    """Shorten the tracebacks of an error and of its causes, and remove repeated notes."""
    mode: Any = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]  # created at run time
    if mode == "off":
        return
    seen: set[int] = set()  # a chain of causes may be a cycle
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        notes = getattr(link, "__notes__", None)
        if notes:  # JAX adds the same note each time that a function raises it
            notes[:] = [text for text, _ in itertools.groupby(notes)]
        short: TracebackType | None = None
        for frame in reversed(_shown(link.__traceback__)):
            short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        BaseException.with_traceback(link, short)  # also of a class that rejects attributes
        if mode == "remove_frames":
            return  # in this mode JAX adds a cause that shows all frames on purpose
        link = link.__cause__ or link.__context__


def _shown(trace: TracebackType | None) -> list[TracebackType]:
    frames: list[TracebackType] = []
    while trace is not None:
        if _file(trace) != __file__:
            frames.append(trace)
        trace = trace.tb_next

    def is_inner(frame: TracebackType) -> bool:
        return _file(frame).startswith((_JSTEP, *_PASSED))

    shown: list[TracebackType] = []
    for _, group in itertools.groupby(frames, is_inner):
        row = list(group)
        own_frames = [frame for frame in row if _file(frame).startswith(_JSTEP)]
        if not own_frames:
            shown += row
            continue
        shown.append(own_frames[0])
        if len(own_frames) > 1:
            shown.append(own_frames[-1])
    return shown


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
