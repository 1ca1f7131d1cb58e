"""Leaving an evaluation between two batches, where a signal wishes the run to stop."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_stop_wished: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar("stop_wished", default=None)


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation that a stopping run does not wait for; never leaves its hook.

    Not an Exception: what is around the evaluator, such as a retry, must not take it for a failure.
    """


@contextlib.contextmanager
def interruptible(stop_wished: Callable[[], bool]) -> Iterator[None]:
    """Lets evaluators that are called inside ask whether to go on.

    Args:
        stop_wished: Whether the run is to stop; on several processes to be asked equally often by all of them.
    """
    token = _stop_wished.set(stop_wished)
    try:
        yield
    finally:
        _stop_wished.reset(token)


def leave_if_wished() -> None:
    """To be called between batches; outside of `interruptible` it does nothing.

    Raises:
        EvaluationAbandoned: The run is to stop.
    """
    stop_wished = _stop_wished.get()
    if stop_wished is not None and stop_wished():
        raise EvaluationAbandoned
