"""The F1 score of a binary classifier."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.checks import as_number
from jstep.metrics import checks
from jstep.metrics.counts import Count, how_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1:
    """Result of `f1`: counts of one batch or several merged batches.

    Attributes:
        both: The number of true positives.
        predicted: The number of predicted positives.
        true: The number of positive labels.
    """

    both: Count
    predicted: Count
    true: Count

    def merge(self, other: "F1") -> "F1":
        """Merge with another metric object."""
        return F1(self.both + other.both, self.predicted + other.predicted, self.true + other.true)

    def compute(self) -> float:
        """2 · both / (predicted + true); 0 if both counts are 0, as in scikit-learn."""
        either = int(self.predicted.exact()) + int(self.true.exact())
        return 2 * int(self.both.exact()) / either if either else 0.0


def f1(scores: Any, labels: Any, threshold: float = 0.5) -> F1:
    """F1 score of a binary classifier: `sklearn.metrics.f1_score(labels, scores > threshold)`.

    Counts are exact up to 2⁴⁴ examples.

    Args:
        scores: Probabilities or other scores, of any shape.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        threshold: Scores above it are predicted positive.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Raises:
        TypeError: An argument is not an array of numbers.
        ValueError: The shapes differ.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.f1(jnp.array([0.9, 0.6, 0.2, 0.1]), jnp.array([1, 0, 1, 0])).compute()
        0.5
    """
    given, truth = checks.scores_and_truth(scores, labels)
    predicted = given > jnp.asarray(as_number(threshold, "threshold"), given.dtype)
    return F1(how_many(predicted & truth), how_many(predicted), how_many(truth))
