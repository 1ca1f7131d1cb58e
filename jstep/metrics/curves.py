"""Area under the ROC curve, and average precision, from counts of examples by score in a fixed number of bins."""

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, one_of
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Array
from jstep.metrics.arguments import scores_and_truth, weights_of, whole
from jstep.metrics.totals import Total, each, joined

_FINER = 32
"""Multiplier of the requested number of thresholds: their cost is negligible compared with a batch."""
_MOST = 2**14


class Thresholds(NamedTuple):
    """Examples in bins of one score or a span of scores each. Vectors of the same length.

    Attributes:
        low: The lowest score of each bin.
        high: The highest score of each bin.
        positive: The number, or weight, of positive examples in each bin.
        negative: The number, or weight, of negative examples in each bin; a bin without examples is empty.
    """

    low: Array
    high: Array
    positive: Total
    negative: Total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AUC:
    """Result of `auc`: the scores of one batch or several merged batches, as counts by threshold.

    Attributes:
        thresholds: The counts.
        curve: `"ROC"` or `"PR"`.
    """

    thresholds: Thresholds
    curve: str = dataclasses.field(metadata={"static": True})

    def merge(self, other: "AUC") -> "AUC":
        """Merge with another metric object."""
        return AUC(_fewer(_both(self.thresholds, other.thresholds), self.thresholds.low.size), self.curve)

    def compute(self) -> float:
        """The area; NaN if it is undefined or a score is NaN."""
        kept = self.thresholds
        positive, negative = (count.exact()[::-1].astype(np.float64) for count in (kept.positive, kept.negative))
        with internal_transfers():
            low, high = (np.asarray(end, np.float64)[::-1] for end in (kept.low, kept.high))
        seen = positive + negative > 0
        if not seen.any() or np.isnan(low[seen]).any():
            return math.nan
        is_span = (low < high)[seen]
        positive, negative = positive[seen], negative[seen]
        if self.curve == "PR":
            return _average_precision(positive, negative, is_span)
        # The fraction of pairs of a positive and a negative example in the right order; equal scores count half.
        pairs = float(positive.sum() * negative.sum())
        above = np.cumsum(positive) - positive
        return float(np.sum(negative * (above + positive / 2))) / pairs if pairs else math.nan


def auc(scores: Any, labels: Any, curve: str = "ROC", num_thresholds: int = 200, *, weights: Any = None) -> AUC:
    """Area under the ROC curve, or average precision, of a binary classifier.

    Equal to `sklearn.metrics.roc_auc_score(labels, scores)` and `average_precision_score(labels, scores)`, both with
    `sample_weight=weights`, for at most `32 · num_thresholds` different scores (6400 by default), with exact counts up
    to 2⁴⁴ examples. If there are more,
    neighboring scores share a threshold, with about equally many examples for each. For a million different scores and
    the default, the area then differs by less than 1e-4 and the average precision by less than 1e-3; both errors
    shrink as `num_thresholds` grows. Scores may be any numbers: probabilities or logits;
    integers are rounded to float32.

    Args:
        scores: Scores of any shape; larger scores mean that label 1 is more likely.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        curve: `"ROC"`, or `"PR"` for the average precision.
        num_thresholds: The number of thresholds, from 2 to 16384.
        weights: Weights of at least 0, of the same shape; a boolean mask works. By default each example counts once.
            An example of weight 0 is ignored, whatever its score.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`: NaN without examples, with a NaN
        score, and for ROC if all labels are equal.

    Raises:
        TypeError: An argument is not an array of numbers.
        ValueError: The shapes differ, or an argument is out of range.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
        >>> jstep.metrics.auc(scores, labels).compute()
        0.75
        >>> round(jstep.metrics.auc(scores, labels, curve="PR").compute(), 4)
        0.8333

    Source: Fawcett, "An introduction to ROC analysis" (2006); `tf.metrics.auc`, whose thresholds form a grid.
    """
    one_of(curve, "curve", ("ROC", "PR"))
    number = as_int(num_thresholds, "num_thresholds", 2, "a number of thresholds")
    if number > _MOST:
        raise ValueError(f"num_thresholds={number}: must be at most {_MOST}")
    given, truth, weight = jax.tree.map(whole, (*scores_and_truth(scores, labels), weights_of(weights, labels)))
    if weight is not None and weight.dtype != jnp.bool_:
        # A wrong weight has the effect of a score that is NaN: bins cannot be compared by weights that are NaN.
        given = jnp.where(jnp.isnan(weight), jnp.full_like(given, jnp.nan), given)
        weight = jnp.where(jnp.isnan(weight), jnp.ones_like(weight), weight)
    bins = Thresholds(given, given, each(truth, weight), each(~truth, weight))
    return AUC(_fewer(bins, number * _FINER), curve)


