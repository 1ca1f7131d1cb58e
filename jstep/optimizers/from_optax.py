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
from jstep.core.calls import has_init_and_update, makes_optimizer
from jstep.core.checks import as_text, kind, shown
from jstep.core.jaxprs import Operation, Subprogram, apply, body_of, evaluate
from jstep.core.logs import log_warning
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

    Wherever jstep takes an optimizer, a transformation may be given as it is, for `from_optax(transformation)`. Call
    the function to report hyperparameters, or to choose the names of the slots.

    Its state becomes slots. State with the structure of the parameters, such as moments, is sharded like them, and is
    float32 for low-precision parameters; other state, such as counts, becomes separate slots. State that is a copy of
    the parameters at first, as its `init` shows, is one of the restored parameters after a partial restore without it.
    The transformation works in at least float32 and sees trainable leaves only. A leaf whose gradient is None, as with
    `var_list`, is a constant for it, and neither the leaf nor its state changes; a transformation that needs all
    leaves, as one with a mask that is a tree, gets zeros for it. `IndexedSlices` are converted to dense arrays.

    A transformation with extra arguments gets `value`, `grad` and `value_fn` in a training step of `minimize`:
    `optax.lbfgs()` with its line search, `optax.polyak_sgd`, `optax.contrib.reduce_on_plateau`. `grad` is the tree of
    gradients passed to it, and `value_fn` is the loss on the batch of the step. With `apply_gradients` they come from
    `context=jstep.Context(...)`.

    Optax keeps its own counts: its schedules see the number of its own updates, which equals the global step unless
    updates were skipped or the slots were created later in the run. Schedules in `hyperparameters` are reported at that
    count. If the transformation has none, or counts that it moves on conditions of its own (`MultiSteps`,
    `apply_if_finite`, `multi_transform`), they are not among the metrics, and a line of the log says how to report the
    rate that is used: `chain(from_optax(optax.scale_by_adam()), scale_by_learning_rate(rate))`.

    Args:
        transformation: An Optax transformation, such as `optax.adam(1e-3)`.
        hyperparameters: The hyperparameters to report: name → number or schedule, or a function of the step that
            returns such a mapping. Optax does not read them: give the transformation the same ones.
        name: The prefix of the slots: `optax/0/mu`.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `transformation` has no `init` and `update`. From `TrainState.create`: it contains `optax.lookahead`
            or `optax.contrib.differentially_private_aggregate` (`dpsgd`), which need other parameters and gradients
            than those of a step. From the step: it needs extra arguments that the step does not have.
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
            f"transformation={shown(transformation)}: must have init and update, like the result of optax.adam(1e-3), "
            f"got {kind(transformation)}"
        )
    hyper.check_prefix("name", as_text(name, "name"))
    reported = _reported(hyperparameters)
    depend = hyper.reported_names(reported)
    schedules = frozenset(key for key, is_schedule in depend.items() if is_schedule)
    log_once = functools.cache(functools.partial(_log_that_no_count_is_known, schedules))
    made = optax_transformations.from_optax(transformation, name)
    plain = made.init
    assert isinstance(plain, Init)

    def roles(params: Params) -> Roles:
        found = plain.roles(params)

        @functools.cache
        def count() -> str | None:
            slot = _slot_of_count(transformation, name, params)
            if slot is None:
                log_once()
            return slot

        known = found.complete and schedules
        return found.joined(Roles(counted=(Counted(schedules, reported, count),) if known else ()))

    finished = isinstance(hyperparameters, Mapping) and hyper.LEARNING_RATE in hyperparameters
    init = dataclasses.replace(plain, roles=roles, finished=finished, rated=hyper.LEARNING_RATE in depend)
    return made._replace(init=init, hyperparameters=reported)


def _log_that_no_count_is_known(names: frozenset[str]) -> None:
    log_warning(
        "from_optax: %s not reported, because the count at which Optax evaluates %s is not known. To report the rate "
        "that is used, leave it to jstep: jstep.chain(jstep.from_optax(optax.scale_by_…), "
        "jstep.scale_by_learning_rate(rate))",
        " and ".join(sorted(names)) + (" is" if len(names) == 1 else " are"),
        "it" if len(names) == 1 else "them",
    )


_BY_LABEL = ("PartitionState", "MultiTransformState")
"""Optax states, by class name, of transformations with a count for each label, of which a schedule may be any one's."""


def _has_labels(node: object) -> bool:
    return type(node).__name__ in _BY_LABEL and type(node).__module__.startswith("optax.")


def _slot_of_count(transformation: Any, name: str, params: Params) -> str | None:
    """The slot of a count of all updates of a transformation; None if it has none, or others that may differ from it.

    A scalar integer of its state is such a count if its next value is its value + 1, whatever else the update is given.
    If an integer depends on anything else, it may be another one, such as those of `MultiSteps` and `apply_if_finite`.
    """
    takes = optax_transformations.takes_extra(transformation.update)

    def update(state: Tree, params: Params) -> Any:
        loss = jnp.zeros((), jnp.float32)
        known = {"value": loss, "grad": params, "value_fn": lambda tree: sum(map(jnp.sum, jax.tree.leaves(tree)), loss)}
        return transformation.update(params, state, params, **{key: x for key, x in known.items() if takes(key)})[1]

    shapes = jax.tree.map(shape_of, jax.eval_shape(optax_transformations.seen, params))
    with optax_transformations.standard_promotion():
        state = jax.eval_shape(transformation.init, shapes)
        if any(map(_has_labels, jax.tree.leaves(state, is_leaf=_has_labels))):
            return None
        program = body_of(jax.make_jaxpr(update)(state, shapes))
    leaves, found = jax.tree_util.tree_leaves_with_path(state), []
    for i, (keys, leaf) in enumerate(leaves):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.integer):
            continue
        values = [np.asarray(value, leaf.dtype) for value in (0, np.iinfo(leaf.dtype).max // 2)]
        after = [_next_value(program, i, value) for value in values]
        if None in after:
            return None
        if after == [int(value) + 1 for value in values]:
            found.append(f"{name}/{trees.path_str(keys)}" if keys else name)
    return found[0] if found else None


def _next_value(program: Subprogram, number: int, value: object) -> int | None:
    """A scalar of the state after an update, from its value alone; None if it depends on anything else.

    Args:
        program: The update, of the state and the parameters.
        number: The number of the scalar among the leaves of the state.
        value: Its value before the update.
    """

    def by(operation: Operation, given: list[Any]) -> Sequence[Any]:
        if operation.kind == "call":
            return evaluate(operation.bodies[0], given, by)
        are_scalars = all(var.aval.shape == () for var in operation.eqn.outvars)
        is_known = are_scalars and not any(one is None for one in given)
        return apply(operation, given) if is_known else [None] * len(operation.eqn.outvars)

    given = [value if i == number else None for i in range(len(program.jaxpr.invars))]
    with jax.ensure_compile_time_eval():
        after = evaluate(program, given, by)[number]
        return None if after is None else int(after)


def _reported(given: object) -> Any:
    if given is None:
        return lambda step: {}
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(key, str):
                raise TypeError(f"hyperparameters: {shown(key)} must be a string, got {kind(key)}")
            if isinstance(value, Held):
                raise TypeError(f"hyperparameters: {key!r} is held, which Optax does not read")
        return hyper.report({key: hyper.checked(key, value) for key, value in given.items()})
    if not callable(given):
        raise TypeError(
            f"hyperparameters={shown(given)}: must map names to numbers or schedules, or be a function of the step, "
            f"got {kind(given)}"
        )
    return lambda step, /: hyper.as_arrays(dict(given(step)), step)
