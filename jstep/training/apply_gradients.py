"""One update of the state, whether it was skipped, and the end of a step of several updates.

Only this module increments the global step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from jstep.core import meshes, placement, trees
from jstep.core.checks import as_bool, describe_type
from jstep.core.exceptions import setting
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import (
    EMPTY_CONTEXT,
    Array,
    Context,
    GradientNoise,
    Optimizer,
    OptimizerLike,
    Params,
    Slots,
    Step,
    T,
    Updates,
)
from jstep.optimizers import guards
from jstep.optimizers.averages import move_model_state
from jstep.optimizers.chains import drop_frozen
from jstep.optimizers.host_slots import TRANSFERS, Transfers, load_small_slots
from jstep.optimizers.nested import INCREMENTS, StepInputs, call_update, inner_context, is_guarded
from jstep.optimizers.updates import apply_in_order, moves
from jstep.slots.indexed_slices import IndexedSlices, is_slices
from jstep.slots.matching import (
    IS_IDLE,
    NoGradientsError,
    as_slots,
    describe_difference,
    match_gradients,
)
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import COUNTS, Role, Roles, roles_of
from jstep.state.global_step import as_count, check_alive, later_step, replace_step, step_array
from jstep.state.sharding import is_model_state
from jstep.state.train_state import TrainState, as_state
from jstep.training.explain import explain_missing_gradients
from jstep.training.metrics import SKIPPED
from jstep.training.watched_updates import note_end, note_update


@shortens_tracebacks
def apply_gradients(
    state: TrainState,
    grads: Updates,
    optimizer: OptimizerLike,
    *,
    context: Context | None = None,
    increment_global_step: bool = True,
    scaled: bool = False,
) -> TrainState:
    """Return the state with params + updates, new slots and global_step + 1.

    This neither compiles nor donates.

    Args:
        state: The state before the update.
        grads: A tree like `state.params`. A leaf is an array, an `IndexedSlices`, or None for a
            parameter that is not updated. The gradient of a parameter that a `partition` freezes is
            ignored.
        optimizer: The optimizer that the state was created with.
        context: Information about the step, for an optimizer with `takes_context`.
        increment_global_step: Whether to increment `global_step`. Ages, and so bias corrections,
            count the update in either case.
        scaled: Whether the gradients are those of `loss * jstep.loss_scale(state)`, as an optimizer
            with `dynamic_loss_scale` requires; that factor is 1 for any other.

    Raises:
        TypeError: A gradient is not floating point, `context` is not a `Context`, or the global
            step is not an integer.
        ValueError: All gradients are None or of frozen parameters, structures or shapes do not
            match, the slots of the state do not match the optimizer, or it has `dynamic_loss_scale`
            and scaled is False.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], state.global_step)
        0.5 1

    Source: `tf.train.Optimizer.apply_gradients`.
    """
    as_bool(increment_global_step, "increment_global_step")
    as_bool(scaled, "scaled")
    if not (context is None or isinstance(context, Context)):
        raise TypeError(f"context: must be a jstep.Context or None, got {describe_type(context)}")
    if not scaled:
        _check_unscaled(state, optimizer)
    with meshes.internal_transfers():
        result = apply_update(
            state, grads, optimizer, increment_global_step, context or EMPTY_CONTEXT
        )
        return move_model_state(result.state, result.roles)


def _check_unscaled(state: TrainState, optimizer: OptimizerLike) -> None:
    # Dividing by the scale what nobody multiplied by it makes updates 32768 times too small, which
    # Adam hides.
    roles = roles_of(as_optimizer("optimizer", optimizer), as_state(state).params)
    if guards.current_loss_scale(roles, state.slots) is not None:
        raise ValueError(
            "scaled=False: must be True for an optimizer with dynamic_loss_scale, which "
            "divides the gradients by the scale; differentiate loss * jstep.loss_scale(state), "
            "and call apply_gradients(…, scaled=True), or use jstep.minimize, which does both"
        )


@shortens_tracebacks
@meshes.supports_meshes("state")
def increment_global_step(
    state: T, amount: Step = 1, *, optimizer: OptimizerLike | None = None
) -> T:
    """Return a new state with global_step incremented by `amount`; for a step, step + amount.

    Ages of slots are unchanged: no update was applied.

    Args:
        state: A state, any other object with a `global_step`, or a step itself (an integer scalar).
        amount: The number of steps.
        optimizer: The optimizer of a state none of whose updates in this step increments the step:
            its averages with `per_step=True` move, to the parameters of `state`.

    Raises:
        ValueError: The state's global step is None, `amount` is negative, or the sum does not fit
            the dtype. A traced step saturates at the largest value of the dtype instead. Or
            `amount` is not 1 and an optimizer is given.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> ema = jstep.ExponentialMovingAverage(0.5, per_step=True)
        >>> optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> for _ in range(4):
        ...     gradients = {"w": jnp.float32(-1.0)}
        ...     state = jstep.apply_gradients(
        ...         state, gradients, optimizer, increment_global_step=False
        ...     )
        >>> state = jstep.increment_global_step(state, optimizer=optimizer)
        >>> print(state.global_step, state.params["w"], jstep.averaged_params(state)["w"])
        1 4.0 2.0
    """
    steps = as_count(amount, "amount")
    step = step_array(state, scalar=True)
    placement.check_no_shapes(step, "state")
    if optimizer is None:
        return cast(T, replace_step(state, step, later_step(step, steps)))
    if trees.is_traced(amount) or amount != 1:
        raise ValueError(
            f"amount={amount}: must be 1 with an optimizer, whose averages move once a step"
        )
    train_state = as_state(state)
    no_gradients = jax.tree.map(lambda leaf: None, train_state.params)
    with meshes.internal_transfers():
        result = _apply(_end_step, train_state, no_gradients, optimizer, EMPTY_CONTEXT)
        return cast(T, move_model_state(result.state, result.roles))


class UpdateResult(NamedTuple):
    """The result of an update.

    Attributes:
        updates: What was added to the parameters.
        skipped_by: A guard's slot → whether the update was skipped.
    """

    state: TrainState
    updates: Updates
    slots: Slots
    roles: Roles
    skipped_by: dict[str, Array]


def apply_update(
    state: TrainState, grads: Updates, optimizer: OptimizerLike, increment: bool, context: Context
) -> UpdateResult:
    return _apply(functools.partial(_update, increment=increment), state, grads, optimizer, context)


def _apply(
    update: Callable[..., UpdateResult],
    state: TrainState,
    grads: Updates,
    optimizer: OptimizerLike,
    context: Context,
) -> UpdateResult:
    """Call `update(state, grads, optimizer, context)`, whether slots are on the host or sharded."""
    optimizer = as_optimizer("optimizer", optimizer)
    check_alive(as_state(state))
    placement.check_no_shapes((state, grads), "state and gradients")
    # Below, the optimizer runs on Auto axes. The loss runs on the user's axes there, too.
    value_and_grad = context.value_and_grad
    if value_and_grad is not None:
        value_and_grad = meshes.leaving_auto_axes(value_and_grad, state.params)
    loaded_slots, limit = load_small_slots(state)

    def update_on_auto_axes(
        state: TrainState, grads: Updates, arrays_of_context: Context
    ) -> UpdateResult:
        context = arrays_of_context._replace(value_and_grad=value_and_grad)
        transfers = None
        if limit is not None:
            # Always 1, which XLA must not know: otherwise it inlines the loops of transfers and
            # loses their order.
            transfers = Transfers(limit, jnp.where(step_array(state) >= 0, 1, 0))
        with setting(TRANSFERS, transfers):
            result = update(state, grads, optimizer, context)
        added = moves(state.params, result.updates)
        params, slots = apply_in_order(
            state.params, result.updates, result.slots, result.roles.in_order
        )
        new = result.state.replace(params=params, slots={**state.slots, **slots})
        return result._replace(state=new, updates=added, slots=slots)

    specs_of = meshes.shard_like(UpdateResult(state, state.params, state.slots, None, {}))  # type: ignore[arg-type]
    with setting(placement.LAYOUTS, parameter_layouts(state)):
        loaded_state = state.replace(slots=loaded_slots)
        arrays_of_context = context._replace(value_and_grad=None)
        result = meshes.call_on_auto_axes(
            update_on_auto_axes, loaded_state, grads, arrays_of_context, specs_of=specs_of
        )
    return result._replace(state=jax.tree.map(placement.place_like_old, result.state, state))


def _update(
    state: TrainState, grads: Updates, optimizer: Optimizer, context: Context, *, increment: bool
) -> UpdateResult:
    step = step_array(state)
    # Gradients are checked here, because perhaps no element of a chain checks them.
    matched = match_gradients(grads, state.params)
    old_slots = _slots_of_optimizers(state)
    roles = roles_of(optimizer, state.params)
    # Both are called for their errors: they raise if their wrapper is inside of others.
    guards.current_loss_scale(roles, old_slots)
    guards.noise_slots(roles)
    # Frozen leaves are dropped here, so that no norm and no wrapper sees them.
    keep_trained = functools.partial(drop_frozen, optimizer, state.params)
    grads = keep_trained(grads)
    context = inner_context(context, lambda params: params, keep_trained)
    if all(map(trees.is_none, jax.tree.leaves(grads, is_leaf=is_slices))):
        raise NoGradientsError(state.params, "All gradients are None or of frozen leaves.")
    note_update(optimizer, state, grads, roles, increments=increment)
    guarding = [name for name in roles.names_with(Role.LAST_FINITE) if name in old_slots]
    inputs = StepInputs(state.params, step, context)
    try:
        with setting(INCREMENTS, increment):
            updates, slots = call_update(
                optimizer, grads, old_slots | _marks(old_slots, roles), inputs, exact=True
            )
    except Exception as error:
        explain_missing_gradients(error, state.params, matched)
        raise
    _check_slots(old_slots, slots)
    skipped_by = {name: slots[name] == guards.SKIPPED_MARK for name in guarding}
    slots |= {name: guards.last_finite_step(old_slots[name], slots[name]) for name in guarding}
    if increment:
        new_step = later_step(step)
    else:
        new_step = step
        # An age is global_step − start_step, and counts this update although the step stays.
        for name in roles.names_with(*COUNTS):
            slots[name] = jax.tree.map(lambda slot: slot - 1, slots[name])
        for name in guarding:
            slots[name] = jnp.minimum(slots[name], jnp.asarray(step).astype(slots[name].dtype))
    new = state.replace(slots={**state.slots, **slots}, global_step=new_step)
    return UpdateResult(new, updates, slots, roles, skipped_by)


def _slots_of_optimizers(state: TrainState) -> Slots:
    if not isinstance(state.slots, Mapping):
        raise TypeError(
            f"state: its slots must be a dict, got {describe_type(state.slots)}; "
            "make them with TrainState.create"
        )
    return {name: tree for name, tree in state.slots.items() if not is_model_state(name)}


def _marks(slots: Slots, roles: Roles) -> Slots:
    """Return the slots that an update changes if it reaches a guard, or an average."""
    marks: Slots = {}
    for name, slot in slots.items():
        if roles.get(name) is Role.LAST_FINITE:
            marks[name] = jnp.full_like(slot, guards.NOT_REACHED)
        elif roles.get(name) is Role.LAST_WEIGHT:
            marks[name] = jnp.zeros_like(slot)
    return marks


def _end_step(
    state: TrainState, no_gradients: Updates, optimizer: Optimizer, context: Context
) -> UpdateResult:
    """Move the averages with `per_step=True`, and increment the step."""
    step = step_array(state)
    old_slots = _slots_of_optimizers(state)
    roles = roles_of(optimizer, state.params)
    note_end()
    inputs = StepInputs(state.params, step, context)
    with setting(INCREMENTS, True), setting(IS_IDLE, True):
        _, new_slots = call_update(
            optimizer, no_gradients, old_slots | _marks(old_slots, roles), inputs
        )
    _check_slots(old_slots, new_slots)
    # `compact` stores a slot in two arrays, and both have moved.
    moving = {*roles.per_step, *map(roles.halves.get, roles.per_step)}
    moved = {name: slot for name, slot in new_slots.items() if name in moving}
    # The ages of all other slots stay as they are.
    later = replace_step(state, step, later_step(step))
    slots = _slots_of_optimizers(later) | moved
    return UpdateResult(later, no_gradients, slots, roles, {})


def _check_slots(old: Slots, new: Slots) -> None:
    different = describe_difference(new, old)
    is_same = trees.structure(new) == trees.structure(old)
    if is_same and different:
        raise TypeError(
            "the optimizer must keep the shapes and dtypes of its slots, "
            f"it returned slots {different}"
        )
    if not is_same:
        raise ValueError(
            "the optimizer's slots are not those of the state: it returned a tree "
            f"{different or 'of others'}; use the optimizer that the state was created with"
        )


def check_fits(optimizer: Optimizer, state: TrainState) -> None:
    """Reject an optimizer whose slots are not those of a state, as an update would.

    The state may consist of shapes.

    Raises:
        TypeError: Its update returns slots of other shapes or dtypes.
        ValueError: The state lacks some of its slots, or its update returns none of those that the
            state has.
    """
    old_slots = _slots_of_optimizers(as_state(state))
    as_slots(roles_of(optimizer, state.params), old_slots)

    def update(params: Params, slots: Slots, step: Array) -> Slots:
        roles = roles_of(optimizer, params)
        gradients = jax.tree.map(
            lambda p: jnp.ones_like(p) if trees.is_trainable(p) else None, params
        )
        loss = jnp.zeros((), jnp.float32)
        context = Context(
            loss, lambda params: (loss, gradients), jax.random.key(0), GradientNoise(loss, loss)
        )
        inputs = StepInputs(params, step, context)
        trained = drop_frozen(optimizer, params, gradients)
        return call_update(optimizer, trained, slots | _marks(slots, roles), inputs, exact=True)[1]

    try:
        with meshes.using_mesh(meshes.mesh_of(state)):
            new_slots = jax.eval_shape(update, state.params, old_slots, state.global_step)
    except Exception:
        # The update may need more than this, such as sparse gradients. If not, the step itself
        # raises the same error.
        return
    _check_slots(old_slots, new_slots)


def parameter_layouts(state: TrainState) -> placement.Layouts:
    """Map the path of each parameter on a mesh to its sharding, or the finest one of its slots."""
    # Under ZeRO-1, parameters are replicated and slots are sharded, and so are the values computed
    # from them. Inside `jax.shard_map`, a device sees only its own shard.
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return {}
    leaves, treedef = trees.flatten(state)
    shardings = placement.traced_shardings(state) or list(map(meshes.sharding_on_mesh, leaves))
    if not any(shardings):
        return {}
    indices = treedef.unflatten(range(len(leaves)))
    layouts: dict[str, NamedSharding] = {}
    params = trees.leaves_with_paths(state.params)
    like_params = [
        indices.slots[name]
        for name, tree in state.slots.items()
        if trees.is_like(state.params, tree)
    ]
    for tree in (indices.params, *like_params):
        tree_indices = trees.flatten_like(state.params, tree, "slots")
        for (path, param), index in zip(params, tree_indices, strict=True):
            sharding = None if index is None else shardings[index]
            if sharding is None or leaves[index].shape != param.shape:
                continue
            old = layouts.get(path)
            if old is None or placement.part_count(sharding) > placement.part_count(old):
                layouts[path] = sharding
    return layouts


def skip_metrics(
    result: UpdateResult, old: TrainState, grads: Updates, optimizer: Optimizer
) -> dict[str, Array]:
    """Return whether each guard skipped the update of the old state, and `skipped` overall.

    The result is empty without guards.
    """
    skips = {_metric_name(name): value for name, value in result.skipped_by.items()}
    if guards.current_loss_scale(result.roles, old.slots) is not None:
        unscalable = ~guards.all_finite(grads, old.params)
        for name in map(_metric_name, result.roles.names_with(Role.LOSS_SCALE)):
            if name in skips:
                skips[name] = skips[name] | unscalable
            else:
                skips[name] = unscalable
    if not skips:
        return {}
    overall = functools.reduce(jnp.logical_or, skips.values())
    if not is_guarded(optimizer):
        # Parts of the optimizer that no guard covers may have applied values that are not finite.
        overall &= ~_became_nonfinite(result.updates, old.slots, result.slots, result.roles)
    skips[SKIPPED] = overall
    return {name: value.astype(jnp.float32) for name, value in skips.items()}


def _metric_name(slot: str) -> str:
    return "/".join([*slot.split("/")[:-1], SKIPPED])


def _became_nonfinite(updates: Updates, old_slots: Slots, new_slots: Slots, roles: Roles) -> Array:
    """Whether an update is not finite, or made a finite value of a slot not finite."""
    values = [
        u.values if isinstance(u, IndexedSlices) else u
        for u in jax.tree.leaves(updates, is_leaf=is_slices)
    ]
    bad = [jnp.any(~jnp.isfinite(u)) for u in values]
    for name in new_slots:
        if name in roles and roles.has_one_value(name):
            continue
        old_tree, new_tree = placement.move_to_devices((old_slots[name], new_slots[name]))
        for old, new in zip(jax.tree.leaves(old_tree), jax.tree.leaves(new_tree), strict=True):
            if jnp.issubdtype(new.dtype, jnp.inexact):
                bad.append(jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new)))
    return functools.reduce(jnp.logical_or, bad, jnp.asarray(False))


def keep_if_skipped(skipped: Array, old: object, new: object) -> Any:
    """Return the old model_state if the metric `skipped` is 1, else the new one."""
    # Another structure, shape or dtype is rejected later.
    if trees.structure(old) != trees.structure(new):
        return new

    def leaf(old_leaf: Any, new_leaf: Any) -> Any:
        x = jax.typeof(old_leaf)
        y = jax.typeof(new_leaf)
        if (x.shape, x.dtype, x.sharding) != (y.shape, y.dtype, y.sharding):
            return new_leaf
        return jnp.where(skipped == 1, old_leaf, new_leaf)

    return jax.tree.map(leaf, old, new)
