"""Splitting a batch, accumulating gradients, reducing them once per step, and their noise."""

import contextlib
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import meshes, trees
from jstep.core.jaxprs import Operation, Subprogram, body_of, evaluate
from jstep.core.logs import logger
from jstep.core.placement import Unroll, scan
from jstep.core.trees import Array, GradientNoise, Tree
from jstep.metrics.totals import MeanOf
from jstep.slots.indexed_slices import IndexedSlices, combine_rows

_log_once = functools.cache(logger.info)  # a step is traced several times


def specs_of_rows(args: tuple[Any, ...], rows: Tree = None) -> list[PartitionSpec | None]:
    """Return the spec of each leaf of a batch, from its type or from `rows`; None if unknown."""
    leaves = jax.tree.leaves(args, is_leaf=trees.is_none)
    shardings = jax.tree.leaves(rows, is_leaf=trees.is_none)
    if len(shardings) != len(leaves):
        shardings = [None] * len(leaves)
    specs: list[PartitionSpec | None] = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        has_own_spec = meshes.explicit_mesh(leaf) is not None
        specs.append(meshes.spec_of(leaf) if has_own_spec else getattr(sharding, "spec", None))
    return specs


def number_of_microbatches(
    args: tuple[Any, ...], specs: Sequence[PartitionSpec | None], minimum: int, max_rows: int | None
) -> int:
    """Return the smallest number of microbatches with which a device has at most `max_rows`.

    It is at least the minimum.
    """
    if max_rows is None:
        return minimum
    what = f"max_rows_per_device={max_rows}"
    first, size = rows_of_batch(args, what)
    devices = _devices_of_batch(jax.tree.leaves(args, is_leaf=trees.is_none), specs)
    for n in range(minimum, size + 1):
        if size % n:
            continue
        rows = size // n
        # If the rows do not split over the devices, every device may have all of them.
        rows_of_device = rows // devices if rows % devices == 0 else rows
        if rows_of_device <= max_rows:
            spread = f" over {devices} devices" if devices > 1 else ""
            _log_once(f"{what}: batches of {size} rows{spread} are split into {n} microbatches")
            return n
    raise ValueError(
        f"{what}, num_microbatches={minimum}: no such number divides the {size} rows of {first}; "
        "use more rows"
    )


def split_batch(
    args: tuple[Any, ...], n: int, specs: list[PartitionSpec | None]
) -> tuple[Any, ...]:
    """Reshape each leaf (B, …) to (B/n, n, …)."""
    # A contiguous block of a sharded batch is on some of the devices only and would move to the
    # others at every step, whereas each device already has its share of every n-th row if n divides
    # its rows. One device uses the same rows, so microbatches do not depend on the number of
    # devices. Nothing is copied: a transposed batch would be a second one in memory.
    advice = f"use a batch of a multiple of {n}, or max_rows_per_device instead of num_microbatches"
    rows = rows_of_part(args, n, f"num_microbatches={n}", advice)
    leaves, treedef = trees.flatten(args, is_leaf=trees.is_none)
    devices = _devices_of_batch(leaves, specs)
    if rows % devices:
        text = (
            "num_microbatches=%d: microbatches of %d rows do not split over %d devices, "
            "so each device computes all"
        )
        logger.warning(
            f"{text} of their rows; use fewer microbatches, or a larger batch", n, rows, devices
        )

    def placed(leaf: Any, spec: PartitionSpec | None) -> Any:
        if leaf is None:
            return None
        mesh = _mesh_of(leaf)
        shape = (rows, n, *np.shape(leaf)[1:])
        reshape = functools.partial(jnp.reshape, shape=shape)
        if spec is None or mesh.empty:
            return reshape(leaf)
        # Sharded like the batch: otherwise XLA would make each device process every row.
        first, *others = meshes.dims_of(spec) or (None,)
        parts_spec = PartitionSpec(first, None, *others)
        # It does not fit if there are fewer rows than devices.
        fits = meshes.fitting_spec(mesh, parts_spec, shape) == parts_spec
        if meshes.explicit_mesh(leaf) is not None:
            specs_of = (lambda _: parts_spec) if fits else None
            return meshes.call_on_auto_axes(reshape, leaf, specs_of=specs_of)
        parts = reshape(leaf)
        if not fits:
            return parts
        return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, parts_spec))

    return tuple(treedef.unflatten(map(placed, leaves, specs)))


