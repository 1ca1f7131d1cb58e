"""Several train steps in one call, compiled as a loop."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_function, as_int
from jstep.core.meshes import dims_of, mesh_of, using_mesh
from jstep.core.placement import Unroll, as_unroll, first_row, scan
from jstep.core.trees import Tree, shape_of
from jstep.state.train_state import TrainState
from jstep.training.metrics import Constants, StepMetrics
from jstep.training.step import PureStep, TrainStep, as_pure_step, jitted_program, makes_step

_S = TypeVar("_S")
_M = TypeVar("_M")


@overload
def scan_steps(
    train_step: TrainStep, length: int | None = None, unroll: Unroll = None
) -> TrainStep: ...


@overload
def scan_steps(
    train_step: Callable[Concatenate[_S, ...], tuple[Any, _M]],
    length: int | None = None,
    unroll: Unroll = None,
) -> Callable[Concatenate[_S, ...], tuple[_S, _M]]: ...


@makes_step()
def scan_steps(
    train_step: Callable[..., tuple[Any, Any]], length: int | None = None, unroll: Unroll = None
) -> Callable[..., tuple[Any, Any]]:
    """Return a function of K steps in one call: `f(state, *stacked) -> (state, stacked metrics)`.

    Args:
        train_step: A step of `minimize`, or any function `(state, *args) -> (state, metrics)`.
        length: K, required if train_step takes no args.
        unroll: Number of steps per iteration of the compiled loop, as in `jax.lax.scan`; True to
            unroll it entirely. None means 1, or K if an operation is slow inside a loop, as
            convolutions on a CPU.

    Returns:
        A function whose args and metrics are stacked on a leading axis of size K. It is compiled,
        and donates the state, if train_step is and does.

    Raises:
        ValueError: The leading axes of the args differ, are missing, or are empty.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state, metrics = jstep.scan_steps(train_step)(state, jnp.ones(3))
        >>> print(state.global_step, metrics["loss"])
        3 [1.     0.25   0.0625]
    """
    as_function(train_step, "train_step", "(state, *args) -> (state, metrics)")
    length = None if length is None else as_int(length, "length", 1)
    unroll = as_unroll(unroll)
    step = as_pure_step(train_step)

    def body(
        state: TrainState, stacked: tuple[Any, ...], batch_specs: Tree
    ) -> tuple[TrainState, StepMetrics]:
        k = _leading_size(stacked, length)
        batch_specs = jax.tree.map(drop_step_axis, batch_specs)

        def one_step(state: TrainState, args: Any) -> tuple[TrainState, StepMetrics]:
            return step.body(state, args, batch_specs)

        state, (computed, constants) = scan(one_step, state, stacked, k, unroll)
        return state, StepMetrics(computed, constants.repeated(k))

    scanned = dataclasses.replace(
        step, body=body, name=f"{step.__name__}s", title="", leading_axes=step.leading_axes + 1
    )
    if isinstance(train_step, TrainStep):
        return TrainStep(scanned, donate=train_step.donate)
    return scanned


def drop_step_axis(sharding: object) -> Any:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*dims_of(sharding.spec)[1:]))
    return sharding


def _leading_size(stacked: object, length: int | None) -> int:
    sizes = trees.leading_sizes(stacked)
    if length is not None:
        sizes = sizes | {length: f"length={length}"}
    scalars = [
        f"none at {path!r}" for path, leaf in trees.leaves_with_paths(stacked) if not np.ndim(leaf)
    ]
    if len(sizes) != 1 or 0 in sizes or scalars:
        got = ", ".join([*sizes.values(), *scalars])
        if not got:
            got = "no arguments: give scan_steps(train_step, length=K)"
        raise ValueError(
            "scan_steps: all arguments must have a leading axis of K steps, "
            f"got {got}; stack K values"
        )
    return next(iter(sizes))


# One compiled program that runs any number of steps, from one to K.


class TracedStep(NamedTuple):
    """The trace of a step; `out` is the structure of its results, `computed` its metrics' types."""

    jaxpr: Any
    out: Any
    computed: Any
    constants: Constants

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The types of the computed metrics by name; empty if they are not a mapping."""
        return self.computed if isinstance(self.computed, Mapping) else {}


class LoopedStep(TrainStep):
    """A compiled program of 1 to K steps.

    `state, metrics, sums = call_step(looped, state, (n, sums, *stacked))` runs the first n of K
    steps, so that results do not depend on the division into calls. The metrics are from the last
    step; the numbers of all steps are added to the sums.

    Args:
        max_steps: K; None for the arguments of a single step, not stacked.
        accumulate: Returns an object with `row(metrics)`, the numbers of one step, and
            `add(sums, rows, count)`.
    """

    _returns_sums = True

    def __init__(
        self,
        step: Callable[..., Any],
        max_steps: int | None,
        accumulate: Callable[[TracedStep], Any],
    ) -> None:
        single = as_pure_step(step)
        # Donates only if the step does: a plain function is not expected to donate the state.
        donate = isinstance(step, TrainStep) and step.donate
        looped = PureStep(
            self._body,
            name=f"{single.__name__}s",
            depends_on_rows=single.depends_on_rows,
            lanes=single.lanes,
        )
        super().__init__(looped, donate=donate)
        self._single = step if isinstance(step, TrainStep) else TrainStep(single, donate=False)
        self.max_steps = max_steps
        self.accumulate = accumulate
        self._traced: dict[Any, TracedStep] = {}

    def prepare(self, state: Tree, args: tuple[Any, ...]) -> TracedStep:
        """Trace one step from its arguments or their shapes, and keep the trace for `_body`."""
        args = jax.tree.map(one_shape, args)
        with using_mesh(mesh_of((state, args))):
            traced = jitted_program(self._single, state, args).trace(state, *args)
        step = _traced_step(traced.jaxpr, traced.out_tree)
        self._traced[_trace_key(state, args)] = step
        return step

    def _body(
        self, state: Tree, args: tuple[Any, ...], batch_specs: Tree
    ) -> tuple[Any, StepMetrics, Any]:
        num_steps, sums, *stacked = args
        if self.max_steps is None:
            stacked = jax.tree.map(_pad_row, stacked)
        row = tuple(jax.tree.map(first_row, stacked))
        # `prepare` has traced the step for the first state of a run, to know its metrics. A later
        # state may be on a mesh although that one was not: then the step is traced here, within the
        # trace of the program.
        traced = self._traced.get(_trace_key(state, row))
        if traced is None:
            traced = self._trace(state, row, batch_specs)
        accumulator = self.accumulate(traced)
        jaxpr = traced.jaxpr

        def one_step(i: object, carry: Tree) -> Any:
            state, _, rows = carry
            args = jax.tree.map(lambda x: _take_row(x, i), stacked)
            values = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves((state, args)))
            state, (computed, _) = jax.tree.unflatten(traced.out, values)
            # Reading the numbers must not change how XLA compiles the step.
            numbers = accumulator.row(jax.lax.optimization_barrier(computed))
            rows = jax.tree.map(
                lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, i, 0), rows, numbers
            )
            return state, computed, rows

        zero_metrics = jax.tree.map(_zeros, traced.computed)
        row_shapes = jax.eval_shape(accumulator.row, zero_metrics)
        rows = jax.tree.map(
            lambda x: jnp.zeros((self.max_steps or 1, *x.shape), x.dtype), row_shapes
        )
        state, computed, rows = jax.lax.fori_loop(
            np.int32(0), num_steps, one_step, (state, zero_metrics, rows)
        )
        sums = accumulator.add(sums, rows, num_steps)
        return state, StepMetrics(computed, traced.constants), sums

    def _trace(self, state: Tree, row: tuple[Any, ...], batch_specs: Tree) -> TracedStep:
        """Trace one step for a state that `prepare` has not seen."""
        # The first two arguments of the program are the number of steps and the sums.
        specs = None if batch_specs is None else batch_specs[2:]
        if self.max_steps is not None:
            specs = jax.tree.map(drop_step_axis, specs)
        body = as_pure_step(self._single).body
        trace = jax.make_jaxpr(lambda state, args: body(state, args, specs), return_shape=True)
        jaxpr, shapes = trace(state, row)
        return _traced_step(jaxpr, jax.tree.structure(shapes))


def loop_step(
    step: Callable[..., Any], max_steps: int | None, accumulate: Callable[[TracedStep], Any]
) -> LoopedStep:
    """Return a step's `LoopedStep`, the same one for the same arguments: it is compiled once."""
    # Stored on the step, so that both are freed together. A decorator copies the step's attributes,
    # hence the check.
    loops: dict[Any, LoopedStep]
    owner, loops = getattr(step, "_jstep_looped", (None, {}))
    if owner is not step:
        loops = {}
        with contextlib.suppress(AttributeError, TypeError):
            # This fails for a bound method, and for a frozen or slotted object.
            step._jstep_looped = (step, loops)  # type: ignore[attr-defined]
    if (max_steps, accumulate) not in loops:
        loops[max_steps, accumulate] = LoopedStep(step, max_steps, accumulate)
    return loops[max_steps, accumulate]


