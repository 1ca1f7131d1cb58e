"""Gradients of functions of trees, and functions of gradients, as in `tf.train`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import meshes, trees
from jstep.core.checks import as_function
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, T, Tree, Updates
from jstep.slots.indexed_slices import IndexedSlices, combine_rows, is_slices, trim_slices


@shortens_tracebacks
def gradients(fn: Callable[[T], Any], xs: T, grad_ys: Tree = None) -> T:
    """Return the sum of d ys/d x for each x of the tree xs, where ys = fn(xs).

    Args:
        fn: A function of one tree that returns a tree of arrays.
        xs: The tree of arrays to differentiate with respect to. Leaves that are not floating point
            get None.
        grad_ys: Weights of the ys, a tree like fn(xs); ones by default.

    Returns:
        A tree like xs.

    Raises:
        TypeError: No leaf of xs, or none of fn(xs), is floating point.
        ValueError: `grad_ys` does not have the structure and shapes of fn(xs).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.gradients(lambda x: x**2, jnp.array([1.0, 2.0])))
        [2. 4.]

    Source: `tf.gradients`.
    """
    as_function(fn, "fn", "of a tree of arrays")
    leaves, treedef = trees.flatten(xs)
    trees.check_arrays(xs, "xs")
    indices = [
        i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if not indices:
        raise TypeError(
            "xs: no leaf is floating point, "
            f"got dtypes {[str(jnp.result_type(leaf)) for leaf in leaves]}"
        )

    def call(inputs: list[Any]) -> Any:
        ys = fn(treedef.unflatten(trees.replace_leaves(leaves, indices, inputs)))
        trees.check_arrays(ys, "the result of fn")
        return jax.tree.map(jnp.asarray, ys)

    def pull_weights_back(inputs: list[Any], weights: object) -> list[Any]:
        ys, pull_back = jax.vjp(call, inputs)
        (grads,) = pull_back(_cotangents(ys, weights))
        return list(grads)

    inputs = [jnp.asarray(leaves[i]) for i in indices]
    differentiate = meshes.AxesFallback(getattr(fn, "__name__", "fn"))
    grads = differentiate(pull_weights_back, inputs, grad_ys, specs_of=meshes.shard_like(inputs))
    return treedef.unflatten(trees.replace_leaves([None] * len(leaves), indices, grads))


@meshes.exempts_transfers
def _cotangents(ys: object, grad_ys: Any) -> Any:
    """Return the weights as `jax.vjp` wants them: float0 for integers, ones by default."""
    named = trees.leaves_with_paths(ys)
    if not any(jnp.issubdtype(y.dtype, jnp.inexact) for _, y in named):
        raise TypeError(
            f"fn returned no floating-point array, but dtypes {[str(y.dtype) for _, y in named]}"
        )
    try:
        weights = (
            [None] * len(named) if grad_ys is None else trees.structure(ys).flatten_up_to(grad_ys)
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"grad_ys has the structure {trees.structure(grad_ys)}, "
            f"fn(xs) has {trees.structure(ys)}"
        ) from error

    def cotangent(path: str, y: Array, weight: Any) -> Any:
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            return np.zeros(y.shape, jax.dtypes.float0)
        if weight is None:
            return jnp.ones_like(y)
        if not trees.is_array_or_number(weight):
            raise trees.not_an_array(weight, path, "grad_ys")
        if np.shape(weight) != y.shape:
            raise ValueError(
                f"grad_ys: the leaf at {trees.quote_path(path)} has shape {np.shape(weight)}, "
                f"but fn(xs) has {y.shape}"
            )
        return jnp.asarray(weight).astype(y.dtype)

    cotangents: list[Any] = []
    for (path, y), weight in zip(named, weights, strict=True):
        cotangents.append(cotangent(path, y, weight))
    return trees.structure(ys).unflatten(cotangents)


@shortens_tracebacks
def stop_gradient(x: T) -> T:
    """Return any tree x unchanged, without propagating gradients to it.

    Example:
        >>> import jax, jstep
        >>> print(jax.grad(lambda x: x * jstep.stop_gradient(x))(3.0))
        3.0

    Source: `tf.stop_gradient`.
    """
    return jax.lax.stop_gradient(x)


@shortens_tracebacks
def map_gradients(fn: Callable[..., Array], grads: T, *others: Updates) -> T:
    """Map a function over the values of gradients.

    These are arrays, and the values (not the indices) of `IndexedSlices`. With several trees, a
    missing leaf counts as zeros. `IndexedSlices` in all of them give `IndexedSlices` with the union
    of their rows; otherwise the gradients become dense.

    Args:
        fn: A function of an array from each tree, of equal shapes.
        grads: A tree of gradients; leaves may be None.
        *others: Other trees of gradients with the same structure.

    Example:
    >>> import jstep
        >>> jstep.map_gradients(lambda a, b: a + 2 * b, {"a": 1.0, "b": None}, {"a": 0.5, "b": 3.0})
        {'a': 2.0, 'b': Array(6., dtype=float32, weak_type=True)}
    """
    as_function(fn, "fn", "of an array")
    if not others:

        def map_leaf(g: Any) -> Any:
            if is_slices(g):
                return dataclasses.replace(g, values=fn(g.values))
            return fn(g)

        return jax.tree.map(map_leaf, grads, is_leaf=is_slices)

    def combine(keys: Any, *leaves: Any) -> Any:
        return _combine(fn, leaves, trees.path_str(keys))

    return jax.tree_util.tree_map_with_path(combine, grads, *others, is_leaf=_is_gradient)


def _is_gradient(node: object) -> bool:
    return node is None or is_slices(node)


def _combine(fn: Callable[..., Array], leaves: Sequence[Any], path: str) -> Any:
    """Apply a function to the gradients of one leaf, some of which may be None."""
    present = [g for g in leaves if g is not None]
    if not present:
        return None
    shapes = {tuple(g.dense_shape) if is_slices(g) else np.shape(g) for g in present}
    if len(shapes) > 1:
        raise ValueError(
            f"grads: the gradients at {trees.quote_path(path)} "
            f"have different shapes: {sorted(shapes)}"
        )
    first, *others = _in_one_form(leaves, present)
    if not is_slices(first):
        return fn(first, *others)
    values = fn(first.values, *(rows.values for rows in others))
    return trim_slices(dataclasses.replace(first, values=values))


@meshes.exempts_transfers
def _in_one_form(leaves: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    """Return gradients in one form: slices with the same rows, or all dense; zeros for None."""
    if not all(map(is_slices, present)):
        whole = [g.to_dense() if is_slices(g) else g for g in leaves]
        zeros = jnp.zeros_like(next(g for g in whole if g is not None))
        return [zeros if g is None else g for g in whole]
    indices = jnp.concatenate([jnp.asarray(g.indices).astype(trees.default_int()) for g in present])
    shape = present[0].dense_shape
    rows = []
    for g in leaves:
        # The rows of this gradient, and zeros for the rows of the others.
        values: list[Any] = []
        for other in present:
            if other is g:
                values.append(jnp.asarray(other.values))
            else:
                values.append(jnp.zeros_like(other.values))
        rows.append(combine_rows(IndexedSlices(jnp.concatenate(values), indices, shape)))
    return rows
