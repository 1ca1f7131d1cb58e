"""A batch in parts: one scan, one weighted mean, one update."""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.loops import Unroll, scan
from jstep.core.types import Array


class AggregationMethod(enum.Enum):
    """How the gradients of microbatches are added up.

    `DEFAULT` keeps a running sum: one copy of the gradients in memory. `ADD_N` keeps every part and sums
    once, which rounds less and takes a copy for each part.
    """

    DEFAULT = "default"
    ADD_N = "add_n"


class Part(NamedTuple):
    """What one (micro)batch gives."""

    loss: Array
    model_state: Any
    aux: Any
    gradients: Any
    summaries: Any = None


def split(args: tuple[Any, ...], n: int, rows: Any = None) -> tuple[Any, ...]:
    """Each leaf (B, …) as (n, B/n, …): contiguous blocks of rows.

    Args:
        args: The batch.
        n: The number of parts.
        rows: The shardings of the leaves, where they are known. The rows of each part are then split as those of
            the batch were; left to itself XLA would make each device go through every row.

    Raises:
        ValueError: A leaf has no leading axis, the leading axes differ, or n does not divide them.
    """
    leaves = trees.leaves_with_paths(args)
    if not leaves:
        raise ValueError(f"num_microbatches={n}: there is no batch to split; pass it as an argument after params")
    sizes = {}
    for path, leaf in leaves:
        place = f"batch argument {path}"
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"num_microbatches={n}: {place} is a scalar and has no rows to split; close over it in loss_fn, or "
                "give it one value for each row"
            )
        sizes[place] = np.shape(leaf)[0]
    first, size = next(iter(sizes.items()))
    for place, other in sizes.items():
        if other != size:
            raise ValueError(f"num_microbatches={n}: {first} has {size} rows and {place} has {other}; they must agree")
    if size % n or size == 0:
        raise ValueError(
            f"num_microbatches={n} does not divide the batch: {first} has {size} rows; use a batch of a multiple of {n}"
        )

    def reshaped(leaf: Any, sharding: Any = None) -> Array:
        parts = jnp.reshape(leaf, (n, size // n, *np.shape(leaf)[1:]))
        if not isinstance(sharding, NamedSharding) or not len(sharding.spec):
            return parts
        whole = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        try:
            whole.shard_shape(parts.shape)
        except ValueError:  # fewer rows than devices, or a batch unlike the one the shardings are of
            return parts
        return jax.lax.with_sharding_constraint(parts, whole)

    def structure(tree: Any) -> Any:
        return jax.tree.structure(tree, is_leaf=trees.is_none)

    if rows is None or structure(args) != structure(rows):
        return jax.tree.map(reshaped, args)
    return jax.tree.map(reshaped, args, rows)


def accumulate(
    part_fn: Callable[[Any, tuple[Any, ...], Array], Part],
    parts: tuple[Any, ...],
    model_state: Any,
    like: list[Array],
    n: int,
    weight_fn: Callable[..., Any] | None,
    method: AggregationMethod,
    unroll: Unroll = None,
) -> Part:
    """The parts of a batch put together as one.

    Args:
        part_fn: `part_fn(model_state, microbatch, i) -> Part`.
        parts: The batch, split.
        model_state: Passes from one microbatch to the next.
        like: Arrays with the shapes and dtypes of the gradients.
        n: The number of parts.
        weight_fn: `weight_fn(*microbatch) -> scalar`, 1 unless told. A microbatch of weight 0 counts as nothing,
            whatever its loss is; where all weigh 0, loss and gradients are 0.
        method: How gradients are added up.
        unroll: How the loop over parts is unrolled.

    Returns:
        Loss, gradients and the floating or complex leaves of aux as means in float32 at least, integer leaves of aux
        as sums in int32 at least (of bools as well: how many were true), and the last model_state. Rows of a table,
        `IndexedSlices`, are those of all parts one after the other; a gradient that no part has is None.
    """
    running = method is AggregationMethod.DEFAULT

    def body(carry: Any, xs: Any) -> Any:
        state, sums = carry
        i, batch = xs
        part = part_fn(state, batch, i)
        weight = _weight(weight_fn, batch)
        gradients = [jax.tree.map(lambda g: g if _is_integer(g) else _weighed(g, weight), g) for g in part.gradients]
        if running:
            # () says that it is carried. What no part has is carried unchanged, which costs nothing.
            dense = [isinstance(g, jax.Array) for g in gradients]
            sums = [s + g.astype(s.dtype) if d else s for s, g, d in zip(sums, gradients, dense, strict=True)]
            gradients = [() if d else g for g, d in zip(gradients, dense, strict=True)]
        others = jax.tree_util.tree_map_with_path(functools.partial(_of_part, weight), (part.aux, part.summaries))
        return (part.model_state, sums), (gradients, _weighed(part.loss, weight), weight, others)

    zeros = [jnp.zeros_like(leaf, dtype=trees.compute_dtype(leaf.dtype)) for leaf in like] if running else []
    (model_state, sums), (gradients, losses, weights, others) = scan(
        body, (model_state, zeros), (jnp.arange(n), parts), n, unroll
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
        return mean(sums[i] if running else jnp.sum(stacked, axis=0))

    def together(leaf: Array) -> Array:
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype) if _is_integer(leaf) else mean(jnp.sum(leaf, axis=0))

    aux, summaries = jax.tree.map(together, others)
    grads = [gradient(i, stacked) for i, stacked in enumerate(gradients)]
    return Part(mean(jnp.sum(losses)), model_state, aux, grads, summaries)


def _is_integer(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))


def _of_part(weight: Array | None, keys: Any, leaf: Array) -> Array:
    """A leaf of aux, ready to be added up."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _weighed(leaf, weight)
    if leaf.dtype == bool or (_is_integer(leaf) and leaf.dtype.itemsize < 4):
        return leaf.astype(jnp.int32)
    if not _is_integer(leaf):
        raise TypeError(
            f"aux: the leaf at {trees.quoted(trees.path_str(keys[1:]))} is of {leaf.dtype}, of which microbatches have "
            "no mean and no sum; return it by model_state, whose last value counts, or not at all"
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
    # 0 · NaN is NaN: the mean over no tokens must not reach the sum.
    return jnp.where(w == 0, jnp.zeros_like(value), value * w)
