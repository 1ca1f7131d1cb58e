"""The metrics of the optimizers that a custom step calls, as a step of `minimize` shows them.

If jstep traces the step, its program computes them. If the user compiles the step, or does not
compile it, it returns only its own metrics, and those of its optimizers are computed separately,
from the state that it was given.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.core.exceptions import forget_frames
from jstep.core.jaxprs import Operation, Subprogram, body_of, evaluate
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Array, Slots, Tree
from jstep.slots.roles import Role, Roles, roles_in
from jstep.state.global_step import step_array
from jstep.training.metrics import (
    SKIPPED,
    Constants,
    StepMetrics,
    flat_metrics,
    slot_metrics,
    split_metrics,
)
from jstep.training.watched_updates import (
    MadeUpdate,
    StepUpdates,
    has_unknown,
    join_updates,
    known_compiled,
    remember_varied,
    watch_updates,
)


class OptimizerMetrics(NamedTuple):
    """What optimizers report.

    Attributes:
        hyperparameters: Name → value. Hooks show constants only once.
        slot_values: Injected hyperparameters and loss scales, whose values are in slots.
    """

    hyperparameters: Mapping[str, Any]
    slot_values: Mapping[str, Any]


def report(
    updates: Sequence[MadeUpdate], step: Array, roles: Roles, slots: Slots
) -> OptimizerMetrics:
    """Return what the optimizers report at `step`.

    Of two hyperparameters of one name, that of the later update is reported.
    """
    if not updates:
        return OptimizerMetrics({}, {})
    hyperparameters: dict[str, Any] = {}
    for update in updates:
        if callable(update.hyperparameters):
            hyperparameters |= update.hyperparameters(step)
    return OptimizerMetrics(hyperparameters, slot_metrics(roles, slots))


class _Inputs(NamedTuple):
    """What the metrics of optimizers are computed from."""

    step: Array
    slots: Slots


@jax.jit
def _copy(inputs: _Inputs) -> _Inputs:
    return jax.tree.map(jnp.copy, inputs)


def _shape_and_sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = None
    return trees.shape_of(leaf, sharding, weak=True)


_NOTHING = StepMetrics({}, Constants({}, SKIPPED))
_MAX_PROGRAMS = 8
"""A step that is not compiled may create an optimizer at each call: then we stop compiling."""

_Compute = Callable[[_Inputs], StepMetrics]


class CustomStepMetrics:
    """Calls a step that jstep did not make; returns its result and what its optimizers report.

    The optimizers of a compiled step are seen when it is traced: they are known after its first
    call, and do not change. A step that is not compiled may call another optimizer each time, and
    is watched at each call. The functions that it calls may be compiled: then an update is seen
    only when it is traced, perhaps in an earlier run. We therefore assume that each call makes the
    compiled updates of the first call, until a call makes another one. From then on only updates
    that are seen are reported.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._is_compiled = hasattr(step, "lower")
        self._is_first = True
        self._slot_names: list[str] = []
        self._known: list[MadeUpdate] = []  # those of the first call
        # By the identities of the optimizers' hyperparameters, which the programs keep alive.
        self._programs: dict[tuple[int, ...], _Compute] = {}
        self._program: _Compute | None = None  # of a compiled step, once it has been called
        # The metrics that are constants of a compiled step.
        self._constants: dict[str, Any] | None = None
        # The metrics of a compiled step, if they are the same at each step.
        self._fixed: StepMetrics | None = None

    def call(
        self, call: Callable[..., Any], state: Tree, args: tuple[Any, ...]
    ) -> tuple[Any, StepMetrics]:
        """Return the result of `call(state, *args)`, and the metrics of its optimizers."""
        if self._fixed is not None:
            return call(state, *args), self._fixed
        if self._program is not None:
            # Before the step, which may donate the state.
            with internal_transfers():
                metrics = self._program(self._inputs(state))
            return call(state, *args), metrics
        if self._is_first:
            names = roles_in(state).names_with(Role.HELD, Role.LOSS_SCALE)
            self._slot_names = [name for name in names if name in state.slots]
        return self._watch(call, state, args)

    def join(
        self, reported: StepMetrics, metrics: Any, state: Tree, args: tuple[Any, ...]
    ) -> tuple[Any, Constants]:
        """Return a call's metrics with those of its optimizers, and the constants among them.

        Hooks show the constants once. `state` is the state that the step returned; it has the same
        kind as the one that was passed in.
        """
        if not isinstance(metrics, dict):
            return metrics, reported.constants
        returned = reported.constants.all.keys() & metrics.keys()
        if not returned:
            return join_metrics(reported, metrics)
        if self._constants is None:
            self._constants = constants_of(self._step, returned, state, args)
        return join_metrics(reported, {**metrics, **self._constants})

    def _inputs(self, state: Tree) -> _Inputs:
        return _Inputs(step_array(state), {name: state.slots[name] for name in self._slot_names})

    def _watch(
        self, call: Callable[..., Any], state: Tree, args: tuple[Any, ...]
    ) -> tuple[Any, StepMetrics]:
        with internal_transfers():
            inputs = _copy(self._inputs(state))  # the step may donate its state
        roles = roles_in(state)
        structure = trees.structure(state)
        with watch_updates(state) as found:
            result = call(state, *args)
            if self._is_first:
                self._known = known_compiled(self._step, structure)
            if self._is_compiled and not self._known and not found.made_to(structure):
                # It was traced before, so that this call has shown nothing.
                self._trace_again(found, state, args)
            seen = found.made_to(structure)
        updates = join_updates(self._known, seen)
        if self._is_first:
            self._known = updates
            self._is_first = False
        elif has_unknown(self._known, seen):
            self._known = []
            remember_varied(self._step, found)
        program = self._program_for(updates, roles)
        metrics = _call_if_possible(program, inputs)
        if self._is_compiled:
            self._program = program
            self._fixed = None if metrics.computed else metrics
        return result, metrics

    def _program_for(self, updates: Sequence[MadeUpdate], roles: Roles) -> _Compute:
        key = tuple(id(update.hyperparameters) for update in updates)
        if key in self._programs:
            return self._programs[key]

        def compute(inputs: _Inputs) -> StepMetrics:
            reported = report(updates, inputs.step, roles, inputs.slots)
            # JAX would return the very array that it was given, which the step may donate.
            slot_values = jax.tree.map(jnp.copy, reported.slot_values)
            return split_metrics(
                {**slot_values, **reported.hyperparameters}, SKIPPED, reported.hyperparameters
            )

        if len(self._programs) >= _MAX_PROGRAMS:
            return compute
        return self._programs.setdefault(key, jax.jit(compute))

    def _trace_again(self, found: StepUpdates, state: Tree, args: tuple[Any, ...]) -> None:
        """Trace a step that was compiled before the run, to see its updates."""
        try:
            step = self._step.__wrapped__
            # Not `step` itself, whose traces JAX keeps. Those of the compiled functions that it
            # calls are kept for each precision of products; nothing is computed, so any other one
            # will do.
            current = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # created at run time
            with jax.default_matmul_precision("float32" if current == "highest" else "highest"):
                shapes = jax.tree.map(_shape_and_sharding, (state, *args))
                jax.eval_shape(lambda *arguments: step(*arguments), *shapes)
        except Exception as error:
            # The step has static arguments, for example, which are not known here.
            logger.debug("the optimizers of the step are not known: %s", error)
            forget_frames(error)


