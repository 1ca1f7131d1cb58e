"""Metrics that no step computes: hyperparameters that are plain numbers.

An output of a compiled program costs some 2 µs a call on a CPU, so they are none. They are a static result of the
trace, part of the structure of what it returns: JAX keeps them with the very program they belong to.
"""

from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.types import Array


@jax.tree_util.register_static
class Constants:
    """Numbers known without running the program, by name; a pytree without leaves, equal where they are.

    Attributes:
        values: Name → NumPy array.
    """

    def __init__(self, values: dict[str, np.ndarray[Any, Any]]) -> None:
        self.values = values
        self.skipped: str | None = None
        self._key = tuple((name, str(value.dtype), value.shape, value.tobytes()) for name, value in values.items())
        self._arrays: dict[str, Array] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def arrays(self) -> dict[str, Array]:
        """The numbers as arrays on the device, made once."""
        if self._arrays is None:
            with jax.ensure_compile_time_eval():
                self._arrays = {name: jax.device_put(value) for name, value in self.values.items()}
        return self._arrays

    def repeated(self, k: int) -> "Constants":
        """The numbers of K steps, stacked."""
        return Constants({name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.values.items()})


def split_constants(metrics: Any) -> tuple[Any, Constants]:
    """What a step computes, and what is a plain number (of Python or NumPy) among its metrics.

    Metrics that are no dict are taken as computed.
    """
    if type(metrics) is not dict:
        return metrics, Constants({})
    plain = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)}
    constants = {name: value for name, value in plain.items() if value is not None}
    return {name: value for name, value in metrics.items() if name not in constants}, Constants(constants)


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
