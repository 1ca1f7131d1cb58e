"""Fingerprints of arrays: arithmetic, and sums on the host and on devices."""

import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.core import meshes, trees
from jstep.core.checks import as_bool, describe_type
from jstep.core.placement import (
    PROGRAMS_IN_FLIGHT,
    array_kind,
    check_no_shapes,
    chunks_of_size,
    compute_on,
    computing_on,
    group_by_devices,
    is_on_cpus,
    move_to_devices,
    strip_mesh_of_one,
)
from jstep.core.trees import Tree
from jstep.state.global_step import check_alive
from jstep.state.leaves import StateLeaves

# Fingerprints (64-bit hashes) of a tree of arrays, for all devices together or for each device.


@overload
def fingerprint(tree: Tree, *, per_leaf: Literal[False] = False) -> jax.Array: ...


@overload
def fingerprint(tree: Tree, *, per_leaf: Literal[True]) -> dict[str, jax.Array]: ...


@overload
def fingerprint(tree: Tree, *, per_leaf: bool) -> jax.Array | dict[str, jax.Array]: ...


def fingerprint(tree: Tree, *, per_leaf: bool = False) -> Any:
    """Hash the paths, dtypes, shapes and bits of all leaves of a tree.

    A leaf has h = seal(Σᵢ mix(bits of element i, i)), with two sums modulo 2³²; a tree has Σ h. Any
    change of a single element's bits changes it, any other change with probability 1 − 2⁻⁶⁴.
    Containers, insertion order, NumPy or JAX, sharding and the number of processes do not matter.
    Each element is read once, on its own device, without blocking.

    Args:
        tree: Any pytree of JAX arrays (also traced, also PRNG keys) or NumPy arrays; None is not a
            leaf.
        per_leaf: Whether to return the fingerprint of each leaf.

    Returns:
        uint32 `[2]`; as a string `f"{a:08x}{b:08x}"`. With `per_leaf` a dict from path to uint32
        `[2]`, whose sum modulo 2³² is the fingerprint of the tree.

    Raises:
        RuntimeError: A leaf was donated to an earlier step.
        TypeError: A leaf is not an array (names its path); Python numbers have no fixed dtype.
        ValueError: Two leaves have the same path.

    Example:
        >>> import jax.numpy as jnp, numpy as np, jstep
        >>> a, b = jstep.fingerprint({"w": jnp.arange(3.0), "b": np.zeros((), np.int32)})
        >>> f"{a:08x}{b:08x}"
        'bec13d0e68c1f965'
        >>> sorted(jstep.fingerprint({"w": jnp.arange(3.0), "b": jnp.int32(0)}, per_leaf=True))
        ['b', 'w']
    """
    per_leaf = as_bool(per_leaf, "per_leaf")
    paths, leaves, keys = leaves_with_hash_keys(tree)
    if trees.has_tracers(leaves):
        sums: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                sums.append(device_sums(leaf))
            else:
                # It becomes a constant of the traced program.
                sums.append(host_sums(np.asarray(leaf)))
        hashes = list(_each(jnp.stack(sums), keys))
        if per_leaf:
            return dict(zip(paths, hashes, strict=True))
        return sum(hashes[1:], hashes[0])
    # Inside a traced function, concrete leaves are hashed without tracing.
    # `ensure_compile_time_eval` would also compute the keys of all positions and store them in the
    # program.
    with meshes.internal_transfers(), jax.core.eval_context():
        groups = start_fingerprints(leaves, keys)
        if not per_leaf:
            return _total([words for _, words in groups])
        hashes_of_leaves: list[Any] = [None] * len(leaves)
        for numbers, words in groups:
            rows = words
            if isinstance(words, jax.Array):
                rows = _split_rows(words)
            for number, row in zip(numbers, rows, strict=True):
                hashes_of_leaves[number] = jnp.asarray(row)
        return dict(zip(paths, hashes_of_leaves, strict=True))


