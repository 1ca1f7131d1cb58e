"""Which slots an optimizer has: known from the optimizer, never read out of names."""

import dataclasses
from collections.abc import Callable, Iterable

import jax

from jstep.core import trees
from jstep.core.types import Optimizer, Params, Slots, Step


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also knows what it will make without making it.

    Attributes:
        make: `make(params, global_step) -> slots`.
        names: `names(params)`: the names of the slots, or None where they cannot be told.
        finished: Whether the updates are finished, with −learning_rate in them, fit to be added.
        late: Slots that updates are made of as they were, and that are written after the parameters: see `leafwise`.
    """

    make: Callable[[Params, Step], Slots]
    names: Callable[[Params], Iterable[str] | None]
    finished: bool = False
    late: tuple[str, ...] = ()

    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """The slots for `params`, created at `global_step`."""
        return self.make(params, global_step)


def slot_names(optimizer: Optimizer, params: Params) -> list[str] | None:
    """The names of an optimizer's slots for some parameters; None where they cannot be told. Touches no device."""
    if isinstance(optimizer.init, Init):
        names = optimizer.init.names(params)
        return None if names is None else list(names)
    try:
        # An init of a user's own: its slots are made, but as shapes.
        return _traced_names(lambda step: optimizer.init(params, step))
    except Exception:  # it may want values: then the names are those it makes in the end
        return None


def own_slots(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Of all slots those that an optimizer made, by the names it knows them under.

    Args:
        optimizer: Whose slots.
        slots: The slots of all parties.
        params: The parameters they are for.
        prefix: What stands before its names in `slots`.
    """
    names = slot_names(optimizer, params)
    if names is None:
        names = [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in names if prefix + name in slots}


def hyperparameter_names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's hyperparameters. Touches no device."""
    return _traced_names(optimizer.hyperparameters)


def _traced_names(fn: Callable[[Step], Iterable[str]]) -> list[str]:
    names: list[str] = []
    jax.eval_shape(lambda step: names.extend(fn(step)), jax.ShapeDtypeStruct((), trees.default_int()))
    return names


def late_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """The slots of an element of a chain that are to be written after the parameters."""
    return optimizer.init.late if isinstance(optimizer.init, Init) else ()


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether what an optimizer returns has −learning_rate in it, so that another one would turn it round."""
    if isinstance(optimizer.init, Init):
        return optimizer.init.finished
    try:
        names = hyperparameter_names(optimizer)
    except Exception:  # a user's own function, which may want a concrete step
        return False
    return any(name.rsplit("/", 1)[-1] == "learning_rate" for name in names)
