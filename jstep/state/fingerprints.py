"""Fingerprints of arrays on devices: each element is read once, on the device of its shard."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jstep.core import trees
from jstep.core.checks import as_bool, kind
from jstep.core.meshes import internal_transfers
from jstep.core.placement import compute_on, on_devices, placements_of, refuse_shapes
from jstep.state.fingerprint_log import HALF, HIGH, MASK, STRIDE, U, host_sums, lanes, leaf_key, sealed, split_at

# Sums of fingerprints over arrays on devices: each element is read once, on the device of its shard.

HOST = np.ndarray | np.generic


def device_sums(array: Any) -> Any:
    """Return the sums of the two lanes over all elements, uint32 `[2]`; to be traced."""
    array = trees.key_data(on_devices(array))
    if not array.size:
        return jnp.zeros(2, U)
    key = _keys(array)
    sums = []
    for half, (low, high) in enumerate(_words(array)):
        both = lanes(low, high, key + U(half * HALF & MASK))
        # Both sums in one fast pass.
        one = lax.reduce(both, (U(0), U(0)), lambda one, other: (one[0] + other[0], one[1] + other[1]), range(key.ndim))
        sums.append(jnp.stack(one))
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


def fingerprints(leaves: list[Any], keys: Any) -> Any:
    """Return the fingerprints of leaves, uint32 `[n, 2]`; to be traced. Leaves in host memory become constants."""
    sums = [host_sums(np.asarray(leaf)) if isinstance(leaf, HOST) else device_sums(leaf) for leaf in leaves]
    return jnp.stack(sealed(jnp.stack(sums), keys), axis=-1)


def leaf_program(leaves: list[Any], keys: Any) -> list[Any]:
    """Return the fingerprint of each leaf, n arrays uint32 `[2]`; to be traced."""
    return list(fingerprints(leaves, keys))


def sum_program(leaves: list[Any], keys: Any) -> Any:
    """Return the sum of the fingerprints, uint32 `[2]`; to be traced."""
    return fingerprints(leaves, keys).sum(axis=0, dtype=U)


# Fingerprint (64-bit hash) of a tree of arrays, of all devices together or by each device.


def fingerprint(tree: Any, per_leaf: bool = False) -> Any:
    """Hash the paths, dtypes, shapes and bits of all leaves of a tree.

    Leaf: h = seal(Σᵢ mix(bits of element i, i)), i its index in the whole array, two sums modulo 2³²; tree: Σ h. `mix`
    is a bijection for each i, and `seal` for each path, dtype and shape: any change of a single element's bits changes
    the fingerprint, any other change with probability 1 − 2⁻⁶⁴. This detects accidental differences; it is not a
    cryptographic hash.

    Containers, insertion order, NumPy or JAX, sharding and the number of processes do not matter: the hash is of
    `params/dense/kernel: float32[784,10]` and its bits. (0.0 and −0.0 differ, as do NaNs with different bits.) Each
    element is read once, on its own device, without blocking.

    Args:
        tree: Any pytree of JAX arrays (also traced, also PRNG keys) or NumPy arrays; None is not a leaf.
        per_leaf: Whether to return the fingerprint of each leaf.

    Returns:
        uint32 `[2]`; as a string `f"{a:08x}{b:08x}"`. With `per_leaf` a dict from path to uint32 `[2]`, whose sum
        modulo 2³² is the fingerprint of the tree.

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
    paths, leaves, keys = named_leaves(tree)
    if any(trees.is_traced(leaf) for leaf in leaves):
        found = list(fingerprints(leaves, keys))
        return dict(zip(paths, found, strict=True)) if per_leaf else _sum(found)
    # Inside a traced function, concrete leaves are hashed without tracing.
    with internal_transfers(), jax.ensure_compile_time_eval():
        parts = _by_placement(leaves, keys, leaf_program if per_leaf else sum_program)
        if not per_leaf:
            return _sum_over_places([part for _, part in parts])
        found = [None] * len(leaves)
        for numbers, part in parts:
            for number, one in zip(numbers, part, strict=True):
                found[number] = jnp.asarray(one)
        return dict(zip(paths, found, strict=True))


def named_leaves(tree: Any) -> tuple[list[str], list[Any], np.ndarray[Any, Any]]:
    """Return the paths, the leaves, and a key `[4]` for each leaf.

    Raises:
        RuntimeError: A leaf was donated.
        TypeError: A leaf is not an array.
        ValueError: Two leaves have the same path.
    """
    named = trees.leaves_with_paths(tree)
    for path, leaf in named:
        _check(path, leaf)
    donated = trees.donated_leaf(tree)
    if donated is not None:
        raise RuntimeError(
            f"tree: {trees.quoted(donated)} was donated to an earlier step and deleted; take the fingerprint of the "
            "state that the step returned"
        )
    paths = [path for path, _ in named]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"tree: two leaves have the path {twice!r}, which must be unique; rename a key with a '/'")
    names = [leaf.dtype.name if isinstance(leaf.dtype, np.dtype) else str(leaf.dtype) for _, leaf in named]
    keys = [leaf_key(path, name, tuple(leaf.shape)) for (path, leaf), name in zip(named, names, strict=True)]
    return paths, [leaf for _, leaf in named], np.stack(keys) if keys else np.zeros((0, 4), U)