def leaves_with_hash_keys(tree: Tree) -> tuple[list[str], list[Any], np.ndarray[Any, Any]]:
    """Return paths, leaves and keys `[n, 4]`; raise the errors of `fingerprint`."""
    check_alive(tree)
    found = StateLeaves(tree)
    paths = found.paths
    leaves = found.values
    for path, leaf in zip(paths, leaves, strict=True):
        _check(path, leaf)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"tree: two leaves have the path {twice!r}, which must be unique; "
            "rename a key with a '/'"
        )
    keys = np.zeros((len(leaves), 4), U)
    for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        # PRNG keys have a dtype of JAX, which has no name.
        dtype = leaf.dtype.name if isinstance(leaf.dtype, np.dtype) else str(leaf.dtype)
        keys[number] = leaf_key(path, dtype, tuple(leaf.shape))
    return paths, leaves, keys


def start_fingerprints(
    leaves: Sequence[Any], keys: np.ndarray[Any, Any]
) -> list[tuple[list[int], Any]]:
    """Start computing fingerprints: by set of devices, indices of leaves, and uint32 `[n, 2]`."""
    return _start(_groups(leaves, keys), leaves)


def _start(
    groups: "Sequence[_DeviceGroup | _HostGroup]", leaves: Sequence[Any]
) -> list[tuple[list[int], Any]]:
    with meshes.internal_transfers():
        return [(group.numbers, group.start(leaves)) for group in groups]


def stacked_words(groups: Sequence[tuple[list[int], Any]]) -> np.ndarray[Any, Any]:
    rows = np.zeros((sum(len(numbers) for numbers, _ in groups), 2), U)
    with meshes.internal_transfers():
        for numbers, words in groups:
            rows[numbers] = np.asarray(words)
    return rows


def as_hexadecimal(pair: Any) -> str:
    return all_as_hexadecimal(np.asarray(pair))[0]


def all_as_hexadecimal(words: np.ndarray[Any, Any]) -> list[str]:
    text = words.astype(">u4").tobytes().hex()
    return [text[start : start + 16] for start in range(0, len(text), 16)]


def _check(path: str, leaf: Any) -> None:
    if _is_supported(leaf):
        return
    check_no_shapes(leaf, "tree")
    raise TypeError(
        f"tree: the leaf at {trees.quote_path(path)} must be an array of numbers, "
        f"got {describe_type(leaf)}; keep only arrays in the tree, numbers as jnp.float32(…)"
    )


def _is_supported(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return True
    if not trees.is_array(leaf):
        return False
    if issubclass(leaf.dtype.type, np.longdouble | np.clongdouble | np.timedelta64):
        # NumPy counts these as numbers.
        return False
    return bool(leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number))


def _total(words: Sequence[Any]) -> Any:
    if len(words) == 1 and isinstance(words[0], jax.Array):
        return compute_on(meshes.mesh_of(words[0]), _summed, words[0])
    # Sums on different devices are combined on the host.
    total = np.zeros(2, U)
    for rows in words:
        total += _summed(np.asarray(rows))
    return jnp.asarray(total)


def _summed(words: Any) -> Any:
    return words.sum(axis=0, dtype=U)


class Fingerprints(NamedTuple):
    paths: list[str]
    groups: list[tuple[list[int], Any]]


class LeafFingerprints:
    """The fingerprints of the leaves of states.

    `_paths` and `_groups` fit states of `_structure` whose leaves are of `_kinds`, and are computed
    again when these change. If the kinds are empty, as before the first state and for NumPy arrays,
    they are computed for each state.
    """

    def __init__(self, tree: Tree) -> None:
        self._prepare(tree)
        self._structure = trees.structure(tree)
        self._kinds = list[Any]()

    def _prepare(self, tree: Tree) -> None:
        self._paths, leaves, keys = leaves_with_hash_keys(tree)
        self._groups = _groups(leaves, keys)

    def start(self, tree: Tree) -> Fingerprints:
        leaves, structure = trees.flatten(tree)
        try:
            kinds = list(map(_KIND, leaves))
        except AttributeError:  # a NumPy array
            kinds = []
        if structure != self._structure or kinds != self._kinds or not kinds:
            self._prepare(tree)
        # Also if they are equal: the next comparison then finds the same objects, and is faster.
        self._structure = structure
        self._kinds = kinds
        try:
            return Fingerprints(self._paths, _start(self._groups, leaves))
        except RuntimeError as error:
            check_alive(tree, error)
            raise


