"""The implementation of `compute_gradients` and `minimize`: differentiation of a loss with all their options."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool, as_function, as_int, kind, shown
from jstep.core.meshes import Attempts, sharded_like, without_explicit_axes
from jstep.core.placement import Unroll, as_unroll
from jstep.core.selection import VarList, check_form, selected
from jstep.core.trees import Array, IndexedSlices, Params
from jstep.differentiate.alike import alike
from jstep.differentiate.lanes import Lanes, arrays_of, as_lanes, of_each_lane, sum_over_lanes
from jstep.differentiate.lookup import tables
from jstep.differentiate.loss_outputs import (
    checked_aux,
    checked_loss,
    collect_summaries,
    same_kind,
    split_outputs,
    track_connected,
)
from jstep.differentiate.microbatches import (
    AggregationMethod,
    Part,
    accumulate,
    number_of_parts,
    rows_of_batch,
    specs_of_rows,
    split,
    summand,
    weighed,
    weight_of,
)
from jstep.differentiate.noise import Squares, squared_norm
from jstep.differentiate.sharpness import checked_sharpness, perturbed
from jstep.differentiate.unreduced import reduced_once, zeros_of_gradient

GATE_NONE = 0
"""No gating: XLA may start an update before its gradient is complete."""
GATE_OP = 1
"""Each gradient is complete before its update begins."""
GATE_GRAPH = 2
"""All gradients are complete before any update begins."""

GATES = (GATE_NONE, GATE_OP, GATE_GRAPH)


def gated(grads: list[Any], gate: int) -> list[Any]:
    """Apply a gate, which keeps XLA from overlapping gradients and updates, to gradients.

    It affects memory and time, never values.

    Args:
        grads: Arrays, `IndexedSlices` or None.
        gate: One of `GATES`.
    """
    if gate == GATE_OP:
        return [None if g is None else jax.lax.optimization_barrier(g) for g in grads]
    return jax.lax.optimization_barrier(grads) if gate == GATE_GRAPH else grads


class Inputs(NamedTuple):
    """The inputs of one evaluation of a loss.

    Attributes:
        params: The parameters.
        model_state: Non-trained variables, if the loss has any.
        args: The batch.
        kwargs: Keyword arguments that are passed to the loss unchanged.
        key: A PRNG key, passed to the loss as `rng`.
        batch_specs: Shardings or specs of args, if known.
        scale: The factor of the loss before differentiation; gradients are scaled by it.
        lanes: The lanes of the batch, if it is computed in lanes: on Auto axes, in a program.
    """

    params: Params
    model_state: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    key: Any = None
    batch_specs: Any = None
    scale: Array | None = None
    lanes: Lanes | None = None


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """The differentiation of a loss, with the options of `compute_gradients` and `minimize`, validated here."""

    loss_fn: Callable[..., Any]
    var_list: VarList = None
    has_aux: bool = False
    has_model_state: bool = False
    num_microbatches: int = 1
    max_rows_per_device: int | None = None
    weight_fn: Callable[..., Any] | None = None
    gate_gradients: int = GATE_OP
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT
    sharpness: Any = None
    adaptive: bool = False
    unroll: Unroll = None
    lanes: int | None = None
    gathers: bool = False
    """Whether to collect summaries that the loss creates."""
    squares: bool = False
    """Whether to compute the squared norms of the gradients of microbatches."""
    attempts: Attempts | None = dataclasses.field(default=None, repr=False, compare=False)
    """The tracer of the loss, shared by all copies made with `dataclasses.replace`."""

    def __post_init__(self) -> None:
        as_function(self.loss_fn, "loss_fn", "(params, *args) -> loss")
        if self.attempts is None:
            object.__setattr__(self, "attempts", Attempts(getattr(self.loss_fn, "__name__", "loss_fn")))
        check_form(self.var_list, "var_list")
        as_bool(self.has_aux, "has_aux")
        as_bool(self.has_model_state, "has_model_state")
        as_bool(self.adaptive, "adaptive")
        as_int(self.num_microbatches, "num_microbatches", 1)
        if self.max_rows_per_device is not None:
            as_int(self.max_rows_per_device, "max_rows_per_device", 1)
        object.__setattr__(self, "lanes", as_lanes(self.lanes))
        as_function(self.weight_fn, "weight_fn", "of a microbatch", optional=True)
        if isinstance(self.gate_gradients, bool) or self.gate_gradients not in GATES:
            raise ValueError(f"gate_gradients={shown(self.gate_gradients)}: must be GATE_NONE, GATE_OP or GATE_GRAPH")
        if not isinstance(self.aggregation_method, AggregationMethod):
            raise TypeError(
                f"aggregation_method={shown(self.aggregation_method)}: must be AggregationMethod.DEFAULT or .ADD_N, "
                f"got {kind(self.aggregation_method)}"
            )
        if checked_sharpness(self.sharpness) is None and self.adaptive:
            raise ValueError("adaptive=True: specifies how sharpness is measured; give sharpness as well")
        as_unroll(self.unroll)

    def __call__(self, given: Inputs) -> Part:
        """Return the loss, new model_state, aux, gradients (a tree like params) and summaries."""
        params = given.params
        for path, leaf in trees.leaves_with_paths(params):
            if not (trees.is_array(leaf) or isinstance(leaf, bool | int | float)):
                raise TypeError(
                    f"params: the leaf at {trees.quoted(path)} is {type(leaf).__name__}, which is not an array or "
                    "number; keep it out of params, for instance with equinox.partition(model, equinox.is_array)"
                )
        if given.lanes is not None:
            return self._of_batch(given)
        given = given._replace(batch_specs=specs_of_rows(given.args, given.batch_specs) if self.looks_at_rows else None)
        there = sharded_like(Part(None, given.model_state, None, params))  # type: ignore[arg-type]
        assert self.attempts is not None  # set in __post_init__
        return self.attempts(self._of_batch, given, place=there)

    @property
    def looks_at_rows(self) -> bool:
        """Whether the computation depends on how the rows of the batch are sharded."""
        return self.num_microbatches > 1 or self.max_rows_per_device is not None or self.lanes is not None

    def _of_batch(self, given: Inputs) -> Part:
        params = given.params
        leaves, treedef = trees.flatten(params)
        indices = selected(params, self.var_list)
        part = self._whole(given, indices)
        if self.sharpness is not None:
            some = [jnp.asarray(leaves[i]) for i in indices]
            move = functools.partial(perturbed, adaptive=self.adaptive)
            on_auto_axes = functools.partial(without_explicit_axes, move, place=sharded_like(some))
            there = alike(given.lanes, on_auto_axes, some, part.gradients, self.sharpness)
            moved = treedef.unflatten(trees.with_leaves(leaves, indices, there))
            calm = dataclasses.replace(self, gathers=False)
            again = calm._whole(given._replace(params=moved), indices)
            part = part._replace(gradients=again.gradients, squares=again.squares)
        grads = gated(part.gradients, self.gate_gradients)
        return part._replace(gradients=treedef.unflatten(trees.with_leaves([None] * len(leaves), indices, grads)))

    def _whole(self, given: Inputs, indices: list[int]) -> Part:
        """Differentiate the batch, at once or in parts; gradients are a list for the leaves at `indices`."""
        if given.lanes is not None:
            return self._in_lanes(given.lanes, given, indices)
        n = number_of_parts(given.args, given.batch_specs, self.num_microbatches, self.max_rows_per_device)
        if n == 1:
            return self._one(given, indices)
        parts = split(given.args, n, given.batch_specs)

        def run(params: Params, parts: tuple[Any, ...]) -> Part:
            def part_fn(model_state: Any, batch: Any, i: Array) -> Part:
                key = None if given.key is None else jax.random.fold_in(given.key, i)
                return self._one(given._replace(params=params, model_state=model_state, args=batch, key=key), indices)

            leaves = jax.tree.leaves(params)
            sums = [zeros_of_gradient(jnp.asarray(leaves[i])) for i in indices]
            square = functools.partial(squared_norm, scale=given.scale) if self.squares else None
            return accumulate(
                part_fn,
                parts,
                given.model_state,
                sums,
                self.weight_fn,
                method=self.aggregation_method,
                unroll=self.unroll,
                square=square,
            )

        # The squared norm of a microbatch gradient requires the sum over all devices, so reduction cannot be deferred.
        if self.weight_fn is not None or self.aggregation_method is not AggregationMethod.DEFAULT or self.squares:
            return run(given.params, parts)

        def loss(params: Params, batch: Any) -> Array:
            return self._one(given._replace(params=params, args=batch), []).loss

        return reduced_once(run, given.params, parts, loss, indices)

    def _in_lanes(self, lanes: Lanes, given: Inputs, indices: list[int]) -> Part:
        """Differentiate the batch in lanes.

        Loss, gradients and the floating leaves of aux are means over the lanes, integers of aux are sums. The floating
        leaves of model_state are means, the others are those of lane 0.
        """
        alone = dataclasses.replace(self, lanes=None, squares=False)
        first, size = rows_of_batch(given.args, f"lanes={lanes.number}")
        if size % lanes.number or size == 0:
            raise ValueError(
                f"lanes={lanes.number} does not divide the batch: {first} has {size} rows; use a multiple of it"
            )
        rows, of_rows = trees.flatten(given.args)
        whole, filled = arrays_of(given._replace(args=(), batch_specs=None, lanes=None))

        def part(i: Array, whole: list[Array], rows: list[Array]) -> Any:
            here = filled(whole)
            args = of_rows.unflatten(rows)
            key = None if here.key is None else jax.random.fold_in(here.key, i)
            found = alone._whole(here._replace(args=args, key=key, batch_specs=specs_of_rows(args)), indices)
            weight = weight_of(self.weight_fn, args)
            dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in found.gradients]
            grads = [None if g is None else weighed(g, weight) for g in dense]
            terms = functools.partial(summand, weight)
            others = jax.tree_util.tree_map_with_path(terms, (found.aux, found.summaries))
            state = jax.tree.map(functools.partial(_of_state, i), found.model_state)
            norms = None
            if self.squares:
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

    def _one(self, given: Inputs, indices: list[int]) -> Part:
        leaves, treedef = trees.flatten(given.params)
        connected: set[int] = set()
        looked_up: Any = None

        def of_some(some: list[Array]) -> tuple[Array, Any]:
            nonlocal looked_up
            some = track_connected(some, connected)
            whole = treedef.unflatten(trees.with_leaves(leaves, indices, some))
            before = (given.model_state,) if self.has_model_state else ()
            rng = {} if given.key is None else {"rng": given.key}

            def call() -> Any:
                return self.loss_fn(whole, *before, *given.args, **{**(given.kwargs or {}), **rng})

            with tables(some) as looked_up:
                out, summaries = collect_summaries(call) if self.gathers else (call(), None)
            loss, model_state, aux = split_outputs(out, self.has_aux, self.has_model_state)
            loss = checked_loss(loss)
            others = same_kind(given.model_state, model_state), checked_aux(aux), summaries
            return _scaled(loss, given.scale), (loss, *others)

        some = [jnp.asarray(leaves[i]) for i in indices]
        (_, (loss, model_state, aux, summaries)), dense = jax.value_and_grad(of_some, has_aux=True)(some)
        grads = [looked_up.gradient(i, g if i in connected else None) for i, g in enumerate(dense)]
        return Part(loss, model_state, aux, grads, summaries)


def _scaled(loss: Array, scale: Array | None) -> Array:
    if scale is None:
        return loss
    dtype = trees.compute_dtype(loss.dtype)
    return loss.astype(dtype) * scale.astype(dtype)


def _of_state(i: Array, leaf: Any) -> Array:
    """A leaf of model_state as it is summed: floating leaves become means, others are those of lane 0."""
    leaf = trees.key_data(jnp.asarray(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf.astype(trees.compute_dtype(leaf.dtype))
    return jnp.where(i == 0, leaf, jnp.zeros_like(leaf))
