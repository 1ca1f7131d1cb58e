"""Differentiation of a loss: whole, in microbatches, in lanes, or twice."""

import contextvars
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jstep.core import meshes, trees
from jstep.core.checks import as_bool, as_choice, as_function, as_int
from jstep.core.device_values import as_scalar
from jstep.core.exceptions import setting
from jstep.core.placement import Unroll, as_unroll, sharding_of
from jstep.core.selection import VarList, check_form, select_leaves
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Array, Number, Params, T, Tree
from jstep.differentiate import microbatches
from jstep.differentiate.clipping import global_norm
from jstep.differentiate.lanes import (
    Lanes,
    as_lanes,
    call_on_lanes,
    check_integers,
    merge_leaf,
    stack_over_lanes,
    state_summand,
    sum_over_lanes,
)
from jstep.differentiate.lookup import TABLES, Tables
from jstep.differentiate.loss_outputs import COLLECTORS, Collector, unpack_outputs
from jstep.differentiate.microbatches import AggregationMethod, LossResult, Squares
from jstep.differentiate.reproducible import evaluate_reproducibly
from jstep.slots.indexed_slices import IndexedSlices


class Gate(enum.IntEnum):
    """How far XLA may overlap gradients and updates, by the names of `tf.train`.

    `GATE_NONE`: it may start an update before its gradient is complete. `GATE_OP`: each gradient is
    complete before its update begins. `GATE_GRAPH`: all gradients are complete before any update
    begins.
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    def __repr__(self) -> str:
        return f"jstep.{self.name}"


GATE_NONE = Gate.GATE_NONE
"""No gating: XLA may start an update before its gradient is complete."""
GATE_OP = Gate.GATE_OP
"""Each gradient is complete before its update begins."""
GATE_GRAPH = Gate.GATE_GRAPH
"""All gradients are complete before any update begins."""

UNUSED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "jstep_unused", default=None
)
"""The paths of parameters on which the loss does not depend; None if nobody asks."""


_Args = ParamSpec("_Args")
_Aux = TypeVar("_Aux")


@overload
def compute_gradients(
    loss_fn: Callable[Concatenate[T, _Args], Any],
    *,
    var_list: VarList = None,
    has_aux: Literal[False] = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    sharpness: Number | None = None,
    adaptive: bool = False,
    lanes: int | None = None,
) -> Callable[Concatenate[T, _Args], tuple[Array, T]]: ...


@overload
def compute_gradients(
    loss_fn: Callable[Concatenate[T, _Args], tuple[Any, _Aux]],
    *,
    var_list: VarList = None,
    has_aux: Literal[True],
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    sharpness: Number | None = None,
    adaptive: bool = False,
    lanes: int | None = None,
) -> Callable[Concatenate[T, _Args], tuple[tuple[Array, _Aux], T]]: ...


@shortens_tracebacks
def compute_gradients(
    loss_fn: Callable[..., Any],
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    sharpness: Number | None = None,
    adaptive: bool = False,
    lanes: int | None = None,
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar; with has_aux
            `-> (loss, aux)`.
        var_list: The parameters to differentiate: None (all), a predicate `(path, leaf) -> bool`, a
            list of paths or globs (`"decoder/*"`), or a tree of bools. The gradients of the others
            are None, as are those of parameters that the loss does not depend on.
        has_aux: Whether loss_fn returns auxiliary values with the loss.
        num_microbatches: Number of microbatches for gradient accumulation in one scan. Microbatch i
            of n has the rows i, i + n, i + 2n, … of every arg. Gradients, loss and inexact leaves
            of aux are means in at least float32; integers and bools of aux are sums in at least
            int32. They equal those of the whole batch only if the loss is a mean over rows.
        weight_fn: `weight_fn(*microbatch)`, the weight of a microbatch in the means, such as its
            number of tokens.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH; it never affects values.
        aggregation_method: How to sum the gradients of microbatches.
        sharpness: The radius ρ ≥ 0 of sharpness-aware minimization: gradients are taken at
            p + ρ·g/‖g‖; loss and aux are evaluated at p. It costs a second gradient. With
            microbatches, g is the gradient of the whole batch.
        adaptive: Whether to scale the radius by the magnitude of each element (ASAM):
            p + ρ·p²·g/‖|p|·g‖.
        lanes: Number of lanes, a power of two, as in `minimize`. Inside your own `jax.jit`, set the
            mesh (`jax.set_mesh`).

    Returns:
        `f(params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. Keyword arguments
        are passed to loss_fn unchanged in every microbatch.

    Raises:
        ValueError: The loss is not a scalar, a var_list entry matches nothing, or num_microbatches
            or lanes do not fit the batch.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> f = jstep.compute_gradients(lambda p, x: jnp.mean(p["w"] * x + p["b"]), var_list=["w"])
        >>> loss, grads = f({"w": jnp.float32(2.0), "b": jnp.float32(1.0)}, jnp.array([1.0, 3.0]))
        >>> print(loss, grads)
        5.0 {'b': None, 'w': Array(2., dtype=float32)}

    Source: `tf.train.Optimizer.compute_gradients`; Foret et al., "Sharpness-Aware Minimization"
    (2020).
    """
    compute = LossGradients(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
        sharpness=as_sharpness(sharpness),
        adaptive=adaptive,
        lanes=lanes,
    )

    @shortens_tracebacks
    def loss_and_gradients(params: Params, *args: Any, **kwargs: Any) -> Any:
        def evaluate(lanes: Lanes | None, params: Params, args: tuple[Any, ...]) -> LossResult:
            return compute(LossInputs(params, args=args, kwargs=kwargs, lanes=lanes))

        params = trees.all_native(params, "params")
        args = trees.all_native(args, "args")
        specs_of = meshes.shard_like(LossResult(None, None, None, params))  # type: ignore[arg-type]
        shardings = jax.tree.map(sharding_of, args)
        result = call_on_lanes(compute.lanes, evaluate, params, args, shardings, specs_of=specs_of)
        if has_aux:
            return (result.loss, result.aux), result.gradients
        return result.loss, result.gradients

    return loss_and_gradients