_KIND = operator.attrgetter("shape", "dtype", "sharding")


# Arithmetic of fingerprints: 32-bit words are mixed with their position and summed modulo 2^32 in
# two lanes.
#
# An element is a pair of words (low, high); high is 0 for elements of 32 bits or fewer. At each
# position a 64-bit bijection maps the pair to the two lanes, so that a change of one element always
# changes the sums, and a change of several with probability 1 − 2⁻⁶⁴. Sums do not depend on order,
# so shards and chunks may be summed separately.

U = np.uint32
STRIDE = 0x9E3779B9
"""2^32 divided by the golden ratio, odd."""
SECOND = 0x7F4A7C15
HIGH = 0xC2B2AE3D
HALF = 0x27D4EB2F
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
MASK = 0xFFFFFFFF


def finalize(x: Any) -> Any:
    """Apply the finalizer of MurmurHash3, a 32-bit bijection; overwrites a NumPy array."""
    x ^= x >> U(16)
    x *= U(MULTIPLIERS[0])
    x ^= x >> U(13)
    x *= U(MULTIPLIERS[1])
    x ^= x >> U(16)
    return x


def lanes(low: Any, high: object, key: Any) -> tuple[Any, Any]:
    """The two lanes from low and high words; `high` is None if all are 0.

    Keys are multiples of `STRIDE`.
    """
    first = finalize(low ^ key)
    second = key ^ U(SECOND)
    second += first
    if high is not None:
        second += high
    second = finalize(second)
    first += second
    return first, second


def indexable_size(shape: tuple[int, ...]) -> int:
    """Return how many elements of the last axes 32 bits can index."""
    sizes = itertools.accumulate(reversed(shape), operator.mul)
    return max((size for size in sizes if size <= 2**32), default=1)


