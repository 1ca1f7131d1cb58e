"""How a wrapper adds slots and hyperparameters, and calls the inner update."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jstep.core import trees
from jstep.core.exceptions import setting
from jstep.core.trees import EMPTY_CONTEXT, Array, Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers import draws, hyperparameters
from jstep.optimizers.draws import fresh_draws, next_draws, shared_names
from jstep.optimizers.host_slots import call_with_loaded, loads_slots
from jstep.optimizers.hyperparameters import held_roles, values_at
from jstep.optimizers.leaf_values import partial_params
from jstep.optimizers.rules import new_start_step
from jstep.optimizers.updates import moves, wide_updates
from jstep.slots.indexed_slices import is_slices
from jstep.slots.matching import IS_IDLE, as_slots
from jstep.slots.roles import (
    ActsByStep,
    CountedSlot,
    Init,
    Labels,
    Role,
    Roles,
    init_labels,
    needs_all_params,
    roles_of,
)
from jstep.state.train_state import START_STEP


class StepInputs(NamedTuple):
    """The inputs of an optimizer's update besides updates and slots.

    Attributes:
        h: The values of a wrapper's hyperparameters.
        starts: The `start_step` of each leaf of an aged wrapper, or None.
    """

    params: Params
    step: Step
    context: Context
    h: Mapping[str, Any] = {}
    starts: Sequence[Array | None] = ()


def unpack_inputs(
    update: Callable[[Updates, Slots, StepInputs], Any], *, loads: bool = True
) -> Callable[..., Any]:
    def optimizer_update(
        updates: Updates,
        slots: Slots,
        params: Params,
        step: Step,
        context: Context = EMPTY_CONTEXT,
        /,
    ) -> tuple[Updates, Slots]:
        new: tuple[Updates, Slots] = update(updates, slots, StepInputs(params, step, context))
        return new

    return loads_slots(optimizer_update) if loads else optimizer_update


WrappedUpdate: TypeAlias = Callable[
    [Updates, Slots, Slots, StepInputs], tuple[Updates, Slots, Slots]
]
"""`update(updates, inner, outer, inputs) -> (updates, inner, outer)`; inner and outer are slots."""


@dataclasses.dataclass(frozen=True)
class WrapperSlots:
    """The slots and hyperparameters of the wrapper itself.

    Attributes:
        slots: Slot name → `make(params, global_step)`.
        averages: The slots that are averages of the parameters.
        hyper: Name → value from `as_hyperparameter`; held ones are slots, too.
        aged: Whether the update needs `inputs.starts`: the inner `start_step`, or else a separate
            slot; around a `partition`, one for each label.
        counted: `counted(step)`: whether the age counts an update. Such an age is separate.
        age_scope: The prefix of separate age slots; by default the name of the wrapper.
        per_step: Whether the slots change once a step.
        by_step: A description of the wrapper if it acts at some global steps only.
        draws: Whether the update draws random numbers, with the slots of `draws.ROLES`.
    """

    slots: Mapping[str, Callable[[Params, Step], Any]] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    holds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    averages: Collection[str] = ()
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aged: bool = False
    counted: Callable[[Step], Array] | None = None
    age_scope: str | None = None
    per_step: bool = False
    by_step: str | None = None
    draws: bool = False

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        fresh = {name: make(params, global_step) for name, make in self.slots.items()}
        drawn = fresh_draws() if self.draws else {}
        return fresh | hyperparameters.held_slots(self.hyper) | drawn

    def all_roles(self) -> Roles:
        roles = Roles(
            {**dict.fromkeys(self.slots), **self.roles},
            holds=self.holds,
            averages=frozenset(self.averages),
        )
        roles = roles.merge(held_roles(self.hyper))
        if self.draws:
            roles = roles.merge(draws.ROLES)
        return self.declared(roles)

    def aged_slots(self) -> list[str]:
        return [name for name in self.slots if self.roles.get(name) is not Role.LAST_WEIGHT]

    def declared(self, roles: Roles) -> Roles:
        return roles.merge(Roles(per_step=set(roles))) if self.per_step else roles


_NOTHING = WrapperSlots()


def wrap_optimizer(
    optimizer: Optimizer,
    wrapper_name: str,
    update: WrappedUpdate,
    outer: WrapperSlots = _NOTHING,
    *,
    guarded: bool | None = None,
    inner_roles: Callable[[Roles], Roles] = lambda roles: roles,
    init_on: Callable[[Params], Params] = lambda params: params,
    takes_context: bool = False,
) -> Optimizer:
    """Wrap an optimizer; `inner_roles` maps its roles, `init_on` the params that it sees."""
    outer_roles = outer.all_roles()
    reported = hyperparameters.report(outer.hyper)
    # The slots and hyperparameters of the wrapper, as an optimizer, so that its names are compared
    # with those inside.
    added = Optimizer(
        Init(outer.init, lambda params: outer_roles), lambda *args: (args[0], {}), reported
    )
    named = {f"the optimizer in {wrapper_name}": optimizer, wrapper_name: added}
    check_names(named)
    age_role = Role.AGE if outer.counted is None else Role.PRIVATE_AGE
    age_scope = wrapper_name if outer.age_scope is None else outer.age_scope

    def age_slots(params: Params) -> Ages:
        if not outer.aged:
            return Ages([None] * len(jax.tree.leaves(params)), {})
        inner = roles_of(optimizer, params)
        labels = init_labels(optimizer, params)

        def free_name(slot: str) -> str:
            # An inner slot of another role is the age of an optimizer that skips steps.
            while inner.get(slot, age_role) is not age_role:
                slot = f"{wrapper_name}/{slot}"
            return slot

        if labels is None:
            slot = free_name(START_STEP if outer.counted is None else f"{age_scope}/{START_STEP}")
            return Ages([slot] * len(jax.tree.leaves(params)), {slot: slot not in inner})
        slots: Labels = []
        for label in labels:
            slots.append(None if label is None else free_name(f"{age_scope}/{label}/{START_STEP}"))
        return Ages(slots, {slot: slot not in inner for slot in slots if slot is not None})

    def init(params: Params, global_step: Step) -> Slots:
        with partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
        shared = (
            shared_names([roles_of(optimizer, params), outer_roles]) if outer.draws else frozenset()
        )
        slots = merge(
            zip(named, (inner, outer.init(params, global_step)), strict=True), "slot", shared
        )
        ages = [age for age, is_own in age_slots(params).slots.items() if is_own]
        return slots | {age: new_start_step(global_step) for age in ages}

    def all_roles(params: Params) -> Roles:
        ages = age_slots(params)
        counted = ages.counted(outer.aged_slots(), params)
        roles = outer.declared(Roles(dict.fromkeys(ages.slots, age_role), counted=counted))
        if outer.by_step is not None:
            leaves = frozenset(keys for keys, _ in jax.tree_util.tree_leaves_with_path(params))
            roles = roles.merge(Roles(by_step={ActsByStep(outer.by_step, leaves)}))
        return inner_roles(roles_of(optimizer, params)).merge(outer_roles).merge(roles)

    def wrapped_update(updates: Updates, slots: Slots, inputs: StepInputs) -> tuple[Updates, Slots]:
        ages = age_slots(inputs.params)
        old = as_slots(outer_roles, slots)
        starts = as_slots(ages.slots, slots)
        gradients = trees.flatten_like(inputs.params, updates, "gradients", is_leaf=is_slices)
        starts_of_leaves = [None if slot is None else starts[slot] for slot in ages.slots_of_leaves]
        inputs = inputs._replace(
            h=values_at(outer.hyper, inputs.step, slots), starts=starts_of_leaves
        )
        updates, inner, new = update(
            updates, slots_of(optimizer, slots, inputs.params), old, inputs
        )
        # The draws of the wrapper come last: the inner optimizer, which may have the same slots, is
        # not always called.
        drawn = next_draws(slots, inputs.step) if outer.draws else {}
        next_starts = ages.next_starts(starts, gradients, outer, inputs.step)
        return updates, old | next_starts | new | inner | drawn

    outer_init = wrap_init(optimizer, init, all_roles, guarded)
    hyper = merge_hyperparameters(named)
    return Optimizer(
        outer_init, unpack_inputs(wrapped_update), hyper, optimizer.takes_context or takes_context
    )


INCREMENTS: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_increments", default=True)
"""Whether the update increments the global step."""


class Ages(NamedTuple):
    """The age slots of a wrapper.

    Attributes:
        slots_of_leaves: The name of the slot with the `start_step` of each leaf, or None.
        slots: Name of such a slot → whether the wrapper keeps it.
    """

    slots_of_leaves: Labels
    slots: Mapping[str, bool]

    def counted(self, slots: Sequence[str], params: Params) -> set[CountedSlot]:
        """Return what the ages count, of slots of the wrapper with a leaf for each parameter."""
        if len(self.slots) == 1:
            (age,) = self.slots
            return {CountedSlot(age, slot) for slot in slots}
        counted = set[CountedSlot]()
        for own_age, (keys, _) in zip(
            self.slots_of_leaves, jax.tree_util.tree_leaves_with_path(params), strict=True
        ):
            if own_age is not None:
                counted |= {CountedSlot(own_age, slot, keys) for slot in slots}
        return counted

    def next_starts(
        self, starts: Slots, gradients: Sequence[Any], outer: WrapperSlots, step: Step
    ) -> Slots:
        """Return the wrapper's own slots after an update.

        An age that does not count the update starts one step later.
        """
        updated: set[str | None] = set()
        for slot, g in zip(self.slots_of_leaves, gradients, strict=True):
            is_updated = INCREMENTS.get() if outer.per_step else g is not None
            if is_updated:
                updated.add(slot)

        def next_start(slot: str, start: Array) -> Array:
            if slot not in updated:
                return start + 1
            if outer.counted is None:
                return start
            return start + (~outer.counted(step)).astype(start.dtype)

        return {
            slot: next_start(slot, starts[slot]) for slot, is_own in self.slots.items() if is_own
        }


def call_update(
    optimizer: Optimizer, updates: Updates, slots: Slots, inputs: StepInputs, *, exact: bool = False
) -> tuple[Updates, Slots]:
    """Call an update; if `exact`, the result may have `Replacement` leaves, for `apply_updates`."""
    if IS_IDLE.get() and not roles_of(optimizer, inputs.params).per_step:
        return updates, slots
    context = (inputs.context,) if optimizer.takes_context else ()

    def update(slots: Slots, params: Params) -> tuple[Updates, Slots]:
        # Conditions inside a custom update may belong to a separate program, so they are not
        # reported.
        with setting(CONDITIONS, CONDITIONS.get() if isinstance(optimizer.init, Init) else ()):
            return optimizer.update(updates, slots, params, inputs.step, *context)

    if getattr(optimizer.update, "loads_slots", False):
        new, slots = update(slots, inputs.params)
    else:
        new, slots = call_with_loaded(update, slots, inputs.params)
    return new if exact else moves(inputs.params, new), slots


def inner_context(
    context: Context,
    outwards: Callable[[Params], Params],
    inwards: Callable[[Updates], Updates] = lambda tree: tree,
) -> Context:
    """The context for other parameters: `outwards` maps parameters, `inwards` gradients."""
    outer = context.value_and_grad
    if outer is None:
        return context

    def value_and_grad(params: Params) -> tuple[Any, Updates]:
        loss, gradients = outer(outwards(params))
        return loss, inwards(gradients)

    return context._replace(value_and_grad=value_and_grad)


def update_masters(
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    masters: Params,
    inputs: StepInputs,
    rounded: Callable[..., Any],
) -> tuple[Updates, Slots]:
    """Call an optimizer's update on the masters; labels, masks and the loss see the parameters."""
    context = inner_context(
        inputs.context, lambda masters: jax.tree.map(rounded, inputs.params, masters), wide_updates
    )
    with partial_params(inputs.params):
        inner_inputs = StepInputs(masters, inputs.step, context)
        return call_update(optimizer, wide_updates(updates), slots, inner_inputs, exact=True)


