"""Use Optax transformations as jstep optimizers."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_text, kind, scoped, shown
from jstep.core.programs import Operation, Subprogram, apply, body_of, evaluate
from jstep.core.slot_roles import Counted, Init, Roles, abstractly, copies_in, of_slots
from jstep.core.trees import Array, Context, Held, IndexedSlices, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.hyperparameters import LEARNING_RATE, as_arrays, check_prefix, checked, report
from jstep.optimizers.leafwise import EMPTY_CONTEXT
from jstep.optimizers.updates import match_gradients, require_slots

_logger = logging.getLogger("jstep")


@makes_optimizer(1)
def from_optax(
    transformation: Any,
    hyperparameters: Mapping[str, Any] | Callable[[Step], Mapping[str, Any]] | None = None,
    name: str = "optax",
) -> Optimizer:
    """An optimizer from an Optax transformation, using its `init` and `update`; Optax itself is not imported.

    Its state becomes slots. State with the structure of the parameters, such as moments, is sharded like them, and is
    float32 for low-precision parameters; other state, such as counts, becomes separate slots. State that is a copy of
    the parameters at first, as its `init` shows, is one of the restored parameters after a partial restore without it.
    The transformation works in at least float32 and sees trainable leaves only. A gradient of None is replaced by
    zeros, and then neither the leaf nor its state changes. `IndexedSlices` are converted to dense arrays.

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
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(
            f"transformation={shown(transformation)}: must have init and update, like the result of optax.adam(1e-3), "
            f"got {kind(transformation)}"
        )
    check_prefix("name", as_text(name, "name"))
    reported = _reported(hyperparameters)
    depend = _names_in(reported)
    schedules = frozenset(key for key, is_schedule in depend.items() if is_schedule)
    log_once = functools.cache(functools.partial(_log_that_no_count_is_known, schedules))
    takes = takes_extra(transformation.update)

    def init(params: Params, global_step: Step = 0) -> Slots:
        with _standard_promotion():
            try:
                state = transformation.init(_seen(params))
            except (AttributeError, TypeError) as error:
                raise _other_params("init", error) from error
        _refuse_impossible(state)
        slots = _StateSlots(name, state, params).slots
        return {slot: jax.tree.map(_own_copy, tree) for slot, tree in slots.items()}

    def skeleton(params: Params) -> _StateSlots:
        with _standard_promotion():
            return _StateSlots(name, jax.eval_shape(lambda given: transformation.init(_seen(given)), params), params)

    def roles(params: Params) -> Roles:
        try:
            shapes = skeleton(params).slots
        except Exception:  # L-BFGS has no state for the empty tree with which wrappers compare names
            return Roles(complete=False)
        with _standard_promotion():
            copies = copies_in(lambda given: _StateSlots(name, transformation.init(_seen(given)), given).slots, params)
        found = of_slots(shapes, params, copies, lambda both: skeleton(both).slots)

        @functools.cache
        def count() -> str | None:
            slot = _slot_of_count(transformation, name, params)
            if slot is None:
                log_once()
            return slot

        return found.joined(Roles(counted=(Counted(schedules, reported, count),) if schedules else ())).ordered()

    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        gradients = match_gradients(updates, params)
        leaves, treedef = trees.flatten(params)
        grads = treedef.unflatten(
            [dense(g, p) if trees.is_trainable(p) else None for g, p in zip(gradients, leaves, strict=True)]
        )
        shape = skeleton(params)
        require_slots(shape.slots, slots)
        with _standard_promotion():
            extra = {key: value for key, value in _extra_arguments(context, grads, params).items() if takes(key)}
            try:
                given, after = transformation.update(grads, shape.state_from(slots), _seen(params), **extra)
            except AttributeError as error:
                raise _other_params("update", error) from error
            except TypeError as error:
                missing = [key for key in EXTRA if takes(key) and key not in extra and f"'{key}'" in str(error)]
                if not missing:
                    raise
                raise TypeError(
                    f"transformation: needs {', '.join(missing)} of the step's loss, which apply_gradients does not "
                    "know; train with jstep.minimize, which gives them, or pass context=jstep.Context(loss, "
                    "value_and_grad)"
                ) from error
        absent = [g is None for g in gradients]
        new = _StateSlots(name, after, params).slots
        if new.keys() != shape.slots.keys():
            raise ValueError(
                f"transformation: its update returned {sorted(new)}, its init returned {sorted(shape.slots)}; a "
                "compiled step needs the same structure after each update"
            )
        kept = {slot: _unless_absent(slots[slot], new[slot], treedef, absent) for slot in new}
        added = trees.flatten_like(params, given, "updates")
        return treedef.unflatten([None if out else u for u, out in zip(added, absent, strict=True)]), kept

    finished = isinstance(hyperparameters, Mapping) and LEARNING_RATE in hyperparameters
    made = Init(init, roles, finished, rated=LEARNING_RATE in depend)
    return Optimizer(made, update, reported, any(map(takes, EXTRA)))


