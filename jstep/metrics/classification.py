"""Metrics of classifiers, computed from counts: accuracy, F1 score, confusion matrix and perplexity."""

import dataclasses
import math
import operator
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, as_number
from jstep.core.contexts import internal_transfers
from jstep.core.types import Array
from jstep.metrics import checks
from jstep.metrics.counts import Count, counted, how_many


class _Counts:
    """Base class of metrics that are counts, which are summed over the batches."""

    def merge(self, other: Self) -> Self:
        """Merge with another metric object."""
        return cast(Self, jax.tree.map(operator.add, self, other, is_leaf=lambda part: isinstance(part, Count)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy(_Counts):
    """Result of `accuracy`: counts of one batch or several merged batches.

    Attributes:
        right: The number of correct predictions.
        total: The number of labels.
    """

    right: Count
    total: Count

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1(_Counts):
    """Result of `f1`: counts of one batch or several merged batches.

    Attributes:
        both: The number of true positives.
        predicted: The number of predicted positives.
        true: The number of positive labels.
    """

    both: Count
    predicted: Count
    true: Count

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(_Counts):
    """Result of `confusion_matrix`: counts of one batch or several merged batches.

    Attributes:
        matrix: Counts `[num_classes, num_classes]`; rows are true classes.
        unknown: The number of examples whose prediction or label is not a class index.
    """

    matrix: Count
    unknown: Count

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result of `perplexity`: sums over one batch or several merged batches.

    Attributes:
        loss: The sum of −log p(label), rounded.
        rest: The rounding error of `loss`, so that the sum over many batches has twice the digits.
        total: The number of labels.
    """

    loss: Array
    rest: Array
    total: Count

    def merge(self, other: "Perplexity") -> "Perplexity":
        """Merge with another metric object."""
        loss = self.loss + other.loss
        part = loss - self.loss
        lost = (self.loss - (loss - part)) + (other.loss - part)  # the exact error of that sum (Knuth)
        finite = jnp.isfinite(loss)
        return Perplexity(
            loss, jnp.where(finite, lost + self.rest + other.rest, jnp.zeros_like(lost)), self.total + other.total
        )

    def compute(self) -> float:
        """exp(mean of −log p(label)); NaN without labels."""
        total = int(self.total.exact())
        with internal_transfers():
            loss, rest = (float(np.asarray(part, np.float64)) for part in (self.loss, self.rest))
        if not total:
            return math.nan
        mean = (loss + rest) / total
        return math.exp(mean) if mean < 709 else mean * math.inf


def perplexity(logits: Any, labels: Any) -> Perplexity:
    """Perplexity of a language model: exp(mean of −log p(label)), p = softmax(logits).

    Equal to `exp(sklearn.metrics.log_loss(labels, p))`. Logarithms are computed in float32 or wider; the sum over
    batches has twice the digits of float32. If a label is not a class index, the result is NaN.

    Args:
        logits: `[..., classes]`.
        labels: `[...]`, the indices of the true classes.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Raises:
        TypeError: Labels are not integers.
        ValueError: The shapes do not match.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> round(jstep.metrics.perplexity(jnp.zeros((2, 3, 50)), jnp.ones((2, 3), int)).compute(), 3)
        50.0
    """
    given, truth = checks.logits_and_labels(logits, labels)
    logs = jax.nn.log_softmax(given, axis=-1)
    chosen = truth.astype(jnp.int32)[:, None] == jnp.arange(given.shape[-1], dtype=jnp.int32)[None]
    picked = jnp.sum(jnp.where(chosen, logs, jnp.zeros_like(logs)), axis=-1)
    known = checks.is_class(truth, given.shape[-1])
    loss = -jnp.sum(jnp.where(known, picked, jnp.full_like(picked, jnp.nan)))
    return Perplexity(loss, jnp.zeros_like(loss), counted(jnp.uint32(truth.size)))
