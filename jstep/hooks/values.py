"""Read and format metrics without blocking the loop."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.meshes import internal_transfers
from jstep.hooks.hook import Metrics


def scalars(metrics: Metrics, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The scalar metrics: `loss` first, then learning rates, then the others by name."""
    return {name: metrics[name] for name in shown(metrics, leave_out) if is_number(metrics[name])}


def shown(names: Collection[str], leave_out: Collection[str]) -> list[str]:
    """Sort names of metrics for display, without those in `leave_out`; the loss and learning rates are always kept."""
    return sorted([name for name in names if name not in leave_out or _rank(name)[0] < 2], key=_rank)


def _rank(name: str) -> tuple[int, str]:
    return (0 if name == "loss" else 1 if name.rsplit("/", 1)[-1] == "learning_rate" else 2, name)


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a bool, or an array of one without axes, or the type of such an array."""
    return is_numeric(value) and getattr(value, "ndim", 0) == 0


def is_numeric(value: Any) -> bool:
    """Whether a value is a real number or a bool, or an array of these with any shape, or its type."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "ndim"):
        return isinstance(value, int | float)
    if getattr(dtype, "kind", "") in ("b", "i", "u", "f"):  # the dtype of a PRNG key has no kind
        return True
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))


def names_of_arrays(metrics: Metrics) -> list[str]:
    """The names of metrics that are arrays of numbers, not scalars."""
    arrays = jax.Array | np.ndarray
    return [name for name, value in metrics.items() if isinstance(value, arrays) and value.ndim and is_numeric(value)]


def start_transfer(values: Mapping[str, Any]) -> None:
    """Start the transfer of values to the host, without waiting."""
    for array in _arrays(values):
        array.copy_to_host_async()


def is_ready(values: Mapping[str, Any]) -> bool:
    """Whether reading the values would not wait."""
    return all(value.is_ready() for value in _arrays(values))


def _arrays(values: Mapping[str, Any]) -> list[Any]:
    return [value for value in values.values() if isinstance(value, jax.Array)]


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for the values and return them as Python numbers."""
    with internal_transfers():
        return {name: host(value).item() for name, value in values.items()}


def host(value: Any) -> np.ndarray[Any, Any]:
    """Copy a value to the host; of an array replicated over several processes, this process's copy."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable and value.is_fully_replicated:
        value = value.addressable_data(0)
    return np.asarray(value)


def text(values: Mapping[str, Any]) -> str:
    """Format values as `loss 0.1234  learning_rate 0.001`; reads them from the device."""
    numbers = values if all(type(value) in (float, int, bool) for value in values.values()) else read(values)
    return "  ".join([f"{name} {_short(number)}" for name, number in numbers.items()])


def _short(number: Any) -> str:
    return str(number) if isinstance(number, int) else f"{number:.4g}"


LeaveOut = Callable[[], Collection[str]]


def nothing() -> Collection[str]:
    """Return no names, the default of `leave_out`."""
    return ()


class NewResults:
    """Evaluation results that are new since the last call of `take`.

    Args:
        evaluations: Hooks with an attribute `newest`: a step and its results by name, or None.
    """

    def __init__(self, evaluations: Sequence[Any] = ()) -> None:
        self._evaluations = evaluations
        self._taken: dict[int, int] = {}

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the new results of each hook, with their step."""
        found = []
        for i, evaluation in enumerate(self._evaluations):
            newest = evaluation.newest
            if newest is not None and self._taken.get(i) != newest[0]:
                self._taken[i] = newest[0]
                found.append((newest[0], numbers_of(newest[1])))
        return found

    def all(self) -> dict[str, Any]:
        """Return the newest results of each hook."""
        found: dict[str, Any] = {}
        for evaluation in self._evaluations:
            if evaluation.newest is not None:
                found |= numbers_of(evaluation.newest[1])
        return found


def numbers_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among some results."""
    return {name: value for name, value in results.items() if is_number(value)}
