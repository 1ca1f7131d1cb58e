"""Clipping of gradients, and norms without intermediate overflow or underflow."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import as_int, describe_type
from jstep.core.device_values import as_scalar
from jstep.core.meshes import internal_transfers, on_any_mesh
from jstep.core.placement import compute_first
from jstep.core.trees import Array, Number
from jstep.slots.indexed_slices import IndexedSlices, combine_rows, is_slices, trim_slices

# Gradient clipping by value, norm, average norm and global norm.


@on_any_mesh("t")
def clip_by_value(t: object, min: Number | Array, max: Number | Array) -> Any:
    """Clip each element to [min, max]: min(max(t, min), max).

    Args:
        t: An array or a tree of arrays.
        min: The minimum, a scalar or an array that broadcasts to the shape of each leaf.
        max: The maximum, likewise.

    Returns:
        The clipped tree, with the same shapes and dtypes. NaNs are preserved.

    Raises:
        TypeError: A leaf is not an array of real numbers, for example a PRNG key (names its path).
        ValueError: `min` > `max`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), -1, 1))
        [-1.   0.5  1. ]

    Source: `tf.clip_by_value`.
    """
    low, high = _bound("min", min), _bound("max", max)
    try:
        np.broadcast_shapes(np.shape(min), np.shape(max))
    except ValueError:
        raise ValueError(
            f"min and max have shapes {np.shape(min)} and {np.shape(max)}, which do not fit together: they must "
            "broadcast with each other"
        ) from None
    if low is not None and high is not None and np.any(low > high):
        raise ValueError(f"min={min!r}: must be ≤ max={max!r}")

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        for name, bound in (("min", min), ("max", max)):
            sizes = zip(reversed(np.shape(bound)), reversed(x.shape), strict=False)
            if np.ndim(bound) > x.ndim or any(size not in (1, wanted) for size, wanted in sizes):
                raise ValueError(
                    f"{name}: has shape {np.shape(bound)}, which does not broadcast to the leaf at "
                    f"{trees.quote_path(path)} of shape {x.shape}"
                )
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"clip_by_value: the leaf at {trees.quote_path(path)} is {x.dtype}, and complex numbers have no order"
            )
        low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (min, max))
        return jnp.clip(x, *(jnp.broadcast_to(bound, x.shape) if bound.ndim else bound for bound in (low, high)))

    return map_arrays(clip, t, "clip_by_value", number)


def _bound(name: str, value: object) -> Any:
    """Return the value on the host; None if traced."""
    if isinstance(value, bool | str) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(f"{name}={value!r}: must be a number or an array, got {describe_type(value)}")
    number = trees.concrete(value)
    if number is not None and np.any(np.isnan(number)):
        raise ValueError(f"{name}={value!r}: must be a number")
    return number


@on_any_mesh("t")
def clip_by_norm(t: object, clip_norm: Number, axes: int | tuple[int, ...] | None = None) -> Any:
    """Clip each leaf by its L2 norm: t · clip_norm / ‖t‖ if ‖t‖ > clip_norm.

    Args:
        t: An array or a tree of arrays.
        clip_norm: The maximum norm, a scalar > 0.
        axes: The axes over which the norm is computed; None for all. To clip the rows of a matrix: `axes=1`.

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
    as_scalar(clip_norm, "clip_norm", low=0, above=True, finite=False)
    listed = axes if axes is None or isinstance(axes, tuple | list) else (axes,)
    over = None if listed is None else tuple(as_int(axis, "axes") for axis in listed)

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        rank = len(shape)
        for axis in over or ():
            if not -rank <= axis < rank:
                raise ValueError(
                    f"axes={axes}: the leaf at {trees.quote_path(path)} has shape {shape}, which has no axis "
                    f"{axis}; map over the leaves that have it"
                )
        if over is not None and len({axis % rank for axis in over}) < len(over):
            raise ValueError(f"axes={axes}: names an axis twice for the leaf at {trees.quote_path(path)}")
        return scale_to_norm(x, compute_norm([x], over, clip_norm), clip_norm)

    return map_arrays(clip, t, "clip_by_norm")