def _average_precision(positive: Any, negative: Any, is_span: Any) -> float:
    """The mean precision over thresholds, weighted by positive examples; averaged over each span of scores."""
    total = float(positive.sum())
    if not total:
        return 0.0  # as scikit-learn
    size = positive + negative
    true, seen = np.cumsum(positive), np.cumsum(size)
    precision = true / seen
    is_first = np.arange(len(seen)) == 0
    before = np.where(is_first, 1, seen - size)
    share = positive / size
    spread = share + (true - positive - before * share) / size * np.log1p(size / before)
    return float(np.sum(positive * np.where(is_span & ~is_first, spread, precision))) / total


def _both(first: Thresholds, second: Thresholds) -> Thresholds:
    """Concatenate the bins of both."""
    return cast(Thresholds, jax.tree.map(joined, first, second, is_leaf=lambda part: isinstance(part, Total)))


def _fewer(given: Thresholds, most: int) -> Thresholds:
    """Reduce the number of bins to `most`, sorted by score.

    Equal scores share a bin. If there are too many different scores, neighbors are merged into bins of about equal
    size, as measured by `size`; a score that exceeds this size by itself keeps its own bin.
    """
    given = _both(given, jax.tree.map(lambda part: jnp.zeros((1,), part.dtype), given))  # one bin at least
    # By the middle of their span, empty bins last.
    limits: Any = jnp.finfo(given.low.dtype)  # type: ignore[no-untyped-call]
    half = jnp.asarray(0.5, given.low.dtype)
    low, high = (jnp.clip(end, limits.min, limits.max) for end in (given.low, given.high))
    middle = jnp.where(given.low == given.high, given.low, low * half + high * half)
    is_empty = given.positive.approximate() + given.negative.approximate() == 0
    order = jnp.lexsort((given.low, middle, is_empty))
    given = jax.tree.map(lambda part: part[order], given)
    unit = jnp.minimum(given.positive.unit(), given.negative.unit())
    positive, negative = given.positive.approximate(), given.negative.approximate()
    # A bin has its share of the positive examples, of the negative ones, and of their log ranks: precision changes
    # fastest at the highest scores.
    both = positive + negative
    rank = jnp.log1p(both / (jnp.cumsum(both[::-1])[::-1] - both + unit))
    shares = [one / jnp.maximum(jnp.sum(one), jnp.float32(1e-30)) for one in (positive, negative, rank)]
    size = shares[0] + shares[1] + shares[2]
    is_seen = size > 0
    is_new = _differs(given.low) | _differs(given.high)
    group = jnp.cumsum(is_new.astype(jnp.int32)) - 1
    count = jnp.sum((is_new & is_seen).astype(jnp.int32))
    place = jnp.where(count <= most, group, _joined_neighbours(size, is_new, group, most // 3))
    place = jnp.where(is_seen, place, jnp.full_like(place, most))  # out of range: dropped
    return Thresholds(
        jax.ops.segment_min(given.low, place, most),
        jax.ops.segment_max(given.high, place, most),
        given.positive.segment_sum(place, most),
        given.negative.segment_sum(place, most),
    )


def _joined_neighbours(size: Array, is_new: Array, group: Array, parts: int) -> Array:
    """Return the bin of each entry, at most 3·parts bins: groups stay together, large ones keep their own bin."""
    total = jnp.sum(size)
    size_of_group = jax.ops.segment_sum(size, group, size.size)[group]
    is_large = size_of_group * parts > total
    before = jnp.cumsum(size) - size
    begins = jax.lax.cummax(jnp.where(is_new, before, jnp.zeros_like(before)))  # where the group of an entry begins
    part = jnp.floor((begins + size_of_group / 2) / jnp.maximum(total, jnp.float32(1)) * parts)
    part = jax.lax.cummax(jnp.clip(part, 0, parts - 1).astype(jnp.int32))  # sums in float32 are not quite monotone
    begins_place = is_new & (_differs(part) | is_large | jnp.roll(is_large, 1))
    return jnp.cumsum(begins_place.astype(jnp.int32)) - 1


def _differs(vector: Array) -> Array:
    """Whether each element differs from the previous one; the first one does."""
    return jnp.concatenate([jnp.ones((1,), bool), vector[1:] != vector[:-1]])
