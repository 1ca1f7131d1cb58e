"""Clipping of each leaf by its norm or average norm."""

from typing import Any

import numpy as np

from jstep.clipping.norms import norm_of, scaled
from jstep.clipping.parts import map_leaves
from jstep.core import trees
from jstep.core.array_checks import as_scalar
from jstep.core.checks import as_int
from jstep.core.meshes import on_any_mesh
from jstep.core.types import Array, Number


@on_any_mesh
def clip_by_norm(t: Any, clip_norm: Number, axes: int | tuple[int, ...] | None = None) -> Any:
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
    given = axes if axes is None or isinstance(axes, tuple | list) else (axes,)
    over = None if given is None else tuple(as_int(axis, "axes") for axis in given)

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        rank = len(shape)
        for axis in over or ():
            if not -rank <= axis < rank:
                raise ValueError(
                    f"axes={axes}: the leaf at {trees.quoted(path)} has shape {shape}, which has no axis "
                    f"{axis}; map over the leaves that have it"
                )
        if over is not None and len({axis % rank for axis in over}) < len(over):
            raise ValueError(f"axes={axes}: names an axis twice for the leaf at {trees.quoted(path)}")
        return scaled(x, norm_of([x], over, clip_norm), clip_norm)

    return map_leaves(clip, t, "clip_by_norm")


@on_any_mesh
def clip_by_average_norm(t: Any, clip_norm: Number) -> Any:
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
        return scaled(x, norm_of([x], limit=clip_norm * size) / size, clip_norm)

    return map_leaves(clip, t, "clip_by_average_norm")