def stacked(leaves: Sequence[Any], keys: np.ndarray[Any, Any]) -> list[tuple[list[int], Any]]:
    """Start computing the fingerprints of leaves: indices of leaves, and their fingerprints as uint32 `[n, 2]`."""
    with internal_transfers():
        return _by_placement(leaves, keys, fingerprints)


def as_text(pair: Any) -> str:
    """Format a fingerprint as 16 hexadecimal digits."""
    first, second = (int(word) for word in np.asarray(pair))
    return f"{first:08x}{second:08x}"


def _check(path: str, leaf: Any) -> None:
    known = isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic)
        and leaf.dtype.names is None
        and (leaf.dtype.kind in "biufc" or (leaf.dtype.kind == "V" and not leaf.dtype.name.startswith("void")))
        and leaf.dtype.name not in ("longdouble", "float128", "float96", "clongdouble", "complex256")
    )
    if not known:
        refuse_shapes(leaf, "tree")
        what = f"dtype {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else kind(leaf)
        raise TypeError(
            f"tree: the leaf at {trees.quoted(path)} must be an array of numbers, got {what}; keep only arrays in the "
            "tree, numbers as jnp.float32(…)"
        )


def _sum(found: Sequence[Any]) -> Any:
    return sum(found[1:], found[0]) if found else jnp.zeros(2, U)


def _by_placement(
    leaves: Sequence[Any], keys: np.ndarray[Any, Any], form: Callable[..., Any]
) -> list[tuple[list[int], Any]]:
    """Compute the fingerprints: by one call of `form` for leaves on the same devices, by NumPy for host memory."""
    placements = placements_of(leaves)
    parts: list[tuple[list[int], Any]] = []
    for numbers, mesh in placements.on_devices:
        some = [leaves[number] for number in numbers]
        parts.append((numbers, compute_on(mesh, form, some, keys[np.array(numbers)])))
    if placements.on_host:
        sums = np.stack([host_sums(np.asarray(leaves[number])) for number in placements.on_host])
        of_host = np.stack(sealed(sums, keys[np.array(placements.on_host)]), axis=-1)
        parts.append((placements.on_host, of_host.sum(axis=0, dtype=U) if form is sum_program else of_host))
    return parts


def _sum_over_places(parts: Sequence[Any]) -> Any:
    if not parts:
        return jnp.zeros(2, U)
    first, *rest = parts
    if rest or not isinstance(first, jax.Array):
        # Sums on different devices are combined on the host: two words each.
        return jnp.asarray(np.sum([np.asarray(part) for part in parts], axis=0, dtype=U))
    return first


_ABSENT = -1
"""Placeholder for a leaf that a device does not hold; words of fingerprints are never negative."""


class ByDevice(NamedTuple):
    """Fingerprints of a tree's leaves, computed by each device from its own data.

    For a replicated array each device reads its own copy; for a split array its devices compute one sum together.
    Results of devices of other processes are not included.

    Attributes:
        paths: The paths of the leaves.
        parts: Indices of leaves, and their fingerprints `[n, 2]` on each device that holds them.
    """

    paths: list[str]
    parts: list[tuple[list[int], Any]]

    def words(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Return device (None: host) → int64 `[leaves, 2]`, −1 for leaves that the device does not hold. Blocks."""
        found: dict[Any, np.ndarray[Any, Any]] = {}
        with internal_transfers():
            for numbers, part in self.parts:
                on_each: list[tuple[Any, Any]] = [(None, part)]
                if isinstance(part, jax.Array):
                    on_each = [(shard.device, shard.data) for shard in part.addressable_shards]
                for device, words in on_each:
                    mine = found.setdefault(device, np.full((len(self.paths), 2), _ABSENT, np.int64))
                    mine[numbers] = np.asarray(words)
        return found


def by_device(tree: Any) -> ByDevice:
    """Start computing the fingerprints of a tree's leaves, without blocking.

    Raises:
        RuntimeError: A leaf was donated.
        TypeError: A leaf is not an array.
        ValueError: Two leaves have the same path.
    """
    paths, leaves, keys = named_leaves(tree)
    return ByDevice(paths, stacked(leaves, keys))
