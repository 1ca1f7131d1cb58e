"""Leaving an evaluation between two batches, where a signal wishes the run to stop."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_stop_requested: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "stop_requested", default=None
)


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation that a stopping run does not wait for; never leaves its hook.

    Not an Exception: what is around the evaluator, such as a retry, must not take it for a failure.
    """


@contextlib.contextmanager
def interruptible(stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Lets evaluators that are called inside ask whether to go on.

    Args:
        stop_requested: Whether the run is to stop; on several processes to be asked equally often by all of them.
    """
    token = _stop_requested.set(stop_requested)
    try:
        yield
    finally:
        _stop_requested.reset(token)


def raise_if_stop_requested() -> None:
    """To be called between batches; outside of `interruptible` it does nothing.

    Raises:
        EvaluationAbandoned: The run is to stop.
    """
    stop_requested = _stop_requested.get()
    if stop_requested is not None and stop_requested():
        raise EvaluationAbandoned
