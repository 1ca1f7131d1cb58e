"""Which classes are taken for which."""

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
    """What `confusion_matrix` returns: counts of a batch, or of several merged.

    Attributes:
        matrix: Counts `[num_classes, num_classes]`, rows the truth.
        unknown: How many predictions or labels are not indices of classes.
    """

    matrix: Count
    unknown: Count

    def merge(self, other: "ConfusionMatrix") -> "ConfusionMatrix":
        """Both together."""
        return ConfusionMatrix(self.matrix + other.matrix, self.unknown + other.unknown)

    def compute(self) -> dict[str, int]:
        """`i/j` → how many of class i were taken for class j.

        Raises:
            ValueError: A prediction or a label is not the index of a class.
        """
        matrix, unknown = self.matrix.exact(), int(self.unknown.exact())
        if unknown:
            raise ValueError(
                f"num_classes={len(matrix)}: predictions and labels of confusion_matrix must be below it and not "
                f"negative, {unknown} examples have others; leave them out, or give more classes"
            )
        return {f"{i}/{j}": int(count) for i, row in enumerate(matrix) for j, count in enumerate(row)}


def confusion_matrix(predictions: Any, labels: Any, num_classes: int) -> ConfusionMatrix:
    """How many examples of each class were taken for which: `sklearn.metrics.confusion_matrix(labels, predictions)`.

    Counted exactly, up to 2⁴⁴ examples.

    Args:
        predictions: The indices of the predicted classes, of any shape.
        labels: The indices of the true classes, as many.
        num_classes: How many classes there are.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute()`, a dict with keys `"i/j"`: truth i was
        predicted as j.

    Raises:
        TypeError: Predictions or labels are not integers.
        ValueError: The shapes differ. From `compute`: a prediction or a label is not the index of a class.

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
