"""Which slots an optimizer has, and what each means to jstep: known from the optimizer, never read out of names."""

import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.types import Optimizer, Params, Slots, Step


class Role(enum.Enum):
    """What a slot means to jstep; most mean nothing, and have none."""

    AGE = "the step at which slots were created: a step that is left out moves it along"
    OWN_AGE = "the same, of an optimizer that leaves out some steps by itself: no age for what is around it"
    HELD = "a hyperparameter that the state holds"
    LOSS_SCALE = "what the loss is multiplied by"
    HIDDEN_SCALE = "a loss scale that is not outermost, which is refused when it is used"
    SCALE_SINCE = "the step of the loss scale's last change"
    LAST_FINITE = "the step that the last finite update made"
    NOISE = "the average of the gradient's noise"
    NOISE_SQUARE = "the average of the gradient's squared norm"
    NOISE_WEIGHT = "the weight of both averages"
    HIDDEN_NOISE = "such an average below a label or beside other elements, which is refused when it is used"


AGES = (Role.AGE, Role.OWN_AGE)
_HIDDEN: dict[Role | None, Role] = dict.fromkeys((Role.NOISE, Role.NOISE_SQUARE, Role.NOISE_WEIGHT), Role.HIDDEN_NOISE)


class Roles(dict[str, Role | None]):
    """Slot name → its role.

    Attributes:
        complete: Whether these are all slots of the optimizer: False if its `init` cannot be traced.
    """

    def __init__(self, roles: Mapping[str, Role | None] | Iterable[str] = (), *, complete: bool = True) -> None:
        super().__init__(roles if isinstance(roles, Mapping) else dict.fromkeys(roles))
        self.complete = complete

    def prefixed(self, prefix: str) -> "Roles":
        """The same roles under `prefix/name`."""
        return Roles({f"{prefix}/{name}": role for name, role in self.items()}, complete=self.complete)

    def joined(self, other: "Roles") -> "Roles":
        """These roles and others."""
        return Roles({**self, **other}, complete=self.complete and other.complete)

    def beside_others(self) -> "Roles":
        """The roles of a part that is not the whole optimizer: what has to be around all of it is not."""
        roles = self.without_scale()
        return Roles({name: _HIDDEN.get(role, role) for name, role in roles.items()}, complete=self.complete)

    def without_scale(self) -> "Roles":
        """The roles of an optimizer that does not see all gradients: its loss scale is not outermost."""
        hidden = {name: Role.HIDDEN_SCALE if role is Role.LOSS_SCALE else role for name, role in self.items()}
        return Roles(hidden, complete=self.complete)

    def at_some_steps(self) -> "Roles":
        """The roles of an optimizer that updates at some steps alone: it sees some gradients, and ages at its own."""
        own = {name: Role.OWN_AGE if role is Role.AGE else role for name, role in self.items()}
        return Roles(own, complete=self.complete).without_scale()

    def of(self, *roles: Role) -> list[str]:
        """The names of the slots that have one of these roles."""
        return [name for name, role in self.items() if role in roles]


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also knows what it will make without making it.

    Attributes:
        make: `make(params, global_step) -> slots`.
        roles: `roles(params)`: the slots that `make` makes for params, and their roles. It touches no device.
        finished: Whether the updates are finished, with −learning_rate in them, fit to be added.
        late: Slots that updates are made of as they were, and that are written after the parameters: see `leafwise`.
        guarded: Whether gradients that are not finite reach neither parameters nor slots.
    """

    make: Callable[[Params, Step], Slots]
    roles: Callable[[Params], Roles]
    finished: bool = False
    late: tuple[str, ...] = ()
    guarded: bool = False

    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """The slots for `params`, created at `global_step`."""
        slots = self.make(params, global_step)
        made = _MADE.get()
        if made is not None:
            roles = self.roles(params)
            made += [(tree, roles.get(name)) for name, tree in slots.items()]
        return slots


_MADE: contextvars.ContextVar[list[tuple[Any, Role | None]] | None] = contextvars.ContextVar("jstep_made", default=None)
"""What optimizers inside a custom one make while its `init` is traced: slots and their roles."""


def roles_of(optimizer: Optimizer, params: Params) -> Roles:
    """The slots of an optimizer for some parameters, and their roles. Touches no device."""
    init = optimizer.init
    if isinstance(init, Init):
        return init.roles(params)
    ages: dict[str, Role | None] = dict.fromkeys(getattr(init, "ages", ()), Role.AGE)
    found: dict[str, Role | None] = {}

    def trace(step: Step) -> None:
        # Those that optimizers inside a custom one have made keep their roles. No tracer leaves this function.
        made: list[tuple[Any, Role | None]] = []
        token = _MADE.set(made)
        try:
            slots = init(params, step)
        finally:
            _MADE.reset(token)
        inherited = {id(tree): role for tree, role in made}
        found.update({name: ages.get(name, inherited.get(id(tree))) for name, tree in slots.items()})

    try:
        _trace(trace)
    except Exception:  # a custom init may want values: then the names are those it makes in the end
        return Roles(ages, complete=False)
    return Roles(found)


def slot_names(optimizer: Optimizer, params: Params) -> list[str] | None:
    """The names of an optimizer's slots for some parameters; None if they are not known."""
    roles = roles_of(optimizer, params)
    return list(roles) if roles.complete else None


def own_slots(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Of all slots those that an optimizer made, by the names it knows them under.

    Args:
        optimizer: Whose slots.
        slots: The slots of all parties.
        params: The parameters they are for.
        prefix: What stands before its names in `slots`.
    """
    names: Iterable[str] | None = slot_names(optimizer, params)
    if names is None:
        names = [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in names if prefix + name in slots}


def hyperparameter_names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's hyperparameters. Touches no device."""
    names: list[str] = []
    _trace(lambda step: names.extend(optimizer.hyperparameters(step)))
    return names


def _trace(fn: Callable[[Step], None]) -> None:
    jax.eval_shape(fn, jax.ShapeDtypeStruct((), trees.default_int()))


def late_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """The slots of an element of a chain that are to be written after the parameters."""
    return optimizer.init.late if isinstance(optimizer.init, Init) else ()


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether gradients that are not finite are known to reach neither parameters nor slots."""
    return isinstance(optimizer.init, Init) and optimizer.init.guarded


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether what an optimizer returns has −learning_rate in it, so that another one would turn it round."""
    if isinstance(optimizer.init, Init):
        return optimizer.init.finished
    try:
        names = hyperparameter_names(optimizer)
    except Exception:  # a user's own function, which may want a concrete step
        return False
    return any(name.rsplit("/", 1)[-1] == "learning_rate" for name in names)
