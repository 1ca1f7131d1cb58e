"""Estimates of the gradient noise from the gradients of microbatches.

Let G be the true gradient and Σ the covariance of the gradient of one example. The gradient of a microbatch of weight w
has an expected squared norm of |G|² + tr Σ/w, and that of the whole batch of weight W one of |G|² + tr Σ/W. Squared
norms at two weights determine both unknowns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, combined
from jstep.core.meshes import without_explicit_axes
from jstep.core.trees import Array, GradientNoise


class Squares(NamedTuple):
    """Squared norms of gradients.

    Attributes:
        weights: The weight of each part, of shape (n,); or the number of examples of each part.
        parts: The squared norm of each part, of shape (n,).
        whole: The squared norm of the mean.
    """

    weights: Any
    parts: Array
    whole: Array


def squared_norm(gradients: Sequence[Any], scale: Array | None = None) -> Array:
    """Return the squared norm of gradients in at least float32.

    Args:
        gradients: Arrays, `IndexedSlices` (whose duplicate rows are summed first) or None.
        scale: The factor of the loss. It is divided out before squaring, because float32 may not hold the square.
    """

    def computed(gradients: list[Any], scale: Array | None) -> Array:
        total = jnp.zeros((), trees.default_float())
        for g in gradients:
            values = combined(g).values if isinstance(g, IndexedSlices) else g
            values = values.astype(trees.compute_dtype(values.dtype))
            if scale is not None:
                values = values * (1 / scale).astype(values.dtype)
            total = total + jnp.sum(jnp.square(values)).astype(total.dtype)
        return total

    return without_explicit_axes(computed, [g for g in gradients if g is not None], scale)


def together_squared(found: Sequence[Squares | None]) -> Squares | None:
    """Combine the squared norms of gradients with respect to different parameters, for the same parts."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    parts = sum((one.parts for one in known[1:]), known[0].parts)
    return Squares(known[0].weights, parts, sum((one.whole for one in known[1:]), known[0].whole))


def estimated(squares: Squares) -> GradientNoise:
    """Return unbiased estimates of tr Σ and |G|² from one batch; NaN if fewer than two parts have a positive weight.

    tr Σ = (small − big)·W/(n − 1) and |G|² = big − tr Σ/W, where big is the squared norm of the mean, small the
    weighted mean of the squared norms of the parts, and W the sum of the n positive weights.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A, for parts of one size.
    """

    def computed(weights: Any, parts: Array, whole: Array) -> GradientNoise:
        w = jnp.broadcast_to(jnp.asarray(weights, parts.dtype), parts.shape)
        counts = w > 0
        # 0 · NaN is NaN, but a part without weight must not contribute.
        weighed = jnp.where(counts, w * parts, jnp.zeros_like(parts))
        n, total = jnp.sum(counts), jnp.sum(jnp.where(counts, w, jnp.zeros_like(w)))
        others = jnp.where(n > 1, (n - 1).astype(parts.dtype), jnp.nan)
        noise = (jnp.sum(weighed) / total - whole) * (total / others)
        return GradientNoise(noise, whole - noise / total)

    return without_explicit_axes(computed, *squares)
