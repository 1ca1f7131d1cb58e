"""The slots of an optimizer and their roles, taken from the optimizer itself and never inferred from names."""

import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.types import Optimizer, Params, Slots, Step


class Role(enum.Enum):
    """The role of a slot that jstep treats specially; most slots have no role."""

    AGE = "the step at which slots were created; a skipped step advances it"
    OWN_AGE = "the same for an optimizer that skips some steps itself, so that wrappers cannot use it as their age"
    HELD = "a held hyperparameter"
    LOSS_SCALE = "the factor on the loss"
    HIDDEN_SCALE = "a loss scale that is not outermost, which raises when it is used"
    SCALE_SINCE = "the step of the loss scale's last change"
    LAST_FINITE = "the global step after the last finite update"
    NOISE = "the average of the gradient's noise"
    NOISE_SQUARE = "the average of the gradient's squared norm"
    NOISE_WEIGHT = "the weight of both averages"
    HIDDEN_NOISE = "such an average under a label or beside other elements, which raises when it is used"


AGES = (Role.AGE, Role.OWN_AGE)
_HIDDEN: dict[Role | None, Role] = dict.fromkeys((Role.NOISE, Role.NOISE_SQUARE, Role.NOISE_WEIGHT), Role.HIDDEN_NOISE)


class Roles(dict[str, Role | None]):
    """Slot name → its role.

    Attributes:
        complete: Whether these are all slots of the optimizer; False if its `init` cannot be traced.
    """

    def __init__(self, roles: Mapping[str, Role | None] | Iterable[str] = (), *, complete: bool = True) -> None:
        super().__init__(roles if isinstance(roles, Mapping) else dict.fromkeys(roles))
        self.complete = complete

    def prefixed(self, prefix: str) -> "Roles":
        """The same roles under `prefix/name`."""
        return Roles({f"{prefix}/{name}": role for name, role in self.items()}, complete=self.complete)

    def joined(self, other: "Roles") -> "Roles":
        """The union of these roles and others."""
        return Roles({**self, **other}, complete=self.complete and other.complete)

    def beside_others(self) -> "Roles":
        """The roles of one part of an optimizer, where wrappers that must be outermost are hidden."""
        roles = self.without_scale()
        return Roles({name: _HIDDEN.get(role, role) for name, role in roles.items()}, complete=self.complete)

    def without_scale(self) -> "Roles":
        """The roles of an optimizer that does not see all gradients, so its loss scale is not outermost."""
        hidden = {name: Role.HIDDEN_SCALE if role is Role.LOSS_SCALE else role for name, role in self.items()}
        return Roles(hidden, complete=self.complete)

    def at_some_steps(self) -> "Roles":
        """The roles of an optimizer that updates at some steps only, with an age of its own."""
        own = {name: Role.OWN_AGE if role is Role.AGE else role for name, role in self.items()}
        return Roles(own, complete=self.complete).without_scale()

    def of(self, *roles: Role) -> list[str]:
        """The names of the slots that have one of these roles."""
        return [name for name, role in self.items() if role in roles]


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also describes its slots without creating them.

    Attributes:
        make: `make(params, global_step) -> slots`.
        roles: `roles(params)`: the names of the slots that `make` returns, and their roles. It uses no device.
        finished: Whether the updates include −learning_rate, ready to be added to the parameters.
        late: Slots whose old values updates are computed from, and which are written after the parameters: see
            `leafwise`.
        guarded: Whether gradients that are not finite reach neither parameters nor slots.
    """

    make: Callable[[Params, Step], Slots]
    roles: Callable[[Params], Roles]
    finished: bool = False
    late: tuple[str, ...] = ()
    guarded: bool = False

    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """Create the slots for `params` at `global_step`."""
        slots = self.make(params, global_step)
        made = _MADE.get()
        if made is not None:
            roles = self.roles(params)
            made += [(tree, roles.get(name)) for name, tree in slots.items()]
        return slots


_MADE: contextvars.ContextVar[list[tuple[Any, Role | None]] | None] = contextvars.ContextVar("jstep_made", default=None)
"""The slots that optimizers inside a custom one create while its `init` is traced, and their roles."""


def roles_of(optimizer: Optimizer, params: Params) -> Roles:
    """The slots of an optimizer for some parameters, and their roles. Uses no device."""
    init = optimizer.init
    if isinstance(init, Init):
        return init.roles(params)
    ages: dict[str, Role | None] = dict.fromkeys(getattr(init, "ages", ()), Role.AGE)
    found: dict[str, Role | None] = {}

    def trace(step: Step) -> None:
        # Slots created by optimizers inside a custom one keep their roles. No tracer leaves this function.
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
    except Exception:  # a custom init may need values; its slots are then known only once it has run
        return Roles(ages, complete=False)
    return Roles(found)


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
    _trace(lambda step: names.extend(optimizer.hyperparameters(step)))
    return names


def _trace(fn: Callable[[Step], None]) -> None:
    jax.eval_shape(fn, jax.ShapeDtypeStruct((), trees.default_int()))


def late_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """The slots of a chain element that must be written after the parameters."""
    return optimizer.init.late if isinstance(optimizer.init, Init) else ()


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
