"""Metrics of classifiers: accuracy, F1 score, confusion matrix, perplexity, and areas under curves."""

import dataclasses
import math
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jstep.core import device_values, meshes, trees
from jstep.core.checks import as_choice, as_int, as_number, describe_type
from jstep.core.trees import Array
from jstep.metrics.totals import FULL, add_totals, in_one_dtype, per_element, read_total, sum_where

# Metrics that are totals over all examples.


class _Totals:
    def merge(self, other: Self) -> Self:
        return cast(Self, jax.tree.map(add_totals, self, other))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accuracy(_Totals):
    """Result of `accuracy`: totals of one batch or several merged batches.

    Attributes:
        right: The number, or weight, of correct predictions.
        unknown: The number of labels of weight above 0 whose logits have a NaN.
    """

    right: Array
    total: Array
    unknown: Array

    def compute(self) -> float:
        """Return the accuracy; NaN without examples, if all weights are 0, or if a logit is NaN."""
        total = read_total(self.total).item()
        return read_total(self.right).item() / total if total and not read_total(self.unknown) else math.nan


def accuracy(logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> Accuracy:
    """Accuracy of a classifier: `sklearn.metrics.accuracy_score(labels, argmax(logits), sample_weight=weights)`.

    Counts are exact up to 2³² labels; more give NaN, and so does a NaN logit. Of equal logits the first is the
    prediction.

    Args:
        logits: `[..., classes]`, logits or probabilities.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, weights ≥ 0, by default 1, or a mask. A label of weight 0 is ignored, whatever it is.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> first = jstep.metrics.accuracy(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([1, 1]))
        >>> second = jstep.metrics.accuracy(jnp.array([[0.0, 2.0]]), jnp.array([1]))
        >>> round(first.merge(second).compute(), 3)
        0.667
    """
    scores, truth = logits_and_labels(logits, labels)
    weight = as_weights(weights, labels)
    right = jnp.argmax(scores, axis=-1).astype(truth.dtype) == truth
    unknown = count_flagged(jnp.any(jnp.isnan(scores), axis=-1), weight)
    return Accuracy(sum_where(right, weight), sum_where(jnp.ones_like(right), weight), unknown)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class F1(_Totals):
    """Result of `f1`: totals of one batch or several merged batches.

    Attributes:
        both, predicted, true: The number, or weight, of true positives, predicted positives, positive labels.
        unknown: The number of examples of weight above 0 whose score is NaN.
    """

    both: Array
    predicted: Array
    true: Array
    unknown: Array

    def compute(self) -> float:
        """Return 2 · both / (predicted + true); 0 if both counts are 0; NaN if a score is NaN."""
        if read_total(self.unknown):
            return math.nan
        either = read_total(self.predicted).item() + read_total(self.true).item()
        return 2 * read_total(self.both).item() / either if either else 0.0


def f1(scores: ArrayLike, labels: ArrayLike, threshold: float = 0.5, *, weights: ArrayLike | None = None) -> F1:
    """F1 score of a binary classifier: `sklearn.metrics.f1_score(labels, scores > threshold, sample_weight=weights)`.

    Counts are exact up to 2³² examples; more give NaN, and so does a NaN score.

    Args:
        scores: Probabilities or other scores, of any shape.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        threshold: Scores above it are predicted positive.
        weights: As in `accuracy`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.f1(jnp.array([0.9, 0.6, 0.2, 0.1]), jnp.array([1, 0, 1, 0])).compute()
        0.5
    """
    values, truth = scores_and_truth(scores, labels)
    weight = as_weights(weights, labels)
    predicted = values > jnp.asarray(as_number(threshold, "threshold"), values.dtype)
    totals = (sum_where(predicted & truth, weight), sum_where(predicted, weight), sum_where(truth, weight))
    return F1(*totals, count_flagged(jnp.isnan(values), weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(_Totals):
    """Result of `confusion_matrix`: totals of one batch or several merged batches.

    Attributes:
        matrix: `[num_classes, num_classes]`; rows are true classes.
        unknown: The number of examples of weight above 0 whose prediction or label is not a class index.
    """

    matrix: Array
    unknown: Array

    def compute(self) -> dict[str, int | float]:
        """Map `i/j` to the number, or weight, of examples of class i that were predicted as class j.

        Raises:
            ValueError: A prediction or a label is not a class index.
        """
        matrix = read_total(self.matrix)
        unknown = int(read_total(self.unknown))
        if unknown:
            raise ValueError(
                f"num_classes={len(matrix)}: must cover all labels and predictions, {unknown} examples have others"
            )
        return {f"{i}/{j}": count.item() for i, row in enumerate(matrix) for j, count in enumerate(row)}


def confusion_matrix(
    predictions: ArrayLike, labels: ArrayLike, num_classes: int, *, weights: ArrayLike | None = None
) -> ConfusionMatrix:
    """Confusion matrix of a classifier: `sklearn.metrics.confusion_matrix(labels, predictions, sample_weight=weights)`.

    Counts are exact up to 2³² in a cell; more give NaN.

    Args:
        predictions: The indices of the predicted classes, of any shape.
        labels: The indices of the true classes, of the same shape.
        num_classes: The number of classes.
        weights: As in `accuracy`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute()`, a dict with keys `"i/j"`: examples of
        class i that were predicted as j, or their weight.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.confusion_matrix(jnp.array([1, 1, 0]), jnp.array([1, 0, 0]), 2).compute()
        {'0/0': 1, '0/1': 1, '1/0': 0, '1/1': 1}
    """
    size = as_int(num_classes, "num_classes", 1, "a number of classes")
    predicted, truth = pair(indices(predictions, "predictions"), indices(labels, "labels"), ("predictions", "labels"))
    predicted, truth, weight = jax.tree.map(whole, (predicted, truth, as_weights(weights, labels)))
    valid = _is_class(predicted, size) & _is_class(truth, size)
    cell = truth.astype(jnp.int32) * size + predicted.astype(jnp.int32)
    cell = jnp.where(valid, cell, jnp.full_like(cell, size * size))  # out of range: left out
    cells = jax.ops.segment_sum(per_element(valid, weight), cell, size * size)
    return ConfusionMatrix(cells.reshape(size, size), count_flagged(~valid, weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perplexity(_Totals):
    """Result of `perplexity`: the sum of weighted −log p(label), and the number, or weight, of labels."""

    loss: Array
    total: Array

    def compute(self) -> float:
        """Return exp(mean of −log p(label)); NaN without labels, or if all weights are 0."""
        total = read_total(self.total).item()
        if not total:
            return math.nan
        mean = read_total(self.loss).item() / total
        return math.exp(mean) if mean < 709 else mean * math.inf


def perplexity(logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> Perplexity:
    """Perplexity of a language model: exp(mean of −log p(label)), p = softmax(logits).

    Equal to `exp(sklearn.metrics.log_loss(labels, p, sample_weight=weights))`; NaN if a label is not a class index.

    Args:
        logits: `[..., classes]`.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, as in `accuracy`, such as `labels != padding`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> labels = jnp.array([[2, 1, -1], [0, -1, -1]])  # with padding
        >>> round(jstep.metrics.perplexity(jnp.zeros((2, 3, 50)), labels, weights=labels >= 0).compute(), 3)
        50.0
    """
    scores, truth = logits_and_labels(logits, labels)
    weight = as_weights(weights, labels)
    logs = jax.nn.log_softmax(scores, axis=-1)
    chosen = truth.astype(jnp.int32)[:, None] == jnp.arange(scores.shape[-1], dtype=jnp.int32)[None]
    picked = jnp.sum(jnp.where(chosen, logs, jnp.zeros_like(logs)), axis=-1)
    valid = _is_class(truth, scores.shape[-1])
    losses = -jnp.where(valid, picked, jnp.full_like(picked, jnp.nan))
    if weight is not None:
        wider = np.promote_types(losses.dtype, weight.dtype)
        factors = weight.astype(wider)
        losses = jnp.where(factors == 0, jnp.zeros_like(factors), losses.astype(wider) * factors)
    return Perplexity(jnp.sum(losses), sum_where(jnp.ones_like(valid), weight))


def count_flagged(flags: Array, weight: Array | None) -> Array:
    return sum_where(flags if weight is None else flags & (weight != jnp.zeros((), weight.dtype)))


def _is_class(labels: Array, num_classes: int) -> Array:
    with jax.numpy_dtype_promotion("standard"):
        return (labels >= 0) & (labels < num_classes)


# Area under the ROC curve, and average precision, from counts of examples by score in a fixed number of bins.

_FINER = 32
"""Multiplier of the requested number of thresholds."""
_MAX_THRESHOLDS = 2**14
_WHOLE = 2**29


class Thresholds(NamedTuple):
    """Examples in bins of scores.

    Attributes:
        low: The lowest score of each bin.
        counts: `[bins, 2]`, the number, or weight, of positive and of negative examples.
    """

    low: Array
    high: Array
    counts: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AUC:
    """Result of `auc`: the scores of one batch or several merged batches, as counts by threshold."""

    thresholds: Thresholds
    curve: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"AUC(curve={self.curve!r}, thresholds: {np.shape(self.thresholds.low)[-1]})"

    def merge(self, other: "AUC") -> "AUC":
        parts = (jnp.concatenate(in_one_dtype(*two)) for two in zip(self.thresholds, other.thresholds, strict=True))
        return AUC(_fewer(Thresholds(*parts), self.thresholds.low.size), self.curve)

    def compute(self) -> float:
        """Return the area; NaN if it is undefined or a score is NaN."""
        kept = self.thresholds
        with meshes.internal_transfers():
            low, high = (np.asarray(end, np.float64) for end in (kept.low, kept.high))
        counts = read_total(kept.counts).astype(np.float64)
        seen = counts.sum(axis=1) > 0
        if not seen.any() or np.isnan(low[seen]).any() or np.isnan(counts).any():
            return math.nan
        # From the highest score to the lowest; equal scores are one threshold.
        spans = np.stack([low, high], axis=1)[seen]
        order = np.lexsort((spans[:, 0], np.where(spans[:, 0] == spans[:, 1], spans[:, 0], spans.mean(axis=1))))[::-1]
        spans = spans[order]
        counts = counts[seen][order]
        first = np.flatnonzero(np.r_[True, (spans[1:] != spans[:-1]).any(axis=1)])
        positive, negative = np.add.reduceat(counts, first).T
        is_span = (spans[:, 0] < spans[:, 1])[first]
        if self.curve == "PR":
            return _average_precision(positive, negative, is_span)
        # The fraction of (positive, negative) pairs in the right order; equal scores count half.
        pairs = float(positive.sum() * negative.sum())
        above = np.cumsum(positive) - positive
        return float(np.sum(negative * (above + positive / 2))) / pairs if pairs else math.nan


def auc(
    scores: ArrayLike,
    labels: ArrayLike,
    curve: str = "ROC",
    num_thresholds: int = 200,
    *,
    weights: ArrayLike | None = None,
) -> AUC:
    """Area under the ROC curve, or average precision, of a binary classifier.

    Equal to `sklearn.metrics.roc_auc_score(labels, scores)` and `average_precision_score(labels, scores)`, both with
    `sample_weight=weights`, for at most `32 · num_thresholds` different scores (6400 by default), with exact counts up
    to 2³² examples. If there are more scores, neighbors share a threshold: for a million scores the area then differs
    by less than 1e-4 and the average precision by less than 1e-3.

    Args:
        scores: Scores of any shape, such as probabilities or logits.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        curve: `"ROC"`, or `"PR"` for the average precision.
        num_thresholds: The number of thresholds, from 2 to 16384.
        weights: As in `accuracy`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`: NaN without examples, with a NaN
        score, and for ROC if all labels are equal.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> jstep.metrics.auc(scores, labels).compute()
        0.75

    Source: Fawcett, "An introduction to ROC analysis" (2006); `tf.metrics.auc`.
    """
    as_choice(curve, "curve", ("ROC", "PR"))
    number = as_int(num_thresholds, "num_thresholds", 2, "a number of thresholds")
    if number > _MAX_THRESHOLDS:
        raise ValueError(f"num_thresholds={number}: must be at most {_MAX_THRESHOLDS}")
    values, truth, weight = jax.tree.map(whole, (*scores_and_truth(scores, labels), as_weights(weights, labels)))
    if weight is not None and weight.dtype != jnp.bool_:
        # An invalid weight acts like a NaN score, because bins cannot be compared by NaN weights.
        values = jnp.where(jnp.isnan(weight), jnp.full_like(values, jnp.nan), values)
        weight = jnp.where(jnp.isnan(weight), jnp.ones_like(weight), weight)
    counts = jnp.stack([per_element(truth, weight), per_element(~truth, weight)], axis=1)
    bins = Thresholds(values, values, counts)
    most = number * _FINER
    if values.size > most:
        return AUC(_fewer(bins, most), curve)
    # The number of bins is the same for all batches, so that `merge` is compiled once.
    missing = most - values.size
    return AUC(Thresholds(*(jnp.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) for part in bins)), curve)


def _average_precision(positive: Any, negative: Any, is_span: object) -> float:
    """The mean precision over thresholds, weighted by positives; averaged over each range of scores."""
    total = float(positive.sum())
    if not total:
        return 0.0  # as scikit-learn
    size = positive + negative
    true = np.cumsum(positive)
    seen = np.cumsum(size)
    precision = true / seen
    is_first = np.arange(len(seen)) == 0
    before = np.where(is_first, 1, seen - size)
    share = positive / size
    spread = share + (true - positive - before * share) / size * np.log1p(size / before)
    return float(np.sum(positive * np.where(is_span & ~is_first, spread, precision))) / total


def _fewer(bins: Thresholds, most: int) -> Thresholds:
    counts = bins.counts.astype(jnp.float32)
    # By the middle of their range; NaN scores and empty bins, which become NaN, come last.
    is_empty = jnp.sum(counts, axis=1) == 0
    low, high = (jnp.where(is_empty, jnp.full_like(end, jnp.nan), end) for end in (bins.low, bins.high))
    limits: Any = jnp.finfo(low.dtype)  # type: ignore[no-untyped-call]
    finite = [jnp.clip(end, limits.min, limits.max) * jnp.asarray(0.5, low.dtype) for end in (low, high)]
    order = jnp.lexsort((low, jnp.where(low == high, low, finite[0] + finite[1])))
    low = low[order]
    high = high[order]
    counts = counts[order]
    group = jnp.cumsum((_differs(low) | _differs(high)).astype(jnp.int32)) - 1
    unit = jnp.float32(1)
    if bins.counts.dtype != jnp.uint32:
        unit = jnp.min(jnp.where(counts > 0, counts, jnp.full_like(counts, jnp.inf)), initial=jnp.inf)
    index = _bin_indices(jax.ops.segment_sum(counts, group, len(group)), unit, most)[group]
    ends = jax.ops.segment_max(jnp.stack([-low, high], axis=1), index, most)
    totals = jax.ops.segment_sum(bins.counts[order], index, most)
    if totals.dtype == jnp.uint32:
        is_full = jax.ops.segment_sum(counts, index, most) >= jnp.float32(FULL)
        totals = jnp.where(is_full, jnp.full_like(totals, FULL), totals)
    return Thresholds(-ends[:, 0], ends[:, 1], totals)


def _bin_indices(counts: Array, unit: Array, most: int) -> Array:
    """The bin of each score, from counts `[scores, 2]`; scores without examples get `most`."""
    # The size of a score is its share of the positive examples, the negative examples and the log ranks, because
    # precision changes fastest at the highest scores.
    both = jnp.sum(counts, axis=1)
    rank = jnp.log1p(both / (jnp.cumsum(both[::-1])[::-1] - both + unit))
    shares = jnp.concatenate([counts, rank[:, None]], axis=1)
    size = jnp.sum(shares / jnp.maximum(jnp.sum(shares, axis=0, keepdims=True), jnp.float32(1e-30)), axis=1)
    # Integers, because sums of float32 are not monotone.
    size = jnp.floor(size / jnp.sum(size) * _WHOLE).astype(jnp.int32)
    equal_bins = most // 3
    middle = jnp.cumsum(size) - size + size // 2
    bins = jnp.minimum(jnp.floor(middle.astype(jnp.float32) * (equal_bins / _WHOLE)), jnp.float32(equal_bins - 1))
    is_large = size > _WHOLE // equal_bins
    index = jnp.cumsum((_differs(bins) | is_large | jnp.roll(is_large, 1)).astype(jnp.int32)) - 1
    is_seen = both > 0
    is_few = jnp.sum(is_seen.astype(jnp.int32)) <= most
    index = jnp.where(is_few, jnp.arange(len(index), dtype=jnp.int32), index)
    return jnp.where(is_seen, index, jnp.full_like(index, most))


def _differs(vector: Array) -> Array:
    before = vector[:-1]
    after = vector[1:]
    return jnp.concatenate([jnp.ones((1,), bool), (before != after) & ~(jnp.isnan(before) & jnp.isnan(after))])


# Validation of arguments.


def scores_and_truth(scores: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    values, truth = pair(_numbers(scores, "scores"), _numbers(labels, "labels"), ("scores", "labels"))
    return _at_least_float32(values), truth == jnp.ones((), truth.dtype)


def logits_and_labels(logits: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    array = _numbers(logits, "logits")
    truth = indices(labels, "labels")
    if array.ndim == 0 or array.shape[:-1] != truth.shape:
        raise ValueError(
            f"logits has shape {array.shape}, labels has shape {truth.shape}: must be [..., classes] and [...]"
        )
    return _at_least_float32(array).reshape(math.prod(truth.shape), array.shape[-1]), truth.reshape(-1)


def as_weights(weights: ArrayLike | None, labels: ArrayLike) -> Array | None:
    """Return flattened weights of float32 or wider, or a mask; an invalid weight becomes NaN."""
    if weights is None:
        return None
    array = _numbers(weights, "weights")
    if array.shape != np.shape(labels):
        raise ValueError(
            f"weights has shape {array.shape}, labels has shape {np.shape(labels)}: must be equal; broadcast weights"
        )
    array = array.reshape(-1)
    if array.dtype == jnp.bool_:
        return array
    array = _at_least_float32(array)
    return jnp.where((array >= 0) & (array < jnp.inf), array, jnp.full_like(array, jnp.nan))


def pair(first: Array, second: Array, names: tuple[str, str]) -> tuple[Array, Array]:
    if first.shape != second.shape:
        raise ValueError(f"{names[0]} has shape {first.shape}, {names[1]} has shape {second.shape}: must be equal")
    return first.reshape(-1), second.reshape(-1)


def indices(value: object, argument: str) -> Array:
    array = _numbers(value, argument)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{argument}: must be integers, the indices of classes, got {describe_type(array)}")
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def _numbers(value: object, argument: str) -> Array:
    if not (trees.is_array(value) or isinstance(value, bool | int | float | list | tuple)):
        raise TypeError(f"{argument}: must be an array of numbers, got {describe_type(value)}")
    array = device_values.as_array(value, argument)
    if not any(jnp.issubdtype(array.dtype, dtype) for dtype in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{argument}: must be an array of numbers, got {describe_type(array)}")
    return array


def _at_least_float32(array: Array) -> Array:
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def whole(vector: Array) -> Array:
    mesh = meshes.explicit_mesh(vector)
    return vector if mesh is None else jax.sharding.reshard(vector, NamedSharding(mesh, PartitionSpec()))
