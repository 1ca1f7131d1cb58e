"""Sparse gradients of tables, such as embeddings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.device_values import as_array
from jstep.core.meshes import exempts_transfers
from jstep.core.trees import Array, Tree, concrete, default_int, native, quote_path, widen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Sparse rows of a table: `dense[indices[i]] += values[i]`, zero elsewhere.

    Rows with the same index are summed first. Concrete indices out of range raise an error, traced
    ones are dropped.

    Attributes:
        values: The rows, shape (n, *dense_shape[1:]).
        indices: Their indices along the first axis, integers of shape (n,).
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
        # Unflattening passes leaves of any type: convert only lists and NumPy arrays of users, and
        # validate later.
        for name in ("values", "indices"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, as_array(value, name))
            elif isinstance(value, np.ndarray):
                object.__setattr__(self, name, native(value, name, "IndexedSlices"))
        object.__setattr__(self, "dense_shape", tuple(int(size) for size in self.dense_shape))

    @exempts_transfers
    def to_dense(self) -> Array:
        """Return the table as an array of shape `dense_shape`."""
        rows = combine_rows(self)
        zeros = jnp.zeros(self.dense_shape, rows.values.dtype)
        return zeros.at[rows.indices].add(rows.values, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsInOrder(IndexedSlices):
    """Slices with one entry for each row of the table, in order, of which only some are named.

    Entry i names row i if `indices[i] == i`. The others are zero rows at the first named index.
    """

    @property
    def named(self) -> Array:
        return _column(self.indices == jnp.arange(self.dense_shape[0]), jnp.ndim(self.values))

    def to_dense(self) -> Array:
        return combine_rows(self).values


def rows_in_order(values: Array, named: Array) -> IndexedSlices:
    """Slices of a table that name the rows of a mask."""
    rows = values.shape[0]
    mask = concrete(named)
    if not rows or (mask is not None and not mask.any()):
        return IndexedSlices(values[:0], jnp.zeros((0,), default_int()), values.shape)
    order = jnp.arange(rows, dtype=default_int())
    first = jnp.where(jnp.any(named), jnp.argmax(named), rows).astype(order.dtype)
    values = jnp.where(_column(named, values.ndim), values, jnp.zeros_like(values))
    return RowsInOrder(values, jnp.where(named, order, first), values.shape)


def map_table(function: Callable[[Array], Array], gradient: Tree) -> Any:
    """Apply a dense function that maps zero rows to zero rows; slices keep their named rows."""
    if not isinstance(gradient, IndexedSlices):
        return function(jnp.asarray(gradient))
    no_rows = jnp.zeros(gradient.dense_shape[:1], bool)
    named = no_rows.at[combine_rows(gradient).indices].set(True, mode="drop")
    return rows_in_order(function(gradient.to_dense()), named)


def _column(mask: Array, ndim: int) -> Array:
    return mask.reshape(-1, *(1,) * (ndim - 1))


def is_slices(x: object) -> bool:
    return isinstance(x, IndexedSlices)


def check(slices: IndexedSlices, path: str = "", shape: tuple[int, ...] | None = None) -> None:
    """Validate slices; the range of indices is checked only if they are concrete."""
    subject = f"IndexedSlices at {quote_path(path)}" if path else "IndexedSlices"
    if shape is not None and slices.dense_shape != tuple(shape):
        raise ValueError(
            f"{subject}: dense_shape={slices.dense_shape}, "
            f"but the parameter has shape {tuple(shape)}"
        )
    if not slices.dense_shape:
        raise ValueError(f"{subject}: dense_shape=() has no rows; a scalar takes a plain gradient")
    if not jnp.issubdtype(jnp.result_type(slices.indices), jnp.integer):
        raise TypeError(
            f"{subject}: indices must be integers, got {jnp.result_type(slices.indices)}"
        )
    if np.ndim(slices.indices) != 1:
        raise ValueError(f"{subject}: indices must have shape (n,), got {np.shape(slices.indices)}")
    expected = (np.shape(slices.indices)[0], *slices.dense_shape[1:])
    if np.shape(slices.values) != expected:
        raise ValueError(
            f"{subject}: values must have shape {expected}, got {np.shape(slices.values)}"
        )
    indices = concrete(slices.indices)
    if indices is not None and indices.size:
        low = int(indices.min())
        high = int(indices.max())
        if low < 0 or high >= slices.dense_shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(
                f"{subject}: indices must be ≥ 0 and < {slices.dense_shape[0]}, got {wrong}"
            )


@exempts_transfers
def trim_slices(rows: IndexedSlices) -> IndexedSlices:
    """Convert a result of `combine_rows` to valid slices, whose unused entries are zero rows."""
    if not rows.indices.shape[0]:
        return rows
    if isinstance(rows, RowsInOrder):
        return rows_in_order(rows.values, rows.named.reshape(-1))
    is_used = rows.indices < rows.dense_shape[0]
    values = jnp.where(_column(is_used, rows.values.ndim), rows.values, jnp.zeros_like(rows.values))
    return IndexedSlices(
        values, jnp.where(is_used, rows.indices, rows.indices[0]), rows.dense_shape
    )


@exempts_transfers
def combine_rows(slices: IndexedSlices, path: str = "") -> IndexedSlices:
    """Sum rows with the same index, in float32 or wider, so that each index occurs once.

    Unused entries are zero rows with indices past the end. The result is for setting rows;
    `trim_slices` converts it to rows to add.
    """
    check(slices, path)
    rows = slices.dense_shape[0]
    values = widen(jnp.asarray(slices.values))
    indices = jnp.asarray(slices.indices)
    if isinstance(slices, RowsInOrder):
        indices = jnp.where(slices.named.reshape(-1), indices, rows)
        values = jnp.where(slices.named, values, jnp.zeros_like(values))
        return dataclasses.replace(slices, values=values, indices=indices)
    n = indices.shape[0]
    if n == 0:
        return IndexedSlices(values, indices.astype(default_int()), slices.dense_shape)
    is_outside = indices < 0
    # Narrow and unsigned index dtypes cannot represent the index past the end, or a negative one.
    if rows <= jnp.iinfo(indices.dtype).max:  # type: ignore[no-untyped-call]
        is_outside |= indices >= rows
    indices = jnp.where(is_outside, rows, indices.astype(default_int()))
    order = jnp.argsort(indices)
    indices = indices[order]
    first = jnp.concatenate([jnp.ones((1,), bool), indices[1:] != indices[:-1]])
    group = jnp.cumsum(first) - 1
    values = jax.ops.segment_sum(values[order], group, num_segments=n, indices_are_sorted=True)
    unique = jnp.full((n,), rows, indices.dtype).at[group].set(indices)
    # Indices out of range share one group at the end; their values must not enter a norm.
    values = jnp.where(_column(unique < rows, values.ndim), values, jnp.zeros_like(values))
    return IndexedSlices(values, unique, slices.dense_shape)
