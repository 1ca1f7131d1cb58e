"""Confusion matrix of a classifier."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.checks import as_int
from jstep.metrics import checks
from jstep.metrics.counts import Count, counted, how_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix:
    """Result of `confusion_matrix`: counts of one batch or several merged batches.

    Attributes:
        matrix: Counts `[num_classes, num_classes]`; rows are true classes.
        unknown: The number of examples whose prediction or label is not a class index.
    """

    matrix: Count
    unknown: Count

    def merge(self, other: "ConfusionMatrix") -> "ConfusionMatrix":
        """Merge with another metric object."""
        return ConfusionMatrix(self.matrix + other.matrix, self.unknown + other.unknown)

    def compute(self) -> dict[str, int]:
        """Map `i/j` to the number of examples of class i that were predicted as class j.

        Raises:
            ValueError: A prediction or a label is not a class index.
        """
        matrix, unknown = self.matrix.exact(), int(self.unknown.exact())
        if unknown:
            raise ValueError(
                f"num_classes={len(matrix)}: predictions and labels of confusion_matrix must be below it and not "
                f"negative, {unknown} examples have others; leave them out, or give more classes"
            )
        return {f"{i}/{j}": int(count) for i, row in enumerate(matrix) for j, count in enumerate(row)}


def confusion_matrix(predictions: Any, labels: Any, num_classes: int) -> ConfusionMatrix:
    """Confusion matrix of a classifier: `sklearn.metrics.confusion_matrix(labels, predictions)`.

    Counts are exact up to 2⁴⁴ examples.

    Args:
        predictions: The indices of the predicted classes, of any shape.
        labels: The indices of the true classes, of the same shape.
        num_classes: The number of classes.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute()`, a dict with keys `"i/j"`: examples of
        class i that were predicted as j.

    Raises:
        TypeError: Predictions or labels are not integers.
        ValueError: The shapes differ. From `compute`: a prediction or a label is not a class index.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.confusion_matrix(jnp.array([1, 1, 0]), jnp.array([1, 0, 0]), 2).compute()
        {'0/0': 1, '0/1': 1, '1/0': 0, '1/1': 1}
    """
    size = as_int(num_classes, "num_classes", 1, "a number of classes")
    given, truth = checks.pair(
        checks.indices(predictions, "predictions"), checks.indices(labels, "labels"), ("predictions", "labels")
    )
    given, truth = checks.whole(given), checks.whole(truth)
    known = checks.is_class(given, size) & checks.is_class(truth, size)
    cell = truth.astype(jnp.int32) * size + given.astype(jnp.int32)
    cell = jnp.where(known, cell, jnp.full_like(cell, size * size))  # out of range: left out
    found = jax.ops.segment_sum(known.astype(jnp.uint32), cell, size * size)
    return ConfusionMatrix(counted(found.reshape(size, size)), how_many(~known))
