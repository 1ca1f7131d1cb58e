"""NaN and infinity in the parameters and slots of a state, and the error that reports them."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core import meshes, placement, trees
from jstep.core.checks import format_list
from jstep.core.exceptions import WrongStateError
from jstep.core.threads import map_in_tasks
from jstep.state.leaves import PARAMS, SLOTS, StateLeaves, field_of
from jstep.state.train_state import MODEL_STATE

FINITE, INFINITE, NAN = range(3)
"""The contents of an array: only finite numbers; infinity but no NaN; NaN."""
_TOGETHER = 64
"""The leaves of a kind that one program checks, unless they are many more."""
_BLOCK = 2**20
"""Bytes that stay in a cache while they are read twice."""


class StateContents:
    """The contents of each parameter and slot of a state, computed without blocking.

    The model_state is not included. With `read_cpus`, arrays on a CPU are read immediately.
    """

    def __init__(
        self, state: trees.Tree | StateLeaves, *, params_only: bool = False, read_cpus: bool = True
    ) -> None:
        if not isinstance(state, StateLeaves):
            names = (PARAMS,) if params_only else (PARAMS, SLOTS)
            state = StateLeaves({name: field_of(state, name) for name in names})
        indices = state.indices
        params = field_of(indices, PARAMS)
        slots = field_of(indices, SLOTS)
        if isinstance(slots, dict):
            slots = {name: tree for name, tree in slots.items() if name != MODEL_STATE}
        checked = jax.tree.leaves(params if params_only else (params, slots))
        checked = [i for i in checked if _may_be_nonfinite(state.values[i])]
        self._paths = [state.paths[i] for i in checked]
        with meshes.internal_transfers():
            self._found = _start_checks([state.values[i] for i in checked], read_cpus)

    def contents(self) -> dict[str, int]:
        values = np.zeros(len(self._paths), np.int8)
        with meshes.internal_transfers():
            for numbers, found in self._found:
                values[numbers] = np.asarray(found)
        return dict(zip(self._paths, values.tolist(), strict=True))

    def are_finite(self) -> bool:
        return not any(self.contents().values())

    def paths_with_nan(self) -> list[str]:
        return [path for path, contents in self.contents().items() if contents == NAN]

    def worse_since(self, earlier: "StateContents | None") -> tuple[dict[str, int], list[str]]:
        """Return path → contents that have become worse, and the slots that have become infinite.

        The latter are not among the former.
        """
        old = {} if earlier is None else earlier.contents()
        worse: dict[str, int] = {}
        infinite_slots: list[str] = []
        for path, kind in self.contents().items():
            if kind <= old.get(path, FINITE):
                continue
            if kind == INFINITE and path.startswith(f"{SLOTS}/"):
                infinite_slots.append(path)
            else:
                worse[path] = kind
        return worse, infinite_slots


def describe_contents(worse: Mapping[str, int]) -> str:
    if not worse:
        return ""
    verb = "contains" if len(worse) == 1 else "contain"
    what = "NaN" if NAN in worse.values() else "infinity"
    return f"{format_list([*worse])} {verb} {what}"


def _may_be_nonfinite(leaf: Any) -> bool:
    return trees.is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact) and leaf.size > 0


# The host reads the arrays of CPUs. Other devices read their own shards, with a program for up to
# 64 leaves of a kind, which does not communicate. One reduction over the devices of a mesh then
# combines the results of all leaves.


def _start_checks(leaves: Sequence[Any], read_cpus: bool) -> list[tuple[list[int], Any]]:
    """Start to check leaves; return indices of leaves, and int8 `[n]` with their contents."""
    kinds: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        kinds.setdefault(_kind_of(leaf, read_cpus), []).append(number)
    # Mesh → indices of leaves, and their contents on each device of it.
    parts: dict[Mesh | None, list[tuple[list[int], Any]]] = {}
    running = placement.ProgramsInFlight()
    for (mesh, kind), numbers in kinds.items():
        mesh_parts = parts.setdefault(mesh, [])
        if kind is None:
            row = _read_contents([leaves[number] for number in numbers])
            mesh_parts.append((numbers, _repeat_on_devices(mesh, row)))
            continue
        size = min(max(_TOGETHER, len(numbers) // 16), len(numbers))
        for _, chunk in placement.chunks_of_size(numbers, size):
            result = _check_locally(mesh, [leaves[number] for number in chunk])
            mesh_parts.append((chunk, result))
            running.add(result)
    found = []
    for mesh, mesh_parts in parts.items():
        if mesh is None:
            found += mesh_parts
            continue
        worst = _worst_of_devices(mesh, [rows for _, rows in mesh_parts])
        indices = itertools.chain.from_iterable(numbers for numbers, _ in mesh_parts)
        found.append((list(indices), worst))
    return found


def _kind_of(leaf: Any, read_cpus: bool) -> tuple[Mesh | None, Any]:
    """Return the mesh whose devices hold parts of a leaf, and its kind.

    The kind is None if the host reads the leaf.
    """
    if not isinstance(leaf, jax.Array):
        return None, None
    mesh = None
    if leaf.sharding.num_devices > 1:
        mesh = meshes.mesh_of(leaf)
    if read_cpus and placement.is_on_cpus(leaf):
        if leaf.is_fully_addressable:
            return None, None
        if mesh is not None:
            # Each process reads its own shards, and the mesh combines what they find.
            return mesh, None
    return mesh, placement.array_kind(leaf)


def _read_contents(leaves: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return int8 `[n]` with the contents of leaves on the host, read by a few threads."""
    arrays: list[np.ndarray[Any, Any]] = []
    leaves_of_arrays: list[int] = []
    for number, leaf in enumerate(leaves):
        for array in _arrays_on_host(leaf):
            arrays.append(array)
            leaves_of_arrays.append(number)
    row = np.full(len(leaves), FINITE, np.int8)
    found = map_in_tasks(_contents_on_host, arrays, [array.nbytes for array in arrays])
    for number, contents in zip(leaves_of_arrays, found, strict=True):
        row[number] = max(row[number], contents)
    return row


