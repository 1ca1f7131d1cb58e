"""A batch in parts: one scan, one weighted mean, one update."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
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
    gradients: list[Array]


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

    Returns:
        Loss, gradients and the floating leaves of aux as means in float32 at least, integer leaves of aux as
        sums (of bools as well: how many were true), and the last model_state.
    """
    running = method is AggregationMethod.DEFAULT

    def body(carry: Any, xs: Any) -> Any:
        state, sums = carry
        i, batch = xs
        part = part_fn(state, batch, i)
        weight = _weight(weight_fn, batch)
        gradients = [_weighed(g, weight) for g in part.gradients]
        if running:
            sums, gradients = [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)], []
        loss = _weighed(part.loss, weight)
        aux = jax.tree.map(lambda leaf: _weighed(leaf, weight) if trees.is_trainable(leaf) else leaf, part.aux)
        return (part.model_state, sums), (gradients, loss, weight, aux)

    zeros = [jnp.zeros_like(leaf, dtype=trees.compute_dtype(leaf.dtype)) for leaf in like] if running else []
    (model_state, sums), (gradients, losses, weights, aux) = jax.lax.scan(
        body, (model_state, zeros), (jnp.arange(n), parts)
    )
    if not running:
        sums = [jnp.sum(g, axis=0) for g in gradients]
    total = jnp.asarray(n, jnp.float32) if weights is None else jnp.sum(weights)

    def mean(summed: Array) -> Array:
        divisor = total.astype(summed.dtype)
        return summed / (divisor if weights is None else jnp.where(divisor == 0, jnp.ones_like(divisor), divisor))

    def together(leaf: Array) -> Array:
        if trees.is_trainable(leaf):
            return mean(jnp.sum(leaf, axis=0))
        return jnp.sum(leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, axis=0, dtype=None).astype(
            jnp.int32 if leaf.dtype == bool else leaf.dtype
        )

    return Part(mean(jnp.sum(losses)), model_state, jax.tree.map(together, aux), [mean(s) for s in sums])


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
