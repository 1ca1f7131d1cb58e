"""Clipping of gradients, and norms."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from jstep.core import trees
from jstep.core.checks import as_int, describe_type
from jstep.core.device_values import as_scalar
from jstep.core.meshes import internal_transfers, supports_meshes
from jstep.core.placement import compute_first
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, Number, T, Tree
from jstep.slots.indexed_slices import IndexedSlices, combine_rows, is_slices, trim_slices

# Gradient clipping by value, norm, average norm and global norm.


@shortens_tracebacks
def clip_by_value(t: T, min: Number | Array, max: Number | Array) -> T:
    """Clip each element to [min, max]: min(max(t, min), max).

    Args:
        t: An array or a tree of arrays.
        min: The minimum, a scalar or an array that broadcasts to the shape of each leaf.
        max: The maximum, likewise.

    Returns:
        The clipped tree, with the same shapes and dtypes. NaNs are preserved.

    Raises:
        TypeError: A leaf is not an array of real numbers (names its path).
        ValueError: `min` > `max`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), -1, 1))
        [-1.   0.5  1. ]

    Source: `tf.clip_by_value`.
    """
    with internal_transfers():
        are_known = trees.concrete(min) is not None and trees.concrete(max) is not None
        if are_known and not np.all(np.less_equal(min, max)):
            raise ValueError(f"min={min!r}: must be ≤ max={max!r}")
    return clip_values(t, min, max)


@supports_meshes("t")
def clip_values(t: Tree, low: Any, high: Any) -> Any:
    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        if jnp.iscomplexobj(x):
            raise TypeError(
                f"clip_by_value: {trees.leaf_at(path)} is {x.dtype}, "
                "and complex numbers have no order"
            )
        least = jnp.asarray(low).astype(x.dtype)
        most = jnp.asarray(high).astype(x.dtype)
        # Broadcast here: while JAX's rank promotion is "raise", `jnp.clip` accepts only scalars and
        # the rank of x.
        if least.ndim:
            least = jnp.broadcast_to(least, x.shape)
        if most.ndim:
            most = jnp.broadcast_to(most, x.shape)
        return jnp.clip(x, least, most)

    return map_arrays(clip, t, "clip_by_value", number)


@shortens_tracebacks
def clip_by_norm(t: T, clip_norm: Number, axes: int | tuple[int, ...] | None = None) -> T:
    """Clip each leaf by its L2 norm: t · clip_norm / ‖t‖ if ‖t‖ > clip_norm.

    Args:
        t: An array or a tree of arrays.
        clip_norm: The maximum norm, a scalar > 0.
        axes: The axes over which the norm is computed, such as 1 for the rows of a matrix; None for
            all.

    Returns:
        The clipped tree, with the same dtypes; values within the norm are unchanged.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_norm(jnp.array([3.0, 4.0]), 1.0))
        [0.6 0.8]

    Source: `tf.clip_by_norm`.
    """
    _check_norm(clip_norm)

    def norm_of(x: Array, shape: tuple[int, ...]) -> Array:
        if axes is None:
            return compute_norm([x])
        return compute_norm([x], normalize_axis_tuple(axes, len(shape), "axes"))

    return clip_norms(t, clip_norm, "clip_by_norm", norm_of)


@shortens_tracebacks
def clip_by_average_norm(t: T, clip_norm: Number) -> T:
    """Clip each leaf by its average L2 norm: t · clip_norm / a if a = ‖t‖ / size(t) > clip_norm.

    Args:
        t: An array or a tree of arrays; the size of an `IndexedSlices` is the size of its table.
        clip_norm: The maximum average norm, a scalar > 0.

    Returns:
        The clipped tree, with the same dtypes.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_average_norm(jnp.array([3.0, 4.0]), 1.0))
        [1.2 1.6]

    Source: `tf.clip_by_average_norm`.
    """
    _check_norm(clip_norm)
    return clip_norms(t, clip_norm, "clip_by_average_norm", average_norm)


def average_norm(x: Array, shape: tuple[int, ...]) -> Array:
    return compute_norm([x]) / max(1, int(np.prod(shape)))


def _check_norm(clip_norm: Any) -> None:
    with internal_transfers():
        as_scalar(clip_norm, "clip_norm", low=0, above=True, finite=False)


@supports_meshes("tree")
def clip_norms(
    tree: Tree,
    limit: Any,
    name: str,
    norm_of: Callable[[Array, tuple[int, ...]], Array],
    norm: Any = None,
) -> Any:
    """Scale arrays down so that `norm`, by default `norm_of(array, dense shape)`, is ≤ `limit`.

    The limit is not checked.
    """

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        if norm is None:
            return scale_to_norm(x, norm_of(x, shape), limit)
        return scale_to_norm(x, norm, limit)

    return map_arrays(clip, tree, name)


@shortens_tracebacks
@supports_meshes()
def global_norm(tree: Tree) -> Array:
    """Global L2 norm of a tree: √(Σ ‖leaf‖²) over all leaves.

    Args:
        tree: An array or a tree of arrays. Repeated rows of an `IndexedSlices` are summed first.

    Returns:
        A float32 scalar (float64 if a leaf is float64); 0 for a tree without leaves. Norms above
        1.8e19 are infinite.

    Raises:
        TypeError: A leaf is not an array of numbers (names its path).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": None}))
        5.0

    Source: `tf.global_norm`.
    """
    return compute_norm([array for _, array in _numbers(tree, "global_norm")])


def _numbers(tree: Tree, name: str) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Yield the keys of each leaf, and an array of the same norm."""
    for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_slices):
        if trees.is_none(x):
            continue
        path = trees.path_str(keys)
        _refuse_list(keys, x, name)
        if isinstance(x, IndexedSlices):
            array = combine_rows(x, path).values
        else:
            array = number(x, path, name)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            array = array.astype(jnp.float32)
        # Without `compute_first`, XLA would merge these squares with the optimizer's g² on a CPU,
        # and keep the array.
        yield keys, *compute_first(array)


