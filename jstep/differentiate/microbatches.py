"""Microbatches: splitting a batch, on one device or over several, and gradient accumulation as a weighted mean."""

import enum
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.meshes import dims_of, explicit_mesh, parts_along, reduced, spec_of, without_explicit_axes
from jstep.core.on_cpus import Unroll, scan
from jstep.core.trees import Array
from jstep.data.placement import fitting_spec
from jstep.differentiate.gradient_noise import Squares

_logger = logging.getLogger("jstep")
_log_once = functools.cache(_logger.info)  # a step is traced several times


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
    first, size = rows_of_batch(args, what)
    devices = _devices_of_batch(jax.tree.leaves(args, is_leaf=trees.is_none), specs)
    for n in range(at_least, size + 1):
        rows = size // n
        # If the rows do not split over the devices, every device may have all of them.
        if size % n == 0 and (rows // devices if rows % devices == 0 else rows) <= max_rows:
            each = f" over {devices} devices" if devices > 1 else ""
            _log_once(f"{what}: batches of {size} rows{each} are split into {n} microbatches")
            return n
    raise ValueError(
        f"{what}, num_microbatches={at_least}: no such number of microbatches divides the batch: {first} has {size} "
        "rows; use a larger batch"
    )


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
    advice = f"use a batch of a multiple of {n}, or max_rows_per_device instead of num_microbatches"
    rows = rows_of_part(args, n, f"num_microbatches={n}", advice)
    leaves, treedef = trees.flatten(args, is_leaf=trees.is_none)
    devices = _devices_of_batch(leaves, specs)
    if rows % devices:
        fitting = [k for k in range(1, n) if rows * n % k == 0 and rows * n // k % devices == 0]
        advice = f"; use at most {fitting[-1]} microbatches" if fitting else ""
        text = "num_microbatches=%d: microbatches of %d rows do not split over %d devices, so each device computes all"
        _logger.warning(f"{text} of their rows%s", n, rows, devices, advice)

    def placed(leaf: Any, spec: PartitionSpec | None) -> Any:
        if leaf is None:
            return None
        mesh, shape = _mesh_of(leaf), (rows, n, *np.shape(leaf)[1:])
        in_parts = functools.partial(jnp.reshape, shape=shape)
        if spec is None or mesh.empty:
            return in_parts(leaf)
        whole = PartitionSpec(*(dims_of(spec)[:1] or (None,)), None, *dims_of(spec)[1:])
        fits = fitting_spec(mesh, whole, shape) == whole  # not if there are fewer rows than devices
        if explicit_mesh(leaf) is not None:
            return without_explicit_axes(in_parts, leaf, place=(lambda _: whole) if fits else None)
        parts = in_parts(leaf)
        return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, whole)) if fits else parts

    return tuple(treedef.unflatten(map(placed, leaves, specs)))


