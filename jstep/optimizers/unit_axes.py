"""The axes of a leaf that form a unit: the weights that feed one output."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jstep.core import trees
from jstep.core.checks import shown

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


def axes_of(axes: UnitAxes, path: str, leaf: Any, default: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
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
