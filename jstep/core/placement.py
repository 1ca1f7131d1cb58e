"""Shardings, memory kinds, arrays read from storage, and computation on devices."""

import collections
import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.checks import as_choice, as_int, as_string
from jstep.core.jaxprs import is_slow_in_loops
from jstep.core.logs import log_once
from jstep.core.meshes import dims_of, internal_transfers, mesh_of, parts_along, using_mesh


def sharding_of(leaf: object) -> Any:
    return None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)


def device_count(tree: trees.Tree) -> int:
    count = 1
    for leaf in jax.tree.leaves(tree):
        sharding = sharding_of(leaf)
        if sharding is not None:
            count = max(count, len(sharding.device_set))
    return count


def device_of(tree: trees.Tree) -> Any:
    mesh = mesh_of(tree)
    if mesh is not None:
        return mesh.devices.flat[0]
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf):
            return next(iter(leaf.devices()))
    return jax.local_devices()[0]


Layouts = Mapping[str, NamedSharding]

LAYOUTS: contextvars.ContextVar[Layouts | None] = contextvars.ContextVar(
    "jstep_layouts", default=None
)
"""Path → sharding on a mesh, for `layout_of`: tracers on Auto axes have none."""


def layout_of(path: str) -> NamedSharding | None:
    return (LAYOUTS.get() or {}).get(path)


def part_count(sharding: NamedSharding) -> int:
    return math.prod(parts_along(sharding.mesh, axis) for axis in sharding.spec)


def as_memory(kind: object, mesh: Mesh) -> str | None:
    if kind is None or as_string(kind, "slots_memory") == "device":
        return None
    device = mesh.devices.flat[0]
    as_choice(kind, "slots_memory", [memory.kind for memory in device.addressable_memories()])
    return None if kind == device.default_memory().kind else str(kind)


