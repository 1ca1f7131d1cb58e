"""The gradients of a batch in lanes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.types import Array
from jstep.differentiate.alike import alike
from jstep.differentiate.lanes import Lanes, arrays_of, of_each_lane, sum_over_lanes
from jstep.differentiate.microbatches import Part, rows_of_batch, specs_of_rows, summand, weighed, weight_of
from jstep.differentiate.noise import Squares, squared_norm


def lane_gradients(
    lanes: Lanes,
    part_fn: Callable[[Any], Part],
    given: Any,
    weight_fn: Callable[..., Any] | None,
    *,
    squares: bool,
) -> Part:
    """Differentiate a batch in lanes.

    Args:
        lanes: The lanes.
        part_fn: Differentiates one lane.
        given: The `Inputs` of the batch.
        weight_fn: The weight of the rows of a lane; defaults to 1. A lane of weight 0 is ignored.
        squares: Whether to compute the squared norms of the gradients of the lanes.

    Returns:
        Loss, gradients and the floating leaves of aux as means over the lanes, integers of aux as sums. The floating
        leaves of model_state are means, the others those of lane 0.

    Raises:
        ValueError: L does not divide the batch, a leaf of it has no rows, or the loss names the mesh axes of the rows.
    """
    first, size = rows_of_batch(given.args, f"lanes={lanes.number}")
    if size % lanes.number or size == 0:
        raise ValueError(
            f"lanes={lanes.number} does not divide the batch: {first} has {size} rows; use a batch of a multiple of "
            f"{lanes.number}"
        )
    rows, of_rows = trees.flatten(given.args)
    whole, filled = arrays_of(given._replace(args=None, batch_specs=None, lanes=None))

    def part(i: Array, whole: list[Array], rows: list[Array]) -> Any:
        here = filled(whole)
        args = of_rows.unflatten(rows)
        key = None if here.key is None else jax.random.fold_in(here.key, i)
        found = part_fn(here._replace(args=args, key=key, batch_specs=specs_of_rows(args)))
        weight = weight_of(weight_fn, args)
        dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in found.gradients]
        grads = [None if g is None else weighed(g, weight) for g in dense]
        others = jax.tree_util.tree_map_with_path(functools.partial(summand, weight), (found.aux, found.summaries))
        state = jax.tree.map(functools.partial(_of_state, i), found.model_state)
        norms = None
        if squares:
            of_lane = jnp.float32(size // lanes.number) if weight is None else weight
            norms = of_each_lane(lanes, i, (of_lane, squared_norm(found.gradients, here.scale)))
        return grads, weighed(found.loss, weight), weight, others, state, norms

    summed = sum_over_lanes(lanes, part, whole, [jnp.asarray(x) for x in rows], [0] * len(rows))
    grads, loss, weight, others, state, norms = summed
    total = jnp.float32(lanes.number) if weight is None else jnp.where(weight == 0, jnp.ones_like(weight), weight)

    def mean(x: Array) -> Array:
        return x if jnp.issubdtype(x.dtype, jnp.integer) else x / total.astype(x.dtype)

    def of_state(x: Array, old: Array) -> Array:
        if trees.is_key(old):
            return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old))
        return (x / lanes.number if jnp.issubdtype(x.dtype, jnp.inexact) else x).astype(old.dtype)

    state = jax.tree.map(of_state, state, given.model_state)
    grads, loss, (aux, summaries) = jax.tree.map(mean, (grads, loss, others))
    found = None
    if norms is not None:
        found = Squares(norms[0], norms[1], alike(lanes, squared_norm, grads, given.scale))
    return Part(loss, state, aux, grads, summaries, found)


def _of_state(i: Array, leaf: Any) -> Array:
    """A leaf of model_state as it is summed: floating leaves become means, others are those of lane 0."""
    leaf = trees.key_data(jnp.asarray(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf.astype(trees.compute_dtype(leaf.dtype))
    return jnp.where(i == 0, leaf, jnp.zeros_like(leaf))