def slots_of(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Return the slots of an optimizer by its own names.

    If it does not know its slots, these are all slots with the prefix.
    """
    roles = roles_of(optimizer, params)
    names: Iterable[str] = roles
    if not roles.complete:
        names = [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in names if prefix + name in slots}


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether nonfinite gradients are known to reach neither parameters nor slots."""
    return isinstance(optimizer.init, Init) and optimizer.init.guarded


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether the updates include −learning_rate, so that another one would flip their sign."""
    if isinstance(optimizer.init, Init):
        return optimizer.init.finished
    names = hyperparameters.report_names(optimizer.hyperparameters)
    return any(map(hyperparameters.is_learning_rate, names))


def negates_updates(optimizer: Optimizer) -> bool:
    return isinstance(optimizer.init, Init) and optimizer.init.negates


def wrap_init(
    optimizer: Optimizer,
    make: Callable[[Params, Step], Slots],
    roles: Callable[[Params], Roles],
    guarded: bool | None = None,
    labels: Callable[[Params], Labels | None] | None = None,
) -> Init:
    """The `init` of a wrapper; everything that is not passed is as in the inner optimizer."""
    is_safe = is_guarded(optimizer) if guarded is None else guarded
    labels = labels or functools.partial(init_labels, optimizer)
    is_finished = makes_finished_updates(optimizer)
    needs_all = needs_all_params(optimizer)
    return Init(make, roles, is_finished, is_safe, labels=labels, needs_all=needs_all)


NamedOptimizers = Mapping[str, Optimizer]


def merge(
    named: Iterable[tuple[str, Mapping[str, Any]]], what: str, shared: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Merge dicts whose names must differ except in `shared`, whose values are the same in all."""

    def refusal(name: str, first: str, second: str) -> str:
        return (
            f"{first} and {second} both have a {what} named {name!r}; "
            "rename one with jstep.scope(optimizer, 'name')"
        )

    common: dict[str, Any] = {}
    separate: list[tuple[str, Mapping[str, Any]]] = []
    for owner, values in named:
        common |= {name: value for name, value in values.items() if name in shared}
        separate.append(
            (owner, {name: value for name, value in values.items() if name not in shared})
        )
    return trees.merge_dicts(separate, refusal) | common


def add_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def merge_roles(named: NamedOptimizers, params: Params, *, are_in_sequence: bool = True) -> Roles:
    roles = {name: roles_of(optimizer, params) for name, optimizer in named.items()}
    # Labels of a partition make their updates separately, so that they cannot count draws together.
    merge(roles.items(), "slot", shared_names(roles.values()) if are_in_sequence else frozenset())
    merged = functools.reduce(Roles.merge, roles.values(), Roles())
    return merged.with_misplaced() if len(named) > 1 else merged


def merge_hyperparameters(named: NamedOptimizers) -> Callable[[Step], dict[str, Any]]:
    def hyperparameters(step: Step, /) -> dict[str, Any]:
        values = [(name, optimizer.hyperparameters(step)) for name, optimizer in named.items()]
        return merge(values, "hyperparameter")

    return hyperparameters


def check_names(named: NamedOptimizers, *, are_in_sequence: bool = True) -> None:
    # Without parameters no device is used, because `jax.distributed.initialize` may be called
    # later.
    merge_roles(named, {}, are_in_sequence=are_in_sequence)
    # The names of a schedule that needs a concrete step are checked at first use.
    names = [
        (name, hyperparameters.report_names(optimizer.hyperparameters))
        for name, optimizer in named.items()
    ]
    merge(names, "hyperparameter")


def check_formats(wrapper_name: str, optimizer: Optimizer, **why: str) -> None:
    """Raise if an optimizer contains a format of `why`, which maps it to the reason and remedy."""
    for name in sorted(roles_of(optimizer, {}).formats & why.keys()):
        raise ValueError(f"optimizer: must not contain {name} inside {wrapper_name}, {why[name]}")


class Condition(NamedTuple):
    """The condition for a guard or `update_every` to update `params`; None stands for others."""

    params: Params
    holds: Array


Conditions = list[Condition]

CONDITIONS: contextvars.ContextVar[tuple[Conditions, ...]] = contextvars.ContextVar(
    "jstep_conditions", default=()
)
"""The lists in which the conditions of updates are collected."""


def report_condition(condition: Condition) -> None:
    for collected in CONDITIONS.get():
        collected.append(condition)


def update_conditions(params: Params, collected: Conditions) -> list[Array | None]:
    """The condition under which each leaf was updated, in order; None if it always was."""
    conditions: dict[Any, Array] = {}
    for partial, condition in collected:
        for keys, _ in jax.tree_util.tree_leaves_with_path(partial):
            # Of nested guards all must hold.
            conditions[keys] = conditions[keys] & condition if keys in conditions else condition
    return [conditions.get(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
