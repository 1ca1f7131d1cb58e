"""A prefix for the names of an optimizer."""

from jstep.core.checks import as_text
from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.held import check_prefix
from jstep.optimizers.merge import prefixed
from jstep.optimizers.names import Init, makes_finished_updates, own_slots, slot_names


def scope(name: str, optimizer: Optimizer) -> Optimizer:
    """The same optimizer, its slots and hyperparameters named `name/…`.

    Args:
        name: The prefix, without the slash at its end.
        optimizer: What to name.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `optimizer` is none, or the name is no string.
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

    def names(params: Params) -> list[str] | None:
        inner = slot_names(optimizer, params)
        return None if inner is None else [f"{name}/{one}" for one in inner]

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        updates, own = optimizer.update(updates, own_slots(optimizer, slots, params, f"{name}/"), params, step)
        return updates, prefixed(name, own)

    return Optimizer(
        Init(init, names, makes_finished_updates(optimizer)),
        update,
        lambda step: prefixed(name, optimizer.hyperparameters(step)),
    )
