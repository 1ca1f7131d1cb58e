"""Use Optax transformations as jstep optimizers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import as_string, describe_type, format_value
from jstep.core.jaxprs import Operation, Subprogram, apply, body_of, evaluate
from jstep.core.logs import log_warning
from jstep.core.recorded_calls import has_init_and_update, makes_optimizer
from jstep.core.trees import Held, Optimizer, Params, Step, shape_of
from jstep.optimizers import hyperparameters as hyper
from jstep.slots import optax_transformations
from jstep.slots.roles import Counted, Init, Roles


@makes_optimizer(1)
def from_optax(
    transformation: object,
    hyperparameters: Mapping[str, Any] | Callable[[Step], Mapping[str, Any]] | None = None,
    name: str = "optax",
) -> Optimizer:
    """An optimizer from an Optax transformation, using its `init` and `update`; Optax itself is not imported.

    Wherever jstep accepts an optimizer, it accepts a transformation, too, as `from_optax(transformation)`. Call the
    function to report hyperparameters, or to choose the names of the slots.

    Its state becomes slots. State with the structure of the parameters, such as moments, is sharded like them, and is
    float32 for low-precision parameters; other state, such as counts, becomes separate slots. State that `init` creates
    as a copy of the parameters is a copy of the restored parameters after a partial restore without it.
    The transformation works in at least float32 and sees trainable leaves only. A leaf whose gradient is None, as with
    `var_list`, is a constant for it, and neither the leaf nor its state changes; a transformation that needs all
    leaves, as one with a mask that is a tree, gets zeros for it. `IndexedSlices` are converted to dense arrays.

    A transformation with extra arguments gets `value`, `grad` and `value_fn` in a training step of `minimize`:
    `optax.lbfgs()` with its line search, `optax.polyak_sgd`, `optax.contrib.reduce_on_plateau`. `grad` is the tree of
    gradients passed to it, and `value_fn` is the loss on the batch of the step. With `apply_gradients` they come from
    `context=jstep.Context(...)`.

    Optax keeps its own counts: its schedules see the number of its own updates, which equals the global step unless
    updates were skipped or the slots were created later in the run. Schedules in `hyperparameters` are reported at that
    count. If the transformation has none, or counts that it advances conditionally (`MultiSteps`, `apply_if_finite`,
    `multi_transform`), they are not among the metrics, and a log message says how to report the rate that is used:
    `chain(from_optax(optax.scale_by_adam()), scale_by_learning_rate(rate))`.

    Args:
        transformation: An Optax transformation, such as `optax.adam(1e-3)`.
        hyperparameters: The hyperparameters to report: name → number or schedule, or a function of the step that
            returns such a mapping. Optax does not read them: pass the same values to the transformation.
        name: The prefix of the slots: `optax/0/mu`.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `transformation` has no `init` and `update`. From `TrainState.create`: it contains `optax.lookahead`
            or `optax.contrib.differentially_private_aggregate` (`dpsgd`), which need other parameters and gradients
            than a step has. From the step: it needs extra arguments that the step does not have.
        ValueError: The name cannot be a prefix.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> from typing import NamedTuple
        >>> class Halves(NamedTuple):  # stands for optax.sgd(0.5)
        ...     init = staticmethod(lambda params: ())
        ...     update = staticmethod(lambda grads, kept, params: (jax.tree.map(lambda g: -0.5 * g, grads), kept))
        >>> optimizer = jstep.from_optax(Halves(), {"learning_rate": 0.5})
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.5

    Source: `optax.GradientTransformation`.
    """
    if not has_init_and_update(transformation):
        raise TypeError(
            f"transformation={format_value(transformation)}: must have init and update, like the result of "
            "optax.adam(1e-3), "
            f"got {describe_type(transformation)}"
        )
    hyper.check_prefix("name", as_string(name, "name"))
    reported = _reported(hyperparameters)
    depend = hyper.report_names(reported)
    schedules = frozenset(key for key, is_schedule in depend.items() if is_schedule)
    log_once = functools.cache(functools.partial(_log_that_no_count_is_known, schedules))
    optimizer = optax_transformations.from_optax(transformation, name)
    plain = optimizer.init
    assert isinstance(plain, Init)

    def roles(params: Params) -> Roles:
        inner = plain.roles(params)

        @functools.cache
        def count() -> str | None:
            slot = _slot_of_count(transformation, name, params)
            if slot is None:
                log_once()
            return slot

        is_complete = inner.complete and schedules
        return inner.joined(Roles(counted=(Counted(schedules, reported, count),) if is_complete else ()))

    finished = isinstance(hyperparameters, Mapping) and hyper.LEARNING_RATE in hyperparameters
    init = dataclasses.replace(plain, roles=roles, finished=finished, rated=hyper.LEARNING_RATE in depend)
    return optimizer._replace(init=init, hyperparameters=reported)


def _log_that_no_count_is_known(names: frozenset[str]) -> None:
    log_warning(
        "from_optax: %s not reported, because the count at which Optax evaluates %s is not known. To report the rate "
        "that is used, leave it to jstep: jstep.chain(jstep.from_optax(optax.scale_by_…), "
        "jstep.scale_by_learning_rate(rate))",
        " and ".join(sorted(names)) + (" is" if len(names) == 1 else " are"),
        "it" if len(names) == 1 else "them",
    )


_BY_LABEL = ("PartitionState", "MultiTransformState")
"""Optax states, by class name, with a count for each label: a schedule may use any of these counts."""


def _has_labels(node: object) -> bool:
    return type(node).__name__ in _BY_LABEL and type(node).__module__.startswith("optax.")


def _slot_of_count(transformation: Any, name: str, params: Params) -> str | None:
    """The slot of a count of all updates of a transformation, or None.

    Its next value is its value + 1, whatever the other inputs are. If any integer of the state depends on anything
    else, there may be another count, as in `MultiSteps`: the result is None.
    """
    takes = optax_transformations.takes_extra(transformation.update)

    def update(state: Tree, params: Params) -> Any:
        loss = jnp.zeros((), jnp.float32)
        extra = {"value": loss, "grad": params, "value_fn": lambda tree: sum(map(jnp.sum, jax.tree.leaves(tree)), loss)}
        return transformation.update(params, state, params, **{key: x for key, x in extra.items() if takes(key)})[1]

    shapes = jax.tree.map(shape_of, jax.eval_shape(optax_transformations.seen, params))
    with optax_transformations.standard_promotion():
        state = jax.eval_shape(transformation.init, shapes)
        if any(map(_has_labels, jax.tree.leaves(state, is_leaf=_has_labels))):
            return None
        program = body_of(jax.make_jaxpr(update)(state, shapes))
    leaves, slots = jax.tree_util.tree_leaves_with_path(state), []
    for i, (keys, leaf) in enumerate(leaves):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.integer):
            continue
        values = [np.asarray(value, leaf.dtype) for value in (0, np.iinfo(leaf.dtype).max // 2)]
        after = [_next_value(program, i, value) for value in values]
        if None in after:
            return None
        if after == [int(value) + 1 for value in values]:
            slots.append(f"{name}/{trees.path_str(keys)}" if keys else name)
    return slots[0] if slots else None


def _next_value(program: Subprogram, number: int, value: object) -> int | None:
    """The next value of leaf `number` of the state; None if it depends on anything but its value."""

    def by(operation: Operation, operands: list[Any]) -> Sequence[Any]:
        if operation.kind == "call":
            return evaluate(operation.bodies[0], operands, by)
        are_scalars = all(var.aval.shape == () for var in operation.eqn.outvars)
        is_known = are_scalars and not any(x is None for x in operands)
        return apply(operation, operands) if is_known else [None] * len(operation.eqn.outvars)

    operands = [value if i == number else None for i in range(len(program.jaxpr.invars))]
    with jax.ensure_compile_time_eval():
        after = evaluate(program, operands, by)[number]
        return None if after is None else int(after)


def _reported(reported: object) -> Any:
    if reported is None:
        return lambda step: {}
    if isinstance(reported, Mapping):
        for key, value in reported.items():
            if not isinstance(key, str):
                raise TypeError(f"hyperparameters: {format_value(key)} must be a string, got {describe_type(key)}")
            if isinstance(value, Held):
                raise TypeError(f"hyperparameters: {key!r} is held, which Optax does not read")
        return hyper.report({key: hyper.check_hyperparameter(key, value) for key, value in reported.items()})
    if not callable(reported):
        raise TypeError(
            f"hyperparameters={format_value(reported)}: must map names to numbers or schedules, or be a function of "
            f"the step, got {describe_type(reported)}"
        )
    return lambda step, /: hyper.as_arrays(dict(reported(step)), step)
