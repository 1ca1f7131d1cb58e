"""Shared parts of the clipping functions: mapping over leaves, and validation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices, within
from jstep.core.types import Array


def number(x: Any, path: str, name: str) -> Array:
    """Return a leaf as an array of numbers; raise an error with its path otherwise."""
    if isinstance(x, bool | str) or not (trees.is_array(x) or isinstance(x, int | float)):
        raise TypeError(f"{name}: {trees.leaf_at(path)} is {type(x).__name__}, which is not an array")
    if trees.is_key(x):
        raise TypeError(f"{name}: {trees.leaf_at(path)} has dtype {x.dtype}, a PRNG key. Replace it by None.")
    return jnp.asarray(x)


def floating(x: Any, path: str, name: str) -> Array:
    """Return a leaf as an array of floating or complex dtype; raise an error with its path otherwise."""
    array = number(float(x) if isinstance(x, int) and not isinstance(x, bool) else x, path, name)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {trees.leaf_at(path)} has dtype {array.dtype}; only floating-point arrays can be "
            "scaled. Replace it by None, or cast it."
        )
    return array


def map_leaves(
    function: Callable[[Array, tuple[int, ...], str], Array],
    tree: Any,
    name: str,
    as_array: Callable[[Any, str, str], Array] = floating,
) -> Any:
    """Map a function of an array, its dense shape and its path over the leaves of a tree.

    The array of an `IndexedSlices` is its combined rows; its dense shape is that of its table.

    Args:
        function: The function.
        tree: The tree; leaves that are None stay.
        name: The name of the caller, for errors.
        as_array: Converts and validates a leaf: `as_array(leaf, path, name)`.
    """
    refuse_numbers_in_a_row(tree, name)

    def leaf(keys: Any, x: Any) -> Any:
        path = trees.path_str(keys)
        if isinstance(x, IndexedSlices):
            rows = combined(x, path)
            values = function(rows.values, x.dense_shape, path).astype(jnp.result_type(x.values))
            return within(dataclasses.replace(rows, values=values))
        if trees.is_none(x):
            return x
        array = as_array(x, path, name)
        return function(array, array.shape, path)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_slices)


def refuse_numbers_in_a_row(tree: Any, name: str) -> None:
    """Reject a list or tuple of numbers, which was probably meant as one array.

    Raises:
        TypeError: The tree contains a list or tuple of numbers.
    """
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        row = bool(keys) and isinstance(keys[-1], jax.tree_util.SequenceKey)
        if row and isinstance(x, bool | int | float | complex | np.generic):
            where = f" at {trees.path_str(keys[:-1])!r}" if keys[:-1] else ""
            raise TypeError(
                f"{name}: a list or tuple of numbers{where} is a tree of scalars; give an array: jnp.array([...])"
            )
