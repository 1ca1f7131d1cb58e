"""Microbatches: splitting a batch, accumulating gradients, their reduction once per step, and the noise they show."""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import meshes, trees
from jstep.core.annotations import Tree
from jstep.core.jaxprs import Operation, Subprogram, body_of, evaluate
from jstep.core.placement import Unroll, scan
from jstep.core.trees import Array, GradientNoise
from jstep.data.placement import fitting_spec
from jstep.differentiate.integer_sums import is_integer, summed
from jstep.slots.indexed_slices import IndexedSlices, combined

_logger = logging.getLogger("jstep")
_log_once = functools.cache(_logger.info)  # a step is traced several times


def specs_of_rows(args: tuple[Any, ...], rows: Tree = None) -> list[PartitionSpec | None]:
    """Return the spec of each leaf of a batch, from its type or from `rows`, a tree of shardings; None if unknown."""
    leaves = jax.tree.leaves(args, is_leaf=trees.is_none)
    given = jax.tree.leaves(rows, is_leaf=trees.is_none)
    given = given if len(given) == len(leaves) else [None] * len(leaves)
    return [
        meshes.spec_of(leaf) if meshes.explicit_mesh(leaf) is not None else getattr(one, "spec", None)
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
        whole = PartitionSpec(*(meshes.dims_of(spec)[:1] or (None,)), None, *meshes.dims_of(spec)[1:])
        fits = fitting_spec(mesh, whole, shape) == whole  # not if there are fewer rows than devices
        if meshes.explicit_mesh(leaf) is not None:
            return meshes.without_explicit_axes(in_parts, leaf, place=(lambda _: whole) if fits else None)
        parts = in_parts(leaf)
        return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, whole)) if fits else parts

    return tuple(treedef.unflatten(map(placed, leaves, specs)))


def microbatch(parts: object, i: object) -> Any:
    """Return microbatch i of the result of `split`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), parts)


def _mesh_of(leaf: object) -> Any:
    return meshes.explicit_mesh(leaf) or jax.sharding.get_abstract_mesh()


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
        mesh = None if leaf is None or spec is None or not meshes.dims_of(spec) else _mesh_of(leaf)
        if mesh is not None and spec is not None and not mesh.empty:
            counts.append(meshes.parts_along(mesh, meshes.dims_of(spec)[0]))
    return max(counts)


class AggregationMethod(enum.Enum):
    """The method of summing the gradients of microbatches.

    `DEFAULT` keeps a running sum, with one copy of the gradients in memory. `ADD_N` keeps the gradients of
    all microbatches and sums them once, which rounds less but stores a copy per microbatch.
    """

    DEFAULT = "default"
    ADD_N = "add_n"


class Squares(NamedTuple):
    """Squared norms of gradients.

    Attributes:
        weights: The weight of each part, of shape (n,); or the number of examples of each part.
        parts: The squared norm of each part, of shape (n,).
        whole: The squared norm of the mean.
    """

    weights: Any
    parts: Array
    whole: Array


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
    model_state: Tree,
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

    def body(carry: Tree, i: Array) -> Any:
        state, sums = carry
        batch = microbatch(parts, i)
        part = part_fn(state, batch, i)
        weight = weight_of(weight_fn, batch)
        squared = None if square is None else square(part.gradients)
        gradients = [jax.tree.map(lambda g: g if is_integer(g) else weighed(g, weight), g) for g in part.gradients]
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
        return mean(meshes.reduced(sums[i]) if running else jnp.sum(stacked, axis=0))

    def sum_or_mean(leaf: Array) -> Array:
        return summed(leaf) if is_integer(leaf) else mean(jnp.sum(leaf, axis=0))

    aux, summaries = jax.tree.map(sum_or_mean, others)
    grads = [gradient(i, stacked) for i, stacked in enumerate(gradients)]
    squares = None
    if square is not None:
        squares = Squares(examples if weights is None else weights, squared, square(grads))
    return Part(mean(jnp.sum(losses)), model_state, aux, grads, summaries, squares)


def summand(weight: Array | None, keys: Any, leaf: Array) -> Array:
    """Convert a leaf of aux to the form in which microbatches are summed."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return weighed(leaf, weight)
    if leaf.dtype == bool or (is_integer(leaf) and leaf.dtype.itemsize < 4):
        return leaf.astype(jnp.int32)
    if not is_integer(leaf):
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


# Reduction of microbatch gradients over the devices once per step instead of once per microbatch.
#
# On Explicit axes, JAX types determine where a reduction takes place. Parameters of type `reduced` over the batch axis
# have gradients of type `unreduced`, which are summed on each device and reduced when their type is changed back. JAX
# rejects such parameters outside of matrix products, so the gradients of those with other uses are accumulated as
# usual.


