"""Metrics that no step computes: hyperparameters that are plain numbers.

An output of a compiled program costs some 2 µs a call on a CPU, so they are none. They are a static result of the
trace, part of the structure of what it returns: JAX keeps them with the very program they belong to.
"""

from typing import Any

import jax
import numpy as np

from jstep.core import trees


@jax.tree_util.register_static
class Constants:
    """Numbers known without running the program, by name; a pytree without leaves, equal where they are.

    Attributes:
        values: Name → NumPy array, which nobody can write to.
        skipped: The name of the metric that tells whether the update was left out, or None if there is no guard.
    """

    def __init__(self, values: dict[str, np.ndarray[Any, Any]], skipped: str | None = None) -> None:
        self.values = values
        self.skipped = skipped
        known = ((name, str(value.dtype), value.shape, value.tobytes()) for name, value in values.items())
        self._key = (skipped, *known)
        # The same objects at each call: who compares them does so by identity, at every step.
        self._arrays = {name: value[()] for name, value in values.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def arrays(self) -> dict[str, Any]:
        """The numbers as NumPy scalars, or arrays that cannot be written to: callers share, donate or drop nothing."""
        return dict(self._arrays)

    def repeated(self, k: int) -> "Constants":
        """The numbers of K steps, stacked."""
        stacked = {name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.values.items()}
        return Constants(stacked, self.skipped)


def split_constants(metrics: Any, skipped: str | None = None) -> tuple[Any, Constants]:
    """What a step computes, and what is a plain number (of Python or NumPy) among its metrics.

    Args:
        metrics: The metrics of a step. Anything but a dict is taken as computed.
        skipped: The name of the metric that tells whether the update was left out.
    """
    if type(metrics) is not dict:
        return metrics, Constants({}, skipped)
    plain = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)}
    constants = {name: value for name, value in plain.items() if value is not None}
    return {name: value for name, value in metrics.items() if name not in constants}, Constants(constants, skipped)


def _plain(value: Any) -> np.ndarray[Any, Any] | None:
    """A plain number in the dtype that JAX would give it; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return np.asarray(value)
    if isinstance(value, int):
        fits = -(2**31) <= value < 2**31 or trees.default_int() == np.int64
        return np.asarray(value, trees.default_int()) if fits else None
    if isinstance(value, float):
        return np.asarray(value, trees.default_float())
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and value.dtype.kind in "iufcV":
        return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
    return None
