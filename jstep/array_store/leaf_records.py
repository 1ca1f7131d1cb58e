"""Records of a state's leaves in a checkpoint, and their stored arrays."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from jstep.array_store.array_index import MAX_PATH_BYTES
from jstep.array_store.manifest import (
    CheckpointError,
    Leaf,
    LeafRecord,
    LeftOutLeaf,
    array_path,
    is_too_large,
)
from jstep.core import device_values, selection, trees
from jstep.core.checks import describe_type
from jstep.slots import compact_numbers
from jstep.state.fingerprints import as_hexadecimal, leaf_key, stacked_words, start_fingerprints
from jstep.state.leaves import StateLeaves

COUNT_DTYPES = {"int32", "int64"}
"""The dtypes of counts."""
_CARRIERS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}
"""A type that tensorstore lacks → the type that it is stored as.

Integers are stored with their values, floats with their bits. `manifest` accepts these pairs, and
others that a later version may need.
"""


class SavedState(NamedTuple):
    """What is saved of a state.

    Attributes:
        leaves: The records of its leaves.
        arrays: Name → array to store.
        left_out: The records of the leaves that are left out, with their values.
    """

    leaves: list[Leaf]
    arrays: dict[str, Any]
    left_out: list[tuple[Leaf, Any]]

    @classmethod
    def collect(cls, found: StateLeaves, leave_out: selection.VarList) -> "SavedState":
        """Record the leaves of a state; raise if one of them cannot be saved."""
        saved = cls([], {}, [])
        excluded = found.left_out(leave_out)
        halves = found.halves
        values = [
            _as_saved(value, path) for value, path in zip(found.values, found.paths, strict=True)
        ]
        names: list[str | None] = []
        for array_name, value in zip(array_names(found), values, strict=True):
            # An array without elements is not stored, and has no name.
            names.append(array_name if value.size else None)
        for i, value in enumerate(values):
            stored = value
            key_impl = None
            if not value.size and is_too_large(value.shape):
                raise ValueError(
                    f"state: {found.paths[i]!r} has the shape {value.shape}, which is too large "
                    "for a checkpoint even without elements; remove it from the state"
                )
            if trees.is_key(value):
                stored = jax.random.key_data(value)
                key_impl = str(jax.random.key_impl(value))
            dtype = str(value.dtype)
            carrier = _CARRIERS.get(dtype)
            name = names[i]
            leaf = Leaf(
                path=found.paths[i],
                keys=found.keys[i],
                shape=tuple(value.shape),
                dtype=dtype,
                nbytes=int(stored.nbytes),
                array=name,
                stored_as=carrier,
                key_impl=key_impl,
                half=names[halves[i]] if i in halves else None,
            )
            if i in excluded:
                saved.left_out.append((leaf, value))
                continue
            saved.leaves.append(leaf)
            if name is None:
                continue
            if carrier is not None:
                stored = _carried(leaf, stored, carrier)
            saved.arrays[name] = stored
        return saved


def array_names(leaves: StateLeaves) -> list[str]:
    """Return the names of the leaves' arrays in a checkpoint.

    Raises:
        ValueError: A name is too long, or two leaves would be stored as one array.
    """
    # Orbax joins keys with dots.
    names = unique(
        quote(path, safe="/", errors="surrogatepass").replace(".", "%2E") for path in leaves.paths
    )
    paths_by_array: dict[str, str] = {}
    for name, path in zip(names, leaves.paths, strict=True):
        array = array_path(name)
        if len(array) > MAX_PATH_BYTES:
            raise ValueError(
                f"state: the path {path[:50]!r}… has {len(array)} bytes in a checkpoint: must be "
                f"at most {MAX_PATH_BYTES}; shorten the keys"
            )
        if array in paths_by_array:
            raise ValueError(
                f"state: {paths_by_array[array]!r} and {path!r} differ only in a slash at the end, "
                "and would be stored as one array; rename one of them"
            )
        paths_by_array[array] = path
    return names


# Records of leaves, and their conversion to and from stored arrays.

_Record = TypeVar("_Record", Leaf, LeftOutLeaf)


def check_saveable(leaf: object, what: str) -> None:
    """Raise an error if a leaf is traced, masked or deleted."""
    if trees.is_traced(leaf):
        raise TypeError(
            f"{what} is traced; save outside of jit, with what a compiled step returned"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, and masks are not saved; pass leaf.filled(…)")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"{what} was donated to a step and deleted; save what the step returned, "
            "before passing it on"
        )


def _as_saved(leaf: object, path: str) -> Any:
    """Return a leaf as an array that can be saved; an array of NumPy is copied."""
    if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and not leaf.is_deleted():
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"state: {path!r} is on only one of {jax.process_count()} processes; a state that "
                "all processes save must be sharded over all of them, for example by "
                "jstep.shard_state(state, mesh, param_specs)"
            )
        return leaf
    check_saveable(leaf, f"state: {path!r}")
    if trees.is_python_number(leaf):
        return device_values.number(leaf, f"state: {path!r}")
    what = type(leaf).__name__
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind in "biufcV" and leaf.dtype.names is None:
            # A copy, because the caller may modify the array while it is being saved, in native
            # byte order.
            return np.array(leaf, leaf.dtype.newbyteorder("="))
        what = describe_type(leaf)
    raise TypeError(
        f"state: {path!r} is {what}, which is not an array of numbers, a key or a number, and "
        "cannot be saved; pass it as extra, or remove it from the state"
    )


def other_half(record: Leaf, leaves_by_array: Mapping[Any, Leaf]) -> Leaf | None:
    """Return the leaf with the other half of a record's numbers; None if the record has all."""
    return None if record.half is None else leaves_by_array.get(record.half)