def _call_if_possible(program: _Compute, inputs: _Inputs) -> StepMetrics:
    try:
        with internal_transfers():
            return program(inputs)
    except Exception as error:
        # Hyperparameters that need a concrete step, for example, must not end a run that works
        # without them.
        logger.debug("the hyperparameters of the step's optimizers are not shown: %s", error)
        forget_frames(error)
        return _NOTHING


# A step that wraps one of `minimize` may return its metrics, constants included. Numbers on the
# host and constants of the program are recognized as constants. Names are not enough: a metric
# `epsilon` may be a rate of exploration.


def join_metrics(
    reported: StepMetrics, metrics: dict[str, Any]
) -> tuple[dict[str, Any], Constants]:
    """Return the metrics of a custom step with those of its optimizers, and the constants.

    Hooks show the constants once. A metric that the step itself returns replaces one of its
    optimizer.
    """
    constants = reported.constants
    joined = {**reported.merged(), **metrics}
    in_both = constants.all.keys() & metrics.keys()
    replaced = {name for name in in_both if not _is_same(metrics[name], constants.all[name])}
    if not replaced:
        return joined, constants
    remaining = {name: value for name, value in constants.all.items() if name not in replaced}
    return joined, Constants(remaining, SKIPPED, constants.values.keys() - replaced)


def _is_same(value: Any, constant: Any) -> bool:
    return isinstance(value, np.generic | int | float) and bool(value == constant)


def constants_of(
    step: Any, names: Collection[str], state: Tree, args: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the metrics with these names that are constants of a compiled step's program."""
    if not names or not hasattr(step, "trace"):
        return {}
    try:
        traced = step.trace(state, *args)
        body = body_of(traced.jaxpr)
        values = _constants_in(body, [_COMPUTED] * len(body.jaxpr.invars))
        _, metrics = jax.tree.unflatten(jax.tree.structure(traced.out_info), values)
    except Exception as error:
        logger.debug("the constants of the step are not known: %s", error)
        forget_frames(error)
        return {}
    flat = flat_metrics(metrics)
    constants = {name: np.asarray(flat[name]) for name in names if flat[name] is not _COMPUTED}
    return {name: value[()] for name, value in constants.items() if value.ndim == 0}


_COMPUTED: Any = object()


def _constants_in(body: Subprogram, values: list[Any]) -> list[Any]:
    def outputs(operation: Operation, operands: list[Any]) -> list[Any]:
        if operation.kind == "call":
            return _constants_in(operation.bodies[0], operands)
        return [_COMPUTED] * len(operation.eqn.outvars)

    return evaluate(body, values, outputs)
