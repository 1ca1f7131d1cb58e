"""Memory kinds of arrays: offloading to host memory and back."""

import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jstep.core import trees
from jstep.core.checks import as_text, shown
from jstep.core.exceptions import scoped

DEVICE = "device"


def checked_memory(kind: Any, mesh: Mesh, argument: str) -> str | None:
    """Validate a memory kind for the devices of a mesh; return None for their default memory.

    Raises:
        TypeError: The value is not a string.
        ValueError: The devices do not have this memory kind.
    """
    if kind is None or as_text(kind, argument) == DEVICE:
        return None
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if not kinds:
        raise ValueError(
            f"{argument}={shown(kind)}: {device.device_kind} devices that only compile do not report their memory "
            "kinds; leave it out"
        )
    if kind not in kinds:
        raise ValueError(f"{argument}={shown(kind)}: {device.device_kind} devices have the memory kinds {kinds}")
    return None if kind == device.default_memory().kind else str(kind)


def is_on_host(leaf: Any) -> bool:
    """Whether an array, traced or not, is in host memory, not in device memory."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def is_of_host(sharding: Any) -> bool:
    """Whether a sharding, of an array or a shape, is in host memory, not in device memory."""
    kind = sharding.memory_kind
    return kind is not None and kind != _here(sharding).default_memory().kind


def _here(sharding: Any) -> Any:
    """Return a device of a sharding, preferably of this process: others may not report their memory kinds."""
    devices = sharding.device_set
    return next((one for one in devices if one.process_index == one.client.process_index()), next(iter(devices)))


def on_devices(tree: Any) -> Any:
    """Move arrays to device memory, for computation."""
    return jax.tree.map(_on_device, tree)


def _on_device(leaf: Any) -> Any:
    if not is_on_host(leaf):
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, jax.memory.Space.Device)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(_here(leaf.sharding).default_memory().kind))


_SHARDINGS: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_shardings", default=None)


@scoped
def sharded(shardings: Any) -> Iterator[None]:
    """Context manager that makes the shardings of a traced state known: tracers on Auto axes do not know them."""
    token = _SHARDINGS.set(shardings)
    try:
        yield
    finally:
        _SHARDINGS.reset(token)


def shardings_of(tree: Any) -> list[Any] | None:
    """Return the shardings of the leaves of a traced state; None if they are unknown."""
    known = _SHARDINGS.get()
    return jax.tree.leaves(known) if known is not None and trees.structure(known) == trees.structure(tree) else None


def to_host(leaf: Any) -> Any:
    """Move a traced array to host memory."""
    return leaf if is_on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host)


def back(leaf: Any, before: Any) -> Any:
    """Move an array to the memory of the array that it replaces, and unless traced, reshard it like that array."""
    if isinstance(leaf, jax.core.Tracer):
        return to_host(leaf) if is_on_host(before) else leaf
    sharding = getattr(before, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(leaf, jax.Array) or leaf.sharding == sharding:
        return leaf
    return jax.device_put(leaf, sharding)
