"""Area under the ROC curve, and average precision."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, one_of
from jstep.core.contexts import internal_transfers
from jstep.core.types import Array
from jstep.metrics import checks
from jstep.metrics.counts import counted
from jstep.metrics.thresholds import Thresholds, both, fewer

_FINER = 32
"""Multiplier of the requested number of thresholds: their cost is negligible compared with a batch."""
_MOST = 2**14


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
        return AUC(fewer(both(self.thresholds, other.thresholds), self.thresholds.low.size), self.curve)

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
        return (_roc if self.curve == "ROC" else _average_precision)(positive[seen], negative[seen], is_span)


def _roc(positive: Any, negative: Any, is_span: Any) -> float:
    """The fraction of pairs of a positive and a negative example in the right order; equal scores count half."""
    pairs = float(positive.sum() * negative.sum())
    above = np.cumsum(positive) - positive
    return float(np.sum(negative * (above + positive / 2))) / pairs if pairs else math.nan


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


def auc(scores: Any, labels: Any, curve: str = "ROC", num_thresholds: int = 200) -> AUC:
    """Area under the ROC curve, or average precision, of a binary classifier.

    Equal to `sklearn.metrics.roc_auc_score(labels, scores)` and `average_precision_score(labels, scores)` for at most
    `32 · num_thresholds` different scores (6400 by default), with exact counts up to 2⁴⁴ examples. If there are more,
    neighboring scores share a threshold, with about equally many examples for each. For a million different scores and
    the default, the area then differs by less than 1e-4 and the average precision by less than 1e-3; both errors
    shrink as `num_thresholds` grows. Scores may be any numbers: probabilities or logits.

    Args:
        scores: Scores of any shape; larger scores mean that label 1 is more likely.
        labels: Labels of the same shape, bools or numbers; positive where they are 1.
        curve: `"ROC"`, or `"PR"` for the average precision.
        num_thresholds: The number of thresholds, from 2 to 16384.

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
    given, truth = map(checks.whole, checks.scores_and_truth(scores, labels))
    each = Thresholds(given, given, counted(_one_of(truth)), counted(_one_of(~truth)))
    return AUC(fewer(each, number * _FINER), curve)


def _one_of(condition: Array) -> Array:
    return condition.astype(jnp.uint32)
