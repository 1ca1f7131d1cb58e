"""Records of the leaves of a state, and their conversion to and from stored arrays."""

import functools
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format.manifest import CheckpointError, Leaf, LeftOut
from jstep.core import trees
from jstep.core.checks import kind

# Types that tensorstore lacks are stored as a type with the same values (integers) or the same bits (floats).
_CARRIERS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}

_Record = TypeVar("_Record", Leaf, LeftOut)


def named(state: Any) -> list[tuple[Leaf, Any]]:
    """Return every leaf of a state with its record.

    Raises:
        TypeError: A leaf is not an array or a number, or has no value (names its path).
        ValueError: A leaf was donated (names its path).
    """
    flat = jax.tree_util.tree_leaves_with_path(state)
    out = []
    for (keys, leaf), (path, number) in zip(flat, ids(trees.path_str(keys) for keys, _ in flat), strict=True):
        leaf = _with_value(leaf, path)
        out.append((_record(path, tuple(trees.path_str((key,)) for key in keys), number, leaf), leaf))
    return out


def _with_value(leaf: Any, path: str) -> Any:
    if trees.is_traced(leaf):
        raise TypeError(f"state: {path!r} is traced; save outside of jit, with the state that a compiled step returned")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"state: {path!r} was donated to a step and deleted. "
                "Save the state that the step returned, before you pass it on."
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"state: {path!r} is on only one of {jax.process_count()} processes; a state that all processes save "
                "must be sharded over all of them, for example by jstep.shard_state(state, mesh, param_specs)"
            )
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return trees.number(leaf, f"state: {path!r}")
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"state: {path!r} is a masked array, and masks are not saved; pass leaf.filled(…)")
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV" and leaf.dtype.names is None:
        # A copy, because the caller may modify the array while it is being saved, in native byte order.
        return np.array(leaf, leaf.dtype.newbyteorder("="))
    what = kind(leaf) if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
    raise TypeError(
        f"state: {path!r} is {what}, which is not an array of numbers, a key or a number, and cannot be saved; "
        "pass it as extra, or remove it from the state"
    )


def _record(path: str, keys: tuple[str, ...], number: int, leaf: Any) -> Leaf:
    # Distinct leaves may share a path, as in {"a": {"b": x}, "a/b": y}. Orbax joins keys with dots.
    array = _unique(urllib.parse.quote(path, safe="/", errors="surrogatepass").replace(".", "%2E"), number)
    nbytes = int(trees.key_data(leaf).nbytes)
    impl = str(jax.random.key_impl(leaf)) if trees.is_key(leaf) else None
    dtype = str(leaf.dtype)
    return Leaf(path, keys, tuple(leaf.shape), dtype, nbytes, array if leaf.size else None, _CARRIERS.get(dtype), impl)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, whatever its byte order."""
    return str(dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype)


def to_stored(record: Leaf, leaf: Any) -> Any:
    """Return the array to store for a leaf, of a type that the storage format supports."""
    if record.key_impl is not None:
        return jax.random.key_data(leaf)
    if record.stored_as is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.view(record.stored_as) if _same_bits(record) else leaf.astype(record.stored_as)
    if _same_bits(record):
        return jax.lax.bitcast_convert_type(leaf, record.stored_as)
    return leaf.astype(record.stored_as)


def from_stored(record: Leaf, array: Any) -> Any:
    """Return the leaf of a stored array."""
    if record.stored_as is None:
        return array
    if isinstance(array, np.ndarray):
        return array.view(record.dtype) if _same_bits(record) else array.astype(record.dtype)
    if _same_bits(record):
        return jax.lax.bitcast_convert_type(array, jnp.dtype(record.dtype))
    return array.astype(record.dtype)


def _same_bits(record: Leaf) -> bool:
    return record.dtype.startswith("float")


def stored_kind(record: Leaf) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of the array that is stored for a leaf."""
    if record.key_impl is not None:
        key = _key_data(record.key_impl)
        return (*record.shape, *key.shape), str(key.dtype)
    return record.shape, record.stored_as or record.dtype


def zeros_of(record: Leaf) -> np.ndarray[Any, Any]:
    """Return the array of a leaf without elements, of which nothing is stored."""
    try:
        shape, dtype = stored_kind(record)
        return np.zeros(shape, jnp.dtype(dtype))
    except (TypeError, ValueError, MemoryError) as error:  # a malicious manifest
        raise CheckpointError(
            f"the manifest is not what jstep writes: {record.path!r} is {record.dtype} of shape {record.shape!s:.50} "
            f"({error!s:.100})"
        ) from None


@functools.cache
def _key_data(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def by_id(saved: Sequence[_Record]) -> dict[tuple[str, int], _Record]:
    """Return the leaves by path and number, which distinguishes leaves with the same path."""
    return dict(zip(ids(leaf.path for leaf in saved), saved, strict=True))


def ids(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Return each path with its number among equal paths: the leaves of {'a': {'b': x}, 'a/b': y} share one."""
    seen: dict[str, int] = {}
    ids = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        ids.append((path, seen[path]))
    return ids


def unique(paths: Iterable[str]) -> list[str]:
    """Return a name for each path: the path, followed by a number from its second occurrence on."""
    return [_unique(*one) for one in ids(paths)]


def _unique(path: str, number: int) -> str:
    return path if number == 1 else f"{path}#{number}"


def nested(leaves: Sequence[tuple[Leaf, Any]]) -> dict[str, Any]:
    """Return nested dicts by the keys of each leaf, for inspection."""
    out: dict[str, Any] = {}
    for record, value in leaves:
        at = out
        for key in record.keys[:-1]:
            at = at.setdefault(key, {})
        at[record.keys[-1]] = value
    return out