def is_on_host(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def is_on_cpus(array: Any) -> bool:
    return {device.platform for device in array.sharding.device_set} == {"cpu"}


def array_kind(array: jax.Array) -> Any:
    """Return a key that is equal for arrays that one compiled program can handle."""
    return array.shape, array.dtype, array.committed and array.sharding


def chunks_of_size(items: list[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the start and the items of chunks of one size; the last may repeat earlier items."""
    for first in range(0, len(items), size):
        first = min(first, len(items) - size)
        yield first, items[first : first + size]


PROGRAMS_IN_FLIGHT = 16
"""How many programs run at once. With more than a CPU client has threads for, their collectives
would wait for each other."""


class ProgramsInFlight:
    """Waits for the oldest result if `PROGRAMS_IN_FLIGHT` programs may be running."""

    def __init__(self) -> None:
        self._results = collections.deque[jax.Array]()

    def add(self, result: jax.Array) -> None:
        self._results.append(result)
        if len(self._results) >= PROGRAMS_IN_FLIGHT:
            self._results.popleft().block_until_ready()


def is_of_host(sharding: Any) -> bool:
    """Whether a sharding is in another memory than the default one of its devices."""
    kind = sharding.memory_kind
    return kind is not None and kind != _default_memory(sharding)


def _default_memory(sharding: Any) -> Any:
    """Return the default kind of memory for arrays, on a device of this process if it has one."""
    devices = sharding.device_set
    local = [device for device in devices if device.process_index == device.client.process_index()]
    device = local[0] if local else next(iter(devices))
    return device.default_memory().kind


def move_to_devices(tree: trees.Tree) -> Any:
    """Return a tree with all arrays in device memory."""

    def moved(leaf: Any) -> Any:
        if not is_on_host(leaf):
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return jax.device_put(leaf, jax.memory.Space.Device)
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(_default_memory(leaf.sharding)))

    return jax.tree.map(moved, tree)


SHARDINGS: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_shardings", default=None)
"""The shardings of the state for which a step is being traced, as such a state; None if unknown."""


def traced_shardings(tree: trees.Tree) -> list[Any] | None:
    state = SHARDINGS.get()
    if state is None or trees.structure(state) != trees.structure(tree):
        return None
    return jax.tree.leaves(state)


def may_run_on(*platforms: str) -> bool:
    shardings = [
        sharding for sharding in jax.tree.leaves(SHARDINGS.get()) if hasattr(sharding, "device_set")
    ]
    if shardings:
        device = next(iter(shardings[0].device_set))
        return device.platform in platforms
    platform = jax.default_backend()
    # A process without accelerators may compile for others.
    return platform in platforms or platform == "cpu"


def move_to_host(leaf: object) -> Any:
    return leaf if is_on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host)


def place_like_old(leaf: object, old: object) -> Any:
    """Move an array to the memory and sharding of the array that it replaces."""
    if isinstance(leaf, jax.core.Tracer):
        return move_to_host(leaf) if is_on_host(old) else leaf
    sharding = getattr(old, "sharding", None)
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(leaf, jax.Array)
        or leaf.sharding == sharding
    ):
        return leaf
    return jax.device_put(leaf, sharding)


def group_by_devices(leaves: Sequence[Any]) -> tuple[list[tuple[list[int], Any]], list[int]]:
    """Return groups of indices of arrays on the same devices, and the indices of host arrays.

    A group comes with its mesh if it has several devices.
    """
    groups: dict[Any, tuple[list[int], Any]] = {}
    host_arrays: list[int] = []
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array):
            host_arrays.append(number)
            continue
        sharding = leaf.sharding
        devices: tuple[Any, ...] | None = None  # JAX may choose the device
        mesh = None
        if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
            mesh = sharding.mesh
            devices = tuple(mesh.devices.flat)
        elif leaf.committed:
            devices = tuple(sorted(sharding.device_set, key=lambda device: device.id))
        numbers, _ = groups.setdefault(devices, ([], mesh))
        numbers.append(number)
    # Arrays that may be anywhere join the first group.
    if None in groups and len(groups) > 1:
        uncommitted, _ = groups.pop(None)
        numbers, _ = next(iter(groups.values()))
        numbers.extend(uncommitted)
    return list(groups.values()), host_arrays


NO_MESH = Mesh(np.empty((), object), ())


def compute_on(mesh: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Compile `fn` once, and call it with arrays of one placement; the result is replicated."""
    if mesh is None:
        args = jax.tree.map(strip_mesh_of_one, args)
    with computing_on(mesh) as compiled:
        return compiled(fn)(*args)


@contextlib.contextmanager
def computing_on(mesh: Any) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Yield a function that compiles functions for `compute_on`, for many calls."""
    with using_mesh(NO_MESH if mesh is None else mesh):
        yield lambda fn: _compiled(fn, mesh)


def strip_mesh_of_one(leaf: object) -> Any:
    """Move an array off a mesh of one device: Explicit axes in its type would not fit others."""
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices > 1:
        return leaf
    # Not from the sharding: after `device_put(leaf, device)`, only the type names the mesh.
    if jax.typeof(leaf).sharding.mesh.empty:
        return leaf
    return leaf.addressable_data(0)


@functools.cache
def _compiled(fn: Callable[..., Any], mesh: Any) -> Any:
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(fn, out_shardings=replicated)


def is_compile_only(device: Any) -> bool:
    # The client of a real device has devices in this process, even if this device belongs to
    # another process.
    return not device.client.local_device_count()


def compiles_only(mesh: object) -> bool:
    return isinstance(mesh, Mesh) and not mesh.empty and is_compile_only(mesh.devices.flat[0])


def check_not_compile_only(tree: trees.Tree, argument: str) -> None:
    for leaf in jax.tree.leaves(tree):
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        mesh: Any = getattr(sharding, "mesh", None)
        if mesh is not None and compiles_only(mesh):
            raise ValueError(
                f"{argument}: these {mesh.size} {mesh.devices.flat[0].device_kind!r} devices only "
                "compile; use jstep.cost or lower with them, and run on devices of this machine"
            )


def check_no_shapes(tree: trees.Tree, argument: str) -> None:
    if any(map(is_shape, jax.tree.leaves(tree))):
        check_not_compile_only(tree, argument)
        raise ValueError(
            f"{argument}: must be arrays, got shapes (jax.ShapeDtypeStruct), which cannot be run; "
            "use jstep.cost or lower with them"
        )


def is_shape(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


ShardBounds = tuple[tuple[int, int], ...]
"""The bounds of a shard: (begin, end) for each axis."""


def bounds(index: Sequence[slice] | None, shape: Sequence[int]) -> ShardBounds:
    ends: list[tuple[int, int]] = []
    for axis, size in zip(index or (), shape, strict=True):
        begin, end, _ = axis.indices(size)
        ends.append((begin, max(begin, end)))
    return tuple(ends)


def slices(shard: ShardBounds) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in shard)


def lengths(shard: ShardBounds) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in shard)


def local_parts(shape: Sequence[int], sharding: Any) -> list[ShardBounds]:
    if sharding is None:
        return [tuple((0, size) for size in shape)]
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return list(dict.fromkeys(bounds(index, shape) for index in indices))


def place(
    shape: Sequence[int],
    dtype: DTypeLike,
    sharding: Any,
    parts: Mapping[ShardBounds, np.ndarray[Any, Any]],
) -> jax.Array:
    """Assemble an array from `local_parts`, without sharing their memory."""
    with internal_transfers():
        array = jax.make_array_from_callback(
            tuple(shape), sharding, lambda index: parts[bounds(index, shape)], dtype=dtype
        )
        return _unshare(array, parts.values())


def place_anywhere(values: np.ndarray[Any, Any], sharding: Any = None) -> jax.Array:
    """Place values on one device without sharing their memory.

    They are uncommitted on the default device, unless a sharding is given.
    """
    with internal_transfers():
        return _unshare(jax.device_put(values, sharding), [values])


def _unshare(array: jax.Array, values: Iterable[np.ndarray[Any, Any]]) -> jax.Array:
    """Copy an array if it shares the memory of NumPy arrays, which only one on a CPU may."""
    addresses = {value.ctypes.data for value in values}
    shards = [shard.data for shard in array.addressable_shards if shard.device.platform == "cpu"]
    if not any(data.unsafe_buffer_pointer() in addresses for data in shards):
        return array
    # A second transfer: in one of a NumPy array JAX ignores may_alias.
    return jax.device_put(array, array.sharding if array.committed else None, may_alias=False)


def target_sharding(leaf: Any, path: str) -> Any:
    if isinstance(leaf, jax.Array):
        # None for uncommitted arrays, so that a compiled step treats a restored state like a newly
        # created one.
        return leaf.sharding if leaf.committed else None
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return None
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = _concrete_sharding(sharding, path)
    try:
        sharding.shard_shape(tuple(leaf.shape))
    except ValueError as error:
        raise ValueError(f"target: {path!r} cannot be sharded as requested: {error}") from None
    return sharding


def _concrete_sharding(sharding: Any, path: str) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.get_mesh()
    if mesh.empty or dict(mesh.shape) != dict(sharding.mesh.shape):
        raise ValueError(
            f"target: the sharding of {path!r} is over an abstract mesh; pass one over devices, or "
            "restore inside jax.set_mesh(mesh)"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


# Compiled programs on CPUs: scans that unroll if the loop would be slow, and an order of execution.
#
# XLA's CPU backend computes each array in a separate kernel, and overwrites slots without copying
# them if it must run the kernels in the right order. On TPUs and GPUs one kernel computes all
# arrays of a leaf, and reads each operand once; an enforced order would split the kernel, which
# then reads operands twice.

Unroll = int | bool | None


def as_unroll(value: object) -> Unroll:
    if value is None or isinstance(value, bool):
        return value
    return as_int(value, "unroll", 1, "a number of iterations")


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: trees.Tree,
    xs: object,
    length: int,
    unroll: Unroll = None,
) -> tuple[Any, Any]:
    """Run `jax.lax.scan`; `unroll=None` fully unrolls a body that would be slow in a loop."""
    if unroll is None and jax.default_backend() == "cpu" and length > 1:
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(carry, jax.tree.map(first_row, xs))
        treedef = jax.tree.structure(shapes)

        # In place of the body, which `jax.lax.scan` would trace once more.
        def body(carry: trees.Tree, x: object) -> Any:
            values = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((carry, x)))
            return jax.tree.unflatten(treedef, values)

        if is_slow_in_loops(traced.jaxpr):
            unroll = True
            text = (
                f"a loop of {length} iterations with convolutions is unrolled, since XLA runs them "
                f"10 to 30 times slower in loops on a CPU: it compiles as long as {length} copies "
                "do; unroll=1 keeps the loop"
            )
            log_once(logging.INFO, text)
    return jax.lax.scan(body, carry, xs, length=length, unroll=1 if unroll is None else unroll)


def first_row(x: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.result_type(x))
    whole: Any = jax.typeof(x).sharding
    sharding = None
    if not whole.mesh.empty:
        sharding = NamedSharding(whole.mesh, PartitionSpec(*dims_of(whole.spec)[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def compute_first(*arrays: object) -> tuple[Any, ...]:
    """Compute arrays on a CPU before their uses."""
    if not trees.has_tracers(arrays):
        # Eager execution has a fixed order, and platform_dependent would compile.
        return arrays
    same: tuple[Any, ...] = jax.lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: jax.lax.optimization_barrier(arrays),
        default=lambda *arrays: arrays,
    )
    return same


def run_in_order(*chains: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return chains of arrays, each of which XLA must compute after the previous one on a CPU.

    Without such a dependency, XLA copies a slot that one of two kernels overwrites.
    """

    def ordered(chains: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
        return [_run_chain(*chain) for chain in chains]

    as_lists = [list(chain) for chain in chains]
    if not any(len(chain) > 1 for chain in as_lists) or not trees.has_tracers(as_lists):
        # As in `compute_first`.
        return as_lists
    # One choice for all chains: one for each of 1000 leaves takes as long to trace as their update.
    results: list[list[jax.Array]] = jax.lax.platform_dependent(
        as_lists, cpu=ordered, default=lambda chains: chains
    )
    return results


@jax.jit  # one trace for all chains of a shape
def _run_chain(first: jax.Array, *later: jax.Array) -> list[jax.Array]:
    results = [first]
    for x in later:
        # The barrier keeps XLA from recomputing `first` in the kernel that must wait for it. The
        # condition is never true; LLVM detects this and XLA does not, so the dependency adds no
        # memory traffic.
        first = jax.lax.optimization_barrier(first)
        first = jax.lax.select((first > 0) & (first < 0), first.astype(x.dtype), x)
        results.append(first)
    return results
