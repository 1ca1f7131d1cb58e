"""Split a batch into microbatches, on one device or over several."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.meshes import dims_of, explicit_mesh, parts_along, spec_of, without_explicit_axes
from jstep.sharding.of_batches import fitting_spec

_logger = logging.getLogger("jstep")


def specs_of_rows(args: tuple[Any, ...], rows: Any = None) -> list[PartitionSpec | None]:
    """Return the spec of each leaf of a batch, from its type or from `rows`, a tree of shardings; None if unknown."""
    leaves = jax.tree.leaves(args, is_leaf=trees.is_none)
    given = jax.tree.leaves(rows, is_leaf=trees.is_none)
    given = given if len(given) == len(leaves) else [None] * len(leaves)
    return [
        spec_of(leaf) if explicit_mesh(leaf) is not None else getattr(one, "spec", None)
        for leaf, one in zip(leaves, given, strict=True)
    ]


def number_of_parts(
    args: tuple[Any, ...], specs: list[PartitionSpec | None], at_least: int, max_rows: int | None
) -> int:
    """Return the number of microbatches such that no device has more than `max_rows` rows of one.

    Args:
        args: The batch.
        specs: The specs of its leaves, or None if unknown.
        at_least: The minimum number of microbatches; without `max_rows`, the number itself.
        max_rows: The maximum number of rows of a microbatch on each device.

    Raises:
        ValueError: The batch has no rows, or fewer than `at_least`.
    """
    if max_rows is None:
        return at_least
    what = f"max_rows_per_device={max_rows}"
    first, size = _rows(args, what)
    devices = _devices_of_batch(jax.tree.leaves(args, is_leaf=trees.is_none), specs)

    def on_each(n: int) -> int:
        rows = size // n
        return rows // devices if rows % devices == 0 else rows  # otherwise every device may have all rows

    for n in range(at_least, size + 1):
        if size % n == 0 and on_each(n) <= max_rows:
            _log_number(what, size, devices, n)
            return n
    raise ValueError(
        f"{what}, num_microbatches={at_least}: no such number of microbatches divides the batch: {first} has {size} "
        "rows; use a larger batch"
    )


@functools.cache  # a step is traced several times
def _log_number(what: str, size: int, devices: int, n: int) -> None:
    each = f" over {devices} devices" if devices > 1 else ""
    _logger.info("%s: batches of %d rows%s are split into %d microbatches", what, size, each, n)


def split(args: tuple[Any, ...], n: int, specs: list[PartitionSpec | None]) -> tuple[Any, ...]:
    """Reshape each leaf (B, …) to (B/n, n, …), of which `microbatch` takes the rows i, i + n, i + 2n, ….

    A contiguous block of a sharded batch is on some of the devices only and would move to the others at every step.
    Of every n-th row each device already has its share, for any number of devices, as long as n divides its rows. One
    device takes the same rows, so that the microbatches do not depend on the number of devices. Nothing is copied here:
    a transposed batch would be a second one in memory.

    Args:
        args: The batch.
        n: The number of microbatches.
        specs: The specs of its leaves, or None if unknown. The rows of each microbatch are sharded like those of the
            batch; otherwise XLA would make each device process every row.

    Raises:
        ValueError: A leaf has no leading axis, the leading axes differ, or n does not divide them.
    """
    first, size = _rows(args, f"num_microbatches={n}")
    if size % n or size == 0:
        raise ValueError(
            f"num_microbatches={n} does not divide the batch: {first} has {size} rows; use a batch of a multiple of "
            f"{n}, or max_rows_per_device instead of num_microbatches"
        )

    all_leaves: list[Any]
    treedef: Any
    all_leaves, treedef = jax.tree.flatten(args, is_leaf=trees.is_none)
    devices = _devices_of_batch(all_leaves, specs)
    if size // n % devices:
        _warn_of_small_microbatches(size, n, devices)

    def in_parts(leaf: Any) -> Any:
        return jnp.reshape(leaf, (size // n, n, *np.shape(leaf)[1:]))

    def placed(leaf: Any, spec: PartitionSpec | None) -> Any:
        if leaf is None:
            return None
        mesh = _mesh_of(leaf)
        if spec is None or mesh.empty:
            return in_parts(leaf)
        rows, rest = dims_of(spec)[:1] or (None,), dims_of(spec)[1:]
        whole = PartitionSpec(*rows, None, *rest)
        shape = (size // n, n, *np.shape(leaf)[1:])
        fits = fitting_spec(mesh, whole, shape) == whole  # not if there are fewer rows than devices
        if explicit_mesh(leaf) is not None:
            return without_explicit_axes(in_parts, leaf, place=(lambda _: whole) if fits else None)
        parts = in_parts(leaf)
        return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, whole)) if fits else parts

    split_args: tuple[Any, ...] = treedef.unflatten(map(placed, all_leaves, specs))
    return split_args


def microbatch(parts: Any, i: Any) -> Any:
    """Return microbatch i of the result of `split`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), parts)


def _warn_of_small_microbatches(size: int, n: int, devices: int) -> None:
    fitting = [k for k in range(1, n) if size % k == 0 and size // k % devices == 0]
    advice = f"; use at most {fitting[-1]} microbatches" if fitting else ""
    _logger.warning(
        "num_microbatches=%d: microbatches of %d rows do not split over %d devices, so each device computes all of "
        "their rows%s",
        n,
        size // n,
        devices,
        advice,
    )


def _mesh_of(leaf: Any) -> Any:
    return explicit_mesh(leaf) or jax.sharding.get_abstract_mesh()


def _rows(args: tuple[Any, ...], what: str) -> tuple[str, int]:
    """Return the name of a leaf of a batch and the number of rows of all leaves; `what` begins error messages."""
    leaves = trees.leaves_with_paths(args)
    if not leaves:
        raise ValueError(f"{what}: there is no batch to split; pass it as an argument after params")
    sizes = {}
    for path, leaf in leaves:
        place = f"batch argument {path}"
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"{what}: {place} is a scalar and has no rows to split; close over it in loss_fn, or "
                "give it one value for each row"
            )
        sizes[place] = np.shape(leaf)[0]
    first, size = next(iter(sizes.items()))
    for place, other in sizes.items():
        if other != size:
            raise ValueError(f"{what}: {first} has {size} rows and {place} has {other}; they must agree")
    return first, size


def _devices_of_batch(leaves: list[Any], specs: list[PartitionSpec | None]) -> int:
    return max(_devices_of_rows(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True))


def _devices_of_rows(leaf: Any, spec: PartitionSpec | None) -> int:
    """Return the number of devices that the rows of a leaf are sharded over; 1 if unknown."""
    if leaf is None or spec is None or not dims_of(spec):
        return 1
    mesh = _mesh_of(leaf)
    return 1 if mesh.empty else parts_along(mesh, dims_of(spec)[0])
