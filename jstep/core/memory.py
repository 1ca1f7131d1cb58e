"""Arrays in the memory of the host, which device computations bring in and send back."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jstep.core import trees
from jstep.core.checks import as_text, shown

DEVICE = "device"


def checked_memory(kind: Any, mesh: Mesh, argument: str) -> str | None:
    """A kind of memory that the devices of a mesh have; None for the one they use by default.

    Raises:
        TypeError: It is not a string.
        ValueError: The devices have no such memory.
    """
    if kind is None or as_text(kind, argument) == DEVICE:
        return None
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if not kinds:
        raise ValueError(
            f"{argument}={shown(kind)}: {device.device_kind} devices that only compile do not say which memory kinds "
            "they have; leave it out"
        )
    if kind not in kinds:
        raise ValueError(f"{argument}={shown(kind)}: {device.device_kind} devices have the memory kinds {kinds}")
    return None if kind == device.default_memory().kind else str(kind)


def is_on_host(leaf: Any) -> bool:
    """Whether an array, traced or not, is in the memory of the host and not in that of its devices."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def is_of_host(sharding: Any) -> bool:
    """Whether a sharding, of an array or a shape, is in the memory of the host and not in that of its devices."""
    kind = sharding.memory_kind
    return kind is not None and kind != _here(sharding).default_memory().kind


def _here(sharding: Any) -> Any:
    """A device of a sharding, of this process if it has one: those of others may not say what memory they have."""
    devices = sharding.device_set
    return next((one for one in devices if one.process_index == one.client.process_index()), next(iter(devices)))


def on_devices(tree: Any) -> Any:
    """The same arrays in the memory of their devices, fit to be computed with."""
    return jax.tree.map(_on_device, tree)


def _on_device(leaf: Any) -> Any:
    if not is_on_host(leaf):
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, jax.memory.Space.Device)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(_here(leaf.sharding).default_memory().kind))


_SHARDINGS: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_shardings", default=None)


@contextlib.contextmanager
def sharded(shardings: Any) -> Iterator[None]:
    """Within, a traced state is known to be sharded as this tree says: on Auto axes no tracer tells."""
    token = _SHARDINGS.set(shardings)
    try:
        yield
    finally:
        _SHARDINGS.reset(token)


def shardings_of(tree: Any) -> list[Any] | None:
    """The shardings of the leaves of a traced state; None if they are not known."""
    known = _SHARDINGS.get()
    return jax.tree.leaves(known) if known is not None and trees.structure(known) == trees.structure(tree) else None


def to_host(leaf: Any) -> Any:
    """A traced array in the memory of the host."""
    return leaf if is_on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host)


def back(leaf: Any, before: Any) -> Any:
    """An array in the memory of another, whose place it takes, and sharded like it unless traced."""
    if isinstance(leaf, jax.core.Tracer):
        return to_host(leaf) if is_on_host(before) else leaf
    sharding = getattr(before, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(leaf, jax.Array) or leaf.sharding == sharding:
        return leaf
    return jax.device_put(leaf, sharding)
