"""Weights in the checkpoints of Orbax and jstep: their arrays by name, read onto the shardings of a target."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.listing import Store
from jstep.checkpoint.manifest import CheckpointError, Leaf, Manifest
from jstep.checkpoint.names import open_store
from jstep.checkpoint.reading import first_of, read_and_verify, short
from jstep.checkpoint.slots import from_stored, stored_kind, unique, zeros_of
from jstep.core import trees
from jstep.core.checks import listing
from jstep.core.meshes import internal_transfers
from jstep.core.placement import target_sharding
from jstep.distributed import processes
from jstep.weights.fit import Fit, Rule, Wanted, fit, from_host, from_parts, rules

PARAMS = "params"
_AT_ONCE = 2**30
"""Bytes to read together: while they are cast, they occupy memory in both dtypes."""
_logger = logging.getLogger("jstep")
_BOX = "/value"  # the attribute of a Flax NNX variable that holds its array


class Array(NamedTuple):
    """An array in a checkpoint.

    Attributes:
        name: Its path in the checkpoint, such as `params/dense/kernel`.
        code: The name of its dtype, such as `key<fry>` for the data of PRNG keys.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its number of bytes."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclasses.dataclass
class Checkpoint:
    """The arrays of a checkpoint.

    Attributes:
        path: The folder or URL that holds them.
        arrays: The arrays by name.
        read: Reads arrays: name → sharding, or None for a NumPy array.
        writer: Who wrote it, as `inspect` shows it.
    """

    path: str
    arrays: Mapping[str, Array]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    writer: str

    def fit(self, target: Any, names: Any, float_dtype: Any) -> Fit:
        """Find the array of each leaf of a target; see `jstep.weights.fit.fit`.

        `params/` may be omitted from names. A checkpoint may hold more than weights, such as the state of an optimizer:
        if `params` is loaded from, groups at the root of its tree from which nothing is loaded do not count as unused;
        if names only adds a group to all paths, nothing outside of that group does.
        """
        given, paths = rules(names, target, "target"), trees.paths_of(target)
        found = fit(target, self.arrays, dict(zip(paths, self._entries(given), strict=True)), float_dtype)
        wanted = {one.path: one.rule.name for one in found.wanted if one.rule.name is not None}
        used = {path: name for path, name in wanted.items() if name in self.arrays}
        if groups := _groups(used):
            outside = {repr(name) for name in self.arrays if not name.startswith(groups)}
            found = dataclasses.replace(found, unused=[name for name in found.unused if name not in outside])
        missing = [name for path, name in wanted.items() if path not in used]
        hint = _names_hint(missing, self.arrays.keys()) if missing and names is None else ""
        return dataclasses.replace(found, hint=hint or found.hint)

    def _entries(self, given: Sequence[Rule]) -> list[Any]:
        """Return the entries of `names` in which `params/` is not omitted."""
        names = [rule.name for rule in given if rule.name is not None]
        # The parameters may have a group `params`, too, so that both "params/w" and "params/params/w" exist.
        everywhere = not all(name in self.arrays for name in names) and all(_in_params(n) in self.arrays for n in names)
        entries: list[Any] = []
        for name, transform in given:
            if name is not None and (everywhere or name not in self.arrays) and _in_params(name) in self.arrays:
                name = _in_params(name)
            entries.append(name if name is None or transform is None else (name, transform))
        return entries

    def whole(self, tensor: Array) -> np.ndarray[Any, Any]:
        """Read a whole array into new memory."""
        return np.asarray(self.read({tensor.name: None})[tensor.name])

    def leaves(self, wanted: Sequence[Wanted]) -> Iterator[Any]:
        """Read leaves in order: each device its own part, except for dtypes that JAX supports only with x64 enabled."""
        for batch in _batches(wanted):
            arrays = self.read({one.tensor.name: _sharding(one) for one in batch})
            for one in batch:
                yield _leaf(one, arrays.pop(one.tensor.name))


def _in_params(name: str) -> str:
    return f"{PARAMS}/{name}" if name else PARAMS  # the parameters may be a single array