def apply_gate(grads: list[Any], gate: int) -> list[Any]:
    """Apply a gate, which affects memory and time, never values."""
    if gate == GATE_OP:
        return [None if g is None else jax.lax.optimization_barrier(g) for g in grads]
    if gate == GATE_GRAPH:
        return jax.lax.optimization_barrier(grads)
    return grads


class LossInputs(NamedTuple):
    """The inputs of one evaluation of a loss.

    Attributes:
        key: A PRNG key, passed to the loss as `rng`.
        scale: The factor of the loss and the gradients.
        lanes: The lanes of the batch, on Auto axes, or None.
    """

    params: Params
    model_state: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    key: Any = None
    batch_specs: Any = None
    scale: Array | None = None
    lanes: Lanes | None = None

    def part_inputs(self, i: Any, **changes: Any) -> "LossInputs":
        """Return the inputs of one of several evaluations, with their own key."""
        key = None if self.key is None else jax.random.fold_in(self.key, i)
        return self._replace(key=key, **changes)

    def lane_inputs(self, i: Array, args: tuple[Any, ...], **changes: object) -> "LossInputs":
        return self.part_inputs(
            i, args=args, batch_specs=microbatches.specs_of_rows(args), **changes
        )


@dataclasses.dataclass(frozen=True)
class LossGradients:
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
    collect: bool = False
    """Whether the results are metrics: summaries are collected, and keys of aux are names."""
    squares: bool = False
    """Whether to compute the squared norms of the gradients of microbatches."""
    frozen: Callable[[Params], Sequence[bool]] | None = None
    """For each leaf of params, whether the optimizer freezes it; None if unknown."""
    fallback: meshes.AxesFallback | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    """The tracer of the loss, shared by all copies."""

    def __post_init__(self) -> None:
        as_function(self.loss_fn, "loss_fn", "(params, *args) -> loss")
        if self.fallback is None:
            name = getattr(self.loss_fn, "__name__", "loss_fn")
            object.__setattr__(self, "fallback", meshes.AxesFallback(name))
        check_form(self.var_list, "var_list")
        as_bool(self.has_aux, "has_aux")
        as_bool(self.has_model_state, "has_model_state")
        as_bool(self.adaptive, "adaptive")
        num_microbatches = as_int(self.num_microbatches, "num_microbatches", 1)
        object.__setattr__(self, "num_microbatches", num_microbatches)
        if self.max_rows_per_device is not None:
            max_rows = as_int(self.max_rows_per_device, "max_rows_per_device", 1)
            object.__setattr__(self, "max_rows_per_device", max_rows)
        object.__setattr__(self, "lanes", as_lanes(self.lanes))
        as_function(self.weight_fn, "weight_fn", "of a microbatch", optional=True)
        if type(self.gate_gradients) is not int or self.gate_gradients not in tuple(Gate):
            as_choice(self.gate_gradients, "gate_gradients", tuple(Gate))
        as_choice(self.aggregation_method, "aggregation_method", tuple(AggregationMethod))
        if not callable(self.sharpness):
            as_sharpness(self.sharpness)
        if self.sharpness is None and self.adaptive:
            raise ValueError(
                "adaptive=True: specifies how sharpness is measured; give sharpness as well"
            )
        as_unroll(self.unroll)

    def __call__(self, inputs: LossInputs) -> LossResult:
        """Return the results, with gradients as a tree like params."""
        params = inputs.params
        trees.check_arrays(params, "params", trees.keep_arrays("params"))
        if inputs.lanes is not None:
            return self._differentiate_batch(inputs)
        row_specs = microbatches.specs_of_rows(inputs.args, inputs.batch_specs)
        inputs = inputs._replace(batch_specs=row_specs)
        specs_of = meshes.shard_like(LossResult(None, inputs.model_state, None, params))  # type: ignore[arg-type]
        assert self.fallback is not None  # set in __post_init__
        return self.fallback(self._differentiate_batch, inputs, specs_of=specs_of)

    @property
    def depends_on_rows(self) -> bool:
        return (
            self.num_microbatches > 1
            or self.max_rows_per_device is not None
            or self.lanes is not None
        )

    def selected(self, params: Params, argument: str = "var_list") -> list[int]:
        return select_leaves(params, self.var_list, argument, self.frozen and self.frozen(params))

    def _differentiate_batch(self, inputs: LossInputs) -> LossResult:
        params = inputs.params
        leaves, treedef = trees.flatten(params)
        indices = self.selected(params)
        result = self._choose_method(inputs)(inputs, indices)
        if self.sharpness is not None:
            trained = [jnp.asarray(leaves[i]) for i in indices]
            perturb_leaves = functools.partial(perturb, adaptive=self.adaptive)
            move = functools.partial(
                meshes.call_on_auto_axes, perturb_leaves, specs_of=meshes.shard_like(trained)
            )
            moved_leaves = evaluate_reproducibly(
                inputs.lanes, move, trained, result.gradients, self.sharpness
            )
            moved = treedef.unflatten(trees.replace_leaves(leaves, indices, moved_leaves))
            # Only the gradients are taken at the nearby parameters, not loss, aux and summaries.
            second_loss = dataclasses.replace(self, collect=False)
            differentiate = second_loss._choose_method(inputs)
            second_result = differentiate(inputs._replace(params=moved), indices)
            result = result._replace(
                gradients=second_result.gradients, squares=second_result.squares
            )
        unused = UNUSED.get()
        if unused is not None:
            paths = trees.leaf_paths(params)
            for i, gradient in zip(indices, result.gradients, strict=True):
                if gradient is None:
                    unused.add(paths[i])
        gated = apply_gate(result.gradients, self.gate_gradients)
        grads = trees.replace_leaves([None] * len(leaves), indices, gated)
        return result._replace(gradients=treedef.unflatten(grads))

    def _choose_method(self, inputs: LossInputs) -> Callable[[LossInputs, list[int]], LossResult]:
        """Return the method that differentiates the batch; its gradients are a list."""
        if inputs.lanes is not None:
            return functools.partial(self._differentiate_lanes, inputs.lanes)
        n = microbatches.number_of_microbatches(
            inputs.args, inputs.batch_specs, self.num_microbatches, self.max_rows_per_device
        )
        if n == 1:
            return self._differentiate_once
        return functools.partial(self._differentiate_microbatches, n)

    def _differentiate_microbatches(
        self, n: int, inputs: LossInputs, indices: list[int]
    ) -> LossResult:
        parts = microbatches.split_batch(inputs.args, n, inputs.batch_specs)

        def accumulate(params: Params, parts: tuple[Any, ...]) -> LossResult:
            def part_fn(model_state: Tree, batch: Tree, i: Array) -> LossResult:
                part = inputs.part_inputs(i, params=params, model_state=model_state, args=batch)
                return self._differentiate_once(part, indices)

            leaves = jax.tree.leaves(params)
            sums = [microbatches.zeros_of_gradient(jnp.asarray(leaves[i])) for i in indices]
            square: Callable[..., Array] | None = None
            if self.squares:
                square = functools.partial(microbatches.squared_norm, scale=inputs.scale)
            return microbatches.accumulate(
                part_fn,
                parts,
                inputs.model_state,
                sums,
                self.weight_fn,
                method=self.aggregation_method,
                unroll=self.unroll,
                square=square,
            )

        is_plain_sum = (
            self.weight_fn is None and self.aggregation_method is AggregationMethod.DEFAULT
        )
        # The squared norm of a microbatch gradient requires the sum over all devices, so reduction
        # cannot be deferred.
        if self.squares or not is_plain_sum:
            return accumulate(inputs.params, parts)

        def loss(params: Params, batch: Tree) -> Array:
            return self._differentiate_once(inputs._replace(params=params, args=batch), []).loss

        return microbatches.reduce_once(accumulate, inputs.params, parts, loss, indices)

    def _differentiate_lanes(
        self, lanes: Lanes, inputs: LossInputs, indices: list[int]
    ) -> LossResult:
        """Differentiate in lanes.

        The result has the means of loss, gradients and floating aux, and the sums of integers.
        """
        one_lane = dataclasses.replace(self, lanes=None, squares=False)
        size = microbatches.rows_of_part(
            inputs.args, lanes.number, f"lanes={lanes.number}", "use a multiple of it"
        )
        rows, args_treedef = trees.flatten(inputs.args)
        whole, filled = trees.partition_arrays(
            inputs._replace(args=(), batch_specs=None, lanes=None)
        )
        self._check_integers(lanes, inputs, size)

        def lane_fn(i: Array, whole: list[Array], rows: list[Array]) -> Any:
            lane = filled(whole).lane_inputs(i, args_treedef.unflatten(rows))
            results = one_lane._choose_method(lane)(lane, indices)
            weight = microbatches.part_weight(self.weight_fn, lane.args)
            dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in results.gradients]
            grads = [None if g is None else microbatches.weigh(g, weight) for g in dense]
            others = microbatches.summands(weight, (results.aux, results.summaries))
            state = jax.tree.map(functools.partial(state_summand, i), results.model_state)
            norms = None
            if self.squares:
                lane_weight = jnp.float32(size) if weight is None else weight
                square = microbatches.squared_norm(results.gradients, lane.scale)
                norms = stack_over_lanes(lanes, i, (lane_weight, square))
            return grads, microbatches.weigh(results.loss, weight), weight, others, state, norms

        summed = sum_over_lanes(
            lanes, lane_fn, whole, [jnp.asarray(x) for x in rows], [0] * len(rows)
        )
        grads, loss, weight, others, state, norms = summed
        state = jax.tree.map(functools.partial(merge_leaf, lanes.number), state, inputs.model_state)
        mean = microbatches.division(lanes.number, weight)
        grads, loss, (aux, summaries) = microbatches.means(mean, (grads, loss, others))
        squares = None
        if norms is not None:
            squared_norm = evaluate_reproducibly(
                lanes, microbatches.squared_norm, grads, inputs.scale
            )
            squares = Squares(norms[0], norms[1], squared_norm)
        return LossResult(loss, state, aux, grads, summaries, squares)

    def _check_integers(self, lanes: Lanes, inputs: LossInputs, size: int) -> None:
        """Reject integers of model_state that depend on a lane, as its traced loss shows."""
        rows, args_treedef = trees.flatten(inputs.args)
        state_treedef = trees.structure(inputs.model_state)
        others, filled = trees.partition_arrays(
            inputs._replace(args=(), model_state=None, batch_specs=None, lanes=None)
        )
        n = self.num_microbatches
        if self.max_rows_per_device is not None:
            lane_rows = [
                jax.ShapeDtypeStruct((size, *np.shape(x)[1:]), jnp.result_type(x)) for x in rows
            ]
            specs = [None] * len(lane_rows)
            n = microbatches.number_of_microbatches(
                (lane_rows,), specs, n, self.max_rows_per_device
            )
        one_lane = dataclasses.replace(
            self,
            lanes=None,
            squares=False,
            collect=False,
            num_microbatches=n,
            max_rows_per_device=None,
            weight_fn=None,
        )

        def new_state(
            i: Array, old: list[Array], others: list[Array], rows: list[Array]
        ) -> list[Array]:
            model_state = state_treedef.unflatten(old)
            lane = filled(others).lane_inputs(
                i, args_treedef.unflatten(rows), model_state=model_state
            )
            return jax.tree.leaves(one_lane._choose_method(lane)(lane, []).model_state)

        check_integers(
            lanes, new_state, inputs.model_state, others, [jnp.asarray(x) for x in rows], size
        )

    def _differentiate_once(self, inputs: LossInputs, indices: list[int]) -> LossResult:
        leaves, treedef = trees.flatten(inputs.params)
        # Both are filled while JAX traces the loss and its derivative: `connected` with the indices
        # of the parameters that the loss depends on, and `tables` with the gradients of the rows
        # that it looks up.
        connected: set[int] = set()
        tables: Any = None

        def loss_of(trained: list[Array]) -> tuple[Array, Any]:
            nonlocal tables
            trained = track_connected(trained, connected)
            whole = treedef.unflatten(trees.replace_leaves(leaves, indices, trained))
            args = inputs.args
            if self.has_model_state:
                args = (inputs.model_state, *args)
            kwargs = dict(inputs.kwargs or {})
            if inputs.key is not None:
                kwargs["rng"] = inputs.key

            collector = Collector("summaries")
            collectors = COLLECTORS.get()
            if self.collect:
                collectors = (*collectors, collector)
            tables = Tables(trained)
            with setting(TABLES, tables), setting(COLLECTORS, collectors):
                out = self.loss_fn(whole, *args, **kwargs)
            loss, *others = unpack_outputs(
                out, inputs.model_state, self.has_aux, self.has_model_state, self.collect
            )
            summaries = None
            if collector.unreturned is not None:
                summaries = collector.unreturned(collector, out)
            scaled = loss
            if inputs.scale is not None:
                wide = trees.compute_dtype(loss.dtype)
                scaled = loss.astype(wide) * inputs.scale.astype(wide)
            return scaled, (loss, *others, summaries)

        trained = [jnp.asarray(leaves[i]) for i in indices]
        (_, outputs), dense = jax.value_and_grad(loss_of, has_aux=True)(trained)
        loss, model_state, aux, summaries = outputs
        grads = [tables.gradient(i, g if i in connected else None) for i, g in enumerate(dense)]
        return LossResult(loss, model_state, aux, grads, summaries)