def microbatch(parts: object, i: object) -> Any:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), parts
    )


def _mesh_of(leaf: object) -> Any:
    return meshes.explicit_mesh(leaf) or jax.sharding.get_abstract_mesh()


def rows_of_batch(args: tuple[Any, ...], what: str) -> tuple[str, int]:
    """Return the name of a leaf and the number of rows of all leaves."""
    leaves = trees.leaves_with_paths(args)
    if not leaves:
        raise ValueError(f"{what}: there is no batch to split; pass it as an argument after params")
    shapes = {f"batch argument {path}": np.shape(leaf) for path, leaf in leaves}
    for name, shape in shapes.items():
        if not shape:
            raise ValueError(
                f"{what}: {name} is a scalar and has no rows to split; close over it in loss_fn"
            )
    (first, (size, *_)), *others = shapes.items()
    for name, (other, *_) in others:
        if other != size:
            raise ValueError(
                f"{what}: {first} has {size} rows and {name} has {other}; they must agree"
            )
    return first, size


def rows_of_part(args: tuple[Any, ...], n: int, what: str, advice: str) -> int:
    """Return the rows of each part; errors begin with `what` and end with `advice`."""
    first, size = rows_of_batch(args, what)
    if size % n or size == 0:
        raise ValueError(f"{what} does not divide the batch: {first} has {size} rows; {advice}")
    return size // n


def _devices_of_batch(leaves: list[Any], specs: Sequence[PartitionSpec | None]) -> int:
    """Return the number of devices that the rows are sharded over; 1 if unknown."""
    count = 1
    for leaf, spec in zip(leaves, specs, strict=True):
        if leaf is None or spec is None or not meshes.dims_of(spec):
            continue
        mesh = _mesh_of(leaf)
        if not mesh.empty:
            count = max(count, meshes.parts_along(mesh, meshes.dims_of(spec)[0]))
    return count


class AggregationMethod(enum.Enum):
    """The method of summing the gradients of microbatches.

    `DEFAULT` keeps a running sum. `ADD_N` keeps all gradients and sums them once, which rounds
    less.
    """

    DEFAULT = "default"
    ADD_N = "add_n"


class Squares(NamedTuple):
    """Squared norms of the gradients of parts (n,) and of their mean, and their weights."""

    weights: Any
    parts: Array
    whole: Array


class LossResult(NamedTuple):
    loss: Array
    model_state: Any
    aux: Any
    gradients: Any
    summaries: Any = None
    squares: Squares | None = None