@supports_meshes()
def layer_norms(tree: Tree, depth: int = 1) -> dict[str, Array]:
    """L2 norms of the layers of a tree: path → √(Σ ‖leaf‖²) over the leaves below it.

    Args:
        tree: A tree of arrays. None leaves are omitted. Repeated rows of an `IndexedSlices` are
            summed first.
        depth: The number of keys in the path of a layer, ≥ 1, or fewer for a leaf with fewer.

    Returns:
        Float32 scalars by path, such as `"decoder"` or, with `depth=2`, `"decoder/0"`, in the order
        of the leaves.

    Raises:
        ValueError: Two layers have the same path, as with keys that contain a slash.

    Example:
        >>> import jstep
        >>> norms = [lambda g, u, p: {f"grad_norm/{k}": v for k, v in jstep.layer_norms(g).items()}]
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> loss_fn = lambda params: params["a"] ** 2 - params["b"]
        >>> step = jstep.minimize(loss_fn, optimizer, metrics=norms)
        >>> _, metrics = step(jstep.TrainState.create({"a": 2.0, "b": 1.0}, optimizer))
        >>> {name: float(value) for name, value in metrics.items() if "norm" in name}
        {'grad_norm/a': 4.0, 'grad_norm/b': 1.0}
    """
    depth = as_int(depth, "depth", at_least=1)
    layers: dict[tuple[Any, ...], list[Array]] = {}
    for keys, array in _numbers(tree, "layer_norms"):
        layers.setdefault(keys[:depth], []).append(array)
    norms: dict[str, Array] = {}
    for keys, arrays in layers.items():
        path = trees.path_str(keys)
        if path in norms:
            raise ValueError(
                "tree: must have a path of its own for each layer, "
                f"got {path!r} for two; rename a key"
            )
        norms[path] = compute_norm(arrays).astype(jnp.float32)
    return norms


@shortens_tracebacks
def clip_by_global_norm(
    tree: T, clip_norm: Number, use_norm: Array | None = None
) -> tuple[T, Array]:
    """Clip by global norm: scale all leaves by clip_norm / norm if norm > clip_norm.

    The norm is `global_norm(tree)`.

    Args:
        tree: An array or a tree of arrays.
        clip_norm: The maximum norm, a scalar > 0.
        use_norm: The precomputed norm, if available.

    Returns:
        The clipped tree, with the same dtypes, and the norm before clipping. If the norm is not
        finite, every leaf becomes NaN.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> tree = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
        >>> clipped, norm = jstep.clip_by_global_norm(tree, 1.0)
        >>> print(clipped["a"], clipped["b"], norm)
        [0.6] [0.8] 5.0

    Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks" (2012);
    `tf.clip_by_global_norm`.
    """
    _check_norm(clip_norm)
    with internal_transfers():
        if use_norm is None:
            norm = global_norm(tree)
        else:
            norm = _as_norm(use_norm)
    return clip_norms(tree, clip_norm, "clip_by_global_norm", average_norm, norm), norm