def reduced_once(
    run: Callable[[Any, Any], Any], params: Tree, parts: object, loss: Callable[[Any, Any], Array], indices: list[int]
) -> Any:
    """Return `run(params, parts)` with parameters typed such that their gradients are reduced once, if possible.

    Args:
        run: Accumulates the gradients.
        params: The parameters.
        parts: The batch, as `split` returns it.
        loss: `loss(params, part)`, which is traced to see how it uses the parameters.
        indices: The indices of the parameters that are differentiated.
    """
    axes: set[str] = set()  # over which the rows of each part are sharded
    for leaf in jax.tree.leaves(parts):
        if meshes.explicit_mesh(leaf) is not None and meshes.dims_of(meshes.spec_of(leaf)):
            axes |= set(meshes.mesh_axes_of(meshes.dims_of(meshes.spec_of(leaf))[0]))
    leaves, treedef = trees.flatten(params)

    def is_able(leaf: object) -> bool:
        if not axes or meshes.explicit_mesh(leaf) is None:
            return False
        spec = meshes.spec_of(leaf)
        split = set().union(*map(meshes.mesh_axes_of, meshes.dims_of(spec)))
        return not (split & axes or spec.reduced or spec.unreduced)

    able = [i for i in indices if is_able(leaves[i])]
    if able:
        first = microbatch(parts, 0)
        traced = jax.make_jaxpr(lambda some: loss(treedef.unflatten(trees.with_leaves(leaves, able, some)), first))(
            [leaves[i] for i in able]
        )
        others = _other_uses(body_of(traced), [frozenset([i]) for i in able])
        able = [i for i in able if i not in others]
    if able:

        def typed(params: Tree, parts: object) -> Any:
            leaves, some = jax.tree.leaves(params), []
            for i in able:
                sharding: Any = jax.typeof(leaves[i]).sharding
                spec = PartitionSpec(*meshes.dims_of(sharding.spec), reduced=frozenset(axes))
                some.append(jax.sharding.reshard(leaves[i], NamedSharding(sharding.mesh, spec)))
            return run(treedef.unflatten(trees.with_leaves(leaves, able, some)), parts)

        with contextlib.suppress(Exception):  # JAX has no rule for an operation of the loss: fall back
            return meshes.atomic(typed, params, parts)
    return run(params, parts)


def zeros_of_gradient(leaf: Array) -> Array:
    """Return zeros to accumulate the gradients of a leaf in: at least float32, with the type of its gradient."""
    dtype = trees.compute_dtype(leaf.dtype)
    mesh = meshes.explicit_mesh(leaf)
    if mesh is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    spec = PartitionSpec(*meshes.dims_of(meshes.spec_of(leaf)), unreduced=meshes.spec_of(leaf).reduced)
    return jax.sharding.reshard(jnp.zeros(leaf.shape, dtype), NamedSharding(mesh, spec))


_SAME_ELEMENTS = frozenset({"convert_element_type", "copy", "copy_p", "reshape", "squeeze", "transpose"})


def _other_uses(body: Subprogram, given: Sequence[frozenset[int]]) -> set[int]:
    """Return which of the given arguments a program does not only use in matrix products.

    Args:
        body: The program.
        given: The arguments that each of its own is, possibly after changes of shape or dtype.
    """
    others: set[int] = set()

    def use(operation: Operation, taken: list[frozenset[int]]) -> list[frozenset[int]]:
        if operation.name in _SAME_ELEMENTS:
            return taken
        if operation.kind == "scan":
            consts, carried = operation.counts
            others.update(*taken[consts : consts + carried])
        if operation.kind in ("call", "scan"):
            others.update(_other_uses(operation.bodies[0], taken))
        elif operation.name != "dot_general":
            others.update(*taken)
        return [frozenset()] * len(operation.eqn.outvars)

    others.update(*evaluate(body, given, use, lambda constant: frozenset()))
    return others


# Estimates of the gradient noise from the gradients of microbatches.
#
# Let G be the true gradient and Σ the covariance of the gradient of one example. The gradient of a microbatch of weight
# w has an expected squared norm of |G|² + tr Σ/w, and that of the whole batch of weight W one of |G|² + tr Σ/W. Squared
# norms at two weights determine both unknowns.


def squared_norm(gradients: Sequence[Any], scale: Array | None = None) -> Array:
    """Return the squared norm of gradients in at least float32.

    Args:
        gradients: Arrays, `IndexedSlices` (whose duplicate rows are summed first) or None.
        scale: The factor of the loss. It is divided out before squaring, because float32 may not hold the square.
    """

    def computed(gradients: list[Any], scale: Array | None) -> Array:
        total = jnp.zeros((), trees.default_float())
        for g in gradients:
            values = combined(g).values if isinstance(g, IndexedSlices) else g
            values = values.astype(trees.compute_dtype(values.dtype))
            if scale is not None:
                values = values * (1 / scale).astype(values.dtype)
            total = total + jnp.sum(jnp.square(values)).astype(total.dtype)
        return total

    return meshes.without_explicit_axes(computed, [g for g in gradients if g is not None], scale)


def together_squared(found: Sequence[Squares | None]) -> Squares | None:
    """Combine the squared norms of gradients with respect to different parameters, for the same parts."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    parts = sum((one.parts for one in known[1:]), known[0].parts)
    return Squares(known[0].weights, parts, sum((one.whole for one in known[1:]), known[0].whole))


def estimated(squares: Squares) -> GradientNoise:
    """Return unbiased estimates of tr Σ and |G|² from one batch; NaN if fewer than two parts have a positive weight.

    tr Σ = (small − big)·W/(n − 1) and |G|² = big − tr Σ/W, where big is the squared norm of the mean, small the
    weighted mean of the squared norms of the parts, and W the sum of the n positive weights.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A, for parts of one size.
    """

    def computed(weights: object, parts: Array, whole: Array) -> GradientNoise:
        w = jnp.broadcast_to(jnp.asarray(weights, parts.dtype), parts.shape)
        counts = w > 0
        # 0 · NaN is NaN, but a part without weight must not contribute.
        terms = jnp.where(counts, w * parts, jnp.zeros_like(parts))
        n, total = jnp.sum(counts), jnp.sum(jnp.where(counts, w, jnp.zeros_like(w)))
        others = jnp.where(n > 1, (n - 1).astype(parts.dtype), jnp.nan)
        noise = (jnp.sum(terms) / total - whole) * (total / others)
        return GradientNoise(noise, whole - noise / total)

    return meshes.without_explicit_axes(computed, *squares)