def _names_in(reported: Callable[[Step], Mapping[str, Any]]) -> dict[str, bool]:
    """The names of hyperparameters, and whether they depend on the step. Uses no device."""
    found: dict[str, bool] = {}
    with contextlib.suppress(Exception):  # a function that needs a concrete step, which no compiled step gives it
        abstractly(lambda step: found.update({key: trees.is_traced(value) for key, value in reported(step).items()}))
    return found


def _log_that_no_count_is_known(names: frozenset[str]) -> None:
    if jax.process_index() != 0:
        return
    _logger.warning(
        "from_optax: %s not reported, because the count at which Optax evaluates %s is not known. To report the rate "
        "that is used, leave it to jstep: jstep.chain(jstep.from_optax(optax.scale_by_…), "
        "jstep.scale_by_learning_rate(rate))",
        " and ".join(sorted(names)) + (" is" if len(names) == 1 else " are"),
        "it" if len(names) == 1 else "them",
    )


_BY_LABEL = ("PartitionState", "MultiTransformState")
"""Optax states, by class name, of transformations with a count for each label, of which a schedule may be any one's."""


def _has_labels(node: Any) -> bool:
    return type(node).__name__ in _BY_LABEL and type(node).__module__.startswith("optax.")


def _slot_of_count(transformation: Any, name: str, params: Params) -> str | None:
    """The slot of a count of all updates of a transformation; None if it has none, or others that may differ from it.

    A scalar integer of its state is such a count if its next value is its value + 1, whatever else the update is given.
    If an integer depends on anything else, it may be another one, such as those of `MultiSteps` and `apply_if_finite`.
    """
    takes = takes_extra(transformation.update)

    def update(state: Any, params: Params) -> Any:
        loss = jnp.zeros((), jnp.float32)
        known = {"value": loss, "grad": params, "value_fn": lambda tree: sum(map(jnp.sum, jax.tree.leaves(tree)), loss)}
        return transformation.update(params, state, params, **{key: x for key, x in known.items() if takes(key)})[1]

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(_seen, params))
    with _standard_promotion():
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


def _next_value(program: Subprogram, number: int, value: Any) -> int | None:
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


def _other_params(function: str, error: Exception) -> TypeError:
    return TypeError(
        f"transformation: its {function} does not take a plain tree of parameters ({error}): from_optax gives it the "
        "tree of the trainable leaves of params, and gradients of the same structure"
    )


_IMPOSSIBLE = {
    "LookaheadState": "optax.lookahead needs LookaheadParams, two copies of the parameters; give plain parameters and "
    "use jstep.lookahead(jstep.from_optax(fast_optimizer), sync_period, slow_step_size), which keeps the slow copy in "
    "a slot",
    "DifferentiallyPrivateAggregateState": "optax.contrib.differentially_private_aggregate (dpsgd) needs the gradient "
    "of each example, and a step has those of the mean, whose first axis it would take for the examples; call its "
    "update on jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)) in a step of your own, and give the result to "
    "jstep.apply_gradients with an optimizer for what follows it, such as jstep.sgd",
}
"""Optax states, by class name, of transformations that no step can serve, and what to do instead."""


def _refuse_impossible(state: Any) -> None:
    """Raise an error for a transformation that would fail in the step, or return wrong numbers there.

    Raises:
        TypeError: The state contains that of such a transformation.
    """

    def reason(node: Any) -> str | None:
        return _IMPOSSIBLE.get(type(node).__name__) if type(node).__module__.startswith("optax.") else None

    for node in jax.tree.leaves(state, is_leaf=lambda node: reason(node) is not None):
        if found := reason(node):
            raise TypeError(f"transformation: {found}")


