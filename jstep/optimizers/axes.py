"""Axes of a leaf: those that form a matrix, and those that feed one output."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, shown

Axes: TypeAlias = Callable[[str, Any], tuple[Any, Any]]
MatrixAxes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def checked_axes(axes: Axes | None) -> Axes:
    """Check the argument `axes`; by default the last two axes are the matrix, (in, out) as in Flax."""
    chosen: Axes = as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True) or _last_two
    return chosen


def _last_two(path: str, leaf: Any) -> tuple[int, int]:
    return -2, -1


def matrix_axes_of(path: str, leaf: Any, chosen: Axes, purpose: str, way_out: str) -> MatrixAxes:
    """The axes of a leaf that form the rows of its matrix, and those that form the columns.

    Args:
        path: The leaf's path.
        leaf: The leaf; only its shape is used.
        chosen: The function returned by `checked_axes`.
        purpose: Why a matrix is needed, for the error.
        way_out: A partition that trains the other leaves, for the error.

    Raises:
        ValueError: The leaf has fewer than two axes, or lacks an axis that `chosen` returns.
    """
    shape = np.shape(leaf)
    if len(shape) < 2:
        raise ValueError(
            f"params: the leaf at {trees.quoted(path)} has shape {shape}: must have two axes, a matrix, {purpose}; "
            f"train the rest with another optimizer: {way_out}"
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
    """The code of a partition that trains matrices with one optimizer and the rest with AdamW, for errors."""
    return (
        f"jstep.partition({{'{label}': {optimizer}, 'adamw': jstep.adamw(1e-3)}}, lambda path, leaf: '{label}' if "
        "leaf.ndim == 2 and 'embed' not in path else 'adamw')"
    )


UnitAxes: TypeAlias = tuple[int, ...] | int | Callable[[str, Any], Any] | None


def check_axes(axes: UnitAxes) -> None:
    """Check the argument `axes`."""
    if not (axes is None or callable(axes)):
        as_axes(axes, "axes")


def as_axes(axes: Any, where: str) -> tuple[int, ...]:
    """Axes as a tuple."""
    some = (axes,) if isinstance(axes, int) else axes
    if not isinstance(some, tuple | list) or not all(isinstance(a, int) and not isinstance(a, bool) for a in some):
        raise TypeError(f"{where}={shown(axes)}: must be a tuple of axes, or a function (path, leaf) -> tuple")
    return tuple(some)


def unit_axes_of(axes: UnitAxes, path: str, leaf: Any, default: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """The axes to reduce over at one leaf.

    Raises:
        ValueError: The leaf has no such axis.
    """
    shape = np.shape(leaf)
    if axes is None:
        return default(shape)
    some = as_axes(axes(path, leaf) if callable(axes) else axes, f"axes at {trees.quoted(path)}")
    for axis in some:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axes={some}: the leaf at {trees.quoted(path)} of shape {shape} has no axis {axis}")
    return some
