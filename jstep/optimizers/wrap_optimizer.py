"""Wrap an optimizer: the slots of the inner one keep their names, and the wrapper may add its own."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jstep.core.slot_roles import Init, Role, Roles, roles_of
from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.age import new_start_step
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import Hyper, report, values_at
from jstep.optimizers.masks import partial_params
from jstep.optimizers.match_gradients import missing_slot
from jstep.optimizers.offloading import loads_slots
from jstep.optimizers.parts import (
    EMPTY_CONTEXT,
    check_names,
    is_guarded,
    makes_finished_updates,
    merge,
    merged_hyperparameters,
    own_slots,
)
from jstep.state.train_state import START_STEP


class StepInputs(NamedTuple):
    """Inputs of a wrapper's update besides updates and slots.

    Attributes:
        params: The parameters.
        step: The step.
        context: The context, for the inner optimizer.
        h: The values of the wrapper's hyperparameters at the step.
    """

    params: Params
    step: Step
    context: Context
    h: Hyper


WrappedUpdate: TypeAlias = Callable[[Updates, Slots, Slots, StepInputs], tuple[Updates, Slots, Slots]]
"""`update(updates, inner, own, at) -> (updates, inner, own)`, with separate slots."""


@dataclasses.dataclass(frozen=True)
class Own:
    """The slots and hyperparameters of a wrapper, besides those of the inner optimizer.

    Attributes:
        slots: The names of its slots → `make(params, global_step)`.
        roles: The roles of some of them.
        hyper: Its hyperparameters, as returned by `checked`; those that are held are slots, too.
        aged: Whether it needs an age. It is that of the inner optimizer's `start_step` if there is one, otherwise of a
            separate slot. In both cases the update gets it as `start_step`, and need not return it.
    """

    slots: Mapping[str, Callable[[Params, Step], Any]] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aged: bool = False

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        """Create the slots, but for the age."""
        made = {name: make(params, global_step) for name, make in self.slots.items()}
        return made | held_slots(self.hyper)

    def all_roles(self) -> Roles:
        """The roles of the slots, but for the age."""
        held = dict.fromkeys(held_names(self.hyper), Role.HELD)
        return Roles({**dict.fromkeys(self.slots), **self.roles, **held})


_NOTHING = Own()


def wrap_optimizer(
    optimizer: Optimizer,
    by: str,
    update: WrappedUpdate,
    own: Own = _NOTHING,
    *,
    guarded: bool | None = None,
    inner_roles: Callable[[Roles], Roles] = lambda roles: roles,
    init_on: Callable[[Params], Params] = lambda params: params,
    takes_context: bool = False,
) -> Optimizer:
    """Wrap an optimizer.

    Args:
        optimizer: The inner optimizer.
        by: The wrapper's name, for errors.
        update: The wrapper's update.
        own: What the wrapper keeps in the state.
        guarded: Whether gradients that are not finite reach neither parameters nor slots; by default as for the inner
            optimizer.
        inner_roles: Maps the roles of the inner optimizer's slots to those that outer wrappers see.
        init_on: Maps params to those from which the inner optimizer creates its slots.
        takes_context: Whether the update reads the context itself.

    Raises:
        ValueError: Both have a slot or a hyperparameter of the same name.
    """
    hyper, own_roles, aged = own.hyper, own.all_roles(), own.aged
    added = Optimizer(
        Init(own.init, lambda params: own_roles), lambda updates, slots, params, step: (updates, {}), report(hyper)
    )
    parts = {f"the optimizer in {by}": optimizer, by: added}
    check_names(parts)

    def age_slot(inner: Roles) -> str:
        name = START_STEP
        while inner.get(name, Role.AGE) is not Role.AGE:  # that of an optimizer that skips steps
            name = f"{by}/{name}"
        return name

    def init(params: Params, global_step: Step) -> Slots:
        with partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
            age = age_slot(roles_of(optimizer, params))
        slots = merge(zip(parts, (inner, own.init(params, global_step)), strict=True), "slot")
        return slots | ({age: new_start_step(global_step)} if aged and age not in inner else {})

    def all_roles(params: Params) -> Roles:
        inner = roles_of(optimizer, params)
        age = Roles({age_slot(inner): Role.AGE} if aged else {})
        return inner_roles(inner).joined(own_roles).joined(age)

    @loads_slots
    def whole(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        age = age_slot(roles_of(optimizer, params)) if aged else None
        for name in (*own_roles, *([age] if age else [])):
            if name not in slots:
                raise missing_slot(name, slots)
        inner = own_slots(optimizer, slots, params)
        mine = {name: slots[name] for name in own_roles}
        seen = mine | ({START_STEP: slots[age]} if age else {})
        at = StepInputs(params, step, context, values_at(hyper, step, slots))
        updates, inner, changed = update(updates, inner, seen, at)
        return updates, mine | ({age: slots[age]} if age else {}) | changed | inner

    is_safe = is_guarded(optimizer) if guarded is None else guarded
    return Optimizer(
        Init(init, all_roles, makes_finished_updates(optimizer), guarded=is_safe),
        whole,
        merged_hyperparameters(parts),
        optimizer.takes_context or takes_context,
    )
