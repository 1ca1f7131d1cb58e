"""Sums of fingerprints over arrays on devices: each element is read once, on the device of its shard."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jstep.core.placement import on_devices
from jstep.core.trees import key_data
from jstep.fingerprints.host import host_sums
from jstep.fingerprints.mix import HALF, HIGH, MASK, STRIDE, U, lanes, sealed, split_at

HOST = np.ndarray | np.generic


def device_sums(array: Any) -> Any:
    """Return the sums of the two lanes over all elements, uint32 `[2]`; to be traced."""
    array = key_data(on_devices(array))
    if not array.size:
        return jnp.zeros(2, U)
    key = _keys(array)
    sums = [_reduced(*lanes(low, high, key + U(half * HALF & MASK))) for half, (low, high) in enumerate(_words(array))]
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def _words(array: Any) -> list[tuple[Any, Any]]:
    """Return the elements as pairs of 32-bit words; two pairs for 128-bit elements."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [_words(part)[0] for part in (lax.real(array), lax.imag(array))]
        return parts if dtype.itemsize == 16 else [(parts[0][0], parts[1][0])]
    if dtype.name.startswith("float4"):
        array = array.astype(jnp.float32)
    elif dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    elif dtype.name in ("int2", "int4"):
        array = array.astype(jnp.int8)
    elif dtype.name in ("uint2", "uint4"):
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    if size == 8:
        both = lax.bitcast_convert_type(array, U)
        return [(both[..., 0], both[..., 1])]
    words = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}"))
    return [(words.astype(U), None)]


def _keys(array: Any) -> Any:
    """Return the keys of all positions in the whole array, in its own shape, so that shards do not move."""
    shape, split = array.shape, split_at(array.shape)
    key = jnp.zeros((), U)
    stride = 1
    for axis in reversed(range(len(shape))):
        of_one = stride * STRIDE if stride < split else stride // split * HIGH
        along = lax.iota(U, shape[axis]) * U(of_one & MASK)
        key = key + lax.expand_dims(along, [other for other in range(len(shape)) if other != axis])
        stride *= shape[axis]
    return key


def _reduced(first: Any, second: Any) -> Any:
    """Compute both sums in one fast pass."""
    sums = lax.reduce(
        (first, second), (U(0), U(0)), lambda one, other: (one[0] + other[0], one[1] + other[1]), range(first.ndim)
    )
    return jnp.stack(sums)


def fingerprints(leaves: list[Any], keys: Any) -> Any:
    """Return the fingerprints of leaves, uint32 `[n, 2]`; to be traced. Leaves in host memory become constants."""
    sums = [host_sums(np.asarray(leaf)) if isinstance(leaf, HOST) else device_sums(leaf) for leaf in leaves]
    return jnp.stack(sealed(jnp.stack(sums), keys), axis=-1)


def per_leaf(leaves: list[Any], keys: Any) -> list[Any]:
    """Return the fingerprint of each leaf, n arrays uint32 `[2]`; to be traced."""
    return list(fingerprints(leaves, keys))


def summed(leaves: list[Any], keys: Any) -> Any:
    """Return the sum of the fingerprints, uint32 `[2]`; to be traced."""
    return fingerprints(leaves, keys).sum(axis=0, dtype=U)
