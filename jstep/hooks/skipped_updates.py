"""Whether a loss that is not finite counts: not if the update it belongs to was skipped."""

from collections.abc import Callable
from typing import Any

from jstep.optimizers import metrics

SKIPPED = metrics.SKIPPED
"""The metric by which a step that jstep did not make says that its whole update was skipped: 1 or 0."""


def skip_metric_of(train_step: Any) -> str | None:
    """The name of the metric that is 1 if the whole update was skipped; None if there is none."""
    name = getattr(train_step, "skip_metric", SKIPPED)
    return name if isinstance(name, str) else None


def is_bad_loss(finite: Any, skipped: Any) -> Any:
    """Which steps are past repair, of arrays of NumPy or JAX: not finite, and not skipped.

    Args:
        finite: Whether each loss is finite.
        skipped: Whether the whole update of each was skipped.
    """
    return ~(finite | skipped)


SkipMetric = Callable[[], str | None]