def one_shape(leaf: object) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.committed:
        return shape_of(leaf, leaf.sharding)
    return shape_of(leaf)


def _traced_step(jaxpr: Any, out: Any) -> TracedStep:
    _, (computed, constants) = jax.tree.unflatten(out, jaxpr.out_avals)
    return TracedStep(jaxpr, out, computed, constants)


def _pad_row(x: object) -> Any:
    """Stack a row with another one, which is not used."""
    # XLA compiles a loop over a single row differently from a loop over several: it would move work
    # out of the loop.
    x = jnp.asarray(x)
    return jnp.stack([x, _zeros(jax.typeof(x))])


def _take_row(x: object, i: object) -> Any:
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
    # A batch may be on Auto axes while the state is on Explicit ones.
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _trace_key(state: Tree, args: tuple[Any, ...]) -> Any:
    """Return what a step's trace depends on: structure, shapes, dtypes, axes of Explicit meshes."""
    shapes: list[Any] = []
    for leaf in jax.tree.leaves((state, args)):
        shape = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        shapes.append((shape.shape, shape.dtype, _explicit_dims(shape)))
    return trees.structure((state, args)), tuple(shapes)


def _explicit_dims(shape: Any) -> tuple[Any, ...] | None:
    """The mesh axes of each dimension of an array on Explicit axes, else None."""
    sharding = shape.sharding
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    dims = dims_of(sharding.spec)
    return (*dims, *[None] * (len(shape.shape) - len(dims)))


def _zeros(aval: Any) -> Any:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding)