def microbatch(parts: Any, i: Any) -> Any:
    """Return microbatch i of the result of `split`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), parts)


def _mesh_of(leaf: Any) -> Any:
    return explicit_mesh(leaf) or jax.sharding.get_abstract_mesh()


def rows_of_batch(args: tuple[Any, ...], what: str) -> tuple[str, int]:
    """Return the name of a leaf of a batch and the number of rows of all leaves; `what` begins error messages."""
    leaves = trees.leaves_with_paths(args)
    if not leaves:
        raise ValueError(f"{what}: there is no batch to split; pass it as an argument after params")
    shapes = {f"batch argument {path}": np.shape(leaf) for path, leaf in leaves}
    for place, shape in shapes.items():
        if not shape:
            raise ValueError(
                f"{what}: {place} is a scalar and has no rows to split; close over it in loss_fn, or "
                "give it one value for each row"
            )
    (first, (size, *_)), *others = shapes.items()
    for place, (other, *_) in others:
        if other != size:
            raise ValueError(f"{what}: {first} has {size} rows and {place} has {other}; they must agree")
    return first, size


def rows_of_part(args: tuple[Any, ...], n: int, what: str, advice: str) -> int:
    """Return the number of rows of each of n parts of a batch.

    Args:
        args: The batch.
        n: The number of parts.
        what: What asks for them, for errors.
        advice: What to do if n does not divide the rows, for the error.

    Raises:
        ValueError: A leaf has no leading axis, the leading axes differ, or n does not divide them.
    """
    first, size = rows_of_batch(args, what)
    if size % n or size == 0:
        raise ValueError(f"{what} does not divide the batch: {first} has {size} rows; {advice}")
    return size // n


def _devices_of_batch(leaves: list[Any], specs: list[PartitionSpec | None]) -> int:
    """Return the number of devices that the rows are sharded over; 1 if unknown."""
    counts = [1]
    for leaf, spec in zip(leaves, specs, strict=True):
        mesh = None if leaf is None or spec is None or not dims_of(spec) else _mesh_of(leaf)
        if mesh is not None and spec is not None and not mesh.empty:
            counts.append(parts_along(mesh, dims_of(spec)[0]))
    return max(counts)


class AggregationMethod(enum.Enum):
    """The method of summing the gradients of microbatches.

    `DEFAULT` keeps a running sum, with one copy of the gradients in memory. `ADD_N` keeps the gradients of
    all microbatches and sums them once, which rounds less but stores a copy per microbatch.
    """

    DEFAULT = "default"
    ADD_N = "add_n"


class Part(NamedTuple):
    """The results of one batch or microbatch."""

    loss: Array
    model_state: Any
    aux: Any
    gradients: Any
    summaries: Any = None
    squares: Squares | None = None


def accumulate(
    part_fn: Callable[[Any, tuple[Any, ...], Array], Part],
    parts: tuple[Any, ...],
    model_state: Any,
    sums: list[Array],
    weight_fn: Callable[..., Any] | None,
    *,
    method: AggregationMethod,
    unroll: Unroll = None,
    square: Callable[[Sequence[Any]], Array] | None = None,
) -> Part:
    """Accumulate the results of all microbatches of a batch.

    Args:
        part_fn: `part_fn(model_state, microbatch, i) -> Part`.
        parts: The batch, as `split` returns it.
        model_state: The model state, which is carried from one microbatch to the next.
        sums: Zeros to accumulate the gradients in, if a running sum is kept.
        weight_fn: `weight_fn(*microbatch) -> scalar`; defaults to 1. A microbatch of weight 0 is ignored, whatever its
            loss; if all weights are 0, loss and gradients are 0.
        method: How to sum the gradients.
        unroll: How to unroll the loop over microbatches.
        square: The squared norm of gradients, some of which may be None, to be computed of each microbatch and of the
            mean; None to omit.

    Returns:
        Loss, gradients and the floating or complex leaves of aux as means in at least float32, integer leaves of aux
        as sums in at least int32 (of bools, the number of True values), and the last model_state. `IndexedSlices`
        contain the rows of all microbatches, concatenated; a gradient that no microbatch has is None.
    """
    examples, n = jax.tree.leaves(parts)[0].shape[:2]
    running = method is AggregationMethod.DEFAULT

    def body(carry: Any, i: Array) -> Any:
        state, sums = carry
        batch = microbatch(parts, i)
        part = part_fn(state, batch, i)
        weight = weight_of(weight_fn, batch)
        squared = None if square is None else square(part.gradients)
        gradients = [jax.tree.map(lambda g: g if _is_integer(g) else weighed(g, weight), g) for g in part.gradients]
        if running:
            # () marks a gradient that is carried. A sum without gradients is carried unchanged, which costs nothing.
            dense = [isinstance(g, jax.Array) for g in gradients]
            sums = [s + g.astype(s.dtype) if d else s for s, g, d in zip(sums, gradients, dense, strict=True)]
            gradients = [() if d else g for g, d in zip(gradients, dense, strict=True)]
        others = jax.tree_util.tree_map_with_path(functools.partial(summand, weight), (part.aux, part.summaries))
        return (part.model_state, sums), (gradients, weighed(part.loss, weight), weight, squared, others)

    (model_state, sums), (gradients, losses, weights, squared, others) = scan(
        body, (model_state, sums if running else []), jnp.arange(n), n, unroll
    )
    total = jnp.asarray(n, jnp.float32) if weights is None else jnp.sum(weights)

    def mean(summed: Array) -> Array:
        divisor = total.astype(summed.dtype)
        return summed / (divisor if weights is None else jnp.where(divisor == 0, jnp.ones_like(divisor), divisor))

    def gradient(i: int, stacked: Any) -> Any:
        if isinstance(stacked, IndexedSlices):
            rows = stacked.values.reshape(-1, *stacked.values.shape[2:])
            return IndexedSlices(mean(rows), stacked.indices.reshape(-1), stacked.dense_shape)
        if stacked is None:
            return None
        return mean(reduced(sums[i]) if running else jnp.sum(stacked, axis=0))

    def sum_or_mean(leaf: Array) -> Array:
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype) if _is_integer(leaf) else mean(jnp.sum(leaf, axis=0))

    aux, summaries = jax.tree.map(sum_or_mean, others)
    grads = [gradient(i, stacked) for i, stacked in enumerate(gradients)]
    squares = None
    if square is not None:
        squares = Squares(examples if weights is None else weights, squared, square(grads))
    return Part(mean(jnp.sum(losses)), model_state, aux, grads, summaries, squares)


def _is_integer(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))


def summand(weight: Array | None, keys: Any, leaf: Array) -> Array:
    """Convert a leaf of aux to the form in which microbatches are summed."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return weighed(leaf, weight)
    if leaf.dtype == bool or (_is_integer(leaf) and leaf.dtype.itemsize < 4):
        return leaf.astype(jnp.int32)
    if not _is_integer(leaf):
        raise TypeError(
            f"aux: the leaf at {trees.quoted(trees.path_str(keys[1:]))} is of {leaf.dtype}, of which microbatches have "
            "no mean and no sum; return it in model_state, whose last value is kept, or not at all"
        )
    return leaf


def weight_of(weight_fn: Callable[..., Any] | None, batch: tuple[Any, ...]) -> Array | None:
    """Return the weight of a part of a batch, or None without `weight_fn`."""
    if weight_fn is None:
        return None
    weight = weight_fn(*batch)
    if np.ndim(weight):
        raise ValueError(f"weight_fn returned shape {np.shape(weight)}; it must return a scalar for each microbatch")
    dtype = jnp.result_type(weight)
    dtype = dtype if trees.is_floating(dtype) else np.dtype(np.float32)
    return jnp.asarray(weight).astype(trees.compute_dtype(dtype))


def weighed(value: Array, weight: Array | None) -> Array:
    """Return a value times a weight, in at least float32; 0 if the weight is 0."""
    value = value.astype(trees.compute_dtype(value.dtype))
    if weight is None:
        return value
    w = weight.astype(value.dtype)
    # 0 · NaN is NaN, but the mean over an empty microbatch must not affect the sum.
    return jnp.where(w == 0, jnp.zeros_like(value), value * w)
