"""Reading metrics without making the device wait."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jstep.hooks.hook import Metrics


def scalars(metrics: Metrics, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The numbers among the metrics: `loss` first, then the rates, then the others by name."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name == "loss" else 1 if name.rsplit("/", 1)[-1] == "learning_rate" else 2, name)

    def is_number(value: Any) -> bool:
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return value.ndim == 0
        return isinstance(value, int | float)

    kept = [name for name in metrics if name not in leave_out or rank(name)[0] < 2]
    return {name: metrics[name] for name in sorted(kept, key=rank) if is_number(metrics[name])}


def start_transfer(values: dict[str, Any]) -> None:
    """Asks for the values on the host, without waiting."""
    for value in values.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()


def is_ready(values: dict[str, Any]) -> bool:
    """Whether reading the values would not wait."""
    arrays: list[Any] = [value for value in values.values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)


def text(values: dict[str, Any]) -> str:
    """`loss 0.1234  learning_rate 0.001`; reads the values."""
    return "  ".join(f"{name} {_short(np.asarray(value).item())}" for name, value in values.items())


def _short(number: Any) -> str:
    return str(number) if isinstance(number, int) else f"{number:.4g}"


LeaveOut = Callable[[], Collection[str]]


def nothing() -> Collection[str]:
    """No names."""
    return ()
