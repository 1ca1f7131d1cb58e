"""Conversion of arrays read from a checkpoint to the leaves of a target, with its shardings and in their own memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format import leaves as _leaves
from jstep.checkpoint.format.manifest import Leaf
from jstep.checkpoint.format.match import Wanted, average_of
from jstep.core import trees
from jstep.core.placement import is_of_host, on_devices, place_anywhere, target_sharding
from jstep.core.selection import has_value


def stored_sharding(wanted: Wanted) -> Any:
    """Return the sharding for reading the stored array of a leaf; None to read it as a NumPy array."""
    if isinstance(wanted.leaf, np.ndarray | np.generic):
        return None
    sharding = target_sharding(wanted.leaf, wanted.path)
    if wanted.source is not None and wanted.source.dtype != dtype_of(wanted):
        return None  # a count of another width: converted on the host, which supports both
    is_key = wanted.source is not None and wanted.source.key_impl is not None
    # The data of a key has additional axes, which these two shardings do not split.
    fits = isinstance(sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding)
    return sharding if fits or not is_key else None


def dtype_of(wanted: Wanted) -> str:
    """Return the dtype of a leaf of a target."""
    leaf = wanted.leaf
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return _leaves.dtype_name(dtype)


def place_leaf(wanted: Wanted, read: Any) -> Any:
    """Return the leaf of the array that was read for it.

    Args:
        wanted: The leaf of the target, with its source.
        read: A NumPy array, or one with `stored_sharding`, which may be donated; None if nothing was stored.
    """
    leaf, record = wanted.leaf, wanted.source
    assert record is not None
    array = _leaves.zeros_of(record) if read is None else read
    if record.dtype != (wanted_dtype := dtype_of(wanted)) and jnp.issubdtype(record.dtype, jnp.integer):
        record, array = dataclasses.replace(record, dtype=wanted_dtype), _count(wanted, np.asarray(array))
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(_leaves.from_stored(record, np.asarray(array)), leaf.dtype)
    sharding = target_sharding(leaf, wanted.path)
    if sharding is None or not isinstance(array, jax.Array):
        value = _on_default_device(wanted, record, np.asarray(array))
        return value if sharding is None else jax.device_put(value, sharding)
    if record.key_impl is not None or record.stored_as is not None or array.dtype != leaf.dtype:

        def leaf_of(stored: Any) -> Any:
            if record.key_impl is not None:
                return jax.random.wrap_key_data(stored, impl=record.key_impl)
            return _leaves.from_stored(record, stored).astype(leaf.dtype)

        array = jax.jit(leaf_of, out_shardings=sharding)(array)
    return array if array.sharding == sharding else jax.device_put(array, sharding)


def _count(wanted: Wanted, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert a count to the integer dtype of the target."""
    converted = array.astype(dtype_of(wanted))
    if (converted != array).any():
        raise ValueError(
            f"target: {wanted.path!r} is {converted.dtype} and cannot represent {array.max()}; enable jax_enable_x64"
        )
    return converted


def _on_default_device(wanted: Wanted, record: Leaf, array: np.ndarray[Any, Any]) -> jax.Array:
    if record.key_impl is not None:
        return jax.random.wrap_key_data(place_anywhere(array), impl=record.key_impl)
    value = _leaves.from_stored(record, array)
    value = value.astype(getattr(wanted.leaf, "dtype", value.dtype), copy=False)
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        raise ValueError(f"target: {wanted.path!r} is {value.dtype}, which JAX supports only with jax_enable_x64")
    return place_anywhere(value)


def nested_values(leaves: Sequence[Leaf], arrays: Mapping[str, Any], averages: Sequence[str] | None) -> dict[str, Any]:
    """Return nested dicts of NumPy arrays; `averages` replace params if given."""
    values = {}
    for key, record in _leaves.by_id(leaves).items():
        array = _leaves.zeros_of(record) if record.array is None else arrays[record.array]
        values[key] = array if record.key_impl is not None else _leaves.from_stored(record, array)
    out = []
    for key, record in _leaves.by_id(leaves).items():
        average = average_of(key, values, averages)
        value = values[key] if average is None else values[average].astype(values[key].dtype)
        out.append((record, value))
    return _leaves.nested(out)


def copy_of(wanted: Wanted, original: Any) -> Any:
    """Return a copy of another leaf of the target, as it was restored, in the dtype and sharding of this one."""
    leaf, dtype = wanted.leaf, dtype_of(wanted)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(original, leaf.dtype)
    array = on_devices(original) if isinstance(original, jax.Array) else place_anywhere(np.array(original, dtype))
    sharding = target_sharding(leaf, wanted.path)

    def cast(x: Any) -> Any:
        return jnp.array(x, dtype, copy=True)

    if sharding is None or is_of_host(sharding) or sharding.device_set != array.sharding.device_set:
        made = jax.jit(cast)(array)
        return made if sharding is None else jax.device_put(made, sharding)
    return jax.jit(cast, out_shardings=sharding)(array)


def keep_target_leaf(wanted: Wanted, step: int) -> Any:
    """Return a copy of a leaf of the target that nothing is restored into; a guard's step becomes the checkpoint's.

    Args:
        wanted: The leaf.
        step: The step of the checkpoint.

    Raises:
        ValueError: The leaf has no value.
    """
    leaf = wanted.leaf
    if wanted.is_guard and jnp.issubdtype(dtype_of(wanted), jnp.integer):
        since = np.full(np.shape(leaf), step, dtype_of(wanted))
        if isinstance(leaf, np.ndarray | np.generic):
            return since
        return jax.device_put(place_anywhere(since), target_sharding(leaf, wanted.path))
    if not has_value(leaf):
        raise ValueError(
            f"target: {wanted.path!r} is not in the checkpoint, or differs there, and has no value to keep; "
            "with partial=True, pass arrays for leaves that the checkpoint lacks"
        )
    return (
        leaf.copy() if trees.is_array(leaf) else jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
    )
