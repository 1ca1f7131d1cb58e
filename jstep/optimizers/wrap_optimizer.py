"""Wrap an optimizer: the slots of the inner one keep their names, and the wrapper may add its own."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jstep.core import trees
from jstep.core.slot_roles import Init, Labels, Role, Roles, labels_of, roles_of
from jstep.core.trees import Array, Context, Optimizer, Params, Slots, Step, Updates, is_slices
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
        starts: The `start_step` of each leaf, in order: the step minus the updates that had a gradient of its label.
            None for a leaf that is never updated, and if the wrapper is not aged.
    """

    params: Params
    step: Step
    context: Context
    h: Hyper
    starts: list[Array | None]


WrappedUpdate: TypeAlias = Callable[[Updates, Slots, Slots, StepInputs], tuple[Updates, Slots, Slots]]
"""`update(updates, inner, own, at) -> (updates, inner, own)`, with separate slots."""


@dataclasses.dataclass(frozen=True)
class Own:
    """The slots and hyperparameters of a wrapper, besides those of the inner optimizer.

    Attributes:
        slots: The names of its slots → `make(params, global_step)`.
        roles: The roles of some of them.
        holds: What some of them hold: see `Slot`.
        hyper: Its hyperparameters, as returned by `checked`; those that are held are slots, too.
        aged: Whether it needs an age. It is that of the inner optimizer's `start_step` if there is one, otherwise of a
            separate slot; around a `partition` each label has a separate slot. The update gets them as `at.starts`.
        counted: `counted(step)`: whether the age counts an update, if it does not count all. Then it is never that of
            the inner optimizer.
        age_scope: The prefix of the separate slots; by default the name of the wrapper.
    """

    slots: Mapping[str, Callable[[Params, Step], Any]] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    holds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aged: bool = False
    counted: Callable[[Step], Array] | None = None
    age_scope: str | None = None

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        """Create the slots, but for the age."""
        made = {name: make(params, global_step) for name, make in self.slots.items()}
        return made | held_slots(self.hyper)

    def all_roles(self) -> Roles:
        """The roles of the slots, but for the age."""
        held = dict.fromkeys(held_names(self.hyper), Role.HELD)
        return Roles({**dict.fromkeys(self.slots), **self.roles, **held}, holds=self.holds)


_NOTHING = Own()


class Ages(NamedTuple):
    """The ages of a wrapper.

    Attributes:
        of_leaves: The slot with the `start_step` of each leaf, in order; None for a leaf that is never updated.
        slots: These slots → whether the wrapper keeps them; otherwise the inner optimizer does.
    """

    of_leaves: Labels
    slots: Mapping[str, bool]

    def after(self, starts: Slots, gradients: Sequence[Any], own: Own, step: Step) -> Slots:
        """The slots that the wrapper keeps, after an update: later by one if it did not count for their leaves."""
        updated = (
            {slot for slot, g in zip(self.of_leaves, gradients, strict=True) if g is not None} if self.slots else set()
        )
        new: Slots = {}
        for slot in (name for name, is_own in self.slots.items() if is_own):
            start = starts[slot]
            waits = None if own.counted is None else ~own.counted(step)
            if slot not in updated:
                start = start + 1
            elif waits is not None:
                start = start + waits.astype(start.dtype)
            new[slot] = start
        return new


def trained(optimizer: Optimizer, params: Params) -> Params:
    """The parameters that an optimizer may update, with None for those that a `partition` freezes."""
    labels = labels_of(optimizer, params)
    if labels is None:
        return params
    leaves, treedef = trees.flatten(params)
    return treedef.unflatten([None if label is None else p for label, p in zip(labels, leaves, strict=True)])


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
    hyper, own_roles = own.hyper, own.all_roles()
    added = Optimizer(
        Init(own.init, lambda params: own_roles), lambda updates, slots, params, step: (updates, {}), report(hyper)
    )
    parts = {f"the optimizer in {by}": optimizer, by: added}
    check_names(parts)
    age_role = Role.AGE if own.counted is None else Role.OWN_AGE
    age_scope = by if own.age_scope is None else own.age_scope

    def labels(params: Params) -> Labels | None:
        with partial_params(params):
            return labels_of(optimizer, params)

    def age_slots(params: Params) -> Ages:
        inner, found = roles_of(optimizer, params), labels(params) if own.aged else None
        if not own.aged:
            return Ages([], {})
        if found is None:
            slot = START_STEP if own.counted is None else f"{age_scope}/{START_STEP}"
            slots: Labels = [slot] * len(jax.tree.leaves(params))
            known = {slot}
        else:
            slots = [None if label is None else f"{age_scope}/{label}/{START_STEP}" for label in found]
            known = {slot for slot in slots if slot is not None}
        free = {slot: slot for slot in known}
        for slot in known:
            while inner.get(free[slot], age_role) is not age_role:  # that of an optimizer that skips steps
                free[slot] = f"{by}/{free[slot]}"
        return Ages([free.get(slot or "") for slot in slots], {name: name not in inner for name in free.values()})

    def init(params: Params, global_step: Step) -> Slots:
        with partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
            ages = age_slots(params)
        slots = merge(zip(parts, (inner, own.init(params, global_step)), strict=True), "slot")
        return slots | {age: new_start_step(global_step) for age, is_own in ages.slots.items() if is_own}

    def all_roles(params: Params) -> Roles:
        ages = Roles(dict.fromkeys(age_slots(params).slots, age_role))
        return inner_roles(roles_of(optimizer, params)).joined(own_roles).joined(ages)

    @loads_slots
    def whole(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        ages = age_slots(params)
        for name in (*own_roles, *ages.slots):
            if name not in slots:
                raise missing_slot(name, slots)
        inner = own_slots(optimizer, slots, params)
        mine = {name: slots[name] for name in own_roles}
        starts = {name: slots[name] for name in ages.slots}
        later = ages.after(starts, trees.flatten_like(params, updates, "gradients", is_leaf=is_slices), own, step)
        at = StepInputs(
            params, step, context, values_at(hyper, step, slots), [starts.get(slot or "") for slot in ages.of_leaves]
        )
        updates, inner, changed = update(updates, inner, mine, at)
        return updates, mine | later | changed | inner

    is_safe = is_guarded(optimizer) if guarded is None else guarded
    return Optimizer(
        Init(init, all_roles, makes_finished_updates(optimizer), guarded=is_safe, labels=labels),
        whole,
        merged_hyperparameters(parts),
        optimizer.takes_context or takes_context,
    )
