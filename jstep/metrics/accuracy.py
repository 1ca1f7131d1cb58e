"""Accuracy."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jstep.metrics import checks
from jstep.metrics.counts import Count, counted, how_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Result of `accuracy`: counts of one batch or several merged batches.

    Attributes:
        right: The number of correct predictions.
        total: The number of labels.
    """

    right: Count
    total: Count

    def merge(self, other: "Accuracy") -> "Accuracy":
        """Merge with another metric object."""
        return Accuracy(self.right + other.right, self.total + other.total)

    def compute(self) -> float:
        """The accuracy; NaN without examples."""
        total = int(self.total.exact())
        return int(self.right.exact()) / total if total else math.nan


def accuracy(logits: Any, labels: Any) -> Accuracy:
    """Accuracy of a classifier: `sklearn.metrics.accuracy_score(labels, argmax(logits))`.

    Counts are exact up to 2⁴⁴ labels. Of equal logits the first is the prediction.

    Args:
        logits: `[..., classes]`, logits or probabilities.
        labels: `[...]`, the indices of the true classes.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Raises:
        TypeError: Labels are not integers.
        ValueError: The shapes do not match.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> first = jstep.metrics.accuracy(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1, 1]))
        >>> second = jstep.metrics.accuracy(jnp.array([[0.0, 2.0]]), jnp.array([1]))
        >>> round(first.merge(second).compute(), 3)
        0.667
    """
    given, truth = checks.logits_and_labels(logits, labels)
    right = jnp.argmax(given, axis=-1).astype(truth.dtype) == truth
    return Accuracy(how_many(right), counted(jnp.uint32(truth.size)))
