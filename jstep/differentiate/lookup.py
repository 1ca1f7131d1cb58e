"""Embedding lookup with sparse gradients."""

import contextvars
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import device_values, meshes, trees
from jstep.core.checks import describe_type
from jstep.core.trees import Array
from jstep.slots.indexed_slices import IndexedSlices


class Tables:
    """The tables for lookups while a loss's gradient is traced, and the gradients of their rows.

    A table is recognized by its identity, which the loss must not change. `_taken` has the lookups
    in the order in which JAX traces their derivatives: index of the table, ids, gradient of the
    rows.
    """

    def __init__(self, leaves: list[Array]) -> None:
        self._shapes = [leaf.shape for leaf in leaves]
        self._indices = {id(leaf): i for i, leaf in enumerate(leaves)}
        self._trace = get_opaque_trace_state()
        self._taken: list[tuple[int, Array, Array]] = []

    def index_of(self, table: object) -> int | None:
        """Return the index; None for other tables, and under another transformation."""
        return self._indices.get(id(table)) if get_opaque_trace_state() == self._trace else None

    def rows(self, index: int, table: Array, ids: Array) -> Array:
        def forward(table: Array, ids: Array) -> tuple[Array, Array]:
            return _rows_at(table, ids), ids

        def backward(ids: Array, gradient: Array) -> tuple[None, None]:
            self._taken.append((index, ids, gradient))
            return None, None

        rows = jax.custom_vjp(_rows_at)
        rows.defvjp(forward, backward)
        return rows(table, ids)

    def gradient(self, index: int, dense: Array | None) -> Any:
        taken = [(ids, gradient) for i, ids, gradient in self._taken if i == index]
        if not taken:
            return dense
        join = functools.partial(_joined, self._shapes[index])
        return meshes.call_on_auto_axes(join, taken, dense, specs_of=meshes.shard_like(dense))


TABLES: contextvars.ContextVar[Tables | None] = contextvars.ContextVar("jstep_tables", default=None)


@meshes.exempts_transfers
def lookup(table: object, ids: object) -> Array:
    """Return rows of a table, `table[ids]`, with an `IndexedSlices` of those rows as gradient.

    The gradient is dense if the loss also uses the table in another way, or looks it up inside
    scan, vmap, cond, remat or a nested jit, and under `jax.grad`.

    Args:
        table: A leaf of params, exactly as passed to the loss, of shape (rows, …).
        ids: Integers of any shape; −1 is the last row. An id out of range gives a row of NaN if the
            table is floating.

    Returns:
        The rows, of shape (*ids.shape, …).

    Raises:
        TypeError: `ids` are not integers.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> f = jstep.compute_gradients(lambda p, ids: jnp.sum(jstep.lookup(p["words"], ids)))
        >>> loss, grads = f({"words": jnp.ones((1000, 2))}, jnp.array([3, 5]))
        >>> print(grads["words"].indices, grads["words"].values.shape)
        [3 5] (2, 2)

    Source: `tf.nn.embedding_lookup`.
    """
    if not trees.is_array(table) and hasattr(table, "__jax_array__"):
        table = table.__jax_array__()  # a boxed variable of Flax NNX
    if not (trees.is_array(table) or isinstance(table, list | tuple)):
        raise TypeError(f"table: must be an array of rows, got {describe_type(table)}")
    tables = TABLES.get()
    index = None if tables is None else tables.index_of(table)
    table = device_values.as_array(table, "table")
    ids = device_values.as_array(ids, "ids")
    if table.ndim == 0:
        raise ValueError("table: must have rows, got a scalar")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids: must be integers, got dtype {ids.dtype}")
    if tables is not None and index is not None:
        return tables.rows(index, table, ids)
    return _rows_at(table, ids)


def _joined(shape: tuple[int, ...], taken: list[tuple[Array, Array]], dense: Array | None) -> Any:
    flat_ids = [jnp.reshape(ids, (-1,)).astype(trees.default_int()) for ids, _ in taken]
    indices = jnp.concatenate(flat_ids)
    values = jnp.concatenate([jnp.reshape(gradient, (-1, *shape[1:])) for _, gradient in taken])
    indices = jnp.where(indices < 0, indices + shape[0], indices)
    slices = IndexedSlices(values, indices, shape)
    if dense is None:
        return slices
    # The loss also uses the table in another way.
    return dense + slices.to_dense().astype(dense.dtype)


def _rows_at(table: Array, ids: Array) -> Array:
    """`table[ids]`, sharded like the ids, within rows like the table; NaN for ids out of range."""
    options: dict[str, Any] = {}
    if jnp.issubdtype(table.dtype, jnp.inexact):
        options = {"mode": "fill", "fill_value": jnp.nan}
    mesh = meshes.explicit_mesh((table, ids))
    if mesh is None:
        return table.at[ids].get(**options)
    id_axes = meshes.dims_of(meshes.spec_of(ids))
    used: set[str] = set()
    used.update(*map(meshes.mesh_axes_of, id_axes))
    row_axes = []
    for axis in meshes.dims_of(meshes.spec_of(table))[1:]:
        # A mesh axis can split only one axis of an array.
        row_axes.append(axis if used.isdisjoint(meshes.mesh_axes_of(axis)) else None)
    sharding = NamedSharding(mesh, PartitionSpec(*id_axes, *row_axes))  # also under no mesh
    return table.at[ids].get(out_sharding=sharding, **options)
