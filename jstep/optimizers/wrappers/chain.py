"""Chain optimizers and gradient transformations, and prefix the names of one."""

import warnings

from jstep.core.checks import as_text
from jstep.core.slot_roles import Init, Labels, Roles, labels_of, roles_of
from jstep.core.trees import Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.held import check_prefix
from jstep.optimizers.offloading import loads_slots
from jstep.optimizers.parts import (
    EMPTY_CONTEXT,
    call_update,
    check_names,
    is_guarded,
    makes_finished_updates,
    merged_hyperparameters,
    merged_roles,
    merged_slots,
    own_slots,
    prefixed,
)


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply optimizers in sequence: the updates of one are the gradients of the next.

    Args:
        *optimizers: At least one; usually elements that transform gradients, then one that turns them into updates,
            then perhaps elements that transform updates. If two elements make finished updates (which include
            −learning_rate), a warning is issued: the sign flips twice, which is gradient ascent.

    Returns:
        An `Optimizer` with the slots and hyperparameters of all.

    Raises:
        ValueError: No element is given, or two have a slot or a hyperparameter of the same name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3))
        >>> sorted(optimizer.hyperparameters(0))
        ['beta1', 'beta2', 'clip_by_global_norm', 'epsilon', 'learning_rate']

    Source: `optax.chain`; the elements share the global step of the state instead of keeping separate counters.
    """
    if not optimizers:
        raise ValueError("chain() needs at least one optimizer")
    if len(optimizers) == 1 and type(optimizers[0]) in (list, tuple):  # an Optax transformation is a NamedTuple
        raise TypeError(
            f"chain: got one {type(optimizers[0]).__name__} of {len(optimizers[0])} elements; pass them as separate "
            "arguments: chain(*[…]), or chain(first, second)"
        )
    parts = {f"optimizers[{i}]": require_optimizer(f"optimizers[{i}]", one) for i, one in enumerate(optimizers)}
    finished = [part for part, one in parts.items() if makes_finished_updates(one)]
    warning = len(finished) > 1 and (
        f"chain: {finished[0]} makes finished updates, which already include −learning_rate, and {finished[1]} takes "
        "them as gradients: the sign flips twice, so this is gradient ascent, and the loss climbs. Keep one of the "
        "two; replace the first by an element that transforms gradients, such as jstep.scale_by_adam() for "
        "jstep.adam(…); or train different leaves with each, using jstep.partition."
    )
    try:
        check_names(parts)
    except ValueError as error:
        if warning:
            error.add_note(warning)
        raise
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=2)

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        new: Slots = {}
        for i, optimizer in enumerate(optimizers):
            mine = own_slots(optimizer, slots, params)
            is_last = i == len(optimizers) - 1
            updates, own = call_update(optimizer, updates, mine, params, step, context, exact=is_last)
            new |= own
        return updates, new

    def labels(params: Params) -> Labels | None:
        known = [found for one in optimizers if (found := labels_of(one, params)) is not None]
        rows = list(zip(*known, strict=True))
        return ["/".join(map(str, row)) if None not in row else None for row in rows] if known else None

    init = Init(
        lambda params, step: merged_slots(parts, params, step),
        lambda params: merged_roles(parts, params),
        finished=bool(finished),
        guarded=is_guarded(optimizers[0]),
        labels=labels,
    )
    return Optimizer(init, update, merged_hyperparameters(parts), any(one.takes_context for one in optimizers))


def scope(name: str, optimizer: Optimizer) -> Optimizer:
    """Rename the slots and hyperparameters of an optimizer to `name/…`.

    Args:
        name: The prefix, without a trailing slash.
        optimizer: The optimizer.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: The name is empty, begins or ends with a slash, or has the part `held`.

    Example:
        >>> import jstep
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, jstep.scope("fast", jstep.adam())))
        ['fast/m', 'fast/v']
    """
    require_optimizer("optimizer", optimizer)
    check_prefix("name", as_text(name, "name"))

    def init(params: Params, global_step: Step = 0) -> Slots:
        return prefixed(name, optimizer.init(params, global_step))

    def roles(params: Params) -> Roles:
        return roles_of(optimizer, params).prefixed(name)

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        mine = own_slots(optimizer, slots, params, f"{name}/")
        updates, own = call_update(optimizer, updates, mine, params, step, context, exact=True)
        return updates, prefixed(name, own)

    def labels(params: Params) -> Labels | None:
        inner = labels_of(optimizer, params)
        return None if inner is None else [None if label is None else f"{name}/{label}" for label in inner]

    return Optimizer(
        Init(init, roles, makes_finished_updates(optimizer), guarded=is_guarded(optimizer), labels=labels),
        update,
        lambda step: prefixed(name, optimizer.hyperparameters(step)),
        optimizer.takes_context,
    )
