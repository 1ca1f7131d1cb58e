"""Wrap an optimizer: the slots of the inner one keep their names, and the wrapper may add its own."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

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

WrappedUpdate: TypeAlias = Callable[[Updates, Slots, Slots, Params, Step, Hyper, Context], tuple[Updates, Slots, Slots]]
"""`update(updates, inner, own, params, step, h, context) -> (updates, inner, own)`, with separate slots."""


def wrap_optimizer(
    optimizer: Optimizer,
    by: str,
    update: WrappedUpdate,
    *,
    added: Mapping[str, Callable[[Params, Step], Any]] | None = None,
    hyper: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    aged: bool = False,
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
        added: The names of the wrapper's slots → `make(params, global_step)`.
        hyper: The wrapper's hyperparameters, as returned by `checked`.
        roles: The roles of some of the wrapper's slots.
        aged: Whether the wrapper needs an age. It is that of the inner optimizer's `start_step` if there is one,
            otherwise of a separate slot. In both cases `own` contains it as `start_step`, and `update` need not
            return it.
        guarded: Whether gradients that are not finite reach neither parameters nor slots; by default as for the inner
            optimizer.
        inner_roles: Maps the roles of the inner optimizer's slots to those that outer wrappers see.
        init_on: Maps params to those from which the inner optimizer creates its slots.
        takes_context: Whether the update reads the context itself.

    Raises:
        ValueError: Both have a slot or a hyperparameter of the same name.
    """
    added, hyper = added or {}, hyper or {}
    held = held_names(hyper)

    def own_init(params: Params, global_step: Step = 0) -> Slots:
        return {name: make(params, global_step) for name, make in added.items()} | held_slots(hyper)

    own_roles = Roles({**dict.fromkeys(added), **(roles or {}), **dict.fromkeys(held, Role.HELD)})
    own = Optimizer(
        Init(own_init, lambda params: own_roles), lambda updates, slots, params, step: (updates, {}), report(hyper)
    )
    parts = {f"the optimizer in {by}": optimizer, by: own}
    check_names(parts)

    def age_slot(inner: Roles) -> str:
        return START_STEP if inner.get(START_STEP, Role.AGE) is Role.AGE else f"{by}/{START_STEP}"

    def init(params: Params, global_step: Step) -> Slots:
        with partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
            age = age_slot(roles_of(optimizer, params))
        slots = merge(zip(parts, (inner, own_init(params, global_step)), strict=True), "slot")
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
        h = values_at(hyper, step, slots)
        updates, inner, changed = update(updates, inner, seen, params, step, h, context)
        return updates, mine | ({age: slots[age]} if age else {}) | changed | inner

    is_safe = is_guarded(optimizer) if guarded is None else guarded
    return Optimizer(
        Init(init, all_roles, makes_finished_updates(optimizer), guarded=is_safe),
        whole,
        merged_hyperparameters(parts),
        optimizer.takes_context or takes_context,
    )
