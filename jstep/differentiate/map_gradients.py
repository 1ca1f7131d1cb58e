"""Mapping a function over dense and sparse gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jstep.core.checks import as_function
from jstep.core.indexed_slices import IndexedSlices, is_slices
from jstep.core.types import Array, Updates


def map_gradients(fn: Callable[[Array], Array], grads: Updates) -> Updates:
    """Map a function over the values of gradients: arrays, and the values (not the indices) of `IndexedSlices`.

    Args:
        fn: A function of an array.
        grads: A tree of gradients; None leaves are kept.

    Returns:
        A tree of the same structure.

    Raises:
        TypeError: `fn` is not a function.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> rows = jstep.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (5, 2))
        >>> doubled = jstep.map_gradients(lambda g: 2 * g, {"table": rows, "frozen": None})
        >>> print(doubled["table"].values, doubled["table"].indices)
        [[2. 2.]] [3]
    """
    as_function(fn, "fn", "of an array")

    def leaf(x: Any) -> Any:
        return dataclasses.replace(x, values=fn(x.values)) if isinstance(x, IndexedSlices) else fn(x)

    return jax.tree.map(leaf, grads, is_leaf=is_slices)
