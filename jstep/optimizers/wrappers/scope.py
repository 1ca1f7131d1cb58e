"""A prefix for the names of an optimizer."""

from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.merge import prefixed, scoped


def scope(name: str, optimizer: Optimizer) -> Optimizer:
    """The same optimizer, its slots and hyperparameters named `name/…`.

    Args:
        name: The prefix, without the slash.
        optimizer: What to name.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `optimizer` is none, or the name is no string.
        ValueError: The name is empty, or begins or ends with a slash.

    Example:
        >>> import jstep
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, jstep.scope("fast", jstep.adam())))
        ['fast/m', 'fast/v']
    """
    require_optimizer("optimizer", optimizer)
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a string, got {type(name).__name__}")
    if not name or name.strip("/") != name:
        raise ValueError(f"name={name!r}: must be a name without slashes at its ends")

    def init(params: Params, global_step: Step = 0) -> Slots:
        return prefixed(name, optimizer.init(params, global_step))

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        updates, own = optimizer.update(updates, scoped(name, slots), params, step)
        return updates, prefixed(name, own)

    return Optimizer(init, update, lambda step: prefixed(name, optimizer.hyperparameters(step)))