def leaf_key(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Hash path, dtype and shape to four words."""
    text = "\0".join((path, dtype, ",".join(map(str, shape))))
    encoded = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(encoded, digest_size=16, person=b"jstep").digest()
    return np.frombuffer(digest, "<u4").astype(U)


def combine_sums(sums: Any, key: Any) -> Any:
    """Compute fingerprints from sums `[..., 2]` and keys `[..., 4]`, by one bijection per leaf."""
    a = sums[..., 0] ^ key[..., 0]
    b = sums[..., 1] ^ key[..., 1]
    a = a + finalize(b + key[..., 2])
    b = b + finalize(a + key[..., 3])
    a = a + finalize(b ^ key[..., 0])
    b = b + finalize(a ^ key[..., 1])
    return a, b


# Sums of fingerprints over arrays in host memory, in chunks that fit into a cache.

_PIECE = 2**16


def host_sums(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sums of the two lanes, uint32 `[2]`."""
    halves = [
        _sums(words, indexable_size(array.shape), half)
        for half, words in enumerate(_host_words(array))
    ]
    return (sum(halves, np.zeros(2, np.uint64)) & np.uint64(MASK)).astype(U)


def _host_words(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return unsigned words, `[n]` or `[n, 2]`; two such arrays for 128-bit elements."""
    flat = np.asarray(array, array.dtype.newbyteorder("="), order="C").reshape(-1)
    if not flat.size:
        return []
    flat = _widen_to_bytes(flat)
    size = flat.dtype.itemsize
    if size <= 4:
        return [flat.view(f"u{size}")]
    words = flat.view("u4").reshape(flat.size, -1)
    return [words[:, first : first + 2] for first in range(0, words.shape[1], 2)]


def _widen_to_bytes(array: Any) -> Any:
    """Widen numbers of less than a byte, and bools on a device."""
    name = array.dtype.name
    if name.startswith("float4"):
        return array.astype(np.float32)
    if name in ("int2", "int4"):
        return array.astype(np.int8)
    if name in ("uint2", "uint4"):
        return array.astype(np.uint8)
    if name == "bool" and isinstance(array, jax.Array):
        return array.astype(np.uint8)
    return array


def _sums(words: np.ndarray[Any, Any], row_size: int, half: int) -> np.ndarray[Any, Any]:
    """Return the sums of words, which are keyed by their row and their position in it.

    A row is the part of an array, along its last axes, that 32 bits can index (`indexable_size`).
    """
    total = np.zeros(2, np.uint64)
    base = np.arange(min(_PIECE, len(words)), dtype=U) * U(STRIDE)
    for row_start in range(0, len(words), row_size):
        row_key = row_start // row_size * HIGH + half * HALF
        row_stop = min(row_start + row_size, len(words))
        for start in range(row_start, row_stop, _PIECE):
            piece = words[start : min(start + _PIECE, row_stop)]
            keys = base[: len(piece)] + U(((start - row_start) * STRIDE + row_key) & MASK)
            if piece.ndim == 1:
                a, b = lanes(piece, None, keys)
            else:
                a, b = lanes(piece[:, 0], piece[:, 1], keys)
            total += np.array([a.sum(dtype=U), b.sum(dtype=U)], np.uint64)
    return total


# Sums of fingerprints over arrays on devices: each element is read once, on the device of its
# shard.


def device_sums(array: Any) -> Any:
    """Trace the sums of the two lanes, uint32 `[2]`."""
    array = trees.key_data(move_to_devices(array))
    return _sums_of_words(_words(array), array.shape)


def _sums_of_words(words: Sequence[tuple[Any, Any]], shape: tuple[int, ...]) -> Any:
    if not math.prod(shape):
        return jnp.zeros(2, U)
    key = _keys(shape)
    sums = []
    for half, (low, high) in enumerate(words):
        mixed = lanes(low, high, key + U(half * HALF & MASK))
        # Both sums in one fast pass.
        sums.append(jnp.stack(lax.reduce(mixed, (U(0), U(0)), _add_pairs, range(key.ndim))))
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def _add_pairs(pair: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return pair[0] + other[0], pair[1] + other[1]


def _words(array: Any) -> list[tuple[Any, Any]]:
    """Return pairs of 32-bit words; two pairs for 128-bit elements."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        (real,) = _words(lax.real(array))
        (imaginary,) = _words(lax.imag(array))
        if dtype.itemsize == 16:
            return [real, imaginary]
        return [(real[0], imaginary[0])]
    array = _widen_to_bytes(array)
    size = array.dtype.itemsize
    if size == 8:
        halves = lax.bitcast_convert_type(array, U)
        return [(halves[..., 0], halves[..., 1])]
    return [(lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(U), None)]


def _keys(shape: tuple[int, ...]) -> Any:
    """Return the keys of all positions, in the shape of the array, so that shards do not move."""
    row_size = indexable_size(shape)
    key = jnp.zeros((), U)
    stride = 1
    for axis in reversed(range(len(shape))):
        if stride < row_size:
            step = stride * STRIDE
        else:
            step = stride // row_size * HIGH
        keys_along_axis = lax.iota(U, shape[axis]) * U(step & MASK)
        other_axes = [other for other in range(len(shape)) if other != axis]
        key = key + lax.expand_dims(keys_along_axis, other_axes)
        stride *= shape[axis]
    return key


_GROUP = 16
"""The number of leaves of a shape that one call stacks."""
_SMALL = 2**14
"""The maximum size of such a leaf, in elements."""


def _write_sums(rows: Tree, start: Any, leaves: Sequence[Any]) -> Any:
    """Write the sums of leaves of one shape into rows."""

    def written(rows: Any, start: Any, leaves: Sequence[Any]) -> Any:
        arrays = [trees.key_data(move_to_devices(leaf)) for leaf in leaves]
        # Words are stacked, not numbers: XLA may change the bits of a NaN that it moves.
        words = jax.tree.map(lambda *words: jnp.stack(words), *map(_words, arrays))
        shape = arrays[0].shape
        sum_each: Callable[..., Any] = jax.vmap(
            lambda words: _sums_of_words(words, shape), axis_size=len(arrays)
        )
        sums = sum_each(words)
        return lax.dynamic_update_slice(rows, sums, (start, np.int32(0)))

    return meshes.call_on_auto_axes(written, rows, start, leaves)


def _split_rows(rows: Tree) -> list[Any]:
    mesh = meshes.mesh_of(rows)
    return [compute_on(mesh, operator.getitem, rows, np.int32(i)) for i in range(len(rows))]


def _each(sums: Any, keys: Any, rows: Tree = None) -> Any:
    return jnp.stack(combine_sums(sums if rows is None else sums[rows], keys), axis=-1)


class _HostGroup(NamedTuple):
    numbers: list[int]
    keys: Any

    def start(self, leaves: Sequence[Any]) -> Any:
        sums = np.stack([host_sums(np.asarray(leaves[i])) for i in self.numbers])
        return np.stack(combine_sums(sums, self.keys), axis=-1)


class _DeviceGroup(NamedTuple):
    """Leaves on one device or one mesh.

    One program for each shape and dtype handles several small leaves.

    Attributes:
        has_mesh_of_one: Whether a leaf is on a mesh of one device, which is stripped.
        rows: Zeros on the devices, in which each call writes the sums of its leaves.
        calls: For each call, its first row and the indices of its leaves.
        order: The row of each leaf of `numbers`.
        max_in_flight: The number of calls that may be in flight; None for any.
    """

    numbers: list[int]
    mesh: Mesh | None
    has_mesh_of_one: bool
    rows: Any
    calls: list[tuple[Any, list[int]]]
    keys: Any
    order: Any
    max_in_flight: int | None

    def start(self, leaves: Sequence[Any]) -> Any:
        rows = self.rows
        if self.has_mesh_of_one:
            leaves = list(map(strip_mesh_of_one, leaves))
        with computing_on(self.mesh) as compiled:
            write_sums = compiled(_write_sums)
            for count, (first_row, numbers) in enumerate(self.calls, 1):
                rows = write_sums(rows, first_row, [leaves[i] for i in numbers])
                if self.max_in_flight and count % self.max_in_flight == 0:
                    jax.block_until_ready(rows)
            words = compiled(_each)(rows, self.keys, self.order)
        if self.max_in_flight:
            jax.block_until_ready(words)
        return words


def _groups(leaves: Sequence[Any], keys: np.ndarray[Any, Any]) -> list[_DeviceGroup | _HostGroup]:
    with meshes.internal_transfers():
        placements, host_numbers = group_by_devices(leaves)
        groups: list[_DeviceGroup | _HostGroup] = []
        for numbers, mesh in placements:
            groups.append(_device_group(leaves, keys, numbers, mesh))
        if host_numbers:
            groups.append(_HostGroup(host_numbers, keys[host_numbers]))
        return groups


def _device_group(
    leaves: Sequence[Any], keys: np.ndarray[Any, Any], numbers: list[int], mesh: Mesh | None
) -> _DeviceGroup:
    rows: Any = np.zeros((len(numbers), 2), U)
    committed = next((leaves[number] for number in numbers if leaves[number].committed), None)
    if mesh is not None:  # `device_put` would compare the rows of all processes
        zeros = rows
        rows = jax.make_array_from_callback(
            rows.shape, NamedSharding(mesh, PartitionSpec()), lambda _: zeros
        )
    elif committed is not None:
        rows = jax.device_put(rows, *committed.devices())
    by_kind: dict[Any, list[int]] = {}
    for number in numbers:
        by_kind.setdefault(array_kind(leaves[number]), []).append(number)
    calls: list[tuple[Any, list[int]]] = []
    first_row = 0
    for (shape, *_), of_kind in by_kind.items():
        size = 1
        if math.prod(shape) <= _SMALL:
            size = min(_GROUP, len(of_kind))
        for first, chunk in chunks_of_size(of_kind, size):
            calls.append((np.int32(first_row + first), chunk))
        first_row += len(of_kind)
    row_of = {number: row for row, number in enumerate(itertools.chain(*by_kind.values()))}
    order = np.array([row_of[number] for number in numbers], np.int32)
    has_mesh_of_one = mesh is None and any(
        strip_mesh_of_one(leaves[i]) is not leaves[i] for i in numbers
    )
    is_limited = mesh is not None and not rows.is_fully_addressable and is_on_cpus(rows)
    return _DeviceGroup(
        numbers=numbers,
        mesh=mesh,
        has_mesh_of_one=has_mesh_of_one,
        rows=rows,
        calls=calls,
        keys=keys[numbers],
        order=order,
        max_in_flight=PROGRAMS_IN_FLIGHT if is_limited else None,
    )
