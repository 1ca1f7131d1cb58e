"""Skipped updates, whose losses need not be finite."""

from typing import Any

from jstep.optimizers import metrics

SKIPPED = metrics.SKIPPED
"""The metric by which a custom step reports that its whole update was skipped: 1 or 0."""


def skip_metric_of(train_step: Any) -> str | None:
    """The name of the metric that is 1 if the whole update was skipped, or None."""
    name = getattr(train_step, "skip_metric", SKIPPED)
    return name if isinstance(name, str) else None


def is_bad(finite: Any, skipped: Any) -> Any:
    """Return which steps applied an update whose loss, or gradient, is not finite, for NumPy or JAX arrays.

    Args:
        finite: Whether each loss, or gradient, is finite.
        skipped: Whether the whole update of each step was skipped.
    """
    return ~(finite | skipped)
