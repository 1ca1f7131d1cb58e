"""Stacking of trees leaf by leaf on a new leading axis, as for batches, and its inverse."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import flatten, leaf_at, path_str, paths_of, quoted


def stack_trees(trees: Sequence[Any], what: str) -> Any:
    """Stack trees leaf by leaf on a new leading axis.

    Leaves become NumPy arrays; JAX arrays are stacked on their device.

    Args:
        trees: At least one tree; all must have the same structure, shapes and dtypes.
        what: The name of the caller, for the error.

    Raises:
        ValueError: Structures, shapes or dtypes differ; names the path and the two elements.
    """
    flat, treedef = flatten(trees[0])
    columns: list[list[Any]] = [[leaf] for leaf in flat]
    for i, tree in enumerate(trees[1:], 1):
        leaves, other = flatten(tree)
        if other != treedef:
            raise ValueError(
                f"{what}: element {i} has the structure {other}, element 0 has {treedef}. Elements must "
                "match to be stacked; dequeue or index them individually otherwise."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(trees[0])]
    return treedef.unflatten(
        [_stack_leaves(column, path_str(k), what) for column, k in zip(columns, keys, strict=True)]
    )


def no_rows(tree: Any) -> Any:
    """Return what `stack_trees` would return for no elements like `tree`, with shapes in place of JAX arrays."""

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct((0, *leaf.shape), leaf.dtype)
        array = np.asarray(leaf)
        return np.empty((0, *array.shape), array.dtype)

    return jax.tree.map(leaf_of, tree)


def rows_of(tree: Any, what: str) -> list[Any]:
    """Return the rows of stacked trees, the inverse of `stack_trees`: copies, so that the arrays can be reused.

    Args:
        tree: A tree of arrays whose leading axes have the same size.
        what: The name of the tree, for the error.

    Raises:
        ValueError: A leaf has no leading axis, sizes differ, or there is no leaf; names the paths.
    """
    leaves, treedef = flatten(tree)
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
    sizes: dict[int, str] = {}
    for path, array in zip(paths_of(tree), arrays, strict=True):
        if not array.ndim:
            raise ValueError(
                f"{what}: {leaf_at(path)} has shape (): must have a leading axis, of the elements; stack them, for "
                "example with np.stack"
            )
        sizes.setdefault(array.shape[0], path)
    if len(sizes) != 1:
        each = ", ".join(f"{size} at {quoted(path)}" for size, path in sizes.items())
        found = f"leaves have leading axes of different sizes ({each})" if each else "the tree has no leaf"
        raise ValueError(f"{what}: {found}: must have arrays with a leading axis of one size, the number of elements")
    return [treedef.unflatten(row) for row in zip(*map(_rows, arrays), strict=True)]


def _rows(array: Any) -> list[Any]:
    """Return copies of the rows: a view would keep the whole array alive, and follow its changes."""
    return list(array) if isinstance(array, jax.Array) or array.ndim == 1 else [row.copy() for row in array]


def _stack_leaves(leaves: list[Any], path: str, what: str) -> Any:
    if all(isinstance(leaf, jax.Array) for leaf in leaves):
        _check_same(leaves, path, what)
        return jnp.stack(leaves)  # without blocking on the device
    arrays = [np.asarray(leaf) for leaf in leaves]
    first = arrays[0]
    if not all(a.dtype == first.dtype and a.shape == first.shape for a in arrays):
        _check_same(arrays, path, what)
        return np.stack(arrays)  # strings of different lengths
    if first.ndim == 0:
        return np.array(leaves, dtype=first.dtype)
    batch = np.empty((len(arrays), *first.shape), first.dtype)
    for i, array in enumerate(arrays):
        batch[i] = array
    return batch


def _check_same(arrays: Sequence[Any], path: str, what: str) -> None:
    def check(name: str, of: Callable[[Any], Any]) -> None:
        for i, array in enumerate(arrays):
            if of(array) != of(arrays[0]):
                raise ValueError(
                    f"{what}: {name}s differ at {quoted(path)}: {of(arrays[0])} in element 0, {of(array)} in "
                    f"element {i}. Elements must match to be stacked: pad, crop or cast them before."
                )

    check("shape", lambda a: a.shape)
    # Strings may have different lengths; the dtypes of PRNG keys have no kind.
    check("dtype", lambda a: a.dtype.kind if getattr(a.dtype, "kind", "V") in "SU" else a.dtype)
