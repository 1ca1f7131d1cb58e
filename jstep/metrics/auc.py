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
"""Thresholds are that many times as many as are asked for: what they cost is nothing beside a batch."""
_MOST = 2**14


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AUC:
    """What `auc` returns: the scores of a batch, or of several merged, as counts by threshold.

    Attributes:
        thresholds: The counts.
        curve: `"ROC"` or `"PR"`.
    """

    thresholds: Thresholds
    curve: str = dataclasses.field(metadata={"static": True})

    def merge(self, other: "AUC") -> "AUC":
        """Both together."""
        return AUC(fewer(both(self.thresholds, other.thresholds), self.thresholds.low.size), self.curve)

    def compute(self) -> float:
        """The area; NaN where it is not defined, or a score is NaN."""
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
    """Of all pairs of a positive and a negative example, how many are in order; half of those with equal scores."""
    pairs = float(positive.sum() * negative.sum())
    above = np.cumsum(positive) - positive
    return float(np.sum(negative * (above + positive / 2))) / pairs if pairs else math.nan


def _average_precision(positive: Any, negative: Any, is_span: Any) -> float:
    """Precision at each threshold, weighted by the positive examples there; over a span of scores, its mean."""
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
    """The area under the ROC curve, or the average precision, of scores.

    As `sklearn.metrics.roc_auc_score(labels, scores)` and `average_precision_score(labels, scores)`: equal as long as
    there are at most `32 · num_thresholds` different scores (6400 by default), counted exactly, up to 2⁴⁴ examples. If
    there are more, neighbouring scores are counted as one threshold, about equally many examples in each. For a million
    different scores and the default, the area then differs by less than 1e-4 and the average precision by less than
    1e-3; both shrink with `num_thresholds`. Scores may be any numbers: probabilities or logits.

    Args:
        scores: Of any shape; the larger, the more likely is the label 1.
        labels: As many; true where they are 1, bools or numbers.
        curve: `"ROC"`, or `"PR"` for the average precision.
        num_thresholds: How many, from 2 up to 16384.

    Returns:
        An object for `jstep.evaluator`, with `merge(other)` and `compute() -> float`: NaN without an example, with a
        score of NaN, and for ROC with labels of one kind only.

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

    Source: Fawcett, "An introduction to ROC analysis" (2006); `tf.metrics.auc`, whose thresholds lie on a grid.
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