def leaf_value(record: Leaf, half: Leaf | None, arrays: Mapping[str, Any]) -> Any:
    """Return the value of a leaf from stored arrays; with `half`, decoded from both."""
    value = zero_leaf(record) if record.array is None else arrays[record.array]
    if record.stored_as is not None:
        value = _carried(record, value, record.dtype)
    if half is None or half.array is None:
        return value
    both = compact_numbers.decode_leaf(value, arrays[half.array])
    return np.asarray(both) if isinstance(value, np.ndarray) else both


def _carried(record: Leaf, array: Any, dtype: str) -> Any:
    """Convert a leaf to the dtype that it is stored as, or back.

    Floats keep their bits, and integers their values.
    """
    if jnp.issubdtype(jnp.dtype(record.dtype), jnp.integer):
        return array.astype(dtype)
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    if dtype == record.dtype:
        # A byte carries one number, even if that has four bits, and JAX would make two numbers of
        # it. So the byte becomes an integer of as many bits first.
        bits = jnp.finfo(dtype).bits  # type: ignore[no-untyped-call]
        array = array.astype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def shape_and_dtype(record: Leaf) -> tuple[tuple[int, ...], str]:
    if record.key_impl is None:
        return record.shape, record.stored_as or record.dtype
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=record.key_impl)))
    return (*record.shape, *data.shape), str(data.dtype)


def zero_leaf(record: Leaf) -> np.ndarray[Any, Any]:
    try:
        shape, dtype = shape_and_dtype(record)
        return np.zeros(shape, jnp.dtype(dtype))
    except (TypeError, ValueError, MemoryError) as error:  # a malicious manifest
        raise CheckpointError(
            f"the manifest is not what jstep writes: {record.path!r:.50}: {error!s:.100}"
        ) from None


def named_records(saved: Sequence[_Record]) -> dict[str, _Record]:
    return dict(zip(unique(leaf.path for leaf in saved), saved, strict=True))


def unique(paths: Iterable[str]) -> list[str]:
    """Return different names for all paths: numbered from a path's second occurrence on."""
    paths = list(paths)
    taken = set(paths)
    if len(taken) == len(paths):
        return paths
    names: list[str] = []
    for path, number in trees.ids(paths):
        name = path
        if number > 1:
            # A path may look like a numbered one.
            numbered = (f"{path}#{n}" for n in itertools.count(number))
            name = next(candidate for candidate in numbered if candidate not in taken)
        names.append(name)
        taken.add(name)
    return names


# Fingerprints of leaves that `Saver(leave_out=…)` does not save.


def start_leaf_fingerprints(
    named: Sequence[tuple[LeafRecord, Any]],
) -> Callable[[], tuple[LeftOutLeaf, ...]]:
    """Start computing fingerprints on the leaves' devices; the returned function waits."""
    begun: Sequence[Any] = []
    if named:
        keys = [leaf_key(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in named]
        begun = start_fingerprints([value for _, value in named], np.stack(keys))

    def records() -> tuple[LeftOutLeaf, ...]:
        found: list[LeftOutLeaf] = []
        for (leaf, _), words in zip(named, stacked_words(begun), strict=True):
            left_out = LeftOutLeaf(
                path=leaf.path,
                keys=leaf.keys,
                shape=leaf.shape,
                dtype=leaf.dtype,
                fingerprint=as_hexadecimal(words),
            )
            found.append(left_out)
        return tuple(found)

    return records
