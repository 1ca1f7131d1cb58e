"""One optimizer after another."""

from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.merge import check_names, merged_hyperparameters, merged_init


def chain(*optimizers: Optimizer) -> Optimizer:
    """The elements one after another: what one returns as updates, the next takes as gradients.

    Args:
        *optimizers: At least one; as a rule some that transform gradients, then one that makes updates of them.

    Returns:
        An `Optimizer` with the slots and hyperparameters of all.

    Raises:
        TypeError: An element is not an optimizer.
        ValueError: There is none, or two have a slot or a hyperparameter of the same name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3))
        >>> sorted(optimizer.hyperparameters(0))
        ['beta1', 'beta2', 'clip_by_global_norm', 'epsilon', 'learning_rate']

    Source: `optax.chain`; the elements share the state's one step instead of counting each for itself.
    """
    if not optimizers:
        raise ValueError("chain() needs at least one optimizer")
    for i, optimizer in enumerate(optimizers):
        require_optimizer(f"optimizers[{i}]", optimizer)
    check_names(optimizers)

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        new: Slots = {}
        for optimizer in optimizers:
            updates, own = optimizer.update(updates, slots, params, step)
            new |= own
        return updates, new

    return Optimizer(merged_init(optimizers), update, merged_hyperparameters(optimizers))
