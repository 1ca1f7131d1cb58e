"""The slots and hyperparameters of an optimizer, taken from the optimizer itself and never inferred from names."""

from collections.abc import Iterable

from jstep.core.slot_roles import Init, abstractly, roles_of
from jstep.core.types import Optimizer, Params, Slots


def slot_names(optimizer: Optimizer, params: Params) -> list[str] | None:
    """The names of an optimizer's slots for some parameters; None if they are not known."""
    roles = roles_of(optimizer, params)
    return list(roles) if roles.complete else None


def own_slots(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Select the slots of one optimizer, under the names it uses itself.

    Args:
        optimizer: The optimizer.
        slots: The slots of all optimizers.
        params: The parameters they are for.
        prefix: The prefix of its names in `slots`.
    """
    names: Iterable[str] | None = slot_names(optimizer, params)
    if names is None:
        names = [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in names if prefix + name in slots}


def hyperparameter_names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's hyperparameters. Uses no device."""
    names: list[str] = []
    abstractly(lambda step: names.extend(optimizer.hyperparameters(step)))
    return names


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether gradients that are not finite are known to reach neither parameters nor slots."""
    return isinstance(optimizer.init, Init) and optimizer.init.guarded


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether the updates of an optimizer include −learning_rate, so that another one would flip their sign."""
    if isinstance(optimizer.init, Init):
        return optimizer.init.finished
    try:
        names = hyperparameter_names(optimizer)
    except Exception:  # a user-defined function, which may need a concrete step
        return False
    return any(name.rsplit("/", 1)[-1] == "learning_rate" for name in names)