def track_connected(leaves: list[Array], connected: set[int]) -> list[Array]:
    """Return the leaves; tracing adds the indices of those that get a gradient to `connected`."""

    # JAX runs the custom backward rule of this identity while it traces the gradient, with a
    # symbolic zero for a leaf that nothing depends on. The rule leaves no trace in the compiled
    # program.
    def forward(leaves: Any) -> tuple[list[Array], None]:
        return [leaf.value for leaf in leaves], None

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        connected.update(i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero))
        return ([None if isinstance(ct, SymbolicZero) else ct for ct in cotangents],)

    identity = jax.custom_vjp(lambda leaves: leaves)
    identity.defvjp(forward, backward, symbolic_zeros=True)
    return list(identity(leaves))


# Sharpness-aware minimization.


def perturb(
    leaves: list[Array], gradients: list[Any], rho: object, *, adaptive: bool
) -> list[Array]:
    """Return the nearby parameters at which the loss is largest, to first order.

    SAM: p + ρ·g / (‖g‖ + 1e-12); ASAM: p + ρ·p²·g / (‖ |p|·g ‖ + 1e-12). Gradients may have any
    scale.

    Source: Foret et al., "Sharpness-Aware Minimization" (2020); Kwon et al., "ASAM" (2021).
    """
    dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in gradients]
    wide = [None if g is None else trees.widen(g) for g in dense]
    weights = [jnp.abs(trees.widen(jnp.asarray(p))) if adaptive else None for p in leaves]

    def weigh(g: Array, w: Array | None) -> Array:
        return g if w is None else w.astype(g.dtype) * g

    weighed = [None if g is None else weigh(g, w) for g, w in zip(wide, weights, strict=True)]
    norm = global_norm(weighed)
    scale = jnp.asarray(rho).astype(norm.dtype) / (norm + jnp.asarray(1e-12, norm.dtype))

    def move(p: Array, g: Array | None, w: Array | None) -> Array:
        p = jnp.asarray(p)
        if g is None:
            return p
        # Weighed twice in ASAM: its step is p²·g.
        step = scale.astype(g.dtype) * weigh(g, w)
        return (p.astype(g.dtype) + step).astype(p.dtype)

    return list(map(move, leaves, weighed, weights))


def as_sharpness(sharpness: object) -> Any:
    if sharpness is None:
        return None
    return as_scalar(sharpness, "sharpness", low=0, expected="a number or None")