def _groups(used: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the names begin with that are to be loaded completely; nothing for all.

    Args:
        used: Path of a leaf → name of its array.
    """
    if "" in used:
        return (used[""],)  # the target is a single array
    roots = {name.partition("/")[0] for name in used.values()}
    if PARAMS in roots:
        return tuple(f"{root}/" for root in roots)
    above = {name.removesuffix(_BOX).removesuffix(path.removesuffix(_BOX)) for path, name in used.items()}
    return tuple(above) if len(above) == 1 and next(iter(above)).endswith("/") else ()


def _names_hint(missing: Sequence[str], there: Set[str]) -> str:
    """Describe the function that finds all missing names, if they differ by what is before or after them."""
    ends: list[tuple[str, Callable[[str], str]]] = [
        ("path", lambda name: name),
        (f'path + "{_BOX}"', lambda name: name + _BOX),
        (f'path.removesuffix("{_BOX}")', lambda name: name.removesuffix(_BOX)),
    ]
    for code, end in ends:
        first, *others = [end(name) for name in missing]
        groups = [one.removesuffix(first) for one in there if one.endswith(f"/{first}")]
        # Those of an optimizer have the same paths: parameters come first.
        for above in ["", *sorted(groups, key=lambda group: (PARAMS not in group.split("/"), group.count("/"), group))]:
            if all(above + name in there for name in (first, *others)):
                whole = f'"{above}" + {code}' if above else code
                return f". The checkpoint has them below other paths: pass names=lambda path: {whole}"
    return ""


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Divide leaves into batches to read together, each with no array twice."""
    batch: dict[str, Wanted] = {}
    nbytes = 0
    for one in wanted:
        nbytes += one.tensor.nbytes
        if batch and (one.tensor.name in batch or nbytes > _AT_ONCE):
            yield list(batch.values())
            batch, nbytes = {}, one.tensor.nbytes
        batch[one.tensor.name] = one
    if batch:
        yield list(batch.values())


def _sharding(wanted: Wanted) -> Any:
    """Return the sharding to read an array with; None for a NumPy array."""
    sharding = None if wanted.on_host else target_sharding(wanted.leaf, wanted.path)
    is_known = jax.dtypes.canonicalize_dtype(wanted.tensor.dtype) == wanted.tensor.dtype
    return sharding if is_known else None


def _leaf(wanted: Wanted, array: Any) -> Any:
    """Return the leaf of an array that was read with `_sharding`."""
    if not isinstance(array, jax.Array):
        return from_host(wanted, array)
    platforms = {getattr(device, "platform", "") for device in array.sharding.device_set}
    if array.dtype == wanted.dtype and platforms != {"cpu"}:
        return array
    # On the CPU an array may alias the memory that it was read into, which is not reused when it is donated.
    with internal_transfers():
        parts = [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]
    return from_parts(wanted, target_sharding(wanted.leaf, wanted.path), parts)


def open_jstep_checkpoint(path: str, *, partial: bool = False) -> Checkpoint:
    """Return the arrays of a checkpoint, which is verified before the first is returned.

    Args:
        path: A folder that has a manifest.
        partial: Whether to leave out the arrays that cannot be read, with a warning, if the checkpoint is corrupted.

    Raises:
        CheckpointError: The checkpoint is corrupted, or another version of jstep wrote it.
    """
    path = os.path.abspath(path)
    store = open_store(os.path.dirname(path))
    manifest = store.manifest(path)
    saved = dict(zip(unique(leaf.path for leaf in manifest.leaves), manifest.leaves, strict=True))
    if partial and jax.process_count() == 1:
        saved = _readable(store, path, manifest, saved)
    verified = partial and jax.process_count() == 1

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal verified
        stored = {array: shardings[name] for name in shardings if (array := saved[name].array) is not None}
        arrays = _read(store, path, manifest, stored, not verified)
        verified = True
        return {name: _value(saved[name], arrays) for name in shardings}

    return Checkpoint(path, {name: _array(name, leaf) for name, leaf in saved.items()}, read, f"jstep {manifest.jstep}")


def _readable(store: Store, path: str, manifest: Manifest, saved: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves whose arrays can be read; if the checkpoint is corrupted, warn and name the others."""
    problems = store.find_corruption(path, manifest)
    if not problems:
        return dict(saved)
    lost = [name for name, leaf in saved.items() if not _is_readable(store, path, manifest, leaf)]
    _logger.warning(
        "load_weights: %s is corrupted: %s. The arrays that can be read are loaded%s%s",
        path,
        first_of(problems),
        " unverified: their values may be wrong" if not manifest.is_packed else "",
        listing("cannot be read", [repr(name) for name in lost]),
    )
    return {name: leaf for name, leaf in saved.items() if name not in lost}


def _is_readable(store: Store, path: str, manifest: Manifest, leaf: Leaf) -> bool:
    try:
        store.restore(path, manifest, {} if leaf.array is None else {leaf.array: None})
    except Exception:  # tensorstore has no error types
        return False
    return True


def _read(store: Store, path: str, manifest: Manifest, shardings: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    arrays, problems, failure = read_and_verify(store, path, manifest, shardings, verify)
    if processes.any_process(bool(problems)):
        raise CheckpointError(
            f"{path} is corrupted: {first_of(problems) or 'another process names the file'}. Nothing was loaded; copy "
            "it again from where it is intact"
        )
    if processes.any_process(failure is not None):
        reason = "see the error of another process" if failure is None else short(failure)
        raise CheckpointError(f"{path} could not be read: {reason}") from failure
    return arrays


def _array(name: str, leaf: Leaf) -> Array:
    """Return the array of a leaf; that of PRNG keys is their data."""
    shape, dtype = stored_kind(leaf) if leaf.key_impl is not None else (leaf.shape, leaf.dtype)
    return Array(name, leaf.dtype, shape, jnp.dtype(dtype))


def _value(leaf: Leaf, arrays: Mapping[str, Any]) -> Any:
    if leaf.array is None:
        return zeros_of(leaf)
    with internal_transfers():
        return from_stored(leaf, arrays[leaf.array])