def accumulate(
    part_fn: Callable[[Any, tuple[Any, ...], Array], LossResult],
    parts: tuple[Any, ...],
    model_state: Tree,
    sums: list[Array],
    weight_fn: Callable[..., Any] | None,
    *,
    method: AggregationMethod,
    unroll: Unroll = None,
    square: Callable[[Sequence[Any]], Array] | None = None,
) -> LossResult:
    """Accumulate the results of all microbatches of a batch, in a loop over them.

    `part_fn(model_state, microbatch, i)` is called for the parts of `split_batch`; `sums` are zeros
    for the gradients; `square` returns the squared norm of gradients. The result has means and sums
    as in `compute_gradients`; `IndexedSlices` contain the rows of all microbatches.
    """
    examples, num_parts = jax.tree.leaves(parts)[0].shape[:2]
    carries_sums = method is AggregationMethod.DEFAULT

    def body(carry: Tree, i: Array) -> Any:
        model_state, sums = carry
        batch = microbatch(parts, i)
        result = part_fn(model_state, batch, i)
        weight = part_weight(weight_fn, batch)
        squared = None if square is None else square(result.gradients)

        def weigh_leaf(g: Any) -> Any:
            return weigh(g, weight) if is_inexact(g) else g

        gradients = [jax.tree.map(weigh_leaf, g) for g in result.gradients]
        if carries_sums:
            sums, gradients = _add_dense(sums, gradients)
        others = summands(weight, (result.aux, result.summaries))
        outputs = (gradients, weigh(result.loss, weight), weight, squared, others)
        return (result.model_state, sums), outputs

    carry = (model_state, sums if carries_sums else [])
    (model_state, sums), (gradients, losses, weights, squared, others) = scan(
        body, carry, jnp.arange(num_parts), num_parts, unroll
    )
    mean = division(num_parts, None if weights is None else jnp.sum(weights))

    def average_gradient(i: int, stacked: Any) -> Any:
        if isinstance(stacked, IndexedSlices):
            rows = stacked.values.reshape(-1, *stacked.values.shape[2:])
            return IndexedSlices(mean(rows), stacked.indices.reshape(-1), stacked.dense_shape)
        if stacked is None:
            return None
        if carries_sums:
            return mean(meshes.reduce_unreduced(sums[i]))
        return mean(jnp.sum(stacked, axis=0))

    summed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), others)
    aux, summaries = means(mean, summed)
    grads = [average_gradient(i, stacked) for i, stacked in enumerate(gradients)]
    squares = None
    if square is not None:
        squares = Squares(examples if weights is None else weights, squared, square(grads))
    return LossResult(mean(jnp.sum(losses)), model_state, aux, grads, summaries, squares)


def _add_dense(sums: list[Array], gradients: list[Any]) -> tuple[list[Array], list[Any]]:
    """Add the gradients that are arrays to their sums; return the sums and the other gradients.

    The loop stacks the others, with () in place of each gradient that was added. A sum without
    gradients is carried unchanged, which costs nothing.
    """
    new_sums: list[Array] = []
    stacked: list[Any] = []
    for total, gradient in zip(sums, gradients, strict=True):
        if isinstance(gradient, jax.Array):
            new_sums.append(total + gradient.astype(total.dtype))
            stacked.append(())
        else:
            new_sums.append(total)
            stacked.append(gradient)
    return new_sums, stacked


def summands(weight: Array | None, outputs: Tree) -> Any:
    """Return the summands of one part's outputs, whose sums over all parts `means` divides."""
    summand = functools.partial(_summand, weight)
    return jax.tree_util.tree_map_with_path(summand, outputs, is_leaf=_is_ratio)


def means(mean: Callable[[Array], Array], sums: Tree) -> Any:
    def leaf(total: Any) -> Any:
        # A ratio has totals of its own, and integers are sums.
        if _is_ratio(total) or not is_inexact(total):
            return total
        return mean(total)

    return jax.tree.map(leaf, sums, is_leaf=_is_ratio)


def division(parts: int, weight: Array | None) -> Callable[[Array], Array]:
    """Return a function that divides a sum over parts by their number, or by their total weight.

    It does not divide by a total weight of 0.
    """
    if weight is None:
        total = jnp.float32(parts)
    else:
        total = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return lambda summed: summed / total.astype(summed.dtype)


def _is_ratio(leaf: object) -> bool:
    return isinstance(leaf, MeanOf)


def _summand(weight: Array | None, keys: Any, leaf: Any) -> Any:
    if _is_ratio(leaf):  # it has its own weight
        if weight is None:
            return leaf
        return jax.tree.map(lambda x: jnp.where(weight == 0, jnp.zeros_like(x), x), leaf)
    if is_inexact(leaf):
        return weigh(leaf, weight)
    if trees.is_key(leaf):
        raise TypeError(
            f"aux: {trees.quote_path(trees.path_str(keys[1:]))} is a key, which has no mean; "
            "return it in model_state"
        )
    if leaf.dtype.itemsize < 4:
        return leaf.astype(jnp.int32)
    return leaf


