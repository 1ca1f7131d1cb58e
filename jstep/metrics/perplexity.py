"""Perplexity of a language model."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.types import Array
from jstep.metrics import checks
from jstep.metrics.counts import Count, counted


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
