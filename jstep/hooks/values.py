"""Reading metrics without making the device wait."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import own_transfers
from jstep.hooks.hook import Metrics


def scalars(metrics: Metrics, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The numbers among the metrics: `loss` first, then the rates, then the others by name."""
    return {name: metrics[name] for name in _shown(metrics, leave_out) if is_number(metrics[name])}


def means(parts: Mapping[str, list[Any]], leave_out: Collection[str] = ()) -> dict[str, Any]:
    """What `Interval.take` gave, in the order and with the names of `scalars`."""
    return {name: parts[name] for name in _shown(parts, leave_out)}


def _shown(names: Collection[str], leave_out: Collection[str]) -> list[str]:
    return sorted([name for name in names if name not in leave_out or _rank(name)[0] < 2], key=_rank)


def _rank(name: str) -> tuple[int, str]:
    return (0 if name == "loss" else 1 if name.rsplit("/", 1)[-1] == "learning_rate" else 2, name)


def is_number(value: Any, ndim: int = 0) -> bool:
    """Whether a value is a real number or a bool: a scalar, or an array of some of them with so many axes."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.ndim != ndim:
            return False
        if getattr(value.dtype, "kind", "") in ("b", "i", "u", "f"):  # a key has a dtype without one
            return True
        return bool(jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer))
    return ndim == 0 and isinstance(value, int | float)


def start_transfer(values: Mapping[str, Any]) -> None:
    """Asks for the values on the host, without waiting."""
    for array in _arrays(values):
        array.copy_to_host_async()


def is_ready(values: Mapping[str, Any]) -> bool:
    """Whether reading the values would not wait."""
    return all(array.is_ready() for array in _arrays(values))


def _arrays(values: Mapping[str, Any]) -> list[Any]:
    """The arrays among values that are numbers or lists of them."""
    found: list[Any] = []
    for value in values.values():
        found += [one for one in (value if isinstance(value, list) else (value,)) if isinstance(one, jax.Array)]
    return found


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as Python numbers; of a list of arrays, the mean of all their elements. Waits for them."""
    with own_transfers():
        return {name: _mean(value) if isinstance(value, list) else host(value).item() for name, value in values.items()}


def host(value: Any) -> np.ndarray[Any, Any]:
    """A value on the host; of an array over several processes, the part that this one has of what all have."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable and value.is_fully_replicated:
        value = value.addressable_data(0)
    return np.asarray(value)


def _mean(parts: list[Any]) -> float:
    flat = [host(part).astype(np.float64).reshape(-1) for part in parts]
    return float(np.mean(np.concatenate(flat)))


def text(values: Mapping[str, Any]) -> str:
    """`loss 0.1234  learning_rate 0.001`; reads the values."""
    return "  ".join(f"{name} {_short(number)}" for name, number in read(values).items())


def _short(number: Any) -> str:
    return str(number) if isinstance(number, int) else f"{number:.4g}"


LeaveOut = Callable[[], Collection[str]]


def nothing() -> Collection[str]:
    """No names."""
    return ()
