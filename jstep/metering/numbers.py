"""The numbers of a log line, and their transfer from the device."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.meshes import internal_transfers
from jstep.core.placement import is_on_cpus
from jstep.metrics.totals import MeanOf
from jstep.training.metrics import LOSS, Metrics

# Which values are numbers, their order, and their text.


def format_numbers(values: Mapping[str, Any]) -> str:
    texts: list[str] = []
    for name, number in read_values(values).items():
        texts.append(f"{name} {number}" if isinstance(number, int) else f"{name} {number:.4g}")
    return "  ".join(texts)


def sorted_numbers(metrics: Metrics, leave_out: Collection[str] = ()) -> dict[str, Any]:
    return {
        name: metrics[name] for name in sort_metrics(metrics, leave_out) if is_number(metrics[name])
    }


def sort_metrics(names: Collection[str], leave_out: Collection[str]) -> list[str]:
    """Sort metrics: always `loss` and learning rates, then the others by name, if not left out."""
    losses: list[str] = []
    rates: list[str] = []
    others: list[str] = []
    for name in names:
        if name == LOSS:
            losses.append(name)
        elif name.rsplit("/", 1)[-1] == "learning_rate":
            rates.append(name)
        elif name not in leave_out:
            others.append(name)
    return [*losses, *sorted(rates), *sorted(others)]


def numbers_in(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if is_number(value)}


def names_of_arrays(metrics: Metrics) -> list[str]:
    """Return the names of metrics that are arrays of numbers, or complex: no row can show them."""
    names: list[str] = []
    for name, value in metrics.items():
        total = value.total if isinstance(value, MeanOf) else value
        if not isinstance(total, jax.Array | np.ndarray):
            continue
        if jnp.issubdtype(total.dtype, jnp.complexfloating) or (total.ndim and is_numeric(total)):
            names.append(name)
    return names


def is_number(value: object) -> bool:
    """Whether a value is one real number."""
    return is_numeric(value) and getattr(value, "ndim", 0) == 0


def is_numeric(value: object) -> bool:
    """Whether a value is a real number, or an array of them."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "ndim"):
        return isinstance(value, int | float)
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return is_real or jnp.issubdtype(dtype, jnp.bool_)


def real_parts(losses: Iterable[Any]) -> list[Any]:
    """Return the real numbers of losses, which are any trees; a complex one counts as two."""
    parts: list[Any] = []
    for leaf in jax.tree.leaves(list(losses)):
        dtype = getattr(leaf, "dtype", None)
        is_complex_array = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
        if is_complex_array or isinstance(leaf, complex):
            parts += [leaf.real, leaf.imag]
        elif is_numeric(leaf):
            parts.append(leaf)
    return parts


# Transfers to the host: `start_…` never waits for the device, `read_…` does.


def start_copies(values: Iterable[Any]) -> None:
    for value in values:
        # From a CPU there is nothing to transfer, and the call takes as long as a small step.
        if isinstance(value, jax.Array) and not is_on_cpus(value):
            value.copy_to_host_async()


def is_ready(values: Iterable[Any]) -> bool:
    arrays: list[Any] = [value for value in values if isinstance(value, jax.Array)]
    return all(map(trees.is_ready, arrays))


def read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    with internal_transfers():
        return {name: read_value(value).item() for name, value in values.items()}


def local_copy(value: Any) -> Any:
    """Return the shard of an array on one device of this process; all of it, if replicated."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value.addressable_data(0)
    return value


def read_value(value: object) -> np.ndarray[Any, Any]:
    if (
        isinstance(value, jax.Array)
        and not value.is_fully_addressable
        and value.is_fully_replicated
    ):
        value = value.addressable_data(0)
    return np.asarray(value)


class PendingTransfer(NamedTuple):
    """A transfer to the host: `read()` waits unless `is_ready()`."""

    is_ready: Callable[[], bool]
    read: Callable[[], Any]


def start_transfer(values: Collection[Any], read: Callable[[], Any]) -> PendingTransfer:
    """Start to copy values to the host, from which `read` computes the numbers."""
    start_copies(values)
    return PendingTransfer(lambda: is_ready(values), read)


Deliver = Callable[[int, Any], None]
"""The method of a hook that gets the numbers of a step: `deliver(step, numbers)`."""


def _call_deliver(owner: Any, deliver: Deliver, step: int, numbers: Any) -> None:
    deliver(step, numbers)


class _Delivery(NamedTuple):
    """A transfer, and the hook that its numbers are for.

    Attributes:
        step: The step whose numbers these are.
        owner: The hook, which an error of `deliver` names.
    """

    step: int
    pending: PendingTransfer
    deliver: Deliver
    owner: Any


class TransferQueue:
    """A queue of transfers to the host, whose numbers are delivered to hooks.

    Args:
        waiting: Makes a context in which to wait for a transfer.
        call: `call(owner, deliver, step, numbers)` calls the `deliver` of a hook.
    """

    def __init__(
        self,
        waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        call: Callable[[Any, Deliver, int, Any], None] = _call_deliver,
    ) -> None:
        self._queue: deque[_Delivery] = deque()
        self._waiting = waiting
        self._call = call

    def add(self, step: int, pending: PendingTransfer, deliver: Deliver, owner: object) -> None:
        self._queue.append(_Delivery(step, pending, deliver, owner))

    def deliver_ready(self) -> None:
        """Deliver what has arrived, in the order of steps: never a row before an earlier one."""
        while self._queue and self._queue[0].pending.is_ready():
            self._deliver_next()

    def deliver_all(self, stop: float = math.inf) -> None:
        """Wait for the numbers of all steps before `stop`, and deliver them."""
        while self._queue and self._queue[0].step < stop:
            self._deliver_next()

    def _deliver_next(self) -> None:
        step, pending, deliver, owner = self._queue.popleft()
        if pending.is_ready():
            numbers = pending.read()
        else:
            with self._waiting():
                numbers = pending.read()
        self._call(owner, deliver, step, numbers)
