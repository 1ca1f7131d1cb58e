"""Clipping by value."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.clipping.parts import map_leaves, number
from jstep.core import trees
from jstep.core.meshes import on_any_mesh
from jstep.core.types import Array, Number


@on_any_mesh
def clip_by_value(t: Any, min: Number | Array, max: Number | Array) -> Any:
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
        raise ValueError(f"min={min!r} is larger than max={max!r}")

    def clip(x: Array, shape: tuple[int, ...], path: str) -> Array:
        for name, bound in (("min", min), ("max", max)):
            if not _broadcasts(np.shape(bound), x.shape):
                raise ValueError(
                    f"{name}: has shape {np.shape(bound)}, which does not broadcast to the leaf at "
                    f"{trees.quoted(path)} of shape {x.shape}"
                )
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"clip_by_value: the leaf at {trees.quoted(path)} is {x.dtype}, and complex numbers have no order"
            )
        low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (min, max))
        return jnp.clip(x, *(jnp.broadcast_to(bound, x.shape) if bound.ndim else bound for bound in (low, high)))

    return map_leaves(clip, t, "clip_by_value", number)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _bound(name: str, value: Any) -> Any:
    """Return a bound on the host, or None if it is traced."""
    if isinstance(value, bool | str) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(f"{name}={value!r}: must be a number or an array, got {type(value).__name__}")
    number = trees.concrete(value)
    if number is not None and np.any(np.isnan(number)):
        raise ValueError(f"{name}={value!r}: must be a number")
    return number
