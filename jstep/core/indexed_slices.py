"""Sparse gradients: some rows of a table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Rows of a table: `dense[indices[i]] += values[i]`, zero elsewhere.

    As a gradient leaf it makes the cost of an update follow the rows rather than the table. Indices may
    repeat; their rows add up first. Indices out of range raise where they are concrete and are dropped
    where they are traced.

    Attributes:
        values: The rows, shape (n, *dense_shape[1:]).
        indices: Their places along the first axis, integers of shape (n,).
        dense_shape: The shape of the table.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> rows = jstep.IndexedSlices(jnp.ones((2, 1)), jnp.array([2, 2]), (4, 1))
        >>> print(rows.to_dense().ravel())
        [0. 0. 2. 0.]

    Source: `tf.IndexedSlices`.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        # Unflattening comes through here with leaves of any kind: convert what a user types, check later.
        if isinstance(self.values, list | tuple):
            object.__setattr__(self, "values", jnp.asarray(self.values))
        if isinstance(self.indices, list | tuple):
            object.__setattr__(self, "indices", jnp.asarray(self.indices))
        object.__setattr__(self, "dense_shape", tuple(int(size) for size in self.dense_shape))

    def to_dense(self) -> Array:
        """The table as an array of shape `dense_shape`."""
        rows = combined(self)
        dense = jnp.zeros(self.dense_shape, rows.values.dtype)
        return dense.at[rows.indices].add(rows.values, mode="drop")


def is_slices(x: Any) -> bool:
    """Whether a node of a tree is an `IndexedSlices`, for `is_leaf`."""
    return isinstance(x, IndexedSlices)


def check(slices: IndexedSlices, path: str = "", shape: tuple[int, ...] | None = None) -> None:
    """Refuses slices that do not fit a table.

    Args:
        slices: What to check; the range of its indices is looked at where they are concrete.
        path: The path of the leaf, for the error.
        shape: The shape of the table, where it is known.

    Raises:
        TypeError: The indices are not integers.
        ValueError: Shapes do not fit, or an index is out of range.
    """
    where = f"IndexedSlices at {trees.quoted(path)}" if path else "IndexedSlices"
    if shape is not None and slices.dense_shape != tuple(shape):
        raise ValueError(f"{where}: dense_shape={slices.dense_shape}, but the parameter has shape {tuple(shape)}")
    if not slices.dense_shape:
        raise ValueError(f"{where}: dense_shape=() has no rows; a scalar takes a plain gradient")
    if not jnp.issubdtype(jnp.result_type(slices.indices), jnp.integer):
        raise TypeError(f"{where}: indices must be integers, got {jnp.result_type(slices.indices)}")
    if np.ndim(slices.indices) != 1:
        raise ValueError(f"{where}: indices must have shape (n,), got {np.shape(slices.indices)}")
    expected = (np.shape(slices.indices)[0], *slices.dense_shape[1:])
    if np.shape(slices.values) != expected:
        raise ValueError(
            f"{where}: values must have shape {expected} (one row of dense_shape={slices.dense_shape} for each of "
            f"the indices), got {np.shape(slices.values)}"
        )
    indices = trees.concrete(slices.indices)
    if indices is not None and indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= slices.dense_shape[0]:
            raise ValueError(
                f"{where}: index {low if low < 0 else high} is out of range for a table of "
                f"{slices.dense_shape[0]} rows (0 ≤ index < {slices.dense_shape[0]})"
            )


def within(rows: IndexedSlices) -> IndexedSlices:
    """What `combined` made, fit to be handed on: places past the end become zero rows of row 0."""
    inside = rows.indices < rows.dense_shape[0]
    shape = (-1,) + (1,) * (jnp.ndim(rows.values) - 1)
    values = jnp.where(inside.reshape(shape), rows.values, jnp.zeros_like(rows.values))
    return IndexedSlices(values, jnp.where(inside, rows.indices, 0), rows.dense_shape)


def combined(slices: IndexedSlices, path: str = "") -> IndexedSlices:
    """The same rows with each index once: repeated rows added up in float32 at least.

    The shapes stay as they are, so that it compiles: the places that become free hold zero rows with
    indices past the end of the table, which `mode="drop"` drops. They are for setting rows; `within` makes
    of them rows to add.

    Args:
        slices: What to combine.
        path: The path of the leaf, for errors.
    """
    check(slices, path)
    rows = slices.dense_shape[0]
    values, indices = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    values = values.astype(trees.compute_dtype(values.dtype))
    n = indices.shape[0]
    if n == 0:
        return IndexedSlices(values, indices.astype(trees.default_int()), slices.dense_shape)
    # Narrow and unsigned index types could neither hold the place past the end nor tell a negative one.
    outside = (indices < 0) | (indices >= rows)
    indices = jnp.where(outside, rows, indices.astype(trees.default_int()))
    order = jnp.argsort(indices)
    indices = indices[order]
    first = jnp.concatenate([jnp.ones((1,), bool), indices[1:] != indices[:-1]])
    group = jnp.cumsum(first) - 1
    values = jax.ops.segment_sum(values[order], group, num_segments=n, indices_are_sorted=True)
    unique = jnp.full((n,), rows, indices.dtype).at[group].set(indices)
    # What was outside shares one group at the end: its values must not reach a norm.
    keep = (unique < rows).reshape((n,) + (1,) * (values.ndim - 1))
    values = jnp.where(jnp.broadcast_to(keep, values.shape), values, jnp.zeros_like(values))
    return IndexedSlices(values, unique, slices.dense_shape)
