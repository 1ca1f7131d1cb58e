"""Gradient accumulation over microbatches in one scan, as a weighted mean."""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.loops import Unroll, scan
from jstep.core.meshes import reduced
from jstep.core.types import Array
from jstep.differentiate.noise import Square, Squares
from jstep.differentiate.split_rows import microbatch


class AggregationMethod(enum.Enum):
    """The method of summing the gradients of microbatches.

    `DEFAULT` keeps a running sum, with one copy of the gradients in memory. `ADD_N` keeps the gradients of
    all microbatches and sums them once, which rounds less but stores a copy per microbatch.
    """

    DEFAULT = "default"
    ADD_N = "add_n"


class Part(NamedTuple):
    """The results of one batch or microbatch."""

    loss: Array
    model_state: Any
    aux: Any
    gradients: Any
    summaries: Any = None
    squares: Squares | None = None


def accumulate(
    part_fn: Callable[[Any, tuple[Any, ...], Array], Part],
    parts: tuple[Any, ...],
    model_state: Any,
    sums: list[Array],
    weight_fn: Callable[..., Any] | None,
    *,
    method: AggregationMethod,
    unroll: Unroll = None,
    square: Square | None = None,
) -> Part:
    """Accumulate the results of all microbatches of a batch.

    Args:
        part_fn: `part_fn(model_state, microbatch, i) -> Part`.
        parts: The batch, as `split` returns it.
        model_state: The model state, which is carried from one microbatch to the next.
        sums: Zeros to accumulate the gradients in, if a running sum is kept.
        weight_fn: `weight_fn(*microbatch) -> scalar`; defaults to 1. A microbatch of weight 0 is ignored, whatever its
            loss; if all weights are 0, loss and gradients are 0.
        method: How to sum the gradients.
        unroll: How to unroll the loop over microbatches.
        square: The squared norm of gradients, to be computed of each microbatch and of the mean; None to omit.

    Returns:
        Loss, gradients and the floating or complex leaves of aux as means in at least float32, integer leaves of aux
        as sums in at least int32 (of bools, the number of True values), and the last model_state. `IndexedSlices`
        contain the rows of all microbatches, concatenated; a gradient that no microbatch has is None.
    """
    examples, n = jax.tree.leaves(parts)[0].shape[:2]
    running = method is AggregationMethod.DEFAULT

    def body(carry: Any, i: Array) -> Any:
        state, sums = carry
        batch = microbatch(parts, i)
        part = part_fn(state, batch, i)
        weight = _weight(weight_fn, batch)
        squared = None if square is None else square(part.gradients)
        gradients = [jax.tree.map(lambda g: g if _is_integer(g) else _weighed(g, weight), g) for g in part.gradients]
        if running:
            # () marks a gradient that is carried. A sum without gradients is carried unchanged, which costs nothing.
            dense = [isinstance(g, jax.Array) for g in gradients]
            sums = [s + g.astype(s.dtype) if d else s for s, g, d in zip(sums, gradients, dense, strict=True)]
            gradients = [() if d else g for g, d in zip(gradients, dense, strict=True)]
        others = jax.tree_util.tree_map_with_path(functools.partial(_of_part, weight), (part.aux, part.summaries))
        return (part.model_state, sums), (gradients, _weighed(part.loss, weight), weight, squared, others)

    (model_state, sums), (gradients, losses, weights, squared, others) = scan(
        body, (model_state, sums if running else []), jnp.arange(n), n, unroll
    )
    total = jnp.asarray(n, jnp.float32) if weights is None else jnp.sum(weights)

    def mean(summed: Array) -> Array:
        divisor = total.astype(summed.dtype)
        return summed / (divisor if weights is None else jnp.where(divisor == 0, jnp.ones_like(divisor), divisor))

    def gradient(i: int, stacked: Any) -> Any:
        if isinstance(stacked, IndexedSlices):
            rows = stacked.values.reshape(-1, *stacked.values.shape[2:])
            return IndexedSlices(mean(rows), stacked.indices.reshape(-1), stacked.dense_shape)
        if stacked is None:
            return None
        return mean(reduced(sums[i]) if running else jnp.sum(stacked, axis=0))

    def sum_or_mean(leaf: Array) -> Array:
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype) if _is_integer(leaf) else mean(jnp.sum(leaf, axis=0))

    aux, summaries = jax.tree.map(sum_or_mean, others)
    grads = [gradient(i, stacked) for i, stacked in enumerate(gradients)]
    squares = None
    if square is not None:
        squares = Squares(examples if weights is None else weights, squared, square(grads))
    return Part(mean(jnp.sum(losses)), model_state, aux, grads, summaries, squares)


def _is_integer(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))


def _of_part(weight: Array | None, keys: Any, leaf: Array) -> Array:
    """Convert a leaf of aux to the form in which microbatches are summed."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _weighed(leaf, weight)
    if leaf.dtype == bool or (_is_integer(leaf) and leaf.dtype.itemsize < 4):
        return leaf.astype(jnp.int32)
    if not _is_integer(leaf):
        raise TypeError(
            f"aux: the leaf at {trees.quoted(trees.path_str(keys[1:]))} is of {leaf.dtype}, of which microbatches have "
            "no mean and no sum; return it in model_state, whose last value is kept, or not at all"
        )
    return leaf


def _weight(weight_fn: Callable[..., Any] | None, batch: tuple[Any, ...]) -> Array | None:
    if weight_fn is None:
        return None
    weight = weight_fn(*batch)
    if np.ndim(weight):
        raise ValueError(f"weight_fn returned shape {np.shape(weight)}; it must return a scalar for each microbatch")
    dtype = jnp.result_type(weight)
    dtype = dtype if trees.is_floating(dtype) else np.dtype(np.float32)
    return jnp.asarray(weight).astype(trees.compute_dtype(dtype))


def _weighed(value: Array, weight: Array | None) -> Array:
    value = value.astype(trees.compute_dtype(value.dtype))
    if weight is None:
        return value
    w = weight.astype(value.dtype)
    # 0 · NaN is NaN, but the mean over an empty microbatch must not affect the sum.
    return jnp.where(w == 0, jnp.zeros_like(value), value * w)