def are_finite_on_host(arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Whether arrays on the host, read by a few threads, have only finite numbers."""
    checked = list(filter(_may_be_nonfinite, arrays))
    return not any(map_in_tasks(_contents_on_host, checked, [array.nbytes for array in checked]))


def _arrays_on_host(leaf: Any) -> list[np.ndarray[Any, Any]]:
    if not isinstance(leaf, jax.Array):
        return [leaf]
    if leaf.is_fully_replicated and leaf.is_fully_addressable:
        return [np.asarray(leaf.addressable_data(0))]
    return [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]


def _contents_on_host(array: np.ndarray[Any, Any]) -> int:
    """Read an array once, as integers.

    Without its sign, infinity exceeds all numbers, and NaN exceeds infinity.
    """
    if array.dtype.kind == "c":
        return max(_contents_on_host(array.real), _contents_on_host(array.imag))
    size = array.dtype.itemsize
    if size == 1:  # some types of one byte have no infinity
        if np.isnan(array).any():
            return NAN
        return INFINITE if np.isinf(array).any() else FINITE
    flat = np.ascontiguousarray(array).reshape(-1)
    step = _BLOCK // size
    largest = 0
    signed, unsigned, sign, infinity = _integers(array.dtype)
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        # Negative numbers are below all positive ones as signed integers, and above them as
        # unsigned ones.
        positive = np.maximum.reduce(block.view(signed))
        negative = np.maximum.reduce(block.view(unsigned))
        largest = max(largest, int(positive), int(negative) - sign)
    if largest < infinity:
        return FINITE
    if largest == infinity:
        return INFINITE
    return NAN


@functools.cache
def _integers(dtype: Any) -> tuple[Any, Any, int, int]:
    """Return the integers of a floating type's size, its sign bit, and the bits of infinity."""
    signed = np.dtype(f"i{dtype.itemsize}")
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = 1 << (8 * dtype.itemsize - 1)
    return signed, unsigned, sign, int(np.array(np.inf, dtype).view(unsigned))


def _repeat_on_devices(mesh: Mesh | None, row: np.ndarray[Any, Any]) -> Any:
    """Return a row of this process for each of its devices in a mesh; without a mesh, the row."""
    if mesh is None:
        return row
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, row.size), sharding, lambda _: row[None])


def _check_locally(mesh: Mesh | None, leaves: Sequence[Any]) -> Any:
    if mesh is None:
        return placement.compute_on(None, _contents_of_each, leaves)
    with meshes.using_mesh(mesh):
        return _local_program(mesh, leaves[0].sharding.spec)(leaves)


@functools.cache
def _local_program(mesh: Mesh, spec: PartitionSpec) -> Any:
    def row(leaves: Sequence[Any]) -> jax.Array:
        return _contents_of_each(leaves)[None]

    specs = PartitionSpec(mesh.axis_names)
    shards = jax.shard_map(row, mesh=mesh, in_specs=spec, out_specs=specs, check_vma=False)
    return jax.jit(lambda leaves: shards([placement.move_to_devices(leaf) for leaf in leaves]))


def _contents_of_each(leaves: Sequence[Any]) -> jax.Array:
    return jnp.stack([_contents(leaf) for leaf in leaves])


def _worst_of_devices(mesh: Mesh, rows: Sequence[jax.Array]) -> Any:
    with meshes.using_mesh(mesh):
        worst = _reduction(mesh)(rows).addressable_data(0)
    worst.copy_to_host_async()
    return worst


@functools.cache
def _reduction(mesh: Mesh) -> Any:
    def worst(rows: Sequence[Any]) -> Any:
        return jax.lax.pmax(jnp.concatenate(rows, axis=1)[0], mesh.axis_names)

    axes = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(worst, mesh=mesh, in_specs=axes, out_specs=PartitionSpec(), check_vma=False)
    )


def _contents(leaf: Any) -> jax.Array:
    leaf = placement.move_to_devices(leaf)
    worst = jnp.where(
        jnp.isnan(leaf),
        np.int8(NAN),
        jnp.where(jnp.isinf(leaf), np.int8(INFINITE), np.int8(FINITE)),
    )
    return worst.max()


class NanLossDuringTrainingError(WrongStateError, RuntimeError):
    """The loss, a parameter or a slot was not finite, or too many consecutive updates were skipped.

    Attributes:
        step: The step N of the update N − 1 → N that has this loss or gradient, or reached the
            limit of skipped updates.
        may_save: Whether the last state may be saved: only if too many consecutive updates were
            skipped.
    """

    def __init__(self, message: str, step: int = 0, *, may_save: bool = False) -> None:
        super().__init__(message)  # pickle calls it with these
        self.step = step
        self.may_save = may_save