def is_inexact(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def part_weight(weight_fn: Callable[..., Any] | None, batch: tuple[Any, ...]) -> Array | None:
    if weight_fn is None:
        return None
    weight = weight_fn(*batch)
    if np.ndim(weight):
        raise ValueError(
            f"weight_fn returned shape {np.shape(weight)}; "
            "it must return a scalar for each microbatch"
        )
    dtype = jnp.result_type(weight)
    if not trees.is_floating(dtype):
        dtype = np.dtype(np.float32)
    return jnp.asarray(weight).astype(trees.compute_dtype(dtype))


def weigh(value: Array, weight: Array | None) -> Array:
    """Return value · weight in at least float32; 0 if the weight is 0."""
    value = trees.widen(value)
    if weight is None:
        return value
    w = weight.astype(value.dtype)
    # 0 · NaN is NaN, but the mean over an empty microbatch must not affect the sum.
    return jnp.where(w == 0, jnp.zeros_like(value), value * w)


# Reduction of microbatch gradients over the devices once per step instead of once per microbatch.
#
# On Explicit axes, JAX types determine where a reduction takes place. Parameters of type `reduced`
# over the batch axis have gradients of type `unreduced`, which are summed on each device and
# reduced when their type is changed back. JAX rejects such parameters outside of matrix products,
# so the gradients of parameters with other uses are accumulated as usual.


def reduce_once(
    fn: Callable[[Any, Any], Any],
    params: Tree,
    parts: object,
    loss: Callable[[Any, Any], Array],
    indices: list[int],
) -> Any:
    """Return `fn(params, parts)`, with gradients reduced once where possible.

    It is possible for the parameters that `loss` uses only in matrix products.
    """
    axes: set[str] = set()  # the axes over which the rows of each part are sharded
    for leaf in jax.tree.leaves(parts):
        if meshes.explicit_mesh(leaf) is None:
            continue
        dims = meshes.dims_of(meshes.spec_of(leaf))
        if dims:
            axes |= set(meshes.mesh_axes_of(dims[0]))
    leaves, treedef = trees.flatten(params)

    def can_be_reduced(leaf: object) -> bool:
        if not axes or meshes.explicit_mesh(leaf) is None:
            return False
        spec = meshes.spec_of(leaf)
        if spec.reduced or spec.unreduced:
            return False
        # A mesh axis that splits the parameter cannot be `reduced` in its type.
        return all(axes.isdisjoint(meshes.mesh_axes_of(axis)) for axis in meshes.dims_of(spec))

    able = [i for i in indices if can_be_reduced(leaves[i])]
    if able:
        first = microbatch(parts, 0)

        def loss_of(arrays: list[Any]) -> Array:
            return loss(treedef.unflatten(trees.replace_leaves(leaves, able, arrays)), first)

        traced = jax.make_jaxpr(loss_of)([leaves[i] for i in able])
        others = _other_uses(body_of(traced), [frozenset([i]) for i in able])
        able = [i for i in able if i not in others]
    if able:

        def call_with_reduced(params: Tree, parts: object) -> Any:
            leaves = jax.tree.leaves(params)
            reduced = []
            for i in able:
                sharding: Any = jax.typeof(leaves[i]).sharding
                spec = PartitionSpec(*meshes.dims_of(sharding.spec), reduced=frozenset(axes))
                reduced.append(jax.sharding.reshard(leaves[i], NamedSharding(sharding.mesh, spec)))
            return fn(treedef.unflatten(trees.replace_leaves(leaves, able, reduced)), parts)

        with contextlib.suppress(Exception):
            # If JAX has no rule for an operation of the loss, fall back.
            return meshes.atomic(call_with_reduced, params, parts)
    return fn(params, parts)


def zeros_of_gradient(leaf: Array) -> Array:
    """Return zeros of a gradient's type and at least float32."""
    dtype = trees.compute_dtype(leaf.dtype)
    mesh = meshes.explicit_mesh(leaf)
    if mesh is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    old_spec = meshes.spec_of(leaf)
    spec = PartitionSpec(*meshes.dims_of(old_spec), unreduced=old_spec.reduced)
    return jax.sharding.reshard(jnp.zeros(leaf.shape, dtype), NamedSharding(mesh, spec))


_SAME_ELEMENTS = frozenset(
    {"convert_element_type", "copy", "copy_p", "reshape", "squeeze", "transpose"}
)
"""Operations whose result is their operand in another form: its uses are those of the operand."""


def _other_uses(body: Subprogram, arguments: Sequence[frozenset[int]]) -> set[int]:
    """Return the arguments that a program uses in anything but matrix products.

    The program is evaluated on sets in place of arrays: a set has the arguments whose elements the
    array consists of.
    """
    others: set[int] = set()

    def use(operation: Operation, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        if operation.name in _SAME_ELEMENTS:
            return operands
        if operation.kind == "scan":
            consts, carried = operation.counts
            others.update(*operands[consts : consts + carried])
        if operation.kind in ("call", "scan"):
            others.update(_other_uses(operation.bodies[0], operands))
        elif operation.name != "dot_general":
            others.update(*operands)
        return [frozenset()] * len(operation.eqn.outvars)

    others.update(*evaluate(body, arguments, use, lambda constant: frozenset()))
    return others


# Estimates of the gradient noise from the gradients of microbatches.
#
# Let G be the true gradient and Σ the covariance of the gradient of one example. The gradient of a
# microbatch of weight w has an expected squared norm of |G|² + tr Σ/w, and the gradient of the
# whole batch of weight W one of |G|² + tr Σ/W. Squared norms at two weights determine both
# unknowns: tr Σ = (small − big)·W/(n − 1) and |G|² = big − tr Σ/W, where big is the squared norm of
# the mean, small the weighted mean of the squared norms of the parts, and W the sum of the n
# positive weights.


def squared_norm(gradients: Sequence[Any], scale: Array | None = None) -> Array:
    """Return the squared norm in at least float32, without the factor `scale` of the loss."""

    def computed(gradients: list[Any], scale: Array | None) -> Array:
        total = jnp.zeros((), trees.default_float())
        for g in gradients:
            if isinstance(g, IndexedSlices):
                g = combine_rows(g).values
            values = trees.widen(g)
            # Before squaring: float32 may not hold the square of a scaled gradient.
            if scale is not None:
                values = values * (1 / scale).astype(values.dtype)
            total = total + jnp.sum(jnp.square(values)).astype(total.dtype)
        return total

    return meshes.call_on_auto_axes(computed, [g for g in gradients if g is not None], scale)


def together_squared(squares: Sequence[Squares | None]) -> Squares | None:
    """Combine squared norms of gradients for the same parts, by different parameters."""
    present = [s for s in squares if s is not None]
    if not present:
        return None
    first, *others = present
    parts = first.parts
    for other in others:
        parts = parts + other.parts
    whole = first.whole
    for other in others:
        whole = whole + other.whole
    return Squares(first.weights, parts, whole)


def estimate_noise(squares: Squares) -> GradientNoise:
    """Return unbiased estimates of tr Σ and |G|²; NaN if fewer than two parts have weight > 0.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.
    """

    def computed(weights: object, parts: Array, whole: Array) -> GradientNoise:
        w = jnp.broadcast_to(jnp.asarray(weights, parts.dtype), parts.shape)
        counts = w > 0
        # 0 · NaN is NaN, but a part without weight must not contribute.
        terms = jnp.where(counts, w * parts, jnp.zeros_like(parts))
        n = jnp.sum(counts)
        total = jnp.sum(jnp.where(counts, w, jnp.zeros_like(w)))
        others = jnp.where(n > 1, (n - 1).astype(parts.dtype), jnp.nan)
        noise = (jnp.sum(terms) / total - whole) * (total / others)
        return GradientNoise(noise, whole - noise / total)

    return meshes.call_on_auto_axes(computed, *squares)
