"""Map a function over trainable leaves, for custom optimizers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.indexed_slices import is_slices
from jstep.core.types import Params


def map_leaves(fn: Callable[..., Any], params: Params, *others: Any) -> Any:
    """Map `fn(path, leaf, …)` over the trainable leaves for which no other tree has None.

    It handles None and integer leaves, None gradients, `IndexedSlices` (converted to dense) and low-precision leaves
    (converted to float32).

    Args:
        fn: `fn(path, leaf, *others)`, with arrays of one floating dtype.
        params: The parameters.
        *others: Trees like params, such as gradients and slots; leaves may be None.

    Returns:
        A tree like params, with None where `fn` was not called: the form in which an `Optimizer` returns updates.

    Raises:
        ValueError: A tree does not have the structure of params.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> params = {"w": jnp.bfloat16(2.0), "n": jnp.array(3), "b": jnp.float32(1.0)}
        >>> grads = {"w": jnp.bfloat16(-4.0), "n": None, "b": None}
        >>> jstep.map_leaves(lambda path, p, g: -0.5 * jnp.sign(g), params, grads)
        {'b': None, 'n': None, 'w': Array(0.5, dtype=float32)}
    """
    as_function(fn, "fn", "(path, leaf, …)")
    found = [trees.flatten_like(params, tree, f"others[{i}]", is_leaf=is_slices) for i, tree in enumerate(others)]
    results: list[Any] = []
    for (path, leaf), *rest in zip(trees.leaves_with_paths(params), *found, strict=True):
        if not trees.is_trainable(leaf) or any(trees.is_none(one) for one in rest):
            results.append(None)
            continue
        dtype = trees.compute_dtype(jnp.result_type(leaf))
        results.append(fn(path, *(_wide(one, dtype) for one in (leaf, *rest))))
    return trees.structure(params).unflatten(results)


def _wide(x: Any, dtype: Any) -> Any:
    x = x.to_dense() if is_slices(x) else jnp.asarray(x)
    return x.astype(dtype) if trees.is_floating(x.dtype) else x
