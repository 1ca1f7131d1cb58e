"""Metrics of classifiers, computed from counts or weights: accuracy, F1 score, confusion matrix and perplexity.

Weights mean the same in all: an example counts with its weight, one of weight 0 not at all, whatever its label and
scores. Without weights, and with a mask, counts are exact integers.
"""

import dataclasses
import math
import operator
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, as_number
from jstep.core.trees import Array
from jstep.metrics.arguments import indices, logits_and_labels, pair, scores_and_truth, weights_of, whole
from jstep.metrics.totals import Count, Sum, Total, each, summed, total_of


class _Totals:
    """Base class of metrics that are totals, which are summed over the batches."""

    def merge(self, other: Self) -> Self:
        """Merge with another metric object."""
        return cast(Self, jax.tree.map(operator.add, self, other, is_leaf=lambda part: isinstance(part, Total)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy(_Totals):
    """Result of `accuracy`: totals of one batch or several merged batches.

    Attributes:
        right: The number, or weight, of correct predictions.
        total: The number, or weight, of labels.
    """

    right: Total
    total: Total

    def compute(self) -> float:
        """The accuracy; NaN without examples, or if all weights are 0."""
        total = self.total.exact().item()
        return self.right.exact().item() / total if total else math.nan


def accuracy(logits: Any, labels: Any, *, weights: Any = None) -> Accuracy:
    """Accuracy of a classifier: `sklearn.metrics.accuracy_score(labels, argmax(logits), sample_weight=weights)`.

    Counts are exact up to 2⁴⁴ labels. Of equal logits the first is the prediction.

    Args:
        logits: `[..., classes]`, logits or probabilities.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, a weight of at least 0 for each label; a boolean mask works. By default each label counts
            once. A label of weight 0 is ignored, whatever it is.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Raises:
        TypeError: Labels are not integers, or weights are not numbers.
        ValueError: The shapes do not match.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> first = jstep.metrics.accuracy(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1, 1]))
        >>> second = jstep.metrics.accuracy(jnp.array([[0.0, 2.0]]), jnp.array([1]))
        >>> round(first.merge(second).compute(), 3)
        0.667
    """
    given, truth = logits_and_labels(logits, labels)
    weight = weights_of(weights, labels)
    right = jnp.argmax(given, axis=-1).astype(truth.dtype) == truth
    return Accuracy(total_of(right, weight), total_of(jnp.ones_like(right), weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1(_Totals):
    """Result of `f1`: totals of one batch or several merged batches.

    Attributes:
        both: The number, or weight, of true positives.
        predicted: The number, or weight, of predicted positives.
        true: The number, or weight, of positive labels.
    """

    both: Total
    predicted: Total
    true: Total

    def compute(self) -> float:
        """2 · both / (predicted + true); 0 if both counts are 0, as in scikit-learn."""
        either = self.predicted.exact().item() + self.true.exact().item()
        return 2 * self.both.exact().item() / either if either else 0.0


def f1(scores: Any, labels: Any, threshold: float = 0.5, *, weights: Any = None) -> F1:
    """F1 score of a binary classifier: `sklearn.metrics.f1_score(labels, scores > threshold, sample_weight=weights)`.

    Counts are exact up to 2⁴⁴ examples.

    Args:
        scores: Probabilities or other scores, of any shape.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        threshold: Scores above it are predicted positive.
        weights: Weights of at least 0, of the same shape; a boolean mask works. By default each example counts once.
            An example of weight 0 is ignored.

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
    given, truth = scores_and_truth(scores, labels)
    weight = weights_of(weights, labels)
    predicted = given > jnp.asarray(as_number(threshold, "threshold"), given.dtype)
    return F1(total_of(predicted & truth, weight), total_of(predicted, weight), total_of(truth, weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(_Totals):
    """Result of `confusion_matrix`: totals of one batch or several merged batches.

    Attributes:
        matrix: Numbers, or weights, of examples, `[num_classes, num_classes]`; rows are true classes.
        unknown: The number of examples of weight above 0 whose prediction or label is not a class index.
    """

    matrix: Total
    unknown: Count

    def compute(self) -> dict[str, int | float]:
        """Map `i/j` to the number, or weight, of examples of class i that were predicted as class j.

        Raises:
            ValueError: A prediction or a label is not a class index.
        """
        matrix, unknown = self.matrix.exact(), int(self.unknown.exact())
        if unknown:
            raise ValueError(
                f"num_classes={len(matrix)}: predictions and labels of confusion_matrix must be below it and not "
                f"negative, {unknown} examples have others; leave them out, or give more classes"
            )
        return {f"{i}/{j}": count.item() for i, row in enumerate(matrix) for j, count in enumerate(row)}


def confusion_matrix(predictions: Any, labels: Any, num_classes: int, *, weights: Any = None) -> ConfusionMatrix:
    """Confusion matrix of a classifier: `sklearn.metrics.confusion_matrix(labels, predictions, sample_weight=weights)`.

    Counts are exact up to 2⁴⁴ examples.

    Args:
        predictions: The indices of the predicted classes, of any shape.
        labels: The indices of the true classes, of the same shape.
        num_classes: The number of classes.
        weights: Weights of at least 0, of the same shape; a boolean mask works. By default each example counts once.
            An example of weight 0 is ignored, whatever its prediction and label.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute()`, a dict with keys `"i/j"`: examples of
        class i that were predicted as j, or their weight.

    Raises:
        TypeError: Predictions or labels are not integers, or weights are not numbers.
        ValueError: The shapes differ. From `compute`: a prediction or a label is not a class index.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.confusion_matrix(jnp.array([1, 1, 0]), jnp.array([1, 0, 0]), 2).compute()
        {'0/0': 1, '0/1': 1, '1/0': 0, '1/1': 1}
    """
    size = as_int(num_classes, "num_classes", 1, "a number of classes")
    given, truth = pair(indices(predictions, "predictions"), indices(labels, "labels"), ("predictions", "labels"))
    given, truth, weight = jax.tree.map(whole, (given, truth, weights_of(weights, labels)))
    known = _is_class(given, size) & _is_class(truth, size)
    cell = truth.astype(jnp.int32) * size + given.astype(jnp.int32)
    cell = jnp.where(known, cell, jnp.full_like(cell, size * size))  # out of range: left out
    found = each(known, weight).segment_sum(cell, size * size)
    matrix: Total = jax.tree.map(lambda part: part.reshape(size, size), found)
    counts = jnp.ones_like(known) if weight is None else weight != jnp.zeros((), weight.dtype)
    return ConfusionMatrix(matrix, cast(Count, total_of(~known & counts)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perplexity(_Totals):
    """Result of `perplexity`: totals of one batch or several merged batches.

    Attributes:
        loss: The sum of −log p(label), times the weights.
        total: The number, or weight, of labels.
    """

    loss: Sum
    total: Total

    def compute(self) -> float:
        """exp(mean of −log p(label)); NaN without labels, or if all weights are 0."""
        total = self.total.exact().item()
        if not total:
            return math.nan
        mean = self.loss.exact().item() / total
        return math.exp(mean) if mean < 709 else mean * math.inf


def perplexity(logits: Any, labels: Any, *, weights: Any = None) -> Perplexity:
    """Perplexity of a language model: exp(mean of −log p(label)), p = softmax(logits).

    Equal to `exp(sklearn.metrics.log_loss(labels, p, sample_weight=weights))`. Logarithms are computed in float32 or
    wider; sums have twice the digits of float32. If a label is not a class index, the result is NaN.

    Args:
        logits: `[..., classes]`.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, a weight of at least 0 for each label; a boolean mask works, such as `labels != padding`. By
            default each label counts once. A label of weight 0 is ignored, whatever it is.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Raises:
        TypeError: Labels are not integers, or weights are not numbers.
        ValueError: The shapes do not match.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> round(jstep.metrics.perplexity(jnp.zeros((2, 3, 50)), jnp.ones((2, 3), int)).compute(), 3)
        50.0

        Padding is left out by a mask:

        >>> labels = jnp.array([[2, 1, -1], [0, -1, -1]])
        >>> logits = jnp.zeros((2, 3, 50))
        >>> round(jstep.metrics.perplexity(logits, labels, weights=labels >= 0).compute(), 3)
        50.0
    """
    given, truth = logits_and_labels(logits, labels)
    weight = weights_of(weights, labels)
    logs = jax.nn.log_softmax(given, axis=-1)
    chosen = truth.astype(jnp.int32)[:, None] == jnp.arange(given.shape[-1], dtype=jnp.int32)[None]
    picked = jnp.sum(jnp.where(chosen, logs, jnp.zeros_like(logs)), axis=-1)
    known = _is_class(truth, given.shape[-1])
    losses = -jnp.where(known, picked, jnp.full_like(picked, jnp.nan))
    if weight is not None:
        wider = np.promote_types(losses.dtype, weight.dtype)
        factors = weight.astype(wider)
        losses = jnp.where(factors == 0, jnp.zeros_like(factors), losses.astype(wider) * factors)
    return Perplexity(summed(losses), total_of(jnp.ones_like(known), weight))


def _is_class(labels: Array, num_classes: int) -> Array:
    """Return a mask of the labels in 0 … num_classes − 1."""
    with jax.numpy_dtype_promotion("standard"):
        return (labels >= 0) & (labels < num_classes)