def _as_norm(norm: Any) -> Array:
    array = number(norm, "", "use_norm")
    if array.ndim:
        raise ValueError(f"use_norm: must be a scalar, got shape {array.shape}")
    if not trees.is_traced(array) and array < 0:
        raise ValueError(f"use_norm={norm}: must be ≥ 0")
    if trees.is_floating(array.dtype):
        return array
    return array.astype(jnp.float32)


def number(x: Any, path: str, name: str) -> Array:
    if isinstance(x, bool | str) or not (trees.is_array(x) or isinstance(x, int | float)):
        raise TypeError(f"{name}: {trees.leaf_at(path)} is {describe_type(x)}: must be an array")
    if trees.is_key(x):
        raise TypeError(
            f"{name}: {trees.leaf_at(path)} has dtype {x.dtype}, a PRNG key. Replace it by None."
        )
    return jnp.asarray(trees.native(x, path, name))


def floating(x: object, path: str, name: str) -> Array:
    if isinstance(x, int) and not isinstance(x, bool):
        x = float(x)
    array = number(x, path, name)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {trees.leaf_at(path)} must be floating-point to be scaled, "
            f"got {array.dtype}; cast it"
        )
    return array


def map_arrays(
    function: Callable[[Array, tuple[int, ...], str], Array],
    tree: Tree,
    name: str,
    as_array: Callable[[Any, str, str], Array] = floating,
) -> Any:
    """Map `function(array, dense shape, path)` over leaves, or combined rows of `IndexedSlices`."""

    def leaf(keys: Any, x: object) -> Any:
        path = trees.path_str(keys)
        if isinstance(x, IndexedSlices):
            rows = combine_rows(x, path)
            values = function(rows.values, x.dense_shape, path).astype(jnp.result_type(x.values))
            return trim_slices(dataclasses.replace(rows, values=values))
        if trees.is_none(x):
            return x
        _refuse_list(keys, x, name)
        array = as_array(x, path, name)
        return function(array, array.shape, path)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_slices)


def _refuse_list(keys: tuple[Any, ...], x: object, name: str) -> None:
    is_in_list = bool(keys) and isinstance(keys[-1], jax.tree_util.SequenceKey)
    if is_in_list and isinstance(x, int | float | np.generic):
        place = trees.leaf_at(trees.path_str(keys))
        raise TypeError(f"{name}: {place} is a number in a list; give an array: jnp.array([...])")


# Norms, and scaling for clipping.


def compute_norm(arrays: Sequence[Array], axes: Any = None) -> Array:
    """√(Σ |x|²) over arrays, or over `axes` of one array, which are kept.

    Its derivative is zero at zero.
    """
    parts = [_squares(x, axes) for x in arrays]
    dtypes = [part.dtype for part in parts]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))
    squares = jnp.zeros((), widest)
    for part in parts:
        squares = squares + part.astype(widest)
    is_zero = squares == 0
    # The derivative of the root is infinite at 0, and would become NaN behind the outer `where`.
    root = jnp.sqrt(jnp.where(is_zero, jnp.ones_like(squares), squares))
    return jnp.where(is_zero, jnp.zeros_like(squares), root)


def _squares(x: Array, axes: Any) -> Array:
    x = trees.widen(x)
    if jnp.iscomplexobj(x):
        squares = jnp.square(jnp.real(x)) + jnp.square(jnp.imag(x))
    else:
        squares = jnp.square(x)
    return jnp.sum(squares, axis=axes, keepdims=axes is not None)


def scale_to_norm(x: Array, norm: Array, clip_norm: object) -> Array:
    """Return x · clip_norm / norm where norm > clip_norm, exactly x elsewhere.

    A norm that is not finite gives NaN.
    """
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    is_clipped = norm > limit
    # The inner `where` keeps the division finite in its derivative, also for a norm of 0.
    quotient = limit / jnp.where(is_clipped, norm, jnp.ones_like(norm))
    factor = jnp.where(is_clipped, quotient, jnp.ones_like(norm))
    # Zero if finite, else NaN: a constant NaN would trigger `jax.debug_nans` without an error.
    factor = factor + jax.lax.stop_gradient(norm - norm)
    dtype = trees.compute_dtype(x.dtype)
    return (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype)
