"""Which axes of a leaf are its matrix: (in, out); further ones count matrices."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, shown

Axes: TypeAlias = Callable[[str, Any], tuple[Any, Any]]
MatrixAxes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def checked_axes(axes: Axes | None) -> Axes:
    """What a user gave as `axes`; by default the last two axes are the matrix, (in, out) as in Flax."""
    chosen: Axes = as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True) or _last_two
    return chosen


def _last_two(path: str, leaf: Any) -> tuple[int, int]:
    return -2, -1


def axes_of(path: str, leaf: Any, chosen: Axes, purpose: str, way_out: str) -> MatrixAxes:
    """The axes of a leaf that are rows of its matrix, and those that are columns.

    Args:
        path: The leaf's path.
        leaf: The leaf, of which the shape counts.
        chosen: What `checked_axes` returned.
        purpose: What a matrix is needed for, for the error.
        way_out: The partition that trains the other leaves, for the error.

    Raises:
        ValueError: The leaf has fewer than two axes, or not those that `chosen` returns.
    """
    shape = np.shape(leaf)
    if len(shape) < 2:
        raise ValueError(
            f"params: the leaf at {trees.quoted(path)} has shape {shape}: must have two axes, a matrix, {purpose}; "
            f"train the rest by another optimizer: {way_out}"
        )
    given = chosen(path, leaf)
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise ValueError(f"axes: must return (in, out) for {path!r} of shape {shape}, got {shown(given)}")
    try:
        parts = [
            tuple(range(len(shape))[axis] for axis in (part if isinstance(part, tuple | list) else (part,)))
            for part in given
        ]
    except (IndexError, TypeError) as error:
        raise ValueError(f"axes: {shown(given)} for {path!r}: must be axes of shape {shape}") from error
    flat = [axis for part in parts for axis in part]
    if not all(parts) or len(set(flat)) != len(flat):
        raise ValueError(f"axes: {shown(given)} for {path!r} of shape {shape}: must be two parts of different axes")
    return parts[0], parts[1]


def partition_shown(label: str, optimizer: str) -> str:
    """A partition that trains matrices by one optimizer and the rest by AdamW, as errors show it."""
    return (
        f"jstep.partition({{'{label}': {optimizer}, 'adamw': jstep.adamw(1e-3)}}, lambda path, leaf: '{label}' if "
        "leaf.ndim == 2 and 'embed' not in path else 'adamw')"
    )
