"""Rows of trees: trees stacked on a new leading axis, the sizes of leading axes, and the rows again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import flatten, leaf_at, leaves_with_paths, paths_of, quoted


def stack_trees(trees: Sequence[Any], what: str, name: Callable[[int], str] = "element {}".format) -> Any:
    """Stack trees leaf by leaf on a new leading axis.

    Leaves become NumPy arrays; JAX arrays are stacked on their device.

    Args:
        trees: At least one tree; all must have the same structure, shapes and dtypes.
        what: The name of the caller, for the error.
        name: What the error calls a tree, by its number.

    Raises:
        ValueError: Structures, shapes or dtypes differ; names the path and the two elements.
    """
    flat = list(map(flatten, trees))
    treedef = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != treedef:
            raise ValueError(
                f"{what}: {name(i)} has the structure {other}, {name(0)} has {treedef}. Elements must "
                "match to be stacked; dequeue or index them individually otherwise."
            )

    def stacked(leaves: Sequence[Any], path: str) -> Any:
        is_on_device = all(isinstance(leaf, jax.Array) for leaf in leaves)
        arrays = leaves if is_on_device else [np.asarray(leaf) for leaf in leaves]
        _check_same(arrays, path, what, name)
        if is_on_device:
            return jnp.stack(arrays)  # without blocking on the device
        if any(a.dtype != arrays[0].dtype for a in arrays):  # strings of different lengths
            return np.stack(arrays)
        return np.stack(arrays, out=np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype))

    return treedef.unflatten(list(map(stacked, zip(*(leaves for leaves, _ in flat), strict=True), paths_of(trees[0]))))


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
    for path, array in zip(paths_of(tree), arrays, strict=True):
        if not array.ndim:
            raise ValueError(
                f"{what}: {leaf_at(path)} has shape (): must have a leading axis, of the elements; stack them, for "
                "example with np.stack"
            )
    sizes = leading_sizes(tree)
    if len(sizes) != 1:
        each = ", ".join(sizes.values())
        found = f"leaves have leading axes of different sizes ({each})" if each else "the tree has no leaf"
        raise ValueError(f"{what}: {found}: must have arrays with a leading axis of one size, the number of elements")
    return [treedef.unflatten(row) for row in zip(*map(_rows, arrays), strict=True)]


def no_rows(tree: Any) -> Any:
    """Return what `stack_trees` would return for no elements like `tree`, with shapes in place of JAX arrays."""

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct((0, *leaf.shape), leaf.dtype)
        array = np.asarray(leaf)
        return np.empty((0, *array.shape), array.dtype)

    return jax.tree.map(leaf_of, tree)


def leading_sizes(tree: Any) -> dict[int, str]:
    """Return the sizes of the leading axes of a tree, each with the first leaf that has it, as `8 at 'x'`."""
    sizes: dict[int, str] = {}
    for path, leaf in leaves_with_paths(tree):
        for size in np.shape(leaf)[:1]:
            sizes.setdefault(size, f"{size} at {quoted(path)}")
    return sizes


def _rows(array: Any) -> list[Any]:
    """Return copies of the rows: a view would keep the whole array alive, and follow its changes."""
    return list(array) if isinstance(array, jax.Array) or array.ndim == 1 else [row.copy() for row in array]


def _check_same(arrays: Sequence[Any], path: str, what: str, name: Callable[[int], str]) -> None:
    # Strings may have different lengths; the dtypes of PRNG keys have no kind.
    dtypes = [a.dtype.kind if getattr(a.dtype, "kind", "V") in "SU" else a.dtype for a in arrays]
    for aspect, each in (("shape", [a.shape for a in arrays]), ("dtype", dtypes)):
        for i, one in enumerate(each):
            if one != each[0]:
                raise ValueError(
                    f"{what}: {aspect}s differ at {quoted(path)}: {each[0]} in {name(0)}, {one} in {name(i)}. "
                    "Elements must match to be stacked: pad, crop or cast them before."
                )
