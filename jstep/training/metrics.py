"""The metrics of a step: those that its program computes, and constants, hyperparameters that are plain numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import device_values

# An output of a compiled program costs some 2 µs per call on a CPU, so constants are not outputs. They are a static
# result of the trace, in the tree structure of its return value, which JAX keeps with the compiled program.


@jax.tree_util.register_static
class Constants:
    """Numbers known without running the program; a pytree without leaves that compares by their values.

    Attributes:
        values: Name → NumPy scalar or read-only array; not to be changed. The same objects at each call, because they
            are compared by identity at every step.
        skipped: The name of the metric that reports whether the update was skipped; None without a guard.
    """

    def __init__(self, values: Mapping[str, Any], skipped: str | None = None) -> None:
        self.values = {name: value[()] for name, value in values.items()}
        self.skipped = skipped
        known = ((name, str(value.dtype), value.shape, value.tobytes()) for name, value in self.values.items())
        self._key = (skipped, *known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def repeated(self, k: int) -> "Constants":
        """Return the numbers of K steps, stacked."""
        stacked = {name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.values.items()}
        return Constants(stacked, self.skipped)


class Metrics(NamedTuple):
    """The metrics of a step, as its program returns them.

    Attributes:
        computed: Those that the program computes, usually a dict.
        constants: Those that are constant.
    """

    computed: Any
    constants: Constants

    def whole(self) -> Any:
        """All metrics, as the caller of a step gets them."""
        return {**self.computed, **self.constants.values} if self.constants.values else self.computed


def split(metrics: Any, skipped: str | None = None) -> Metrics:
    """Split metrics into those that a step computes and those that are plain Python or NumPy numbers.

    Args:
        metrics: The metrics of a step. Anything but a dict counts as computed.
        skipped: The name of the metric that reports whether the update was skipped.
    """
    if type(metrics) is not dict:
        return Metrics(metrics, Constants({}, skipped))
    plain = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)}
    constants = {name: value for name, value in plain.items() if value is not None}
    computed = {name: value for name, value in metrics.items() if name not in constants}
    return Metrics(computed, Constants(constants, skipped))


def _plain(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a plain number to the dtype that JAX would give it; return None for anything else."""
    is_scalar = isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and value.dtype.kind in "iufcV"
    if not (isinstance(value, bool | np.bool_ | int | float) or is_scalar):
        return None
    if isinstance(value, int) and device_values.first_wide(value) is not None:
        return None
    dtype = value.dtype if is_scalar else jnp.result_type(value)
    return np.asarray(value, jax.dtypes.canonicalize_dtype(dtype))
