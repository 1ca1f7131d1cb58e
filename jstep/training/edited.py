"""Detection of edits to a user's loss after a step was made, which still runs the old code."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from jstep.core.logs import log_warning


class UserCode:
    """The user's functions that a step traces, and their code at that time."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._functions = [inner for function in functions if (inner := _function_of(function)) is not None]
        self._traced: list[Any] | None = None

    def note(self) -> None:
        """Record the code when the step is traced for the first time."""
        if self._traced is None:
            self._traced = [_content(function.__code__) for function in self._functions]

    def edited(self) -> list[str]:
        """The functions whose code differs now, or whose module has another function of that name."""
        # `%autoreload` changes the code of a function in place; `importlib.reload`, and a cell that is run again, make
        # a new function. Moved lines and comments are not an edit.
        now = [_content(function.__code__) for function in self._functions]
        names = []
        for function, before, here in zip(self._functions, self._traced or now, now, strict=True):
            there = _function_of(_find_in_module(function))
            if before != here or (there is not None and before != _content(there.__code__)):
                names.append(function.__qualname__)
        return names


def warn_of_edits(steps: Iterable[Any]) -> None:
    """Log a warning for each function that was edited since the step that calls it was made."""
    codes = {id(code): code for step in steps if (code := getattr(step, "user_code", None)) is not None}
    for name in dict.fromkeys(name for code in codes.values() for name in code.edited()):
        log_warning(
            "%s was edited after train_step was created, which still runs the old code. Create the step again: "
            "train_step = jstep.minimize(%s, …)",
            *(name, name),
        )


def _function_of(value: Any) -> FunctionType | None:
    """Return the Python function inside decorators, partials and methods, if any."""
    with contextlib.suppress(ValueError):  # wrappers in a circle
        value = inspect.unwrap(value)
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _find_in_module(function: Callable[..., Any]) -> Any:
    value: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)  # None for the locals of a function
    return value


def _content(code: CodeType) -> Any:
    """The content of a code object, without its line numbers."""
    consts = tuple(
        _content(const) if isinstance(const, CodeType) else (type(const), repr(const)) for const in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_code, code.co_exceptiontable, names, counts, consts
