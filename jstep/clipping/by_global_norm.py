"""Global norm, and clipping by global norm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.clipping.norms import clipped, factors, norm_of
from jstep.clipping.parts import map_leaves, number
from jstep.core import trees
from jstep.core.array_checks import as_scalar
from jstep.core.execution_order import compute_first
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices
from jstep.core.meshes import on_any_mesh
from jstep.core.types import Array, Number


@on_any_mesh
def global_norm(tree: Any) -> Array:
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


def _global_norm(tree: Any, name: str) -> Array:
    arrays: list[Array] = []
    for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_slices):
        if trees.is_none(x):
            continue
        path = trees.path_str(keys)
        array = combined(x, path).values if isinstance(x, IndexedSlices) else number(x, path, name)
        array = array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)
        # Computed first: on a CPU, XLA would otherwise merge these squares with the optimizer's g² and keep the array.
        arrays += compute_first(array)
    return norm_of(arrays)


@on_any_mesh
def clip_by_global_norm(tree: Any, clip_norm: Number, use_norm: Array | None = None) -> tuple[Any, Array]:
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
    as_scalar(clip_norm, "clip_norm", low=0, above=True, finite=False)
    norm = _global_norm(tree, "clip_by_global_norm") if use_norm is None else _known_norm(use_norm)
    by = factors(norm, clip_norm)  # once for all leaves
    return map_leaves(lambda x, *_: clipped(x, norm, *by), tree, "clip_by_global_norm"), norm


def _known_norm(norm: Any) -> Array:
    if isinstance(norm, bool | str) or not (isinstance(norm, int | float) or trees.is_array(norm)):
        raise TypeError(f"use_norm={norm!r}: must be the result of global_norm, got {type(norm).__name__}")
    if np.ndim(norm):
        raise ValueError(f"use_norm: must be a scalar, got shape {np.shape(norm)}")
    value = trees.concrete(norm)
    if value is not None and np.isfinite(value) and value < 0:
        raise ValueError(f"use_norm={value}: must be ≥ 0")
    array = jnp.asarray(norm)
    return array if trees.is_floating(array.dtype) else array.astype(jnp.float32)
