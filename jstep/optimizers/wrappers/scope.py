"""Prefix the names of an optimizer's slots and hyperparameters."""

from jstep.core.checks import as_text
from jstep.core.slot_roles import Init, Roles, roles_of
from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.call_update import EMPTY_CONTEXT, call_update
from jstep.optimizers.held import check_prefix
from jstep.optimizers.merge import prefixed
from jstep.optimizers.names import is_guarded, makes_finished_updates, own_slots


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

    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        mine = own_slots(optimizer, slots, params, f"{name}/")
        updates, own = call_update(optimizer, updates, mine, params, step, context, exact=True)
        return updates, prefixed(name, own)

    return Optimizer(
        Init(init, roles, makes_finished_updates(optimizer), guarded=is_guarded(optimizer)),
        update,
        lambda step: prefixed(name, optimizer.hyperparameters(step)),
        optimizer.takes_context,
    )
