"""Counts of positive and negative examples by score, in a fixed number of bins."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.types import Array
from jstep.metrics.counts import Count, joined


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Examples in bins of one score or a span of scores each. Vectors of the same length.

    Attributes:
        low: The lowest score of each bin.
        high: The highest score of each bin.
        positive: The number of positive examples in each bin.
        negative: The number of negative examples in each bin; a bin without examples is empty.
    """

    low: Array
    high: Array
    positive: Count
    negative: Count


def both(first: Thresholds, second: Thresholds) -> Thresholds:
    """Concatenate the bins of both."""
    return Thresholds(
        jnp.concatenate([first.low, second.low]),
        jnp.concatenate([first.high, second.high]),
        joined(first.positive, second.positive),
        joined(first.negative, second.negative),
    )


def fewer(given: Thresholds, most: int) -> Thresholds:
    """Reduce the number of bins to `most`, sorted by score.

    Equal scores share a bin. If there are too many different scores, neighbors are merged into bins of about equal
    size, as measured by `_weight`; a score that exceeds this size by itself keeps its own bin.
    """
    given = _sorted(both(given, _empty(given)))
    size = _weight(given.positive.approximate(), given.negative.approximate())
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


def _weight(positive: Array, negative: Array) -> Array:
    """Weight each bin by its share of the positive examples, of the negative examples, and of their log ranks.

    Ranks are logarithmic because precision changes fastest at the highest scores.
    """
    each = positive + negative
    above = jnp.cumsum(each[::-1])[::-1] - each
    rank = jnp.log1p(each / (above + 1))
    return _share(positive) + _share(negative) + _share(rank)


def _share(size: Array) -> Array:
    return size / jnp.maximum(jnp.sum(size), jnp.float32(1e-30))


def _empty(like: Thresholds) -> Thresholds:
    """Return one empty bin, in case there is no other."""
    end, zero = jnp.zeros((1,), like.low.dtype), jnp.zeros((1,), jnp.uint32)
    return Thresholds(end, end, Count(zero, zero), Count(zero, zero))


def _sorted(given: Thresholds) -> Thresholds:
    """Sort bins by the middle of their span, empty bins last."""
    limits: Any = jnp.finfo(given.low.dtype)  # type: ignore[no-untyped-call]
    half = jnp.asarray(0.5, given.low.dtype)
    low, high = (jnp.clip(end, limits.min, limits.max) for end in (given.low, given.high))
    middle = jnp.where(given.low == given.high, given.low, low * half + high * half)
    is_empty = (given.positive.high | given.positive.low | given.negative.high | given.negative.low) == jnp.uint32(0)
    order = jnp.lexsort((given.low, middle, is_empty))
    return Thresholds(given.low[order], given.high[order], given.positive[order], given.negative[order])


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