@on_any_mesh("t")
def clip_by_average_norm(t: object, clip_norm: Number) -> Any:
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
    as_scalar(clip_norm, "clip_norm", low=0, above=True, finite=False)

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        size = max(1, int(np.prod(shape)))
        return scale_to_norm(x, compute_norm([x], limit=clip_norm * size) / size, clip_norm)

    return map_arrays(clip, t, "clip_by_average_norm")


def global_norm(tree: Tree) -> Array:
    """Global L2 norm of a tree: √(Σ ‖leaf‖²) over all leaves.

    Args:
        tree: An array or a tree of arrays. Repeated rows of an `IndexedSlices` are summed first.

    Returns:
        A float32 scalar (float64 if a leaf is float64); 0 for a tree without leaves. Intermediate values do not
        overflow if the result is finite. Complex leaves enter with their absolute values.

    Raises:
        TypeError: A leaf is not an array of numbers, for example a PRNG key (names its path).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": None}))
        5.0

    Source: `tf.global_norm`.
    """
    return _global_norm(tree, "global_norm")


@on_any_mesh()
def _global_norm(tree: Tree, name: str) -> Array:
    return compute_norm([array for _, array in _numbers(tree, name)])


def _numbers(tree: Tree, name: str) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Yield the keys of each leaf, and an array of the same norm."""
    for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_slices):
        if trees.is_none(x):
            continue
        path = trees.path_str(keys)
        array = combine_rows(x, path).values if isinstance(x, IndexedSlices) else number(x, path, name)
        array = array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)
        # Computed first: on a CPU, XLA would otherwise merge these squares with the optimizer's g² and keep the array.
        yield keys, *compute_first(array)


@on_any_mesh()
def layer_norms(tree: Tree, depth: int = 1) -> dict[str, Array]:
    """L2 norms of the layers of a tree: path → √(Σ ‖leaf‖²) over the leaves below it.

    Args:
        tree: A tree of arrays, such as parameters, gradients or updates. Leaves that are None are omitted, and so is a
            layer without any other leaf. Repeated rows of an `IndexedSlices` are summed first.
        depth: The number of keys in the path of a layer, ≥ 1. A leaf with fewer keys is listed under its own path.

    Returns:
        Float32 scalars by path, such as `"decoder"` or, with `depth=2`, `"decoder/0"`, in the order of the leaves.
        Intermediate values do not overflow if the norm fits float32. Complex leaves enter with their absolute values,
        integers as numbers.

    Raises:
        TypeError: A leaf is not an array of numbers, for example a PRNG key (names its path), or `depth` is not an
            integer.
        ValueError: `depth` is below 1, or two layers have the same path, as with keys that contain a slash.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> tree = {"dense": {"b": jnp.array([3.0]), "w": jnp.array([[4.0]])}, "scale": jnp.float32(2.0), "n": None}
        >>> {name: float(norm) for name, norm in jstep.layer_norms(tree).items()}
        {'dense': 5.0, 'scale': 2.0}
        >>> sorted(jstep.layer_norms(tree, depth=2))
        ['dense/b', 'dense/w', 'scale']

        The norm of each layer's gradient and update as metrics of a step:

        >>> norms = [
        ...     lambda g, u, p: {f"grad_norm/{k}": v for k, v in jstep.layer_norms(g).items()},
        ...     lambda g, u, p: {f"update_norm/{k}": v for k, v in jstep.layer_norms(u).items()},
        ... ]
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> step = jstep.minimize(lambda params: params["a"] ** 2 - params["b"], optimizer, metrics=norms)
        >>> _, metrics = step(jstep.TrainState.create({"a": 2.0, "b": 1.0}, optimizer))
        >>> {name: float(value) for name, value in metrics.items() if "norm" in name}
        {'grad_norm/a': 4.0, 'grad_norm/b': 1.0, 'update_norm/a': 2.0, 'update_norm/b': 0.5}
    """
    depth = as_int(depth, "depth", at_least=1)
    layers: dict[tuple[Any, ...], list[Array]] = {}
    for keys, array in _numbers(tree, "layer_norms"):
        layers.setdefault(keys[:depth], []).append(array)
    norms: dict[str, Array] = {}
    for keys, arrays in layers.items():
        path = trees.path_str(keys)
        if path in norms:
            raise ValueError(f"tree: must have a path of its own for each layer, got {path!r} for two; rename a key")
        norms[path] = compute_norm(arrays).astype(jnp.float32)
    return norms


def clip_by_global_norm(tree: Tree, clip_norm: Number, use_norm: Array | None = None) -> tuple[Any, Array]:
    """Clip by global norm: scale all leaves by clip_norm / norm if norm > clip_norm, norm = `global_norm(tree)`.

    Args:
        tree: An array or a tree of arrays.
        clip_norm: The maximum norm, a scalar > 0.
        use_norm: The precomputed norm, if available.

    Returns:
        The clipped tree, with the same dtypes, and the norm before clipping. If the norm is not finite, every leaf
        becomes NaN, so that a diverged step is visible and is not applied in part.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> clipped, norm = jstep.clip_by_global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
        >>> print(clipped["a"], clipped["b"], norm)
        [0.6] [0.8] 5.0

    Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks" (2012);
    `tf.clip_by_global_norm`.
    """
    with internal_transfers():
        as_scalar(clip_norm, "clip_norm", low=0, above=True, finite=False)
        norm = _global_norm(tree, "clip_by_global_norm") if use_norm is None else _known_norm(use_norm)
    return _with_norm(tree, norm, clip_norm), norm


@on_any_mesh("tree")
def _with_norm(tree: Tree, norm: Array, clip_norm: Number) -> Any:
    by = factors(norm, clip_norm)  # once for all leaves
    return map_arrays(lambda x, *_: multiply_twice(x, norm, *by), tree, "clip_by_global_norm")


def _known_norm(norm: Any) -> Array:
    if isinstance(norm, bool | str) or not (isinstance(norm, int | float) or trees.is_array(norm)):
        raise TypeError(f"use_norm={norm!r}: must be the result of global_norm, got {describe_type(norm)}")
    if np.ndim(norm):
        raise ValueError(f"use_norm: must be a scalar, got shape {np.shape(norm)}")
    value = trees.concrete(norm)
    if value is not None and np.isfinite(value) and value < 0:
        raise ValueError(f"use_norm={value}: must be ≥ 0")
    array = jnp.asarray(norm)
    return array if trees.is_floating(array.dtype) else array.astype(jnp.float32)


def number(x: Any, path: str, name: str) -> Array:
    if isinstance(x, bool | str) or not (trees.is_array(x) or isinstance(x, int | float)):
        what = describe_type(x) if isinstance(x, np.ndarray) else f"{type(x).__name__}, which is not an array"
        raise TypeError(f"{name}: {trees.leaf_at(path)} is {what}")
    if trees.is_key(x):
        raise TypeError(f"{name}: {trees.leaf_at(path)} has dtype {x.dtype}, a PRNG key. Replace it by None.")
    return jnp.asarray(trees.native(x, path, name))


def floating(x: object, path: str, name: str) -> Array:
    array = number(float(x) if isinstance(x, int) and not isinstance(x, bool) else x, path, name)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {trees.leaf_at(path)} has dtype {array.dtype}; only floating-point arrays can be "
            "scaled. Replace it by None, or cast it."
        )
    return array


def map_arrays(
    function: Callable[[Array, tuple[int, ...], str], Array],
    tree: Tree,
    name: str,
    as_array: Callable[[Any, str, str], Array] = floating,
) -> Any:
    """Map `function(array, dense shape, path)` over the leaves that are not None.

    The array of an `IndexedSlices` is its combined rows. `as_array` converts and validates a leaf.
    """
    refuse_numbers_in_a_row(tree, name)

    def leaf(keys: Any, x: object) -> Any:
        path = trees.path_str(keys)
        if isinstance(x, IndexedSlices):
            rows = combine_rows(x, path)
            values = function(rows.values, x.dense_shape, path).astype(jnp.result_type(x.values))
            return trim_slices(dataclasses.replace(rows, values=values))
        if trees.is_none(x):
            return x
        array = as_array(x, path, name)
        return function(array, array.shape, path)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_slices)


def refuse_numbers_in_a_row(tree: Tree, name: str) -> None:
    """Reject a list or tuple of numbers, which was probably meant as one array."""
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        row = bool(keys) and isinstance(keys[-1], jax.tree_util.SequenceKey)
        if row and isinstance(x, bool | int | float | complex | np.generic):
            where = f" at {trees.path_str(keys[:-1])!r}" if keys[:-1] else ""
            raise TypeError(
                f"{name}: a list or tuple of numbers{where} is a tree of scalars; give an array: jnp.array([...])"
            )


# Norms without intermediate overflow or underflow, and the scale factors for clipping.


def compute_norm(arrays: Sequence[Array], axes: object = None, limit: object = 0.0) -> Array:
    """Compute √(Σ |x|²) over the arrays (over `axes` of a single array, kept), in float32 or wider.

    Finite if the result fits the dtype. The derivative is x / norm, and zero at zero. Norms below `limit` may underflow
    unless it is tiny, so that a leaf or row of zeros costs no second pass.
    """
    return _norm_of(axes, list(arrays), jnp.asarray(limit))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)  # outside of a compiled step JAX would recompile the loop at each call
def _norm_of(axes: object, arrays: list[Array], limit: Array) -> Array:
    unscaled = jnp.ones_like(jax.eval_shape(lambda arrays: _squares(arrays, axes, np.float32(1)), arrays))
    # If squares overflow or underflow, everything is scaled by a power of two and squared again.
    # A sum of squares overflows only if some numbers, all within ±2¹²⁸, exceed 2⁵⁰. Scaled by 2⁻¹⁰⁰ the largest is
    # below 2²⁸, and numbers that underflow are negligible. Squares that underflow are below 2⁻¹²⁶ each, negligible
    # beside a norm of 2⁻³². Below it, numbers scaled by 2⁹⁰ have squares that neither underflow nor overflow.
    down, least, up = (-100, -32, 90) if unscaled.dtype.itemsize == 4 else (-600, -400, 600)
    floor = jnp.where(limit < 2.0**least, 2.0**least, 0.0).astype(unscaled.dtype)

    # One or two rounds.
    def is_unfinished(carry: tuple[Any, ...]) -> Array:
        rounds, factor, _ = carry
        return (rounds == 0) | ((rounds == 1) & jnp.any(factor != 1))

    def squared(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        rounds, factor, _ = carry
        norm = jnp.sqrt(_squares(arrays, axes, factor)) / factor
        huge, tiny = jnp.isinf(norm), norm < floor
        return rounds + 1, jnp.where(huge, unscaled * 2.0**down, jnp.where(tiny, unscaled * 2.0**up, unscaled)), norm

    # LLVM would compile the squares of a branch a second time. A loop on a GPU would store arrays that are only
    # converted, such as bfloat16 gradients to float32, while XLA moves conversions into a branch.
    def in_branch(*start: Array) -> Array:
        carry = squared(start)
        return jax.lax.cond(is_unfinished(carry), lambda: squared(carry)[-1], lambda: carry[-1])

    def in_loop(*start: Array) -> Array:
        return jax.lax.while_loop(is_unfinished, squared, start)[-1]

    return jax.lax.platform_dependent(0, unscaled, unscaled, cpu=in_loop, default=in_branch)


@_norm_of.defjvp
def _norm_jvp(axes: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    # As x / norm: differentiating the root and the squares would overflow.
    ((arrays, limit), (moved, _)) = primals, tangents
    norm = _norm_of(axes, arrays, limit)
    total = jnp.zeros_like(norm)
    for x, dx in zip(arrays, moved, strict=True):
        unit, dx = _unit(x, norm), dx.astype(trees.compute_dtype(dx.dtype))
        along = jnp.real(unit) * jnp.real(dx)
        if jnp.iscomplexobj(x):
            along += jnp.imag(unit) * jnp.imag(dx)
        total += jnp.sum(along, axis=axes, keepdims=axes is not None).astype(norm.dtype)
    return norm, total


def _unit(x: Array, norm: Array) -> Array:
    dtype = trees.compute_dtype(x.dtype)
    huge = _shrinks(norm)
    divisor = jnp.where(norm > 0, norm * huge, jnp.ones_like(norm))
    return jnp.where(norm > 0, x.astype(dtype) * huge.astype(dtype) / divisor.astype(dtype), jnp.zeros((), dtype))


def _shrinks(norm: Array) -> Array:
    """A power of two, 1 unless the norm is huge."""
    # XLA multiplies by the reciprocal, which is flushed to 0 above 8.5e37.
    half = 64 if norm.dtype.itemsize == 4 else 512
    huge = norm > jnp.asarray(2.0**half, norm.dtype)
    return jnp.where(huge, jnp.full_like(norm, 2.0**-half), jnp.ones_like(norm))


def _squares(arrays: Sequence[Array], axes: object, factor: object) -> Array:
    parts: list[Array] = []
    for x in arrays:
        parts += [jnp.real(x), jnp.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]

    def squared(parts: list[Array], factor: object) -> list[Array]:
        # One factor per array: XLA would store a factor shared by arrays of the same shape in that shape.
        factors = jax.lax.optimization_barrier([factor] * len(parts))
        return [_square(part, axes, own) for part, own in zip(parts, factors, strict=True)]

    low = [part for part in parts if part.dtype.itemsize < 4]
    # XLA adds converted numbers in another order if they are multiplied first, even by 1.
    of_low = iter(
        jax.lax.cond(jnp.all(factor == 1), lambda low, _: [_square(part, axes) for part in low], squared, low, factor)
    )
    of_wide = iter(squared([part for part in parts if part.dtype.itemsize >= 4], factor))
    squares = [next(of_low if part.dtype.itemsize < 4 else of_wide) for part in parts]
    return functools.reduce(_added, squares) if squares else jnp.zeros((), np.float32)


def _added(first: Array, second: Array) -> Array:
    dtype = max(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return first.astype(dtype) + second.astype(dtype)


def _square(x: Array, axes: Any, factor: Any = None) -> Array:
    x = x.astype(trees.compute_dtype(x.dtype))
    x = x if factor is None else x * factor.astype(x.dtype)
    return jnp.sum(jnp.square(x), axis=axes, keepdims=axes is not None)


def scale_to_norm(x: Array, norm: Array, clip_norm: object) -> Array:
    """Return x · clip_norm / norm where norm > clip_norm, exactly x elsewhere; NaN if the norm is not finite."""
    return multiply_twice(x, norm, *factors(norm, clip_norm))


@jax.custom_jvp
def multiply_twice(x: Array, norm: Array, limit: Array, first: Array, second: Array) -> Array:
    """Return (x · first) · second, computed in float32 or wider."""
    dtype = trees.compute_dtype(x.dtype)
    return (x.astype(dtype) * first.astype(dtype) * second.astype(dtype)).astype(x.dtype)


@multiply_twice.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # With u = x / norm and c the limit: c / norm · (dx − u · dnorm) + u · dc if norm > c, else dx, in an order without
    # intermediate overflow or underflow.
    x, norm, limit, first, second = primals
    dx, dnorm, dlimit, _, _ = tangents
    dtype = trees.compute_dtype(x.dtype)
    over = norm > limit
    unit = jnp.where(over, _unit(x, norm), jnp.zeros((), dtype))
    across = multiply_twice(dx.astype(dtype) - unit * dnorm.astype(dtype), norm, limit, first, second)
    return multiply_twice(*primals), (across + unit * dlimit.astype(dtype)).astype(x.dtype)


def factors(norm: Array, clip_norm: object) -> tuple[Array, Array, Array]:
    """Return the limit and two factors whose product is limit / norm if norm > limit, else 1.

    NaN if the norm is not finite. The first factor is a power of two, 1 unless the norm is huge.
    """
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    ones = jnp.ones_like(norm)
    first = _shrinks(norm)
    over = norm > limit
    second = jnp.where(over, limit / jnp.where(over, norm * first, ones), ones)
    # Zero if finite, else NaN: a constant NaN would trigger `jax.debug_nans` without an error.
    second = second + jax.lax.stop_gradient(norm - norm)
    # The barrier keeps XLA from multiplying the two factors first if both are constants.
    return limit, jnp.where(over, first, ones), jax.lax.optimization_barrier(second)
