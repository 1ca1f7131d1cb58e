"""Interrupt an evaluation between two batches when a signal stops the run."""

import contextlib
import contextvars
from collections.abc import Callable

from jstep.core.checks import setting

_stop_requested: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "stop_requested", default=None
)


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation when the run stops; the evaluation hook catches it.

    It is not an Exception, so that user code around the evaluator, such as a retry, does not catch it.
    """


def interruptible(stop_requested: Callable[[], bool]) -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """Make evaluators that are called inside interruptible.

    Args:
        stop_requested: Returns whether the run is stopping; must be called equally often on all processes.
    """
    return setting(_stop_requested, stop_requested)


def raise_if_stop_requested() -> None:
    """Raise if the run is stopping; called between batches. Outside of `interruptible` it does nothing.

    Raises:
        EvaluationAbandoned: The run is stopping.
    """
    stop_requested = _stop_requested.get()
    if stop_requested is not None and stop_requested():
        raise EvaluationAbandoned
