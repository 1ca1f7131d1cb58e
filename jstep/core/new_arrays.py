"""New arrays of a state, made without compiling a program for each shape.

`jnp.copy` and `jnp.full_like` compile a program for each shape and dtype. A state needs both for
each leaf, at each start, before a run has begun: 80 programs of about 15 ms for 40 leaves. A
transfer compiles nothing. Inside of a trace, or of `jax.set_mesh`, whose mesh decides where arrays
are, these functions are those of `jax.numpy`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.meshes import current_mesh, explicit_mesh, internal_transfers
from jstep.core.placement import place_anywhere

MAX_HOST_BYTES = 2**22
"""The maximum size of an array made on the host: above, filling and transferring it costs more than
a program."""


def copy_of(leaf: Any) -> Any:
    """Return a copy with memory of its own, placed like the array."""
    if trees.is_key(leaf) or not _is_transferable(leaf):
        return jnp.copy(leaf)  # leaf.copy() fails during tracing
    return jax.device_put(leaf, may_alias=False)


def copy_as(leaf: Any, dtype: DTypeLike) -> Any:
    """Return a copy of an array or number with memory of its own, in a dtype that is not weak."""
    dtype = np.dtype(dtype)
    is_on_host = trees.is_python_number(leaf) or isinstance(leaf, np.ndarray | np.generic)
    if is_on_host and _is_eager():
        # A copy on the host first: a transfer may read the memory later, when the caller has
        # changed it.
        return place_anywhere(np.array(leaf, dtype))
    if is_on_host or not _is_transferable(leaf):
        return jnp.array(leaf, dtype, copy=True)
    if leaf.dtype == dtype and not trees.is_weak(leaf):
        return copy_of(leaf)
    # Only a dtype that holds each value: NumPy and XLA may round differently.
    if np.can_cast(leaf.dtype, dtype) and _is_made_on_host(leaf, dtype):
        with internal_transfers():
            return place_anywhere(np.asarray(leaf).astype(dtype), _sharding_like(leaf))
    return jnp.array(leaf, dtype, copy=True)


def full_like(leaf: Any, value: Any, dtype: DTypeLike) -> Any:
    """Return an array of the shape of another, placed like it."""
    if trees.is_array(value) or not _is_transferable(leaf) or not _is_made_on_host(leaf, dtype):
        return jnp.full_like(leaf, value, dtype=dtype)
    return place_anywhere(np.full(leaf.shape, value, dtype), _sharding_like(leaf))


def full(shape: tuple[int, ...], value: Any, dtype: DTypeLike) -> Any:
    """Return an array on the default device."""
    if (
        trees.is_array(value)
        or not _is_eager()
        or math.prod(shape) * np.dtype(dtype).itemsize > MAX_HOST_BYTES
    ):
        return jnp.full(shape, value, dtype)
    return place_anywhere(np.full(shape, value, dtype))


def _is_eager() -> bool:
    mesh = current_mesh()
    return mesh is not None and mesh.empty  # None: inside of a trace


def _is_transferable(leaf: Any) -> bool:
    """Whether a transfer gives an array placed as an operation of `jax.numpy` would place it."""
    if not isinstance(leaf, jax.Array) or trees.is_traced(leaf) or not _is_eager():
        return False
    # `jnp.copy` writes the axes of a spec out, as a compiled step does: P() becomes P(None, None)
    # in the type.
    if not leaf.is_fully_addressable or explicit_mesh(leaf) is not None:
        return False
    if leaf.committed:
        return True
    # Operations move an uncommitted array to the default device; a transfer does not. A default
    # that is the name of a platform is no device, and is left to JAX.
    config: Any = jax.config
    default = config.jax_default_device
    if default is None:
        default = jax.local_devices()[0]
    return leaf.devices() == {default}


def _is_made_on_host(leaf: jax.Array, dtype: DTypeLike) -> bool:
    return (
        leaf.size * np.dtype(dtype).itemsize <= MAX_HOST_BYTES
        and len(leaf.sharding.device_set) == 1
    )


def _sharding_like(leaf: jax.Array) -> Any:
    return leaf.sharding if leaf.committed else None


def are_on_one_device(leaves: Sequence[Any]) -> bool:
    """Whether there are arrays, all of them on the same device."""
    if not leaves or not all(map(_is_transferable, leaves)):
        return False
    return len({device for leaf in leaves for device in leaf.sharding.device_set}) == 1


def place_like(array: jax.Array, leaf: jax.Array | None) -> jax.Array:
    """Move an array to the device of a leaf to which the leaf is committed."""
    if leaf is None or not leaf.committed:
        return array
    return jax.device_put(array, leaf.sharding)