@scoped
def _standard_promotion() -> Iterator[None]:
    """Use JAX's standard dtype promotion, on which Optax relies, whatever the user has configured."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class _StateSlots:
    """An Optax state, split into slots.

    Attributes:
        slots: Name → a tree with the structure of params, or another value from the state.
    """

    def __init__(self, prefix: str, state: Any, params: Params) -> None:
        leaves, self._params = trees.flatten(params)
        self._trained = [trees.is_trainable(leaf) for leaf in leaves]
        self._of_trained = trees.structure(_trained_only(params))
        nodes, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: self._parts(x) is not None)
        self._state: Any = treedef
        named = {f"{prefix}/{trees.path_str(keys)}" if keys else prefix: node for keys, node in nodes}
        self._parts_of = {slot: self._parts(node) for slot, node in named.items()}
        self.slots = {slot: self._slot(node, self._parts_of[slot]) for slot, node in named.items()}

    def _parts(self, node: Any) -> list[Any] | None:
        """The values at the trained leaves if a node is like params: arrays, or nodes without leaves as MaskedNode."""
        if self._of_trained.num_leaves == 0 or jax.tree_util.all_leaves([node]):
            return None
        try:
            parts: list[Any] = self._of_trained.flatten_up_to(node)
        except (ValueError, TypeError):
            return None
        fits = any(map(_is_array, parts)) and all(_is_array(part) or not jax.tree.leaves(part) for part in parts)
        return parts if fits else None

    def _slot(self, node: Any, parts: list[Any] | None) -> Any:
        if parts is None:
            return node
        arrays = iter([part if _is_array(part) else None for part in parts])
        return self._params.unflatten([next(arrays) if trained else None for trained in self._trained])

    def state_from(self, slots: Slots) -> Any:
        """Rebuild the Optax state from the values of these slots."""

        def value(slot: str, parts: list[Any] | None) -> Any:
            if parts is None:
                return slots[slot]
            found = self._params.flatten_up_to(slots[slot])
            mine = [leaf for leaf, trained in zip(found, self._trained, strict=True) if trained]
            return self._of_trained.unflatten([p if x is None else x for x, p in zip(mine, parts, strict=True)])

        return self._state.unflatten([value(*item) for item in self._parts_of.items()])


def _is_array(x: Any) -> bool:
    return trees.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _trained_only(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf if trees.is_trainable(leaf) else None, params)


def _seen(params: Params) -> Params:
    """The parameters as Optax sees them: trainable leaves, in at least float32."""
    return jax.tree.map(lambda leaf: leaf.astype(trees.compute_dtype(leaf.dtype)), _trained_only(params))


def _own_copy(leaf: Any) -> Any:
    """Copy to a separate buffer: some initial states alias the parameters or contain an array twice."""
    if trees.is_key(leaf):
        return jnp.copy(leaf)  # leaf.copy() fails where a program is traced
    # A weak type would become strong in the first step, which would recompile it.
    return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)), copy=True)


def _unless_absent(old: Any, new: Any, treedef: Any, absent: list[bool]) -> Any:
    """The new slot with the old leaves where there was no gradient, in the dtypes of the old slot."""

    def like(before: Any, after: Any) -> Any:
        return jnp.asarray(after).astype(before.dtype) if hasattr(before, "dtype") else after

    try:
        leaves = zip(treedef.flatten_up_to(old), treedef.flatten_up_to(new), absent, strict=True)
    except (ValueError, TypeError):
        return jax.tree.map(like, old, new)
    return treedef.unflatten([x if out or x is None else jax.tree.map(like, x, y) for x, y, out in leaves])


def _reported(given: Any) -> Any:
    if given is None:
        return lambda step: {}
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(key, str):
                raise TypeError(f"hyperparameters: {shown(key)} must be a string, got {kind(key)}")
            if isinstance(value, Held):
                raise TypeError(f"hyperparameters: {key!r} is held, which Optax does not read")
        return report({key: checked(key, value) for key, value in given.items()})
    if not callable(given):
        raise TypeError(
            f"hyperparameters={shown(given)}: must map names to numbers or schedules, or be a function of the step, "
            f"got {kind(given)}"
        )
    return lambda step, /: as_arrays(dict(given(step)), step)


EXTRA = ("value", "grad", "value_fn")
"""The extra arguments that Optax's own transformations take."""


def takes_extra(update: Callable[..., Any]) -> Callable[[str], bool]:
    """A predicate for whether an update takes an extra argument of a given name."""
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return lambda name: False
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return lambda name: takes_any or name in parameters


def _extra_arguments(context: Context, grads: Updates, params: Params) -> dict[str, Any]:
    """The extra arguments of Optax transformations that the step can provide."""
    known: dict[str, Any] = {}
    if context.loss is not None:
        known |= {"value": _wide(context.loss), "grad": grads}
    if context.value_and_grad is not None:
        known["value_fn"] = _value_fn(context.value_and_grad, params)
    return known


def _value_fn(value_and_grad: Callable[[Params], tuple[Array, Updates]], params: Params) -> Callable[[Params], Array]:
    """The loss as a function of the parameters that Optax sees, with the derivative given by the step."""
    leaves, treedef = trees.flatten(params)

    def evaluated(seen: Params) -> tuple[Array, Params]:
        found = treedef.flatten_up_to(seen)
        own = [p if s is None else s.astype(p.dtype) for s, p in zip(found, leaves, strict=True)]
        loss, gradients = value_and_grad(treedef.unflatten(own))
        pairs = zip(treedef.flatten_up_to(gradients), leaves, found, strict=True)
        return _wide(loss), treedef.unflatten([None if s is None else dense(g, p) for g, p, s in pairs])

    @jax.custom_jvp
    def value_fn(seen: Params) -> Array:
        return evaluated(seen)[0]

    @value_fn.defjvp
    def _derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        loss, gradients = evaluated(*primals)
        products = jax.tree.map(lambda g, t: jnp.sum(g * t), gradients, *tangents)
        return loss, sum(jax.tree.leaves(products), start=jnp.zeros_like(loss)).astype(loss.dtype)

    return value_fn


def _wide(loss: Array) -> Array:
    loss = jnp.asarray(loss)
    return loss.astype(trees.compute_dtype(loss.dtype))


def dense(gradient: Any, leaf: Any) -> Any:
    """A gradient as Optax sees it: an array, in at least float32."""
    dtype = trees.compute_dtype(leaf.dtype)
    if gradient is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    return (gradient.to_dense() if isinstance(gradient, IndexedSlices) else jnp.asarray(gradient)).astype(dtype)
