"""The leaves of a state as a checkpoint knows them, and how a target's leaves are found among them."""

import dataclasses
import functools
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format.manifest import Leaf
from jstep.core import trees

# What tensorstore has no name for is stored as a type of the same values (integers) or the same bits (floats).
_CARRIERS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}
_SHOWN = 20  # paths listed in an error


def named(state: Any) -> list[tuple[Leaf, Any]]:
    """Every leaf of a state with its record.

    Raises:
        TypeError: A leaf is no array and no number, or has no value (names its path).
        ValueError: A leaf was donated (names its path).
    """
    seen: dict[str, int] = {}
    out = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = trees.path_str(keys)
        seen[path] = seen.get(path, 0) + 1
        leaf = _with_value(leaf, path)
        out.append((_record(path, tuple(trees.path_str((key,)) for key in keys), seen[path], leaf), leaf))
    return out


def _with_value(leaf: Any, path: str) -> Any:
    if trees.is_traced(leaf):
        raise TypeError(f"state: {path!r} is traced; save outside of jit, from the state a compiled step returned")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"state: {path!r} was donated to a step, whose result holds its memory now. "
                "Save the state a step returned, before it is passed on."
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"state: {path!r} lies on one of {jax.process_count()} processes alone; a state that is saved by all "
                "of them is laid out over all, as by jstep.shard_state(state, mesh, param_specs)"
            )
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV" and leaf.dtype.names is None:
        return np.array(leaf)  # a copy: the caller may write into theirs while it is being saved
    raise TypeError(f"state: {path!r} is {type(leaf).__name__}, which is no array or number and cannot be saved")


def _record(path: str, keys: tuple[str, ...], number: int, leaf: Any) -> Leaf:
    # Distinct leaves may have one path, as in {"a": {"b": x}, "a/b": y}. Dots join keys in orbax.
    array = urllib.parse.quote(path, safe="/", errors="surrogatepass").replace(".", "%2E")
    array += f"#{number}" if number > 1 else ""
    impl, nbytes = None, int(leaf.nbytes) if not _is_key(leaf) else int(jax.random.key_data(leaf).nbytes)
    if _is_key(leaf):
        impl = str(jax.random.key_impl(leaf))
    dtype = str(leaf.dtype)
    return Leaf(path, keys, tuple(leaf.shape), dtype, nbytes, array if leaf.size else None, _CARRIERS.get(dtype), impl)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def to_stored(record: Leaf, leaf: Any) -> Any:
    """The array to store for a leaf, of a type that the storage format knows."""
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
    """The leaf, from the array that was stored for it."""
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
    """Shape and dtype of the array that is stored for a leaf, as the storage format has them."""
    if record.key_impl is not None:
        key = _key_data(record.key_impl)
        return (*record.shape, *key.shape), str(key.dtype)
    return record.shape, record.stored_as or record.dtype


@functools.cache
def _key_data(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A leaf of a target, and the saved leaf to fill it with; None where there is none that fits."""

    path: str
    leaf: Any
    source: Leaf | None


def match(target: Any, saved: Sequence[Leaf], averages: str | None, partial: bool, where: str) -> list[Wanted]:
    """Finds the saved leaf of each leaf of a target, in the target's order.

    Args:
        target: A tree of arrays, numbers or `jax.ShapeDtypeStruct`.
        saved: The leaves of the checkpoint.
        averages: The slot of moving averages to take the place of params; None to leave params as they are.
        partial: Whether what does not fit is passed over.
        where: The checkpoint, for errors.

    Raises:
        TypeError: A leaf of the target has no shape and dtype.
        ValueError: Something does not fit; lists it.
    """
    records = by_id(saved)
    flat = trees.leaves_with_paths(target)
    found: list[Wanted] = []
    used: set[tuple[str, int]] = set()
    missing, differing = [], []
    for (path, leaf), key in zip(flat, _ids(path for path, _ in flat), strict=True):
        kind = _kind(leaf, path)
        used.add(key)
        source, average = records.get(key), average_of(key, records, averages)
        if average is not None and records[average].shape == kind[0]:
            used.add(average)
            source = records[average]
        elif source is None:
            missing.append(path)
        elif (source.shape, source.dtype) != kind:
            differing.append(f"{path!r} ({_text(source.shape, source.dtype)}, and {_text(*kind)} in target)")
            source = None
        found.append(Wanted(path, leaf, source))
    extra = [key[0] for key in records if key not in used and not _is_average(key[0], averages)]
    if not partial and (missing or extra or differing):
        raise ValueError(
            f"target does not fit {where}"
            + _listing("missing in the checkpoint", [repr(path) for path in missing])
            + _listing("extra in the checkpoint", [repr(path) for path in extra])
            + _listing("differing", differing)
            + ". Nothing was restored; partial=True restores what fits."
        )
    if found and all(wanted.source is None for wanted in found):
        raise ValueError(
            f"target has nothing in common with {where}"
            + _listing("target has", [repr(path) for path, _ in flat])
            + _listing("the checkpoint has", [repr(leaf.path) for leaf in saved])
        )
    return found


def by_id(saved: Sequence[Leaf]) -> dict[tuple[str, int], Leaf]:
    """The leaves by path and, where several have one path, number."""
    return dict(zip(_ids(leaf.path for leaf in saved), saved, strict=True))


def _ids(paths: Iterable[str]) -> list[tuple[str, int]]:
    seen: dict[str, int] = {}
    ids = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        ids.append((path, seen[path]))
    return ids


def average_of(key: tuple[str, int], known: Mapping[tuple[str, int], Any], slot: str | None) -> Any:
    """The key of the moving average of a parameter, or None."""
    path, number = key
    if slot is None or (path != "params" and not path.startswith("params/")):
        return None
    average = (f"slots/{slot}{path.removeprefix('params')}", number)
    return average if average in known else None


def _is_average(path: str, slot: str | None) -> bool:
    return slot is not None and (path == f"slots/{slot}" or path.startswith(f"slots/{slot}/"))


def check_averages(slot: str, saved: Sequence[Leaf], where: str) -> None:
    """Makes sure that there are averages.

    Raises:
        ValueError: There is no such slot; names those there are.
    """
    if not any(_is_average(leaf.path, slot) for leaf in saved):
        slots = sorted({leaf.keys[1] for leaf in saved if leaf.keys[0] == "slots" and len(leaf.keys) > 1})
        raise ValueError(
            f"use_averages: {where} has no slot {slot!r}{trees.nearest(slot, slots)}; it has {slots}. Averages are "
            "kept by jstep.with_moving_average(optimizer, ema); use_averages takes the name of their slot as well."
        )


def _kind(leaf: Any, path: str) -> tuple[tuple[int, ...], str]:
    if isinstance(leaf, bool | int | float | complex):
        return (), str(jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
    if isinstance(leaf, jax.ShapeDtypeStruct) or trees.is_array(leaf):
        return tuple(leaf.shape), str(leaf.dtype)
    raise TypeError(
        f"target: {trees.quoted(path)} is {type(leaf).__name__}; give an array or a shape for each leaf, such as "
        "jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))"
    )


def _text(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _listing(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f", … and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"; {title} ({len(items)}): " + ", ".join(items[:_SHOWN]) + more


def nested(leaves: Sequence[tuple[Leaf, Any]]) -> dict[str, Any]:
    """Nested dicts after the keys of each leaf, for looking."""
    out: dict[str, Any] = {}
    for record, value in leaves:
        at = out
        for key in record.keys[:-1]:
            at = at.setdefault(key, {})
        at[record.keys[-1]] = value
    return out
