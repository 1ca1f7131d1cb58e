"""Context variables, notes on exceptions, and the exception that ends an input."""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class WrongStateError(Exception):
    """Base of errors after which the last state must not be saved, unless `may_save`."""

    may_save = False


class QueueError(Exception):
    """Base of the exceptions of a closed queue: `OutOfRangeError` and `CancelledError`.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=2)
        >>> queue.close()
        >>> try:
        ...     queue.enqueue(1)
        ... except jstep.QueueError as error:
        ...     print(error)
        FIFOQueue is closed: it accepts no more elements
    """


class OutOfRangeError(QueueError):
    """A queue is closed and holds fewer elements than requested: the input has ended.

    If a `QueueRunner` thread failed, its exception is the `__cause__`. Otherwise `train` and
    `evaluator` treat this exception as the end of the data.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=2)
        >>> queue.close()
        >>> queue.dequeue()
        Traceback (most recent call last):
            ...
        jstep.OutOfRangeError: FIFOQueue is closed and has insufficient elements (requested 1, current size 0)
    """  # noqa: E501


def items_until_end(items: Iterable[_T]) -> Iterator[_T]:
    """Yield items until there are no more, or an `OutOfRangeError` without a cause."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except OutOfRangeError as error:
            if error.__cause__ is not None:
                raise
            return
        # Not inside `try`: if the interpreter closes this generator at exit, the exception classes
        # no longer exist.
        yield item


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[Any], value: _T) -> Iterator[_T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def note(error: BaseException, text: str) -> None:
    with contextlib.suppress(Exception):
        error.add_note(text)


def note_other(error: BaseException, other: BaseException) -> None:
    if other is not error:
        notes = getattr(other, "__notes__", ())
        note(error, "\n".join([f"Additionally, {type(other).__name__}: {other}", *notes]))


def noting(close: Callable[[], object]) -> Callable[[object, BaseException | None, object], None]:
    """Return an `__exit__` that calls `close`, whose error becomes a note on the other."""

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        try:
            close()
        except Exception as failure:
            if error is None:
                raise
            note_other(error, failure)

    return leave


def add_path(error: OSError, path: str) -> OSError:
    """Return an error that names a file: the same one if it does already."""
    if error.filename is not None:
        return error
    if error.errno is None:
        return OSError(f"{path}: {error}")
    return OSError(error.errno, error.strerror, path)


def forget_frames(error: BaseException) -> None:
    BaseException.with_traceback(error, None)  # also of a class that rejects attributes


_WAYS_OUT = (
    (
        NameError,
        re.compile(r"unbound axis name: (.+?)(?:\.|$)"),
        "A model written for pmap names its axis {0!r}, and a step of jstep is one program over "
        "the whole batch: leave the name out (jnp.mean for lax.pmean), or bind it with "
        "jax.vmap(fn, axis_name={0!r}) over x[None].",
    ),
    (
        TypeError,
        re.compile(
            "carry input and carry output must have equal types"
            "|branches must have equal output types"
        ),
        "A carry keeps its dtypes, and so does what branches return: create states with "
        "TrainState.create, and other initial values as arrays of their final dtype "
        "(jnp.float32(0) for 0).",
    ),
    (
        (RuntimeError, ValueError),
        re.compile("(?:Array|Buffer) has been deleted"),
        "If it was an array of a state, the next train step took its memory (donation): read it "
        "before, keep a copy (jax.tree.map(jnp.copy, state.params)), or make the step with "
        "donate=False.",
    ),
)
"""Errors of JAX whose message does not say how to fix them, and a note that does."""


def explain_jax(error: BaseException) -> None:
    for kind, pattern, way_out in _WAYS_OUT:
        if not isinstance(error, kind):
            continue
        match = pattern.search(str(error))
        if match is None:
            continue
        text = way_out.format(*match.groups())
        # An error passes several public functions on its way, each of which calls this.
        if text not in getattr(error, "__notes__", ()):
            note(error, text)
