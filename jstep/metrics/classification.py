"""Metrics of classifiers: accuracy, F1 score, confusion matrix, perplexity, areas under curves."""

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
from jstep.metrics.totals import (
    FULL,
    add_totals,
    as_one_dtype,
    element_totals,
    read_total,
    sum_where,
)

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
        if not total or read_total(self.unknown):
            return math.nan
        return read_total(self.right).item() / total


def accuracy(logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> Accuracy:
    """Accuracy of a classifier.

    Equal to `sklearn.metrics.accuracy_score(labels, argmax(logits), sample_weight=weights)`. Counts
    are exact up to 2³² labels; more give NaN, and so does a NaN logit. Of equal logits the first is
    the prediction.

    Args:
        logits: `[..., classes]`, logits or probabilities.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, weights ≥ 0, by default 1, or a mask. A label of weight 0 is ignored,
            whatever it is.

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
        both, predicted, true: The number, or weight, of true positives, predicted positives,
            positive labels.
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
        if not either:
            return 0.0
        return 2 * read_total(self.both).item() / either


def f1(
    scores: ArrayLike,
    labels: ArrayLike,
    threshold: float = 0.5,
    *,
    weights: ArrayLike | None = None,
) -> F1:
    """F1 score of a binary classifier.

    Equal to `sklearn.metrics.f1_score(labels, scores > threshold, sample_weight=weights)`. Counts
    are exact up to 2³² examples; more give NaN, and so does a NaN score.

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
    return F1(
        both=sum_where(predicted & truth, weight),
        predicted=sum_where(predicted, weight),
        true=sum_where(truth, weight),
        unknown=count_flagged(jnp.isnan(values), weight),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(_Totals):
    """Result of `confusion_matrix`: totals of one batch or several merged batches.

    Attributes:
        matrix: `[num_classes, num_classes]`; rows are true classes.
        unknown: The number of examples of weight above 0 whose prediction or label is not a class
            index.
    """

    matrix: Array
    unknown: Array

    def compute(self) -> dict[str, int | float]:
        """Map `i/j` to the number, or weight, of examples of class i predicted as class j.

        Raises:
            ValueError: A prediction or a label is not a class index.
        """
        matrix = read_total(self.matrix)
        unknown = int(read_total(self.unknown))
        if unknown:
            raise ValueError(
                f"num_classes={len(matrix)}: must cover all labels and predictions, "
                f"{unknown} examples have others"
            )
        cells: dict[str, int | float] = {}
        for i, row in enumerate(matrix):
            for j, count in enumerate(row):
                cells[f"{i}/{j}"] = count.item()
        return cells


def confusion_matrix(
    predictions: ArrayLike, labels: ArrayLike, num_classes: int, *, weights: ArrayLike | None = None
) -> ConfusionMatrix:
    """Confusion matrix of a classifier.

    Equal to `sklearn.metrics.confusion_matrix(labels, predictions, sample_weight=weights)`. Counts
    are exact up to 2³² in a cell; more give NaN.

    Args:
        predictions: The indices of the predicted classes, of any shape.
        labels: The indices of the true classes, of the same shape.
        num_classes: The number of classes.
        weights: As in `accuracy`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute()`, a dict with keys
        `"i/j"`: examples of class i that were predicted as j, or their weight.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.metrics.confusion_matrix(jnp.array([1, 1, 0]), jnp.array([1, 0, 0]), 2).compute()
        {'0/0': 1, '0/1': 1, '1/0': 0, '1/1': 1}
    """
    size = as_int(num_classes, "num_classes", 1, "a number of classes")
    predicted = indices(predictions, "predictions")
    truth = indices(labels, "labels")
    predicted, truth = pair(predicted, truth, ("predictions", "labels"))
    predicted, truth, weight = jax.tree.map(whole, (predicted, truth, as_weights(weights, labels)))
    valid = _is_class(predicted, size) & _is_class(truth, size)
    cell = truth.astype(jnp.int32) * size + predicted.astype(jnp.int32)
    # `segment_sum` ignores indices out of range.
    cell = jnp.where(valid, cell, jnp.full_like(cell, size * size))
    cells = jax.ops.segment_sum(element_totals(valid, weight), cell, size * size)
    return ConfusionMatrix(cells.reshape(size, size), count_flagged(~valid, weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perplexity(_Totals):
    """Result of `perplexity`: Σ weighted −log p(label), and the number, or weight, of labels."""

    loss: Array
    total: Array

    def compute(self) -> float:
        """Return exp(mean of −log p(label)); NaN without labels, or if all weights are 0."""
        total = read_total(self.total).item()
        if not total:
            return math.nan
        mean = read_total(self.loss).item() / total
        # From 710 on, `math.exp` raises an OverflowError; NaN stays NaN.
        return math.exp(mean) if mean < 709 else mean * math.inf


def perplexity(
    logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None
) -> Perplexity:
    """Perplexity of a language model: exp(mean of −log p(label)), p = softmax(logits).

    Equal to `exp(sklearn.metrics.log_loss(labels, p, sample_weight=weights))`; NaN if a label is
    not a class index.

    Args:
        logits: `[..., classes]`.
        labels: `[...]`, the indices of the true classes.
        weights: `[...]`, as in `accuracy`, such as `labels != padding`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> labels = jnp.array([[2, 1, -1], [0, -1, -1]])  # with padding
        >>> logits = jnp.zeros((2, 3, 50))
        >>> result = jstep.metrics.perplexity(logits, labels, weights=labels >= 0)
        >>> round(result.compute(), 3)
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
    if weight is not None:
        flags = flags & (weight != jnp.zeros((), weight.dtype))
    return sum_where(flags)


def _is_class(labels: Array, num_classes: int) -> Array:
    with jax.numpy_dtype_promotion("standard"):
        return (labels >= 0) & (labels < num_classes)


# Area under the ROC curve, and average precision, from counts of examples by score in a fixed
# number of bins.

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
    """Result of `auc`: the scores of one batch or several merged ones, as counts by threshold."""

    thresholds: Thresholds
    curve: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"AUC(curve={self.curve!r}, thresholds: {np.shape(self.thresholds.low)[-1]})"

    def merge(self, other: "AUC") -> "AUC":
        first = self.thresholds
        second = other.thresholds
        merged = Thresholds(
            low=jnp.concatenate(as_one_dtype(first.low, second.low)),
            high=jnp.concatenate(as_one_dtype(first.high, second.high)),
            counts=jnp.concatenate(as_one_dtype(first.counts, second.counts)),
        )
        return AUC(_merge_bins(merged, self.thresholds.low.size), self.curve)

    def compute(self) -> float:
        """Return the area; NaN if it is undefined or a score is NaN."""
        with meshes.internal_transfers():
            low = np.asarray(self.thresholds.low, np.float64)
            high = np.asarray(self.thresholds.high, np.float64)
        counts = read_total(self.thresholds.counts).astype(np.float64)
        is_filled = counts.sum(axis=1) > 0
        if not is_filled.any() or np.isnan(low[is_filled]).any() or np.isnan(counts).any():
            return math.nan
        low = low[is_filled]
        high = high[is_filled]
        counts = counts[is_filled]
        # Sort from the highest score to the lowest, by the middle of each bin. If its ends are
        # equal, either is the middle: their sum may overflow.
        middle = np.where(low == high, low, np.stack([low, high], axis=1).mean(axis=1))
        order = np.lexsort((low, middle))[::-1]
        low = low[order]
        high = high[order]
        # Bins of equal scores from different batches are one threshold.
        is_new = np.r_[True, (low[1:] != low[:-1]) | (high[1:] != high[:-1])]
        first = np.flatnonzero(is_new)
        positive, negative = np.add.reduceat(counts[order], first).T
        if self.curve == "PR":
            is_span = (low < high)[first]
            return _average_precision(positive, negative, is_span)
        # The fraction of (positive, negative) pairs in the right order; equal scores count half.
        pair_count = float(positive.sum() * negative.sum())
        if not pair_count:
            return math.nan
        higher_positive = np.cumsum(positive) - positive
        return float(np.sum(negative * (higher_positive + positive / 2))) / pair_count


def auc(
    scores: ArrayLike,
    labels: ArrayLike,
    curve: str = "ROC",
    num_thresholds: int = 200,
    *,
    weights: ArrayLike | None = None,
) -> AUC:
    """Area under the ROC curve, or average precision, of a binary classifier.

    Equal to `sklearn.metrics.roc_auc_score(labels, scores)` and
    `average_precision_score(labels, scores)`, both with `sample_weight=weights`, for at most
    `32 · num_thresholds` different scores (6400 by default), with exact counts up to 2³² examples.
    If there are more scores, neighbors share a threshold: for a million scores the area then
    differs by less than 1e-4 and the average precision by less than 1e-3.

    Args:
        scores: Scores of any shape, such as probabilities or logits.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        curve: `"ROC"`, or `"PR"` for the average precision.
        num_thresholds: The number of thresholds, from 2 to 16384.
        weights: As in `accuracy`.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`: NaN without
        examples, with a NaN score, and for ROC if all labels are equal.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> scores = jnp.array([0.1, 0.4, 0.35, 0.8])
        >>> labels = jnp.array([0, 0, 1, 1])
        >>> jstep.metrics.auc(scores, labels).compute()
        0.75

    Source: Fawcett, "An introduction to ROC analysis" (2006); `tf.metrics.auc`.
    """
    as_choice(curve, "curve", ("ROC", "PR"))
    num_thresholds = as_int(num_thresholds, "num_thresholds", 2, "a number of thresholds")
    if num_thresholds > _MAX_THRESHOLDS:
        raise ValueError(f"num_thresholds={num_thresholds}: must be at most {_MAX_THRESHOLDS}")
    values, truth = scores_and_truth(scores, labels)
    values, truth, weight = jax.tree.map(whole, (values, truth, as_weights(weights, labels)))
    if weight is not None and weight.dtype != jnp.bool_:
        # An invalid weight acts like a NaN score, because bins cannot be compared by NaN weights.
        values = jnp.where(jnp.isnan(weight), jnp.full_like(values, jnp.nan), values)
        weight = jnp.where(jnp.isnan(weight), jnp.ones_like(weight), weight)
    counts = jnp.stack([element_totals(truth, weight), element_totals(~truth, weight)], axis=1)
    bins = Thresholds(values, values, counts)
    bin_count = num_thresholds * _FINER
    if values.size > bin_count:
        return AUC(_merge_bins(bins, bin_count), curve)
    # The number of bins is the same for all batches, so that `merge` is compiled once.
    missing = bin_count - values.size
    padded = Thresholds(
        low=jnp.pad(bins.low, (0, missing)),
        high=jnp.pad(bins.high, (0, missing)),
        counts=jnp.pad(bins.counts, [(0, missing), (0, 0)]),
    )
    return AUC(padded, curve)


def _average_precision(positive: Any, negative: Any, is_span: object) -> float:
    """The mean precision over thresholds, weighted by positives; averaged over ranges of scores."""
    total = float(positive.sum())
    if not total:
        return 0.0  # as in scikit-learn
    size = positive + negative
    true = np.cumsum(positive)
    seen = np.cumsum(size)
    precision = true / seen
    # In a range of scores, positives and negatives are assumed to be mixed evenly. After x of its
    # examples, the precision is (true' + x·share) / (seen' + x), with the totals of the higher
    # scores; its mean over x is `spread`.
    is_first = np.arange(len(seen)) == 0
    higher_seen = np.where(is_first, 1, seen - size)
    share = positive / size
    spread = share + (true - positive - higher_seen * share) / size * np.log1p(size / higher_seen)
    return float(np.sum(positive * np.where(is_span & ~is_first, spread, precision))) / total


def _merge_bins(bins: Thresholds, bin_count: int) -> Thresholds:
    """Sort bins by their scores, and join neighbors so that at most `bin_count` are left."""
    counts = bins.counts.astype(jnp.float32)
    # Sort by the middle of the range; NaN scores and empty bins, which become NaN, come last.
    is_empty = jnp.sum(counts, axis=1) == 0
    low = jnp.where(is_empty, jnp.full_like(bins.low, jnp.nan), bins.low)
    high = jnp.where(is_empty, jnp.full_like(bins.high, jnp.nan), bins.high)
    order = jnp.lexsort((low, jnp.where(low == high, low, _half(low) + _half(high))))
    low = low[order]
    high = high[order]
    counts = counts[order]
    # Bins of equal scores are one group.
    group = jnp.cumsum((_differs(low) | _differs(high)).astype(jnp.int32)) - 1
    unit = jnp.float32(1)
    if bins.counts.dtype != jnp.uint32:
        # The least weight stands for one example.
        positive = jnp.where(counts > 0, counts, jnp.full_like(counts, jnp.inf))
        unit = jnp.min(positive, initial=jnp.inf)
    index = _bin_indices(jax.ops.segment_sum(counts, group, len(group)), unit, bin_count)[group]
    ends = jax.ops.segment_max(jnp.stack([-low, high], axis=1), index, bin_count)
    totals = jax.ops.segment_sum(bins.counts[order], index, bin_count)
    if totals.dtype == jnp.uint32:
        # The floats show which sums have wrapped around.
        is_full = jax.ops.segment_sum(counts, index, bin_count) >= jnp.float32(FULL)
        totals = jnp.where(is_full, jnp.full_like(totals, FULL), totals)
    return Thresholds(-ends[:, 0], ends[:, 1], totals)


def _half(scores: Array) -> Array:
    """Half of each score, and of the largest finite number for infinite ones.

    The sum of two halves is finite.
    """
    limits: Any = jnp.finfo(scores.dtype)  # type: ignore[no-untyped-call]
    return jnp.clip(scores, limits.min, limits.max) * jnp.asarray(0.5, scores.dtype)


def _bin_indices(counts: Array, unit: Array, bin_count: int) -> Array:
    """The bin of each score, from counts `[scores, 2]`; scores without examples get `bin_count`."""
    # The size of a score is its share of the positive examples, the negative examples and the log
    # ranks, because precision changes fastest at the highest scores.
    both = jnp.sum(counts, axis=1)
    higher = jnp.cumsum(both[::-1])[::-1] - both
    rank = jnp.log1p(both / (higher + unit))
    shares = jnp.concatenate([counts, rank[:, None]], axis=1)
    totals = jnp.sum(shares, axis=0, keepdims=True)
    size = jnp.sum(shares / jnp.maximum(totals, jnp.float32(1e-30)), axis=1)
    # Integers, because sums of float32 are not monotone.
    size = jnp.floor(size / jnp.sum(size) * _WHOLE).astype(jnp.int32)
    # A third of the bins have equal sizes. A score that is larger than such a bin has a bin of its
    # own, which divides the equal bin that it is in. There are fewer of these than equal bins, and
    # each adds two bins.
    equal_bins = bin_count // 3
    middle = jnp.cumsum(size) - size + size // 2
    bins = jnp.floor(middle.astype(jnp.float32) * (equal_bins / _WHOLE))
    bins = jnp.minimum(bins, jnp.float32(equal_bins - 1))
    is_large = size > _WHOLE // equal_bins
    starts_bin = _differs(bins) | is_large | jnp.roll(is_large, 1)
    index = jnp.cumsum(starts_bin.astype(jnp.int32)) - 1
    # If there is a bin for each score, the scores are kept as they are.
    is_seen = both > 0
    is_few = jnp.sum(is_seen.astype(jnp.int32)) <= bin_count
    index = jnp.where(is_few, jnp.arange(len(index), dtype=jnp.int32), index)
    return jnp.where(is_seen, index, jnp.full_like(index, bin_count))


def _differs(vector: Array) -> Array:
    """Whether each number differs from the previous one; NaNs are equal, and the first differs."""
    previous = vector[:-1]
    current = vector[1:]
    is_equal = (previous == current) | (jnp.isnan(previous) & jnp.isnan(current))
    return jnp.concatenate([jnp.ones((1,), bool), ~is_equal])


# Validation of arguments.


def scores_and_truth(scores: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    values = _numbers(scores, "scores")
    truth = _numbers(labels, "labels")
    values, truth = pair(values, truth, ("scores", "labels"))
    return _widen(values), truth == jnp.ones((), truth.dtype)


def logits_and_labels(logits: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    array = _numbers(logits, "logits")
    truth = indices(labels, "labels")
    if array.ndim == 0 or array.shape[:-1] != truth.shape:
        raise ValueError(
            f"logits has shape {array.shape}, labels has shape {truth.shape}: "
            "must be [..., classes] and [...]"
        )
    return _widen(array).reshape(math.prod(truth.shape), array.shape[-1]), truth.reshape(-1)


def as_weights(weights: ArrayLike | None, labels: ArrayLike) -> Array | None:
    """Return flattened weights of float32 or wider, or a mask; an invalid weight becomes NaN."""
    if weights is None:
        return None
    array = _numbers(weights, "weights")
    if array.shape != np.shape(labels):
        raise ValueError(
            f"weights has shape {array.shape}, labels has shape {np.shape(labels)}: must be equal; "
            "broadcast weights"
        )
    array = array.reshape(-1)
    if array.dtype == jnp.bool_:
        return array
    array = _widen(array)
    return jnp.where((array >= 0) & (array < jnp.inf), array, jnp.full_like(array, jnp.nan))


def pair(first: Array, second: Array, names: tuple[str, str]) -> tuple[Array, Array]:
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} has shape {first.shape}, "
            f"{names[1]} has shape {second.shape}: must be equal"
        )
    return first.reshape(-1), second.reshape(-1)


def indices(value: object, argument: str) -> Array:
    array = _numbers(value, argument)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{argument}: must be integers, the indices of classes, got {describe_type(array)}"
        )
    if array.dtype.itemsize < 4:
        return array.astype(jnp.int32)
    return array


def _numbers(value: object, argument: str) -> Array:
    if not (trees.is_array(value) or isinstance(value, bool | int | float | list | tuple)):
        raise TypeError(f"{argument}: must be an array of numbers, got {describe_type(value)}")
    array = device_values.as_array(value, argument)
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(f"{argument}: must be an array of numbers, got {describe_type(array)}")
    return array


def _widen(array: Array) -> Array:
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def whole(vector: Array) -> Array:
    """Replicate a vector of an Explicit mesh: sorting and segments need all of it."""
    mesh = meshes.explicit_mesh(vector)
    if mesh is None:
        return vector
    return jax.sharding.reshard(vector, NamedSharding(mesh, PartitionSpec()))
